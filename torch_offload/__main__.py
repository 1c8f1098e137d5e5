"""``python -m torch_offload`` is the console script ``torch-offload``."""

from torch_offload.cli.app import main

if __name__ == "__main__":
    main()
