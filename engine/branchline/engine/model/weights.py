"""Where a decoder's weights come from: a source of tensors by name, and the reader that fuses and checks them."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.errors import CorruptModelError

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
# buffers that old checkpoints carry beside the weights
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
MAX_NAMES_SHOWN = 4


class TensorSource(abc.ABC):
    """Tensors of one model in files. Names are Hugging Face's, whatever the format.

    Attributes:
        file: the file or folder, for error texts.
    """

    file: str

    @abc.abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that is there, by name."""

    @abc.abstractmethod
    def read(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (contiguous, on the CPU, of the tensor's shape) with the tensor's values, converted to its dtype.

        Modifies `out` only. Safe to call from several threads.

        Raises CorruptModelError, UnsupportedModelError (the tensor's type can't be converted).
        """

    @abc.abstractmethod
    def format(self, name: str) -> str:
        """The type of a tensor's numbers in the file, as GGUF spells it ("F32", "BF16", "Q4_1", …), whatever the file."""

    @abc.abstractmethod
    def raw(self, name: str) -> Bytes:
        """The tensor's bytes, [rows, bytes a row], rows in Hugging Face's order; a vector is one row.

        It may be a view of the file, which stays open as long as the view is kept. Safe to call from several threads.
        """

    def name_in_file(self, name: str) -> str:
        """What the file's format calls the tensor, there or not."""
        return name

    def describe(self, name: str) -> str:
        """File and tensor, as an error's text should name them."""
        return f"{self.file}: tensor {self.name_in_file(name)}"


class WeightReader:
    """Reads a model's tensors from a source into one dtype on one device. Each may be read once."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device
        self._shapes = source.shapes()
        self._unread = {name for name in self._shapes if not name.endswith(IGNORED_SUFFIXES)}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`. Raises CorruptModelError if it is missing or has another shape."""
        return self.fused([(name, shape)])

    def fused(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> torch.Tensor:
        """Tensors (name, shape) joined along their first dimension, read in place: no copy is made of the parts.

        Raises CorruptModelError if one is missing or has another shape.
        """
        for name, shape in parts:
            self._check(name, shape)
        rows = sum(shape[0] for _, shape in parts)
        whole = torch.empty((rows, *parts[0][1][1:]), dtype=self._dtype)
        begin = 0
        for name, shape in parts:
            self._source.read(name, whole[begin : begin + shape[0]])
            self._unread.discard(name)
            begin += shape[0]
        return whole.to(self._device)

    def raw(self, name: str, shape: tuple[int, ...]) -> tuple[str, Bytes]:
        """(format, bytes) of the tensor `name` as it is stored. Raises CorruptModelError if it is missing or has another
        shape."""
        self._check(name, shape)
        self._unread.discard(name)
        return self._source.format(name), self._source.raw(name)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._shapes.get(name)
        if found is None:
            raise CorruptModelError(f"{self._source.describe(name)} is missing: expected shape {list(shape)}")
        if found != shape:
            raise CorruptModelError(f"{self._source.describe(name)} has shape {list(found)}: expected {list(shape)}")

    def map(self, load: Callable[[int], T], count: int) -> list[T]:
        """[load(0), load(1), …], in as many threads as torch computes with."""
        with ThreadPoolExecutor(torch.get_num_threads(), "branchline-load") as pool:
            return list(pool.map(load, range(count)))

    def finish(self, *, optional: frozenset[str] = frozenset()) -> None:
        """Raise CorruptModelError if tensors are left that nobody read, but for the `optional` ones: the model would not be
        what its author made."""
        left = sorted(self._unread - optional, key=self._source.name_in_file)
        if left:
            shown = ", ".join(map(self._source.name_in_file, left[:MAX_NAMES_SHOWN])) + (
                ", …" if len(left) > MAX_NAMES_SHOWN else ""
            )
            numbers = sum(math.prod(self._shapes[name]) for name in left)
            raise CorruptModelError(
                f"{self._source.file}: {len(left)} tensors ({numbers} numbers) that this architecture doesn't have: {shown}"
            )
