"""The ``torch-offload`` command."""
