"""The directory of a GGUF file: metadata and tensors, without reading the tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. `gguf.GGUFReader` reads
the same; it makes several objects for each of a vocabulary's 100,000 strings and takes 2.8 s for a file that takes 0.1 s
here. Its constants and its dequantisation are used.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from branchline.engine.errors import CorruptModelError, UnsupportedModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
_SCALARS = {
    GGUFValueType.UINT8: "<B", GGUFValueType.INT8: "<b", GGUFValueType.UINT16: "<H", GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I", GGUFValueType.INT32: "<i", GGUFValueType.FLOAT32: "<f", GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q", GGUFValueType.INT64: "<q", GGUFValueType.FLOAT64: "<d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: rows first, as torch has it (GGUF writes it the other way round).
        begin, num_bytes: its place in the file.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


class GGUFFile:
    """A GGUF file, mapped into memory.

    Attributes:
        path: the file.
        metadata: all keys; values are Python's (int, float, bool, str, list).
        tensors: by name.
    """

    def __init__(self, path: Path) -> None:
        """Read the directory. Raises CorruptModelError (not GGUF, truncated, garbage), UnsupportedModelError (version)."""
        self.path = path
        size = path.stat().st_size
        if size < len(MAGIC):
            raise CorruptModelError(f"{path}: {size} bytes: not a GGUF file")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._map[:4] != MAGIC:
            raise CorruptModelError(f"{path}: begins with {self._map[:4]!r}, not with {MAGIC!r}: not a GGUF file")
        cursor = _Cursor(self._map, path)
        version = cursor.scalar(GGUFValueType.UINT32, "the version")
        if version not in VERSIONS:
            raise UnsupportedModelError(f"{path}: GGUF version {version} isn't supported. There are: little-endian 2 and 3")
        num_tensors = cursor.scalar(GGUFValueType.UINT64, "the number of tensors")
        num_keys = cursor.scalar(GGUFValueType.UINT64, "the number of keys")
        self.metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = cursor.string(f"key {index} of {num_keys}")
            self.metadata[key] = cursor.value(cursor.kind(f"the type of {key}"), f"the value of {key}")
        self.tensors = self._read_tensors(cursor, num_tensors)

    def _read_tensors(self, cursor: _Cursor, num_tensors: int) -> dict[str, GGUFTensor]:
        entries = [cursor.tensor_entry(f"entry {index} of {num_tensors} tensors") for index in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CorruptModelError(f"{self.path}: general.alignment = {alignment!r}: expected an integer >= 1")
        data_begin = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in entries:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if name in tensors:
                raise CorruptModelError(f"{self.path}: tensor {name} is there twice")
            if shape[-1] % block:
                raise CorruptModelError(
                    f"{self.path}: tensor {name}: rows of {shape[-1]} numbers can't be cut into {kind.name}'s blocks of {block}"
                )
            num_bytes = math.prod(shape) // block * block_bytes
            begin = data_begin + offset
            if begin + num_bytes > len(self._map):
                raise CorruptModelError(
                    f"{self.path}: truncated: tensor {name} ends at byte {begin + num_bytes}, the file at {len(self._map)}: "
                    "download it again"
                )
            tensors[name] = GGUFTensor(name, kind, shape, begin, num_bytes)
        return tensors

    @cached_property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._map, np.uint8)

    def raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as they lie in the file, [rows, bytes a row]. A read-only view."""
        data = self._bytes[tensor.begin : tensor.begin + tensor.num_bytes]
        rows = math.prod(tensor.shape[:-1])
        return data.reshape(rows, tensor.num_bytes // rows if rows else 0)


class _Cursor:
    """Reads values one after another and never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.offset = len(MAGIC)

    def _take(self, num_bytes: int, what: str) -> int:
        begin = self.offset
        if num_bytes > len(self._data) - begin:
            raise self._truncated(what, begin, num_bytes)
        self.offset = begin + num_bytes
        return begin

    def _truncated(self, what: str, begin: int, num_bytes: int) -> CorruptModelError:
        return CorruptModelError(
            f"{self._path}: truncated or damaged: {what} needs {num_bytes} bytes at byte {begin}, the file ends at byte "
            f"{len(self._data)}: download it again"
        )

    def scalar(self, kind: GGUFValueType, what: str) -> Any:
        layout = _SCALARS[kind]
        return struct.unpack_from(layout, self._data, self._take(struct.calcsize(layout), what))[0]

    def kind(self, what: str) -> GGUFValueType:
        number = self.scalar(GGUFValueType.UINT32, what)
        try:
            return GGUFValueType(number)
        except ValueError as err:
            raise CorruptModelError(f"{self._path}: {what}: {number} is no GGUF type: the file is damaged") from err

    def string(self, what: str) -> str:
        length = self.scalar(GGUFValueType.UINT64, what)
        begin = self._take(length, what)
        return self._decode(self._data[begin : begin + length], what)

    def value(self, kind: GGUFValueType, what: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string(what)
        if kind != GGUFValueType.ARRAY:
            return self.scalar(kind, what)
        item = self.kind(what)
        count = self.scalar(GGUFValueType.UINT64, what)
        if item == GGUFValueType.STRING:
            return self._strings(count, what)
        if item == GGUFValueType.ARRAY:
            raise UnsupportedModelError(f"{self._path}: {what} is an array of arrays, which isn't supported")
        dtype = np.dtype(_SCALARS[item])
        return np.frombuffer(self._data, dtype, count, self._take(count * dtype.itemsize, what)).tolist()

    def _strings(self, count: int, what: str) -> list[str]:
        """A vocabulary: the one long loop of a start, so it is kept short."""
        data, unpack, strings = self._data, struct.Struct("<Q").unpack_from, []
        offset, end = self.offset, len(self._data)
        for _ in range(count):
            begin = offset + 8
            if begin > end:
                raise self._truncated(what, offset, 8)
            offset = begin + unpack(data, offset)[0]
            if offset > end:
                raise self._truncated(what, begin, offset - begin)
            strings.append(self._decode(data[begin:offset], what))
        self.offset = offset
        return strings

    def _decode(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as err:
            raise CorruptModelError(f"{self._path}: {what} isn't UTF-8 ({raw[:40]!r}): the file is damaged") from err

    def tensor_entry(self, what: str) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        """(name, type, shape, offset in the data)."""
        name = self.string(what)
        what = f"the entry of tensor {name}"
        num_dimensions = self.scalar(GGUFValueType.UINT32, what)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise CorruptModelError(f"{self._path}: {what}: {num_dimensions} dimensions: expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(self.scalar(GGUFValueType.UINT64, what) for _ in range(num_dimensions))[::-1]
        number = self.scalar(GGUFValueType.UINT32, what)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as err:
            raise UnsupportedModelError(
                f"{self._path}: tensor {name} has type {number}, which this version of the gguf library doesn't know"
            ) from err
        return name, kind, shape, self.scalar(GGUFValueType.UINT64, what)
