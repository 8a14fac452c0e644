"""The directory of a GGUF file: metadata and tensors, without reading the tensors.

`gguf.GGUFReader` reads it. What is added: arrays are read at once (the library makes numpy objects of each of a vocabulary's
items: seconds, where this takes a tenth of one), nothing is read past the file's end, and errors are this project's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS, GGUFReader, ReaderField

from branchline.engine.errors import CorruptModelError, ModelError, UnsupportedModelError

MAX_DIMENSIONS = 4
_HEAD = struct.Struct("<II")  # magic, version
_LENGTH = struct.Struct("<Q")  # before each string


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
        metadata: all keys; values are Python's (int, float, bool, str, list), decoded when they are asked for.
        tensors: by name.
    """

    def __init__(self, path: Path) -> None:
        """Read the directory.

        Raises:
            CorruptModelError: not GGUF, truncated, garbage.
            UnsupportedModelError: a version, a byte order or a type of tensor that the library can't read.
            OSError: the file can't be opened.
        """
        self.path = path
        _check_head(path)
        try:
            reader = DirectoryReader(path)
        except (ModelError, OSError, MemoryError):
            raise
        except Exception as err:  # ValueError, KeyError, OverflowError: the library has no errors of its own
            raise CorruptModelError(f"{path}: the file is damaged: {err}: download it again") from err
        self.metadata: Mapping[str, Any] = _Metadata(path, reader.fields)
        self.tensors = {
            tensor.name: GGUFTensor(
                tensor.name, tensor.tensor_type, tuple(tensor.shape.tolist()[::-1]), tensor.data_offset, tensor.n_bytes
            )
            for tensor in reader.tensors
        }
        self._bytes: npt.NDArray[np.uint8] = reader.data.view(np.ndarray)

    def raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as they lie in the file, [rows, bytes a row]. A read-only view."""
        data = self._bytes[tensor.begin : tensor.begin + tensor.num_bytes]
        rows = math.prod(tensor.shape[:-1])
        return data.reshape(rows, tensor.num_bytes // rows if rows else 0)


def _check_head(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or _HEAD.unpack(head)[0] != GGUF_MAGIC:
        raise CorruptModelError(f"{path}: begins with {head!r}: not a GGUF file")
    _, version = _HEAD.unpack(head)
    if version not in READER_SUPPORTED_VERSIONS:  # big-endian files too: their tensors couldn't be dequantised
        there_are = ", ".join(map(str, READER_SUPPORTED_VERSIONS))
        raise UnsupportedModelError(f"{path}: GGUF version {version} isn't supported. There are: little-endian {there_are}")


class DirectoryReader(GGUFReader):  # type: ignore[misc]  # the library's types aren't followed
    """The library's reader, with its internal methods bounded by the file's end and fast over arrays.

    A field that is an array has three parts (type, count, and all items, undecoded if they are strings) where the library's
    has one or two for each item; `ReaderField.contents()` remains right for all but arrays of strings.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path)

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> npt.NDArray[Any]:
        """As the library's, which returns fewer items than `count` where the file ends."""
        self._check_end(offset, np.dtype(dtype).itemsize * int(count))
        items: npt.NDArray[Any] = super()._get(offset, dtype, count, override_order)
        return items

    def _check_end(self, offset: int, num_bytes: int) -> None:
        if offset + num_bytes > len(self.data):
            raise CorruptModelError(
                f"{self._path}: truncated or damaged: {num_bytes} bytes should follow byte {offset}, the file ends at byte "
                f"{len(self.data)}: download it again"
            )

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            parts: tuple[int, list[npt.NDArray[Any]], list[int], list[GGUFValueType]]
            parts = super()._get_field_parts(orig_offs, int(raw_type))
            return parts
        item = self._get(orig_offs, np.uint32)
        count = self._get(orig_offs + item.nbytes, np.uint64)
        kind = GGUFValueType(int(item[0]))
        if kind == GGUFValueType.ARRAY:
            raise UnsupportedModelError(f"{self._path}: an array of arrays at byte {orig_offs}, which isn't supported")
        begin = orig_offs + item.nbytes + count.nbytes
        if kind == GGUFValueType.STRING:
            items = self._get(begin, np.uint8, self._end_of_strings(begin, int(count[0])) - begin)
        else:
            items = self._get(begin, self.gguf_scalar_to_np[kind], count[0])
        return begin + items.nbytes - orig_offs, [item, count, items], [2], [GGUFValueType.ARRAY, kind]

    def _end_of_strings(self, begin: int, count: int) -> int:
        """A vocabulary: the one long loop of a start, so it is kept short."""
        self._check_end(begin, count * _LENGTH.size)
        unpack, data, offset, last = _LENGTH.unpack_from, memoryview(self.data), begin, len(self.data) - _LENGTH.size
        for _ in range(count):
            if offset > last:
                self._check_end(offset, _LENGTH.size)
            offset += _LENGTH.size + unpack(data, offset)[0]
        return offset

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        """As the library's. Checks at once, so that a wrong number of tensors doesn't read on through the tensors' bytes."""
        field = super()._get_tensor_info_field(orig_offs)
        num_dimensions, kind = int(field.parts[2][0]), int(field.parts[4][0])
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise CorruptModelError(
                f"{self._path}: tensor {field.name} has {num_dimensions} dimensions: expected 1 to {MAX_DIMENSIONS}"
            )
        try:
            GGMLQuantizationType(kind)
        except ValueError as err:
            raise UnsupportedModelError(
                f"{self._path}: tensor {field.name} has type {kind}, which this version of the gguf library doesn't know"
            ) from err
        return field

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """As the library's, whose sums and products wrap at 2**64: no number gets there that leads out of the file."""
        begin = int(start_offs)  # a numpy number of 32 bits after padding
        for field in fields:
            _, _, _, dims, kind, offset = field.parts
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
            if int(offset[0]) % int(self.alignment):
                raise CorruptModelError(
                    f"{self._path}: tensor {field.name} begins {int(offset[0])} bytes into the data, which is no multiple of "
                    f"the alignment {int(self.alignment)}: the file is damaged"
                )
            end = begin + int(offset[0]) + math.prod(dims.tolist()) * block_bytes // block
            if end > len(self.data):
                raise CorruptModelError(
                    f"{self._path}: truncated: tensor {field.name} ends at byte {end}, the file at {len(self.data)}: "
                    "download it again"
                )
        super()._build_tensors(begin, fields)


class _Metadata(Mapping[str, Any]):
    """The values of a reader's fields, decoded at each access. Raises CorruptModelError for text that isn't UTF-8."""

    def __init__(self, path: Path, fields: dict[str, ReaderField]) -> None:
        self._path = path
        self._fields = {key: field for key, field in fields.items() if not key.startswith("GGUF.")}

    def __getitem__(self, key: str) -> Any:
        field = self._fields[key]
        try:
            if field.types == [GGUFValueType.ARRAY, GGUFValueType.STRING]:
                return _decode_strings(field.parts[-1].tobytes())
            return field.contents()
        except UnicodeDecodeError as err:
            raise CorruptModelError(
                f"{self._path}: the value of {key} isn't UTF-8 ({err.object[:40]!r}): the file is damaged"
            ) from err

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def _decode_strings(data: bytes) -> list[str]:
    strings, offset = [], 0
    while offset < len(data):
        begin = offset + _LENGTH.size
        offset = begin + _LENGTH.unpack_from(data, offset)[0]
        strings.append(data[begin:offset].decode())
    return strings
