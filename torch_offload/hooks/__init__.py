"""How the package attaches to other people's code and lets go again."""
