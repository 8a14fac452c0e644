"""Weights from a Hugging Face folder: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from branchline.engine.errors import CorruptModelError, UnsupportedModelError
from branchline.engine.model.weights import Bytes, TensorSource

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16", "F64")


class SafetensorsSource(TensorSource):
    """Tensors of a folder's safetensors files."""

    def __init__(self, folder: Path) -> None:
        """Open the files' headers. Raises CorruptModelError (missing, truncated, garbage), UnsupportedModelError (the
        weights have another format)."""
        self.file = str(folder)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        if (folder / INDEX).exists():
            self._open_shards(folder)
        elif (folder / SINGLE).exists():
            self._open(folder / SINGLE)
        else:
            other = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt", "*.h5") for path in folder.glob(pattern))
            if other:
                raise UnsupportedModelError(f"{folder}: weights in {other[0]} aren't supported: convert them to safetensors")
            raise CorruptModelError(f"{folder}: neither {SINGLE} nor {INDEX} is there: the download is incomplete")

    def _open_shards(self, folder: Path) -> None:
        path = folder / INDEX
        try:
            weight_map = json.loads(path.read_bytes())["weight_map"]
            files = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise CorruptModelError(f"{path}: not an index of safetensors files ({err!r}): download it again") from err
        for name in files:
            if not isinstance(name, str) or Path(name).name != name:
                raise CorruptModelError(f"{path}: {name!r} is no name of a file in this folder")
            if not (folder / name).exists():
                raise CorruptModelError(f"{path}: the shard {name} ({files.index(name) + 1} of {len(files)}) is missing")
            self._open(folder / name)
        for tensor, name in weight_map.items():
            if self._file_of.get(tensor) != folder / name:
                raise CorruptModelError(f"{folder / name}: tensor {tensor} is missing, which the index says is there")

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        except (SafetensorError, OSError) as err:
            size = path.stat().st_size
            raise CorruptModelError(f"{path}: truncated or damaged, {size} bytes ({err}): download it again") from err
        self._files[str(path)] = file
        self._shapes |= shapes
        self._file_of |= dict.fromkeys(shapes, path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def describe(self, name: str) -> str:
        return f"{self._file_of.get(name, self.file)}: tensor {name}"

    def read(self, name: str, out: torch.Tensor) -> None:
        dtype = self.format(name)
        if dtype not in DTYPES:
            raise UnsupportedModelError(f"{self.describe(name)} has type {dtype}. Supported are: {', '.join(DTYPES)}")
        out.copy_(self._tensor(name))

    def format(self, name: str) -> str:
        return str(self._files[str(self._file_of[name])].get_slice(name).get_dtype())

    def raw(self, name: str) -> Bytes:
        tensor = self._tensor(name).contiguous()
        rows: Bytes = tensor.view(torch.uint8).reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1).numpy()
        return rows

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[str(self._file_of[name])].get_tensor(name)
        return tensor
