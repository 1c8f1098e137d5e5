"""A folder of coded experts made to fill memory: reading it takes at most twice its size and a constant."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.moe_models import tiny_moe

from torch_offload import moe
from torch_offload.moe import checkpoint, inspection, ternary
from torch_offload.moe.operators import encode

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.any_torch]

CONSTANT_BYTES = 64 << 20
HIDDEN, INTERMEDIATE = 1 << 15, 1 << 11
"""Of experts whose matrices have 128 and 64 MiB of values, nearly all of them zero."""

# The peak beyond what is there once everything is imported and kept; the kernel counts it from 5 in clear_refs on.
MEASURED = """
    import pathlib, sys
    from torch_offload.cli import app

    def status(name):
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024

    def run(command, folder):
        sys.argv = ["torch-offload", command, folder]
        try:
            app.main()
        except SystemExit as ended:
            return ended.code

    command, small, hostile = sys.argv[1:]
    run(command, small)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    code = run(command, hostile)
    print("taken", status("VmHWM") - before, code)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """One layer of two experts."""
    folder = tmp_path_factory.mktemp("small")
    model = tiny_moe("mixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_local_experts=2)
    moe.code_experts(model, lambda weight: ternary.in_planes(weight, [0.5]))
    checkpoint.save(model, folder)
    return folder


def mostly_zeros(rows: int, columns: int) -> torch.Tensor:
    values = torch.zeros(rows, columns, dtype=torch.int8)
    values[0, 0], values[0, 1] = 1, -1
    return encode(values)


def copy_with(small: Path, folder: Path, *, blob: torch.Tensor, **sizes: int) -> Path:
    """Put one blob in place of all, and other sizes into the model's configuration."""
    folder.mkdir()
    for file in small.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    [experts] = folder.glob("experts-*.safetensors")
    save_file({name: blob.clone() for name in load_file(experts)}, experts, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | sizes
    for entry in config["quantization_config"]["experts"].values():
        entry["blob_bytes"] = [[blob.numel()] * len(plane) for plane in entry["blob_bytes"]]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def large_matrices(small: Path, folder: Path) -> tuple[Path, str]:
    """Matrices as the model says it has them, of few bytes and many values."""
    blob = torch.cat([mostly_zeros(2 * INTERMEDIATE, HIDDEN), mostly_zeros(HIDDEN, INTERMEDIATE)])
    copy_with(small, folder, blob=blob, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE)
    return folder, ""


def other_matrices(small: Path, folder: Path) -> tuple[Path, str]:
    """The same in a model that has small ones: nothing is decoded."""
    blob = torch.cat([mostly_zeros(2 * INTERMEDIATE, HIDDEN), mostly_zeros(HIDDEN, INTERMEDIATE)])
    return copy_with(small, folder, blob=blob), "the model has [(32, 16), (16, 16)]"


def wide_matrices(small: Path, folder: Path) -> tuple[Path, str]:
    """Rows so long that the few that are decoded at once fill memory, in a model that has such."""
    columns = 1 << 22
    blob = torch.cat([mostly_zeros(32, columns), mostly_zeros(columns, 16)])
    copy_with(small, folder, blob=blob, hidden_size=columns)
    return folder, f"matrix 0 has 32 x {columns} values, at most"


def many_values(small: Path, folder: Path) -> tuple[Path, str]:
    """An index of lists that take twenty times their bytes."""
    copy_with(small, folder, blob=mostly_zeros(32, 16))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    text = json.dumps(index)[:-1] + ', "x": [' + ",".join(["[]"] * 2_500_000) + "]}"
    (folder / "model.safetensors.index.json").write_text(text)
    return folder, "is larger than any that compress writes"


def long_header(small: Path, folder: Path) -> tuple[Path, str]:
    """A file that says of many tensors that they are empty."""
    copy_with(small, folder, blob=mostly_zeros(32, 16))
    [experts] = folder.glob("experts-*.safetensors")
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{number}": entry for number in range(400_000)}).encode()
    experts.write_bytes(len(header).to_bytes(8, "little") + header)
    return folder, "the header has"


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("make", [large_matrices, other_matrices, wide_matrices, many_values, long_header])
def test_memory_is_bounded_by_the_size_of_the_folder(small, tmp_path, make, command):
    """Method: the command in a new process on a small folder, then on the hostile one; its peak beyond the first."""
    hostile, expected = make(small, tmp_path / "hostile")
    size_bytes = sum(file.stat().st_size for file in hostile.iterdir())
    arguments = [sys.executable, "-c", textwrap.dedent(MEASURED), command, str(small), str(hostile)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
    [taken_bytes] = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("taken")]
    assert expected in done.stdout + done.stderr
    assert taken_bytes <= 2 * size_bytes + CONSTANT_BYTES, f"{taken_bytes} for a folder of {size_bytes}"


def test_zeros_are_those_of_the_matrix():
    """Method: against the decoded matrix, by each coder, with several tiles and columns that no vector divides."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-1, 2, (300, 333), generator=generator, dtype=torch.int8)
    values[torch.rand(values.shape, generator=generator) < 0.7] = 0
    for coder in ("smallest", "tun12", "rans4", "qmoe"):
        for classes in (1, 4):
            blob = torch.cat([encode(values[:7], coder=coder), encode(values, coder=coder, most_classes=classes)])
            counted = [moe.operators.count_zeros(blob, number) for number in (0, 1)]
            assert counted == [int((values[:7] == 0).sum()), int((values == 0).sum())]


def test_folders_of_the_largest_models_are_below_the_bounds():
    """Method: names and sizes of 61 layers of 384 experts in two planes."""
    names = [
        f"model.layers.{layer}.mlp.experts.coded.planes.{plane}.blob_{expert}"
        for layer in range(61)
        for plane in range(2)
        for expert in range(384)
    ]
    index = json.dumps({"weight_map": dict.fromkeys(names, "experts-00001-of-00099.safetensors")}, indent=2)
    assert len(index) < inspection.MAX_INDEX_BYTES
    assert index.count(",") < inspection.MAX_JSON_VALUES / 2
    sizes = json.dumps([[12_582_912] * 384] * 2, indent=2)
    assert 61 * len(sizes) < inspection.MAX_CONFIG_BYTES
