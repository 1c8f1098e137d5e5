"""Says whether the GPU targets of the Makefile can run here: names everything that is missing, or prints the GPU's
compute capability, for which the extension is then compiled.
"""

import importlib.util
import shutil
import sys

PACKAGES = ("torch", "setuptools", "ninja", "numpy", "pydantic", "rich", "safetensors", "typer", "pytest")


def missing_packages():
    names = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return [f"Python packages: pip install {' '.join(names)}"] if names else []


def missing_gpu():
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if torch.version.cuda is None:
        return [f"a torch with CUDA: {torch.__version__} has none"]
    if not torch.cuda.is_available():
        return ["a GPU: torch.cuda.is_available() is False (nvidia-smi says what the driver sees)"]
    return []


def missing_tools(names):
    return [f"{name}, a part of the CUDA toolkit, on the path" for name in names if shutil.which(name) is None]


def main():
    missing = [*missing_packages(), *missing_gpu(), *missing_tools(sys.argv[1:])]
    if missing:
        sys.exit("This target needs a machine with a GPU. Missing here:\n  " + "\n  ".join(missing))
    import torch

    print("{}.{}".format(*torch.cuda.get_device_capability()))


if __name__ == "__main__":
    main()
