"""What an import of the package does for its process, for processes that must not import it."""

import torch


def settle_vector_math() -> None:
    """Call torch's functions of positions on one thread before others do; the package's function of this name says
    why.
    """
    for function in (torch.cos, torch.sin):
        function(torch.ones(1))
