"""ggml, the library that llama.cpp computes with, in the race of the linear layers: the same weights from the same file, as a
graph of nothing but matrix products. Driven by its C interface through the libraries that llama-cpp-python brings."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from branchline.engine.config import DEFAULT_MODEL, EngineConfig
from branchline.engine.model.runner import find_model
from branchline.load.measure import BenchmarkError
from branchline.load.peers.base import activations, clock_for

Floats = npt.NDArray[np.float32]
SPARE_BYTES = 64 << 20  # for ggml's own structs and the products' work buffers


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Peer:
    """Weights lie in ggml's plain layout: llama.cpp repacks no matrix of these formats on this kind of processor.

    Attributes:
        weights: by name the tensor, its rows and its columns.
    """

    def __init__(self, threads: int) -> None:
        self._base, self._cpu = _libraries()
        self._threads = threads
        self._clock = clock_for(threads)
        _, config, source = find_model(EngineConfig(model=DEFAULT_MODEL))
        names = [name for name, shape in source.shapes().items() if len(shape) == 2]
        if config.tied_embeddings:
            names = [name for name in names if not name.startswith("lm_head")]
        raw = {name: source.raw(name).reshape(-1) for name in names}
        self._weights_context = self._context(sum(data.nbytes for data in raw.values()))
        self.weights: dict[str, tuple[Any, int, int]] = {}
        for name, data in raw.items():
            rows, cols = source.shapes()[name]
            kind = int(GGMLQuantizationType[source.format(name)])
            tensor = self._base.ggml_new_tensor_2d(self._weights_context, kind, cols, rows)
            ctypes.memmove(self._base.ggml_get_data(tensor), data.ctypes.data, data.nbytes)
            self.weights[name] = tensor, rows, cols

    def multiply(self, rows: int) -> float:
        """Seconds of one pass for `rows` tokens."""
        context, graph, _ = self._graph({name: activations(rows, cols) for name, (_, _, cols) in self.weights.items()})
        began = self._clock()
        self._compute(context, graph)
        took = self._clock() - began
        self._base.ggml_free(context)
        return took

    def product(self, name: str, x: Floats) -> Floats:
        """x [N, cols] times one transposed matrix, as [N, rows]."""
        context, graph, (result,) = self._graph({name: x})
        self._compute(context, graph)
        out = np.empty((len(x), self.weights[name][1]), np.float32)
        ctypes.memmove(out.ctypes.data, self._base.ggml_get_data(result), out.nbytes)
        self._base.ggml_free(context)
        return out

    def close(self) -> None:
        """Give the weights back."""
        self._base.ggml_free(self._weights_context)

    def _graph(self, inputs: dict[str, Floats]) -> tuple[Any, Any, list[Any]]:
        """A new context with a product of each named matrix in a graph; inputs of the same width are one tensor."""
        rows = len(next(iter(inputs.values())))
        tensors: dict[int, Any] = {}
        context = self._context(4 * rows * sum(self.weights[name][1] + self.weights[name][2] for name in inputs))
        graph, results = self._base.ggml_new_graph(context), []
        for name, values in inputs.items():
            tensor, _, cols = self.weights[name]
            if cols not in tensors:
                tensors[cols] = self._base.ggml_new_tensor_2d(context, int(GGMLQuantizationType.F32), cols, rows)
                ctypes.memmove(self._base.ggml_get_data(tensors[cols]), values.ctypes.data, values.nbytes)
            results.append(self._base.ggml_mul_mat(context, tensor, tensors[cols]))
            self._base.ggml_build_forward_expand(graph, results[-1])
        return context, graph, results

    def _compute(self, context: Any, graph: Any) -> None:
        # Takes its work buffer from the context.
        if (status := self._cpu.ggml_graph_compute_with_ctx(context, graph, self._threads)) != 0:
            raise BenchmarkError(f"ggml_graph_compute_with_ctx returned {status}")

    def _context(self, num_bytes: int) -> Any:
        context = self._base.ggml_init(_InitParams(num_bytes + SPARE_BYTES, None, False))
        if not context:
            raise BenchmarkError(f"ggml_init gave no context of {num_bytes} bytes")
        return context


def _libraries() -> tuple[Any, Any]:
    """ggml's base and processor libraries, with the types of what is called. Raises BenchmarkError."""
    package = importlib.import_module("llama_cpp")  # loads them
    folder = Path(str(package.__file__)).parent / "lib"
    try:
        base, cpu = (ctypes.CDLL(str(next(folder.glob(f"libggml-{name}.*")))) for name in ("base", "cpu"))
    except (StopIteration, OSError) as err:
        raise BenchmarkError(f"{folder}: llama-cpp-python brings no ggml library: {err!r}") from err
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, number, number]),
        ("ggml_get_data", pointer, [pointer]),
        ("ggml_mul_mat", pointer, [pointer, pointer, pointer]),
        ("ggml_new_graph", pointer, [pointer]),
        ("ggml_build_forward_expand", None, [pointer, pointer]),
    ):
        function = getattr(base, name)
        function.restype, function.argtypes = result, arguments
    cpu.ggml_cpu_init()
    cpu.ggml_graph_compute_with_ctx.restype = ctypes.c_int
    cpu.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, ctypes.c_int]
    return base, cpu
