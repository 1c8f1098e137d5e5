"""What autograd saves for the backward pass: paged, kept or recomputed, and who decides."""
