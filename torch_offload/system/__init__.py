"""This machine: memory, disks, files, GPU, environment."""
