"""Runs unmodified scripts and their child processes."""
