"""Ours in the race of the linear layers: one pass through all weight matrices of the default model, packed as the engine has
them."""

from __future__ import annotations

from branchline.engine import _kernels
from branchline.engine.config import DEFAULT_MODEL, EngineConfig
from branchline.engine.model.runner import find_model
from branchline.load.peers.base import activations, clock_for

QKV, OUT, GATE_UP, DOWN, HEAD = "qkv", "out", "gate_up", "down", "head"


class Peer:
    """Queries, keys and values fused, gate and up fused with the activation between them, as in a step.

    Attributes:
        matrices: what they are for, and they themselves, in the order of a step.
    """

    def __init__(self, threads: int) -> None:
        _, config, source = find_model(EngineConfig(model=DEFAULT_MODEL))
        self._pool = _kernels.ThreadPool(threads)
        self._clock = clock_for(threads)
        arena = _kernels.Arena()

        def pack(*names: str, interleave: bool = False) -> _kernels.Matrix:
            cols = source.shapes()[names[0]][1]
            (form,) = {source.format(name) for name in names}
            return _kernels.Matrix.pack(form, [source.raw(name).reshape(-1) for name in names], cols, interleave, arena)

        self.matrices: list[tuple[str, _kernels.Matrix]] = []
        for index in range(config.num_layers):
            attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
            self.matrices += [
                (QKV, pack(*(f"{attention}{name}_proj.weight" for name in "qkv"))),
                (OUT, pack(f"{attention}o_proj.weight")),
                (GATE_UP, pack(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight", interleave=True)),
                (DOWN, pack(f"{mlp}down_proj.weight")),
            ]
        self.matrices.append((HEAD, pack("model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight")))

    def multiply(self, rows: int) -> float:
        """Seconds of one pass for `rows` tokens, the rounding of the inputs included."""
        inputs = {matrix.cols: activations(rows, matrix.cols) for _, matrix in self.matrices}
        began = self._clock()
        for kind, matrix in self.matrices:
            matrix.multiply(inputs[matrix.cols], self._pool, epilogue="silu_gate" if kind == GATE_UP else "store")
        return self._clock() - began

    def close(self) -> None:
        """Nothing to give back."""
