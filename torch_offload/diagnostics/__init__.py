"""Measures and checks this machine: ``probe``, ``bench-ssd``, ``doctor``."""
