"""Files written from front to end past the page cache: what is written takes no memory beyond a few blocks."""

import ctypes
import errno
import functools
import os
from dataclasses import dataclass
from fcntl import F_GETFL, F_SETFL, fcntl
from types import TracebackType

import torch

from torch_offload.system.threads import BackgroundWork, Work

SECTOR_BYTES = 4096
MAX_BLOCK_BYTES = 4 << 20
MIN_BLOCK_BYTES = 16 << 10
DEPTH = 4
BLOCK_SHARE = 64
"""A block takes one part in so many of the budget; there are `DEPTH` of them."""


def preallocate(file: int, size_bytes: int) -> None:
    """Give a file its length and, where the file system can, all of its space.

    The C library's own function writes a byte to every block where the file system cannot.

    Raises:
        OSError: If the disk is too full.
    """
    error = _fallocate(file, size_bytes)
    if error == 0:
        return
    if error not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(error, os.strerror(error))
    disk = os.fstatvfs(file)
    free_bytes = disk.f_bavail * disk.f_frsize
    if disk.f_blocks > 0 and free_bytes < size_bytes:
        raise OSError(errno.ENOSPC, f"{size_bytes} bytes are needed, {free_bytes} are free on the disk")
    os.ftruncate(file, size_bytes)


def _fallocate(file: int, size_bytes: int) -> int:
    """Return 0 or errno."""
    library = ctypes.CDLL(None, use_errno=True)
    while library.fallocate64(file, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return ctypes.get_errno()
    return 0


def _set_direct(file: int, *, is_direct: bool) -> bool:
    """Have writes go past the page cache, or not; returns whether they do now."""
    flags = fcntl(file, F_GETFL)
    try:
        fcntl(file, F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False  # a file system in memory, say
    return is_direct


@dataclass
class Block:
    """Memory for a part of the file, under the budget as every allocation is."""

    memory: torch.Tensor
    written: Work | None = None

    @classmethod
    def make(cls, size_bytes: int) -> "Block":
        return cls(torch.empty(size_bytes + SECTOR_BYTES, dtype=torch.uint8))

    @property
    def address(self) -> int:
        """Where the block begins: at a sector, as direct writes must."""
        return -(-self.memory.data_ptr() // SECTOR_BYTES) * SECTOR_BYTES

    def view(self, size_bytes: int) -> memoryview:
        array = (ctypes.c_ubyte * size_bytes).from_address(self.address)
        return memoryview(array).cast("B")


class DirectFile:
    """Fills a new file of known size. Threads: one appends; others, if there is room for them, write behind it."""

    def __init__(self, file: int, *, size_bytes: int, budget_bytes: int) -> None:
        """Give the file all the space that it needs.

        Args:
            file: Descriptor of an empty file, open for writing; it stays the caller's.
            size_bytes: Of the whole file.
            budget_bytes: Blocks take a share of it.

        Raises:
            OSError: If the disk is too full for it.
        """
        self._size_bytes = size_bytes
        self._file = file
        if size_bytes > 0:
            preallocate(file, size_bytes)
        self._is_direct = _set_direct(file, is_direct=True)
        share_bytes = budget_bytes // BLOCK_SHARE // SECTOR_BYTES * SECTOR_BYTES
        self._block_bytes = min(max(share_bytes, MIN_BLOCK_BYTES), MAX_BLOCK_BYTES)
        self._blocks: list[Block] = []
        self._filled_bytes = 0
        self._offset = 0
        self._turn = 0
        self._writes = BackgroundWork(DEPTH)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for block in self._blocks:
            if block.written is not None:
                block.written.leave_out()
        self._writes.close()
        self._blocks = []

    def append(self, address: int, size_bytes: int) -> None:
        """Copy memory to the end of what was appended so far.

        Raises:
            OSError: If it, or something appended before, cannot be written.
        """
        while size_bytes > 0:
            block = self._current()
            part_bytes = min(size_bytes, self._block_bytes - self._filled_bytes)
            ctypes.memmove(block.address + self._filled_bytes, address, part_bytes)
            self._filled_bytes += part_bytes
            address += part_bytes
            size_bytes -= part_bytes
            if self._filled_bytes == self._block_bytes:
                self._send()

    def finish(self) -> None:
        """Write what is left and cut the file to its size.

        Raises:
            OSError: If anything cannot be written.
        """
        if self._filled_bytes > 0:
            rest_bytes = -self._filled_bytes % SECTOR_BYTES
            ctypes.memset(self._current().address + self._filled_bytes, 0, rest_bytes)
            self._filled_bytes += rest_bytes
            self._send()
        for block in self._blocks:
            self._wait(block)
        os.ftruncate(self._file, self._size_bytes)

    def _current(self) -> Block:
        """Return the block to fill, free to be written to."""
        if self._turn == len(self._blocks):
            self._blocks.append(Block.make(self._block_bytes))
        block = self._blocks[self._turn]
        if self._filled_bytes == 0:
            self._wait(block)
        return block

    def _send(self) -> None:
        block = self._blocks[self._turn]
        content = block.view(self._filled_bytes)
        block.written = self._writes.submit(functools.partial(self._write, content, self._offset))
        self._offset += self._filled_bytes
        self._filled_bytes = 0
        self._turn = (self._turn + 1) % DEPTH

    def _wait(self, block: Block) -> None:
        written, block.written = block.written, None
        if written is not None:
            written.finish()

    def _write(self, content: memoryview, offset: int) -> None:
        """Write all of it; a short write goes on with the rest, from a sector on where that is needed."""
        while content:
            was_direct = self._is_direct  # another thread may find out meanwhile that it cannot be
            try:
                written_bytes = os.pwrite(self._file, content, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._is_direct = _set_direct(self._file, is_direct=False)  # accepted when it was set, and refused now
                continue
            if self._is_direct and written_bytes < len(content):
                written_bytes = written_bytes // SECTOR_BYTES * SECTOR_BYTES
            if written_bytes == 0:
                raise OSError(errno.EIO, "a write ended before the first sector")
            if not self._is_direct:
                os.fdatasync(self._file)
                os.posix_fadvise(self._file, offset, written_bytes, os.POSIX_FADV_DONTNEED)
            content = content[written_bytes:]
            offset += written_bytes
