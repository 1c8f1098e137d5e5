"""Attaches to other packages, by hooks and by replaced functions, and lets go of them again."""
