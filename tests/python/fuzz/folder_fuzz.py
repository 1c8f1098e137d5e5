"""Whatever a file of a folder with coded experts holds, reading the folder ends with what is in it or with words that
say what is wrong, and takes no more memory than twice the folder and a constant.

    folder_fuzz.py [LIBFUZZER_OPTION ...] FOLDER_OF_INPUTS
"""

import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["torch_offload"]):
    from torch_offload.cli import app
    from torch_offload.errors import OffloadError
    from torch_offload.moe import checkpoint, inspection

import torch
from damaged_folder import FILES, WAYS, DamagedFolder, write_folder
from typer.testing import CliRunner

CONSTANT_BYTES = 64 << 20


def require(holds: bool, claim: str) -> None:
    if not holds:
        raise AssertionError(f"does not hold: {claim}")


def run_command(*arguments: str) -> None:
    result = CliRunner().invoke(app.app, arguments, obj=[])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    require(result.exit_code in (0, 1, 2), "a command ends with a status that is documented")
    require(bool(result.output.strip()), "a command says something")


def lay_out(path: Path) -> None:
    """Do what from_pretrained has us do before it reads tensors.

    The model, which it makes itself, has a size that fits the folder: what transformers takes for others is not ours.
    """
    try:
        folder = inspection.CodedFolder(path)
        checkpoint.lay_out(folder.model(), folder.config, dtype=torch.bfloat16)
    except OffloadError as error:
        require(bool(str(error)), "an error says something")


READERS: tuple[Callable[[Path], None], ...] = (
    lambda path: run_command("inspect", str(path)),
    lambda path: run_command("inspect", str(path), "--json"),
    lambda path: run_command("verify", str(path)),
    lay_out,
)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_damaged(folder: DamagedFolder, said: bytes) -> None:
    """Read a folder: by whom and which file is damaged in the first byte, the way in the second, what in the others."""
    if len(said) < 2:
        return
    number, reader = said[0] % len(FILES), said[0] // len(FILES) % len(READERS)
    folder.damage(number, said[1] % len(WAYS), said[2:])
    before = peak_bytes()
    READERS[reader](folder.path)
    taken = peak_bytes() - before
    require(taken <= 2 * folder.size_bytes + CONSTANT_BYTES, f"{taken} bytes are few beside {folder.size_bytes}")


def write_seeds(folder: DamagedFolder, seeds: Path) -> None:
    """Write, for each file and reader, its own text and small changes by the other ways."""
    seeds.mkdir()
    for first in range(len(FILES) * len(READERS)):
        for way, said in enumerate([folder.texts[first % len(FILES)], b"\5\0\0", b"\0\0\1\1\1\1", b"\0\30\0\1"]):
            (seeds / f"{first}-{way}").write_bytes(bytes([first, way]) + said)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch, "whole")
        write_folder(whole)
        folder = DamagedFolder(whole, Path(scratch, "damaged"))
        seeds = Path(scratch, "seeds")
        write_seeds(folder, seeds)
        for reader in READERS:
            reader(folder.path)  # what is imported and kept once is no part of what a damaged folder takes
        atheris.Setup([*sys.argv, str(seeds)], lambda said: read_damaged(folder, said))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
