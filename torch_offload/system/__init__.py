"""What this machine offers: memory, disks, files, GPU, environment."""
