"""Harnesses of the fault programme that run Python. One thread of a library's own would not outlive a fork."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch and numpy are imported
