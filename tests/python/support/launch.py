"""The launcher without its command line, with pages as small as the tests' models.

python -m support.launch [--gpu 2MiB] --ram 4MiB --ssd DIRECTORY [--optimizer NAME] [--update WHEN] [--fit] [-m] SCRIPT
    ARGUMENTS...
"""

import argparse
import importlib
import sys

from support.figures import MACHINE
from torch_offload import Config
from torch_offload.launch.runner import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpu")
    parser.add_argument("--ram", required=True)
    parser.add_argument("--ssd", required=True)
    parser.add_argument("--optimizer")
    parser.add_argument("--update", default="step")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("-m", dest="is_module", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.fit:
        importlib.import_module("torch_offload.launch.fit").probe = lambda *_: MACHINE
    tiers = {"gpu": options.gpu, "ram": options.ram, "ssd": options.ssd}
    config = Config(**tiers, min_paged_bytes=0, page_elements=4096, update=options.update)
    sys.exit(run(config, options.command, is_module=options.is_module, optimizer=options.optimizer, fit=options.fit))


if __name__ == "__main__":
    main()
