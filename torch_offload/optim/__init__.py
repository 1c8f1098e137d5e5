"""The optimizer, ``torch_offload.AdamW``."""
