"""Compressing a model's experts: layer by layer to a total of bytes, with what each layer is given as it will run."""

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_offload.compression import calibration as calibrations
from torch_offload.compression import gptq
from torch_offload.compression.calibration import DEFAULT_SEQUENCE, Sample
from torch_offload.compression.gptq import Rounding
from torch_offload.compression.input_moments import ExpertMoments, moments_of
from torch_offload.compression.layerwise import BlockWalk, block_of
from torch_offload.compression.rate_allocation import RateCurve, bytes_in, min_sectors, share_sectors
from torch_offload.compression.resume import FOLDER, ResumeState, fingerprint_of
from torch_offload.compression.rounding import QuantProblem
from torch_offload.config import SECTOR_BYTES, Config
from torch_offload.errors import ConfigError, OutOfTierMemory, UnsupportedModelError
from torch_offload.integrations.hf_models import files_of, loaded_model, model_folder
from torch_offload.moe import checkpoint
from torch_offload.moe.activate import experts_of
from torch_offload.moe.layouts import ExpertsModule, read_ahead
from torch_offload.moe.modules import DOWN, UP, CodedExperts, ExpertShapes, coded_experts, scale_widths
from torch_offload.moe.operators import CODERS
from torch_offload.moe.ternary import SCALE_DTYPE, check_finite
from torch_offload.reporting.progress import progress
from torch_offload.reporting.result import Result
from torch_offload.runtime.loading import loading
from torch_offload.runtime.process import PROCESS
from torch_offload.runtime.session import REMEDIES
from torch_offload.system.terminal import error_console

logger = logging.getLogger(__name__)

_MAX_AT_ONCE_ELEMENTS = 1 << 25
"""Of matrices that are rounded together, and of the second moments of their inputs."""

_BUDGET_BYTES_PER_ELEMENT = 256
"""Of a model that is paged: rounding takes up to 16 copies in float32, a quarter of the budget then."""

_CURVE_ROWS = 96

_CODERS = tuple(coder for coder in CODERS if coder != "qmoe")

_NAME_BYTES = 110
"""Maximum of a blob's entry in the header of its file, beside its name."""

_SPARE_BYTES = 1
"""Of a module's share at least: what rounding of numbers may take from it."""


@dataclass(frozen=True)
class ModuleResult:
    """Result for the experts of one module.

    Attributes:
        name: The module's.
        weights: Of all its experts.
        coded_bytes: Pages, scales and what names them in the file.
        planes: Of each expert.
        tokens: That each expert was given while the model ran on the calibration.
        errors: Part of each expert's output energy that is lost, of the first matrix and of the last.
    """

    name: str
    weights: int
    coded_bytes: int
    planes: int
    tokens: list[int]
    errors: list[tuple[float, float]]


@dataclass(frozen=True)
class Compression(Result):
    """Result of :func:`compress`."""

    modules: list[ModuleResult]
    target_bytes: int

    @property
    def coded_bytes(self) -> int:
        """Of all modules."""
        return sum(module.coded_bytes for module in self.modules)

    @property
    def bits(self) -> float:
        """Per weight, everything counted."""
        return self.coded_bytes * 8 / sum(module.weights for module in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON knows."""
        return asdict(self) | {"coded_bytes": self.coded_bytes, "bits": self.bits}


def compress(
    model: nn.Module,
    *,
    bits: float = 0.8,
    calibration: Iterable[Sample],
    tokenizer: Callable[..., Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    sequence: int = DEFAULT_SEQUENCE,
    damping: float = 0.01,
    sweeps: int = 2,
    coder: str = "smallest",
) -> Compression:
    """Code all experts of a model in place, one block after the other; all else stays as it is.

    Experimental: may change in a minor release.

    The texts are run through the model; each block sees what the coded ones before it say. Memory: the model, the
    hidden states of all texts, and the second moments of one block's experts. A wrapped model stays paged, and all of
    this counts in its budget.

    Args:
        model: Of transformers.
        bits: Per weight of the experts, everything counted: blobs with headers, tables and fill, scales, names.
        calibration: Texts, token ids, or what the model is called with; some hundred thousand tokens of the kind that
            the model is meant for.
        tokenizer: Turns texts into tokens.
        out: A folder for the model, which ``from_pretrained`` opens. Finished blocks are kept there meanwhile, and the
            same call goes on with them, in a new process or with the model loaded anew, if it was ended.
        sequence: Tokens of a row that texts are cut into.
        damping: See ``gptq.quantize``.
        sweeps: See ``gptq.quantize``.
        coder: ``"smallest"`` codes to the fewest bytes; ``"tun12"`` to some more, which are multiplied by faster, for
            experts that are mostly in memory.

    Raises:
        ConfigError: If experts are coded already, the rate is out of reach, or `out` holds the model itself or the
            beginning of another compression. The message names what.
        UnsupportedModelError: If a layout is not known, there are no experts, or a weight is not finite.
        CheckpointError: If what an interrupted call left in `out` is damaged.
        OutOfTierMemory: If the model is wrapped and its budget is too small for one block.
        OSError: If `out` cannot be written.
    """
    _check_coder(coder)
    batches = calibrations.batches_of(calibration, model, tokenizer=tokenizer, sequence=sequence)
    calibrations.warn_of_few_tokens(batches)
    found = experts_of(model)
    _check_none_is_coded(found, model)
    settings = {"bits": bits, "damping": damping, "sweeps": sweeps, "coder": coder, "version": 2}
    budget = RateBudget(found, bits=bits)
    folder = None if out is None else Path(out)
    source = getattr(getattr(model, "config", None), "name_or_path", "")
    if folder is not None and source:
        _check_is_another(folder, Path(source))
    finished = ResumeState(
        None if folder is None else folder / FOLDER,
        "" if folder is None else fingerprint_of(model, batches, settings),
    )
    run = _Compressor(model, budget, finished, damping=damping, sweeps=sweeps, coder=coder)
    with _evaluating(model), torch.no_grad(), _with_own_remedy():
        results = run.run(_by_block(found, model), BlockWalk(model, batches))
    read_ahead(model)
    if folder is not None:
        checkpoint.save(model, folder)  # type: ignore[arg-type]  # a model with experts is one of transformers
        finished.remove()
    return Compression(results, budget.target_bytes)


def compress_folder(
    model: str | os.PathLike[str],
    *,
    bits: float,
    calibration: Path,
    out: Path,
    rows: int,
    sequence: int = DEFAULT_SEQUENCE,
    coder: str = "smallest",
    config: Config | None = None,
    trust_remote_code: bool = False,
    pickled_weights: bool = False,
) -> Compression:
    """Compress a saved model with its tokenizer into another folder. The model is paged: it may be larger than memory.

    Args:
        model: Its folder, or its name on the hub.
        bits: See :func:`compress`.
        calibration: A file of texts, see ``calibration.texts_in``.
        out: Of what is written.
        rows: The most rows of tokens that are used, the first ones of the file.
        sequence: Tokens of a row.
        coder: See :func:`compress`.
        config: Budget and directory, as of ``torch_offload.wrap``.
        trust_remote_code: Run code of the folder.
        pickled_weights: Also read weights that are pickles.

    Raises:
        ConfigError: As :func:`compress`, if a file is missing or cannot be read, or if `out` is the model's folder.
        UnsupportedModelError: As :func:`compress`, or if code of the folder would have to be run.
        CheckpointError: If a file of the model is damaged.
        OutOfTierMemory: If the budget is too small for one block, or a disk for the rest.
        TierIOError: If a scratch file cannot be made or written.
    """
    _check_coder(coder)
    path = model_folder(model, files=files_of(trust_remote_code=trust_remote_code, pickled_weights=pickled_weights))
    _check_is_another(out, path)
    texts = calibrations.texts_in(calibration)
    with _with_own_remedy(), loading(config=config) as block:
        read = loaded_model(path, trust_remote_code=trust_remote_code, pickled_weights=pickled_weights)
        loaded = block.wrap(read.requires_grad_(requires_grad=False))
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} has no tokenizer that transformers can load: {error}") from None
    batches = calibrations.batches_of(texts, loaded, tokenizer=tokenizer, sequence=sequence, rows=rows)
    tokenizer.save_pretrained(str(out))  # first: a folder that is finished has all of it
    return compress(loaded, bits=bits, calibration=batches, out=out, coder=coder)


def _check_coder(coder: str) -> None:
    if coder not in _CODERS:
        raise ConfigError(f"coder: {coder!r} is none of {', '.join(_CODERS)}")


def _check_is_another(out: Path, path: Path) -> None:
    if out.resolve() == path.resolve():
        raise ConfigError(f"{out} is the folder of the model itself, which would be lost; give another folder")


def _check_none_is_coded(found: Sequence[ExpertsModule], model: nn.Module) -> None:
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__} has no experts; give a mixture-of-experts model")
    coded = [experts.name for experts in found if experts.is_coded]
    if coded:
        raise ConfigError(
            f"{len(coded)} of {len(found)} modules of experts are compressed already (first: {coded[0]}), probably by "
            "an interrupted call; reload the model and call again"
        )


def _by_block(found: Sequence[ExpertsModule], model: nn.Module) -> dict[str, list[ExpertsModule]]:
    blocks: dict[str, list[ExpertsModule]] = {}
    for experts in found:
        blocks.setdefault(block_of(experts.name, model), []).append(experts)
    return blocks


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _with_own_remedy() -> Iterator[None]:
    """Take the remedies of training from the message of a full budget: a larger one is all that helps here."""
    try:
        yield
    except OutOfTierMemory as error:
        message = str(error)
        for remedy in REMEDIES.values():
            message = message.removesuffix(remedy)
        raise OutOfTierMemory(message) from error


class RateBudget:
    """Bytes for all modules: each has its share, and what it leaves goes to those behind it."""

    def __init__(self, modules: Sequence[ExpertsModule], *, bits: float) -> None:
        """Set the target.

        Raises:
            ConfigError: If it is out of reach for a module; the message says what is not.
        """
        self.planes = gptq.planes_for(bits)
        self._weights = {experts.name: _weights(experts.shapes) for experts in modules}
        self.target_bytes = int(bits * sum(self._weights.values()) / 8)
        self._spent_bytes = 0
        self._allowed_bytes = 0.0
        for experts in modules:
            shapes = experts.shapes
            sectors = min_sectors(_matrix_weights(shapes), self.planes)
            least = self.overhead_bytes(experts.name, shapes) + SECTOR_BYTES * sectors + _SPARE_BYTES
            if least > self._share_bytes(experts.name):
                least_bits = math.ceil((least + _SPARE_BYTES) * 800 / self._weights[experts.name]) / 100
                raise ConfigError(
                    f"{experts.name}: {bits:g} bits per weight are out of reach, {least_bits:g} is the least for "
                    f"experts of {shapes.weights_each} weights in {self.planes} planes"
                )

    def overhead_bytes(self, name: str, shapes: ExpertShapes) -> int:
        """Return the bytes of a module beside its blobs: scales, and the names of blobs."""
        scales = sum(scale_widths(shapes).values()) * SCALE_DTYPE.itemsize
        return shapes.count * self.planes * (scales + len(name) + _NAME_BYTES) + SECTOR_BYTES

    def sectors(self, name: str, shapes: ExpertShapes) -> int:
        """Return how many sectors a module may have. What the modules before it took has to be counted already."""
        self._allowed_bytes += self._share_bytes(name)
        left = self._allowed_bytes - self._spent_bytes - self.overhead_bytes(name, shapes)
        return int(left // SECTOR_BYTES)

    def spend(self, size_bytes: int) -> None:
        """Count what a module took."""
        self._spent_bytes += size_bytes

    def _share_bytes(self, name: str) -> float:
        return self.target_bytes * self._weights[name] / sum(self._weights.values())


def _weights(shapes: ExpertShapes) -> int:
    return shapes.count * shapes.weights_each


def _matrix_weights(shapes: ExpertShapes) -> list[int]:
    """Weights of all matrices: the first ones of all experts, then the last ones."""
    return [math.prod(shape) for shape in (shapes.up, shapes.down) for _ in range(shapes.count)]


class _Compressor:
    """Codes blocks one after the other."""

    def __init__(
        self,
        model: nn.Module,
        budget: RateBudget,
        finished: ResumeState,
        *,
        damping: float,
        sweeps: int,
        coder: str,
    ) -> None:
        self._model = model
        self._budget = budget
        self._finished = finished
        self._damping = damping
        self._sweeps = sweeps
        self._coder = coder

    def run(self, blocks: Mapping[str, list[ExpertsModule]], walk: BlockWalk) -> list[ModuleResult]:
        results: list[ModuleResult] = []
        with progress(error_console(), "coding experts", uses_lines=True) as show:
            for done, (block, modules) in enumerate(blocks.items()):
                show(block, done, len(blocks))
                results += self._block(block, modules, walk)
                walk.go_past(block)
        return results

    def _block(self, block: str, modules: Sequence[ExpertsModule], walk: BlockWalk) -> list[ModuleResult]:
        """Code one block's experts, or take what was kept of it."""
        kept = self._finished.take(block, {experts.name: experts.shapes for experts in modules})
        if kept is not None:
            coded, results = kept[0], [ModuleResult(**result) for result in kept[1]]
            for result, experts in zip(results, modules, strict=True):
                self._budget.sectors(experts.name, experts.shapes)
                self._budget.spend(result.coded_bytes)
        else:
            moments = moments_of(modules, lambda: walk.run(block))
            coded, results = {}, []
            for experts in modules:
                sectors = self._budget.sectors(experts.name, experts.shapes)
                coded[experts.name], result = self._module(experts, moments[experts.name], sectors)
                self._budget.spend(result.coded_bytes)
                results.append(result)
            self._finished.keep(block, coded, [asdict(result) for result in results])
        for experts in modules:
            experts.replace(coded[experts.name])
        return results

    def _module(
        self, experts: ExpertsModule, moments: ExpertMoments, sectors: int
    ) -> tuple[CodedExperts, ModuleResult]:
        shapes, planes = experts.shapes, self._budget.planes
        for expert in range(shapes.count):
            _check_finite(experts, expert)
        energies = moments.energies().tolist()
        curves = [
            curve
            for matrix in (UP, DOWN)
            for curve in _curves(experts, moments, matrix, energies, damping=self._damping)
        ]
        given = share_sectors(curves, sectors=sectors, planes=planes)
        up, down = (
            self._matrices(experts, moments, matrix, given[matrix * shapes.count : (matrix + 1) * shapes.count])
            for matrix in (UP, DOWN)
        )
        coded = coded_experts(
            shapes,
            [(first.terms, last.terms) for first, last in zip(up, down, strict=True)],
            label=experts.name,
            coder=self._coder,
        )
        blob_bytes = sum(blob.numel() for name, blob in coded.named_buffers() if ".blob_" in name)
        result = ModuleResult(
            name=experts.name,
            weights=_weights(shapes),
            coded_bytes=blob_bytes + self._budget.overhead_bytes(experts.name, shapes),
            planes=planes,
            tokens=[int(count) for count in moments.tokens.tolist()],
            errors=[(first.error, last.error) for first, last in zip(up, down, strict=True)],
        )
        logger.info("%s: %.3f bits per weight", experts.name, result.coded_bytes * 8 / result.weights)
        return coded, result

    def _matrices(
        self, experts: ExpertsModule, moments: ExpertMoments, matrix: int, sectors: Sequence[Sequence[int]]
    ) -> list[Rounding]:
        """Round one matrix of all experts, with these sectors for each plane."""
        rounded: list[Rounding] = []
        for part in _parts(experts, matrix):
            limits = [[bytes_in(count) for count in sectors[expert]] for expert in part]
            rounded += gptq.quantize_all(
                _stacked(experts, part, matrix),
                moments.means(matrix, part),
                limits_bytes=limits,
                damping=self._damping,
                sweeps=self._sweeps,
                coder=self._coder,
            )
        return rounded


def _curves(
    experts: ExpertsModule,
    moments: ExpertMoments,
    matrix: int,
    energies: Sequence[float],
    *,
    damping: float,
) -> list[RateCurve]:
    """Return what one matrix of each expert loses at some rates."""
    curves: list[RateCurve] = []
    for part in _parts(experts, matrix):
        weights = _stacked(experts, part, matrix)
        problem = QuantProblem.make(weights, moments.means(matrix, part), damping=damping)
        entropies, errors = gptq.curve(problem.take(torch.arange(len(part)), most_rows=_CURVE_ROWS))
        curves += [
            RateCurve.make(
                entropies[:, at].tolist(), errors[:, at].tolist(), energy=energies[expert], weights=weights[0].numel()
            )
            for at, expert in enumerate(part)
        ]
    return curves


def _parts(experts: ExpertsModule, matrix: int) -> list[list[int]]:
    """Experts that are rounded together, by number."""
    shapes = experts.shapes
    rows, columns = shapes.up if matrix == UP else shapes.down
    size = max(1, _at_once_elements() // (columns * (rows + columns)))
    return [list(range(begin, min(begin + size, shapes.count))) for begin in range(0, shapes.count, size)]


def _at_once_elements() -> int:
    session = PROCESS.session
    ram = None if session is None else session.config.ram
    return _MAX_AT_ONCE_ELEMENTS if ram is None else min(_MAX_AT_ONCE_ELEMENTS, ram // _BUDGET_BYTES_PER_ELEMENT)


def _stacked(experts: ExpertsModule, part: Sequence[int], matrix: int) -> Tensor:
    return torch.stack([experts.weight(expert, matrix).detach().to("cpu", torch.float32) for expert in part])


def _check_finite(experts: ExpertsModule, expert: int) -> None:
    for matrix in (UP, DOWN):
        try:
            check_finite(experts.weight(expert, matrix))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"expert {expert} of {experts.name}: {error}") from error
