"""A folder with coded experts as it lies on the disk: what is in it, and whether all of it is what was written."""

import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from torch_offload.config import format_size
from torch_offload.errors import CheckpointError, OffloadError
from torch_offload.moe.checkpoint import CodedExpertsConfig, may_be_absent
from torch_offload.moe.folder_format import QUANT_METHOD
from torch_offload.moe.layouts import CODED, experts_of
from torch_offload.moe.modules import ExpertShapes, blob_name, scale_widths
from torch_offload.moe.operators import CodedExtent, count_zeros, extents
from torch_offload.reporting.result import Result
from torch_offload.system.tables import PlainTable

MAX_VALUES = 1 << 30
"""Of one matrix, which takes a second to decode. Experts have less than half as many."""
MAX_COLUMNS = 1 << 18
"""Of one matrix, of which up to 64 rows are in memory, a byte for each value."""
MAX_CONFIG_BYTES = 2 << 20
MAX_INDEX_BYTES = 8 << 20
"""Of an index, and of what a file of tensors says about them: some 50,000 tensors."""
MAX_JSON_VALUES = 200_000
"""Each takes up to some hundred bytes in memory, few in a file."""

_BF16_BYTES = 2
_NO_SUCH_EXPERTS = "the model has no such experts"
_FILE_NAME = re.compile(r"[^/\0]+\.safetensors")
_COUNT = re.compile(r"(num|n)_(\w+_)?(layers?|experts)")


@dataclass(frozen=True)
class ModuleContent:
    """The experts of one module, or of all.

    Attributes:
        name: The module's.
        experts: How many.
        planes: Of each; the most of any module.
        weights: Of all experts.
        zeros: Part of all coded values that is zero.
        tiles: How many tiles each coder has.
        coded_bytes: Blobs and scales.
    """

    name: str
    experts: int
    planes: int
    weights: int
    zeros: float
    tiles: dict[str, int]
    coded_bytes: int

    @property
    def bits(self) -> float:
        """Per weight."""
        return self.coded_bytes * 8 / max(self.weights, 1)

    @property
    def bf16_bytes(self) -> int:
        """Size of the weights without coding."""
        return self.weights * _BF16_BYTES

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        return asdict(self) | {"bits": self.bits, "bf16_bytes": self.bf16_bytes}


@dataclass(frozen=True)
class FolderContent(Result):
    """The coded experts of a folder, by module."""

    path: Path
    modules: list[ModuleContent]

    @property
    def total(self) -> ModuleContent:
        """Of all modules."""
        weights = sum(module.weights for module in self.modules)
        values = sum(module.weights * module.planes for module in self.modules)
        zeros = sum(module.zeros * module.weights * module.planes for module in self.modules)
        tiles: Counter[str] = Counter()
        for module in self.modules:
            tiles.update(module.tiles)
        return ModuleContent(
            "all",
            sum(module.experts for module in self.modules),
            max((module.planes for module in self.modules), default=0),
            weights,
            zeros / max(values, 1),
            dict(tiles),
            sum(module.coded_bytes for module in self.modules),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        modules = [module.to_dict() for module in self.modules]
        return {"folder": str(self.path), "modules": modules, "total": self.total.to_dict()}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a table with a line for each module and one for all."""
        table = PlainTable(title=f"coded experts in {self.path}", box=box.SQUARE)
        for heading in ("module", "experts", "planes", "bits/weight", "zeros", "coders", "bytes", "bf16"):
            table.add_column(heading, justify="left" if heading in ("module", "coders") else "right")
        for module in self.modules:
            table.add_row(*_cells(module))
        table.add_section()
        table.add_row(*_cells(self.total))
        yield table


def _cells(module: ModuleContent) -> tuple[str, ...]:
    tiles = sum(module.tiles.values())
    coders = ", ".join(f"{name} {count / tiles:.0%}" for name, count in sorted(module.tiles.items()))
    return (
        module.name,
        str(module.experts),
        str(module.planes),
        f"{module.bits:.3f}",
        f"{module.zeros:.1%}",
        coders,
        format_size(module.coded_bytes),
        f"{format_size(module.bf16_bytes)} ({module.bf16_bytes / max(module.coded_bytes, 1):.1f}x)",
    )


class CodedFolder:
    """The files of a folder, opened as they are asked for."""

    def __init__(self, path: Path) -> None:
        """Read the configuration and the index.

        Raises:
            CheckpointError: If the folder has no coded experts, is one of ``save_pretrained``, or is damaged.
        """
        self.path = path
        self._said = _json_of(path / "config.json", max_bytes=MAX_CONFIG_BYTES)
        self.config = _coded_config(path, self._said)
        if (path / SAFE_WEIGHTS_NAME).exists():
            raise CheckpointError(
                f"{path} was written by save_pretrained, blobs among all else in {SAFE_WEIGHTS_NAME}; only folders "
                "that compress or coded_files.save has written can be read"
            )
        index = _json_of(path / SAFE_WEIGHTS_INDEX_NAME, max_bytes=MAX_INDEX_BYTES)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{path / SAFE_WEIGHTS_INDEX_NAME} has no weight_map")
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or not _FILE_NAME.fullmatch(file_name):
                raise CheckpointError(
                    f"{path / SAFE_WEIGHTS_INDEX_NAME}: {name} refers to {reprlib.repr(file_name)}, which is not in "
                    "this folder; copy the whole folder again"
                )
        self.weight_map: dict[str, str] = weight_map

    def model(self) -> nn.Module:
        """Return the model that the configuration describes, without values and on the meta device.

        Raises:
            CheckpointError: If transformers knows no such model, or it would have more layers or experts than the index
                has tensors, which takes long to make and cannot be right.
        """
        for name, count in _counts(self._said):
            if count > len(self.weight_map):
                raise CheckpointError(
                    f"{self.path / 'config.json'}: {name} is {count}, the index has {len(self.weight_map)} tensors"
                )
        return _empty_model(self.path)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            OffloadError: If it cannot be read; the message says why.
        """
        file_name = self.weight_map.get(name)
        if file_name is None:
            raise OffloadError("not in the index")
        try:
            with _opened(self.path / file_name) as file:
                tensor: Tensor = file.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise OffloadError(f"{file_name}: {error}") from error
        return tensor

    def blob(self, name: str) -> Tensor:
        """Read one coded blob. Its content is not checked yet.

        Raises:
            OffloadError: As :meth:`tensor`, or if it cannot be a blob.
        """
        blob = self.tensor(name)
        if blob.dtype != torch.uint8 or blob.dim() != 1:
            raise OffloadError(f"expected a 1-D torch.uint8 tensor, got {blob.dtype} of shape {tuple(blob.shape)}")
        return blob

    def blobs(self, module: str) -> Iterator[tuple[int, int, int, str]]:
        """List a module's blobs: plane, expert, bytes as configured, name."""
        for plane, sizes in enumerate(self.config.experts[module]["blob_bytes"]):
            for expert, size_bytes in enumerate(sizes):
                yield plane, expert, size_bytes, f"{_plane_name(module, plane)}.{blob_name(expert)}"


def _plane_name(module: str, plane: int) -> str:
    return f"{module}.{CODED}.planes.{plane}"


def _opened(path: Path) -> Any:
    """Open a file of tensors, unless what it says about them would fill memory."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > MAX_INDEX_BYTES:
        raise OSError(f"the header has {header_bytes} bytes, at most {MAX_INDEX_BYTES} are read")
    return safetensors.safe_open(str(path), framework="pt")


def _json_of(path: Path, *, max_bytes: int) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"there is no {path}; give a folder that compress has written")
    with path.open("rb") as file:
        text = file.read(max_bytes + 1)
    values = sum(map(text.count, (b",", b"[", b"{")))
    if len(text) > max_bytes or values > MAX_JSON_VALUES:
        raise CheckpointError(
            f"{path} is larger than any that compress writes: at most {max_bytes} bytes and {MAX_JSON_VALUES} values "
            "are read"
        )
    try:
        content = json.loads(text.decode())
        json.dumps(content, ensure_ascii=False).encode()  # a half character cannot be shown, nor name a file
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: expected a JSON object, got {type(content).__name__}")
    return content


def _counts(content: Any) -> Iterator[tuple[str, int]]:
    """Yield the layers and experts that a configuration has, and those inside it."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, int) and _COUNT.fullmatch(name):
            yield name, value
        yield from _counts(value)


def _coded_config(path: Path, configuration: dict[str, Any]) -> CodedExpertsConfig:
    content = configuration.get("quantization_config")
    if not isinstance(content, dict) or content.get("quant_method") != QUANT_METHOD:
        raise CheckpointError(f"{path} has no coded experts; give a folder that compress has written")
    try:
        return CodedExpertsConfig(**{name: value for name, value in content.items() if name != "quant_method"})
    except CheckpointError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from None


def inspect(path: Path) -> FolderContent:
    """Say what a folder's coded experts are like. Every blob is read and decoded that the model can have.

    Raises:
        CheckpointError: If it has none, or its configuration describes no model with such experts.
        OffloadError: If something cannot be read; the message names it. See :func:`verify` for all that is damaged.
    """
    folder = CodedFolder(path)
    found = {experts.name: experts.shapes for experts in experts_of(folder.model())}
    for name in folder.config.experts:
        if name not in found:
            raise CheckpointError(f"{name}: {_NO_SUCH_EXPERTS}")
    return FolderContent(path, [_content_of(folder, module, found[module]) for module in folder.config.experts])


def _content_of(folder: CodedFolder, module: str, shapes: ExpertShapes) -> ModuleContent:
    coded_bytes = zeros = values = weights = 0
    tiles: Counter[str] = Counter()
    experts, planes = set(), set()
    for plane, expert, _, name in folder.blobs(module):
        try:
            blob = folder.blob(name)
            matrices = _matrices_of(blob, shapes)
            zeros += sum(count_zeros(blob, number) for number in range(len(matrices)))
        except OffloadError as error:
            raise OffloadError(f"{name}: {error}") from error
        experts.add(expert)
        planes.add(plane)
        coded_bytes += blob.numel()
        size = sum(matrix.rows * matrix.columns for matrix in matrices)
        values += size
        weights += size if plane == 0 else 0
        for matrix in matrices:
            tiles.update({"TUN12": matrix.tun12_tiles, "RANS4": matrix.rans4_tiles, "QMoE": matrix.qmoe_tiles})
    for name in folder.weight_map:
        if name.startswith(f"{module}.{CODED}.") and name.endswith("_scale"):
            coded_bytes += folder.tensor(name).nbytes
    return ModuleContent(module, len(experts), len(planes), weights, zeros / max(values, 1), dict(+tiles), coded_bytes)


@dataclass(frozen=True)
class Verification(Result):
    """Amounts read, and the problems found, one line each."""

    path: Path
    blobs: int
    read_bytes: int
    problems: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        return {
            "folder": str(self.path),
            "blobs": self.blobs,
            "read_bytes": self.read_bytes,
            "problems": self.problems,
        }


def verify(path: Path) -> Verification:
    """Read every blob, check its checksum, decode it, and hold shapes and names against the configuration.

    Raises:
        CheckpointError: If the folder has no coded experts, or its configuration describes no model with experts.
    """
    folder = CodedFolder(path)
    model = folder.model()
    found = {experts.name: experts.shapes for experts in experts_of(model)}
    problems = [f"{name}: {_NO_SUCH_EXPERTS}" for name in folder.config.experts if name not in found]
    problems += _absent_problems(folder, model)
    problems += _other_problems(folder)
    blobs = read_bytes = 0
    for module in folder.config.experts:
        shapes = found.get(module)
        for plane, expert, size_bytes, name in folder.blobs(module):
            blobs += 1
            try:
                blob = folder.blob(name)
                read_bytes += blob.nbytes
                problem = _problem_of(blob, size_bytes, shapes)
            except OffloadError as error:
                problem = str(error)
            if problem:
                problems.append(f"expert {expert} of {module}, plane {plane}: {problem}")
        if shapes is not None:
            planes = folder.config.experts[module]["blob_bytes"]
            counts = {len(sizes) for sizes in planes}
            if counts != {shapes.count}:
                problems.append(f"{module}: {sorted(counts)} experts in the files, {shapes.count} in the model")
            problems += _scale_problems(folder, module, len(planes), scale_widths(shapes), shapes.count)
    return Verification(path, blobs, read_bytes, problems)


def _absent_problems(folder: CodedFolder, model: nn.Module) -> Iterator[str]:
    """Tensors of the model that the index does not name. Of tied ones it has to name one."""
    not_needed: set[str] = set()
    for experts in experts_of(model):
        weights = experts.weight_names
        if experts.name in folder.config.experts:
            not_needed.update(weights)
        elif not all(name in folder.weight_map for name in weights):
            not_needed.update(weights)
            yield f"{experts.name}: the model has such experts, the configuration names no coded ones of them"
    tied: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tied.setdefault(id(tensor), []).append(name)
    for names in tied.values():
        if not any(name in folder.weight_map or name in not_needed or may_be_absent(model, name) for name in names):
            yield f"{names[0]}: the model has such a tensor, the index does not name it"


def _problem_of(blob: Tensor, size_bytes: int, shapes: ExpertShapes | None) -> str | None:
    """Check a blob. Of experts that the model does not have only the checksums are, whatever they say they hold."""
    if blob.nbytes != size_bytes:
        return f"{blob.nbytes} bytes, {size_bytes} in the configuration"
    if shapes is None:
        extents(blob)
        return None
    for number in range(len(_matrices_of(blob, shapes))):
        count_zeros(blob, number)
    return None


def _matrices_of(blob: Tensor, shapes: ExpertShapes) -> list[CodedExtent]:
    """List a blob's matrices once it is clear that decoding them takes no more than the model says.

    Raises:
        OffloadError: If they are others than the model's, or larger than any expert's.
    """
    matrices = extents(blob)
    sizes, wanted = [(matrix.rows, matrix.columns) for matrix in matrices], [shapes.up, shapes.down]
    if sizes != wanted:
        raise OffloadError(f"matrices of {reprlib.repr(sizes)}, the model has {wanted}")
    for number, (rows, columns) in enumerate(sizes):
        if rows * columns > MAX_VALUES or columns > MAX_COLUMNS:
            raise OffloadError(
                f"matrix {number} has {rows} x {columns} values, at most {MAX_VALUES} in {MAX_COLUMNS} columns are read"
            )
    return matrices


def _scale_problems(
    folder: CodedFolder, module: str, planes: int, widths: dict[str, int], experts: int
) -> Iterator[str]:
    for plane in range(planes):
        for scale, width in widths.items():
            name = f"{_plane_name(module, plane)}.{scale}"
            try:
                tensor = folder.tensor(name)
            except OffloadError as error:
                yield f"{name}: {error}"
                continue
            if tuple(tensor.shape) != (experts, width):
                yield f"{name}: shape {tuple(tensor.shape)}, the model has {(experts, width)}"
            elif not tensor.isfinite().all():
                yield f"{name}: not all of it is finite"


def _other_problems(folder: CodedFolder) -> Iterator[str]:
    """Files of all other tensors: that they open and hold what the index says. They have no checksums."""
    by_file: dict[str, set[str]] = {}
    for name, file_name in folder.weight_map.items():
        if f".{CODED}." not in name:
            by_file.setdefault(file_name, set()).add(name)
    for file_name, names in by_file.items():
        try:
            with _opened(folder.path / file_name) as file:
                missing = names - set(file.keys())
        except (OSError, safetensors.SafetensorError) as error:
            yield f"{file_name}: {error}"
            continue
        yield from (f"{file_name}: {name} is missing" for name in sorted(missing))


def _empty_model(path: Path) -> nn.Module:
    """Return the model that a saved folder's configuration names, on the meta device.

    Raises:
        CheckpointError: If transformers knows no such model.
    """
    import transformers

    try:
        configuration = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        named = getattr(transformers, (configuration.architectures or [""])[0], transformers.AutoModelForCausalLM)
        with torch.device("meta"):
            if hasattr(named, "_from_config"):
                model: nn.Module = named._from_config(configuration)
            else:
                model = named.from_config(configuration, trust_remote_code=False)
    except Exception as error:  # of any type: whatever a value makes code fail that takes it for granted
        if "trust_remote_code" in str(error):
            raise CheckpointError(f"the model in {path} needs code of its own, which is never run here") from None
        raise CheckpointError(f"{path} describes no model that transformers knows: {error!r}") from error
    return model
