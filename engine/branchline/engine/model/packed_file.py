"""Packed weights in a file that all engines of a machine map, so that they hold them in memory once.

The first engine packs into memory of its own, writes that to the cache and maps it; later ones only map it, which also spares
them the packing. A file is named by what it was made from: the model's files (path, size, time of change), how they are
quantised, and the compiled kernels, whose layout it has.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import filelock
import platformdirs

from branchline.engine import _kernels
from branchline.engine.config import EngineConfig
from branchline.engine.model.resolve import ModelFiles

# Behind the weights: their sha256, their number of bytes, this mark.
_TRAILER = struct.Struct("<32sQ8s")
_MARK = b"BRNCHPK1"
LOCK_TIMEOUT_S = 600.0
T = TypeVar("T")
logger = logging.getLogger(__name__)


def packed_path(files: ModelFiles, config: EngineConfig) -> Path:
    """Where the packed weights of a model belong. The folder is BRANCHLINE_CACHE, or the user's cache folder."""
    parts = sorted(files.path.iterdir()) if files.path.is_dir() else [files.path]
    made_from = [str(config.quantize)]
    for part in parts:
        resolved = part.resolve()
        status = resolved.stat()
        made_from.append(f"{resolved} {status.st_size} {status.st_mtime_ns}")
    name = hashlib.sha256("\n".join(made_from).encode())
    with Path(str(_kernels.__file__)).open("rb") as kernels:
        name.update(hashlib.file_digest(kernels, "sha256").digest())
    folder = os.environ.get("BRANCHLINE_CACHE") or platformdirs.user_cache_path("branchline")
    return Path(folder) / "packed" / f"{files.name}-{name.hexdigest()[:24]}.bin"


def pack_mapped(path: Path, pack: Callable[[_kernels.Arena], T]) -> T:
    """`pack` in an arena that maps `path`, which is made first if it isn't there or is damaged. `pack` may be called twice:
    then the first time fills an arena that is written. Where the file can't be written, what that call packed is returned,
    with a warning: the engine works, and shares nothing.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S):
            if (num_bytes := _checked(path)) is None:
                arena = _kernels.Arena()
                packed = pack(arena)
                try:
                    num_bytes = _write(path, arena)
                except OSError as err:
                    return _alone(path, err, packed)
                del packed, arena
            mapped = _kernels.Arena.mapped(str(path), num_bytes)
    except (OSError, filelock.Timeout) as err:
        return _alone(path, err, pack(_kernels.Arena()))
    return pack(mapped)


def _alone(path: Path, err: Exception, packed: T) -> T:
    logger.warning("%s: weights aren't shared with other engines, since the file can't be used: %s", path, err)
    return packed


def _checked(path: Path) -> int | None:
    """Bytes of weights in the file; None if it isn't there or isn't whole."""
    try:
        with path.open("rb") as file:
            file.seek(-_TRAILER.size, os.SEEK_END)
            digest, num_bytes, mark = _TRAILER.unpack(file.read())
            if mark == _MARK and file.tell() == num_bytes + _TRAILER.size:
                file.seek(0)
                if _digest(file.read, num_bytes) == digest:
                    return int(num_bytes)
    except FileNotFoundError:
        return None
    except OSError as err:  # too short for a trailer
        logger.warning("%s: %s", path, err)
        return None
    logger.warning("%s: damaged, so it is made again", path)
    return None


def _digest(read: Callable[[int], bytes], num_bytes: int) -> bytes:
    digest, left = hashlib.sha256(), num_bytes
    while left > 0 and (piece := read(min(left, 1 << 20))):
        digest.update(piece)
        left -= len(piece)
    return digest.digest()


def _write(path: Path, arena: _kernels.Arena) -> int:
    """Write what lies in the arena, whole or not at all. Returns its bytes. Raises OSError."""
    digest = hashlib.sha256()
    handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            arena.write_to(file.write)
            arena.write_to(digest.update)
            file.write(_TRAILER.pack(digest.digest(), arena.nbytes, _MARK))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return arena.nbytes
