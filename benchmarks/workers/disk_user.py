"""Uses a disk as one rank of several does: random whole blocks of a file of its own, through the engine of pages.

Reads one command per line from stdin, a JSON object with `pattern`, `depth` and `seconds`, and answers each with a JSON
line on stdout.
"""

import argparse
import json
import sys

from harness.machine import CpuSeconds

from torch_offload import _C


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", required=True)
    parser.add_argument("--file-bytes", type=int, required=True)
    parser.add_argument("--block-bytes", type=int, required=True)
    parser.add_argument("--max-depth", type=int, required=True)
    options = parser.parse_args()
    probe = _C.SsdProbe(
        directory=options.ssd,
        io_engine="auto",
        file_bytes=options.file_bytes,
        block_bytes=options.block_bytes,
        max_depth=options.max_depth,
    )
    print(json.dumps({"io_engine": probe.engine_name, "is_direct": probe.is_direct}), flush=True)
    for line in sys.stdin:
        begin = CpuSeconds.now()
        moved = probe.measure(**json.loads(line))
        used = CpuSeconds.now().since(begin)
        rate = (moved["read_bytes"] + moved["written_bytes"]) / moved["seconds"]
        print(json.dumps({"rate": rate, "cpu_seconds": used["process_cpu_seconds"]}), flush=True)


if __name__ == "__main__":
    main()
