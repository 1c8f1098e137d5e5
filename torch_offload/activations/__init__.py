"""Saved tensors of autograd: paged, kept or recomputed, and the policy that decides."""
