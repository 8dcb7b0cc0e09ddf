"""A file mapped into memory, whose pages can be given back.

A page of the map that was read counts as this process's memory until it is released, so a tensor is copied out piece by
piece and the pages are released behind the copy: however large the file, one piece of it is resident at a time.
"""

import mmap
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sharpi_jax.errors import CheckpointError

_PIECE = 1 << 24
_BOUNDARY = 64  # JAX takes over a host array of this alignment on CPU without a second copy

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """A regular file, mapped read-only.

    Attributes:
      path: the file. size: its bytes. data: the map.
    """

    def __init__(self, path: Path) -> None:
        """Maps a file; nothing of it is read yet.

        Raises:
          CheckpointError: it is missing, empty, unreadable or no regular file.
        """
        self.path = path
        self.data = _map(path)
        self.size = len(self.data)
        self._bytes: Bytes = np.frombuffer(self.data, np.uint8)

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Bytes of the file, read-only and without a copy."""
        return self._bytes[offset : offset + nbytes]

    def copy(self, offset: int, nbytes: int) -> Bytes:
        """Bytes of the file in memory of their own, aligned for JAX; the map's pages are released behind the copy."""
        room = np.empty(nbytes + _BOUNDARY, np.uint8)
        start = -room.ctypes.data % _BOUNDARY
        copied = room[start : start + nbytes]
        for at in range(0, nbytes, _PIECE):
            piece = self.view(offset + at, min(_PIECE, nbytes - at))
            copied[at : at + piece.size] = piece
            self.release(offset + at, piece.size)
        return copied

    def release(self, offset: int, nbytes: int) -> None:
        """Gives back every page that these bytes touch; one that is needed again is read from the file again."""
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):  # elsewhere the system takes the pages when it needs them
            self.data.madvise(mmap.MADV_DONTNEED, first, min(offset + nbytes, self.size) - first)

    def release_view(self, view: Bytes) -> None:
        """The same for what `view` returned, or a contiguous part of it."""
        self.release(view.ctypes.data - self._bytes.ctypes.data, view.nbytes)

    def same_bytes(self, offset: int, other: "MappedFile", other_offset: int, nbytes: int) -> bool:
        """Whether `nbytes` bytes here equal those there; the pages are released behind the comparison."""
        for at in range(0, nbytes, _PIECE):
            size = min(_PIECE, nbytes - at)
            equal = np.array_equal(self.view(offset + at, size), other.view(other_offset + at, size))
            self.release(offset + at, size)
            other.release(other_offset + at, size)
            if not equal:
                return False
        return True


def _map(path: Path) -> mmap.mmap:
    """Maps a regular, non-empty file read-only; anything else is refused (opening a pipe would wait for ever)."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise CheckpointError(f"{path} is a folder; give the .gguf file in it.")
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file; give a .gguf file.")
        if status.st_size == 0:
            raise CheckpointError(f"{path} is empty; download it again.")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; check the path.") from None
    except PermissionError:
        raise CheckpointError(f"{path} may not be read by this user; change its permissions.") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise CheckpointError(f"{str(path)!r} cannot be opened ({error}); check the path.") from None
