"""A small folder of coded experts of which a fuzzer changes one file at a time, as bytes say."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from support.moe_models import tiny_moe

from torch_offload.moe import checkpoint
from torch_offload.moe.activate import code_experts
from torch_offload.moe.checkpoint import BLOB_ALIGNMENT_BYTES
from torch_offload.moe.ternary import in_planes

FILES = ("config.json", "model.safetensors.index.json", "experts-*.safetensors", "model-*.safetensors")
_LENGTH_BYTES = 8

# JSON that takes the place of what is in a file.
_STRANGE = (
    *("null", "true", "-1", "0", "1", "4096", "4095", "0.5", "NaN", "1e999", "2147483648", "9223372036854775808"),
    *("9" * 5000, '"9"', '""', '"a"', '"../a"', '"/"', '"[/a]"', r'"\u0000"', r'"\ud800"', '"."', '"config.json"'),
    *('"F32"', '"F4"', '"BOOL"', '"I64"', '"utils"', '"AutoConfig"', '"MixtralModel"', '"switch_transformers"'),
    *("[]", "[[]]", "[0, 1e3]", "[8192, 8192]", "[[8192, 8192]]", "[0, 1099511627776]", "[4294967296, 4294967296]"),
    *("{}", '{"a": {}}', '{"blob_bytes": 1}', "[" * 5000, "[" * 5000 + "]" * 5000),
)

# Where an extent has its checksum, what it covers and how long it is: csrc/codec/FORMAT.md.
_MAGIC = b"TOTERN1\0"
_CHECKSUM_AT, _HASHED_FROM, _EXTENT_SIZE_AT = 8, 16, 24


def write_folder(folder: Path) -> None:
    """Write one layer of two experts, each of two planes."""
    model: Any = tiny_moe("mixtral", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_local_experts=2)
    code_experts(model, lambda weight: in_planes(weight, [0.5, 0.8]))
    checkpoint.save(model, folder)


class DamagedFolder:
    """A copy of a folder with one file that is not as it was."""

    def __init__(self, whole: Path, copy: Path) -> None:
        """Copy the folder."""
        self.path = Path(shutil.copytree(whole, copy))
        self._files = [next(self.path.glob(name)) for name in FILES]
        self._whole = [file.read_bytes() for file in self._files]
        self._damaged = 0

    @property
    def texts(self) -> list[bytes]:
        """The JSON of each file."""
        return [_text_of(file, whole) for file, whole in zip(self._files, self._whole, strict=True)]

    @property
    def size_bytes(self) -> int:
        """Of all files, as they are now."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    def damage(self, number: int, way: int, said: bytes) -> None:
        """Change a file; the one that was changed before becomes whole.

        Args:
            number: Of ``FILES``.
            way: Of ``WAYS``.
            said: What to change. Any bytes say something.
        """
        self._files[self._damaged].write_bytes(self._whole[self._damaged])
        self._damaged = number
        file = self._files[number]
        file.write_bytes(WAYS[way](file, self._whole[number], said))


def _text_of(file: Path, whole: bytes) -> bytes:
    """The JSON in a file: all of it, or what describes tensors."""
    if file.suffix == ".json":
        return whole
    return whole[_LENGTH_BYTES:][: int.from_bytes(whole[:_LENGTH_BYTES], "little")]


def replace_text(file: Path, whole: bytes, text: bytes) -> bytes:
    """Put other JSON into a file, whose length is right."""
    if file.suffix == ".json":
        return text
    tensors = whole[_LENGTH_BYTES + len(_text_of(file, whole)) :]
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + tensors


def change_nodes(file: Path, whole: bytes, said: bytes) -> bytes:
    """Change values in the JSON. Two bytes say which one, a third what becomes of it."""
    root = {"": json.loads(_text_of(file, whole))}
    for begin in range(0, len(said) - 2, 3):
        nodes = list(_nodes(root))
        if not nodes:
            break
        owner, key = nodes[int.from_bytes(said[begin : begin + 2], "little") % len(nodes)]
        _change_node(owner, key, said[begin + 2])
    text = json.dumps(root.get("", 0))
    return replace_text(file, whole, re.sub(r'"@(\d+)@"', lambda match: _STRANGE[int(match[1])], text).encode())


def _nodes(owner: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all values, each as what it lies in and where."""
    keys = list(owner) if isinstance(owner, dict) else range(len(owner)) if isinstance(owner, list) else ()
    for key in keys:
        yield owner, key
        yield from _nodes(owner[key])


def _change_node(owner: Any, key: Any, kind: int) -> None:
    """Drop a value, have it twice, or put a strange one in its place."""
    kind %= len(_STRANGE) + 3
    if kind == len(_STRANGE):
        del owner[key]
    elif kind == len(_STRANGE) + 1 and isinstance(owner, list):
        owner.append(json.loads(json.dumps(owner[key])))
    elif kind > len(_STRANGE) and isinstance(owner, dict):
        owner["a" if kind % 2 else "[/a]"] = owner.pop(key)
    else:
        owner[key] = f"@{kind % len(_STRANGE)}@"


def change_bytes(file: Path, whole: bytes, said: bytes) -> bytes:
    """Change bytes anywhere. Three bytes say where, a fourth what is there; the first two cut the file if they are odd.

    The 8 bytes of a header's length are among them.
    """
    changed = bytearray(whole)
    for begin in range(2, len(said) - 3, 4):
        changed[int.from_bytes(said[begin : begin + 3], "little") % len(changed)] = said[begin + 3]
    cut = int.from_bytes(said[:2], "little")
    return bytes(changed[: cut // 2 % (len(changed) + 1)] if cut % 2 else changed)


def forge_pages(file: Path, whole: bytes, said: bytes) -> bytes:
    """Change bytes of coded extents and make their checksums right. Which extent, where in it (two bytes), what."""
    changed = bytearray(whole)
    extents = [at for at in range(0, len(whole), BLOB_ALIGNMENT_BYTES) if whole[at : at + len(_MAGIC)] == _MAGIC]
    for begin in range(0, len(said) - 3 if extents else 0, 4):
        at = extents[said[begin] % len(extents)]
        size = int.from_bytes(whole[at + _EXTENT_SIZE_AT :][:8], "little")
        changed[at + _HASHED_FROM + int.from_bytes(said[begin + 1 : begin + 3], "little") % (size - _HASHED_FROM)] = (
            said[begin + 3]
        )
        checksum = xxhash.xxh3_64_intdigest(bytes(changed[at + _HASHED_FROM : at + size]))
        changed[at + _CHECKSUM_AT : at + _HASHED_FROM] = checksum.to_bytes(8, "little")
    return bytes(changed)


Way = Callable[[Path, bytes, bytes], bytes]
WAYS: tuple[Way, ...] = (replace_text, change_nodes, change_bytes, forge_pages)
