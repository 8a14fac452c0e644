"""The compiled CPU kernels. Calls release the GIL; arrays must be C-contiguous."""

from collections.abc import Callable, Sequence
from typing import Literal, final

import numpy as np
import numpy.typing as npt
import torch

def isa() -> str:
    """The instruction set that the kernels use: the best that the machine has, or what BRANCHLINE_ISA names.

    Raises ValueError if that names one that is unknown or that the machine lacks.
    """

def available_isas() -> list[str]:
    """What this machine has, least demanding first: `baseline`, then `avx2`, `avx512` (with VNNI) or `dotprod`."""

@final
class ThreadPool:
    """Threads that the kernels share. One that is idle sleeps after about 50 µs."""

    def __init__(self, num_threads: int) -> None:
        """Starts num_threads - 1 threads; the caller of a kernel is the last. Raises ValueError unless it is 1 to 1024."""

    @property
    def num_threads(self) -> int: ...

def attention_isas() -> list[str]:
    """What `TreeAttention` is compiled for and this machine has, least demanding first: `available_isas()` and, where the
    machine multiplies pairs of bfloat16, `avx512bf16`."""

@final
class TreeAttention:
    """Attention over the branch tree, on the pages of one pool. See engine/kernels/include/branchline/kernels/attention.hpp
    for the order of a page's bytes. Used by one thread."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_tokens: int,
        scale: float,
        kv_dtype: Literal["float32", "bfloat16", "int8"],
        isa: str = "",
    ) -> None:
        """`kv_dtype`: of the pool. `isa`: one of `attention_isas()`; "": the best that BRANCHLINE_ISA allows.

        Raises ValueError on shapes that it can't take, with the numbers, and on an instruction set that isn't there.
        """

    @property
    def isa(self) -> str: ...
    @property
    def page_bytes(self) -> int: ...
    def plan(
        self,
        write_slots: npt.NDArray[np.int32],
        row_indptr: npt.NDArray[np.int32],
        levels: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]],
        num_pages: int,
    ) -> None:
        """Take a step's arrays (see `branchline.engine.step`); copies what it needs. Levels: (qo_indptr, kv_indptr,
        kv_indices, last_page_len), root first. Raises ValueError if they contradict each other or name pages outside
        [0, num_pages)."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        pool: torch.Tensor,
        threads: ThreadPool,
    ) -> None:
        """Write the planned step's K/V of `layer` at its slots, then attend. Modifies `out` and the pool at those slots.

        q, out [T, num_heads, head_dim], k, v [T, num_kv_heads, head_dim]: float32, each token contiguous. `pool`: all its
        bytes, uint8. Raises ValueError on other sizes, with the numbers.
        """

def sample(
    logits: npt.NDArray[np.float32],
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
    keys: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int32],
    is_bad: npt.NDArray[np.bool_],
    pool: ThreadPool,
) -> None:
    """Choose a token of each row of logits [N, vocab]; the others are [N]. Modifies `tokens` and `is_bad`.

    `temperature` 0: the likeliest. `top_k` 0, `top_p` 1, `min_p` 0: all. Draws with `rng.uniform(keys, positions)`.
    A row's token depends on that row alone. Raises ValueError on sizes that don't fit, with the numbers.
    """

@final
class Arena:
    """Memory in which many matrices lie side by side, so that small ones share huge pages too (twice the bandwidth).

    A matrix keeps the memory that it lies in, so the arena may go first.

    What lies in one arena can be written to a file and mapped by another: the same matrices packed in the same order then
    need no packing, and all processes that map the file share its memory.
    """

    def __init__(self) -> None: ...
    @staticmethod
    def mapped(path: str, nbytes: int) -> Arena:
        """An arena over the first `nbytes` of a file, mapped for reading. Raises OSError."""

    @property
    def nbytes(self) -> int:
        """Handed out so far."""

    @property
    def is_filled(self) -> bool:
        """Whether it is mapped: `Matrix.pack` then only looks at the sizes of its parts. It raises ValueError when the file
        has no more bytes."""

    def write_to(self, write: Callable[[memoryview], object]) -> None:
        """Call `write` with each block that was handed out, in order: the bytes that `mapped` expects. Lent for the call."""

@final
class Matrix:
    """Weights [rows, cols], packed once for the kernels. Immutable."""

    @staticmethod
    def pack(
        format: str,
        parts: Sequence[npt.NDArray[np.uint8]],
        cols: int,
        interleave_halves: bool = False,
        arena: Arena | None = None,
    ) -> Matrix:
        """Packs the bytes of whole rows, part below part, as a GGUF file has them. Copies.

        `format`: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K.
        `interleave_halves`: the two parts are gate and up of one layer, for the epilogue `silu_gate`. Rows keep their numbers.
        `arena`: where the weights go; None: memory of their own.
        Raises ValueError on another format or on sizes that don't fit, with the numbers.
        """

    def multiply(
        self,
        x: npt.NDArray[np.float32],
        pool: ThreadPool,
        *,
        epilogue: Literal["store", "add", "silu_gate"] = "store",
        onto: npt.NDArray[np.float32] | None = None,
        precision: Literal["int8", "exact"] | None = None,
        isa: str | None = None,
    ) -> npt.NDArray[np.float32]:
        """x [N, cols] times the transposed weights, as [N, rows].

        `epilogue`: `add` returns onto + product; `silu_gate` silu(gate) * up with rows / 2 columns.
        `precision` of x: `int8` (default for quantised weights) rounds each 32 columns to max|x| / 127, `exact` (default for
        the others) doesn't round. A row of the result depends on its own row of x alone, bit for bit.
        Raises ValueError on sizes or options that don't fit, with the numbers.
        """

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The weights [rows, cols] as the format's reference decoder gives them. A new array."""

    def row(self, index: int) -> npt.NDArray[np.float32]:
        """One row of that: the look-up of an embedding that is tied to the head. Raises ValueError if there is none."""

    @property
    def format(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Memory of the packed weights."""

@final
class LlamaLayer:
    """Weights of one layer, for `LlamaModel`. None: the model has none."""

    def __init__(
        self,
        *,
        attention_norm: npt.NDArray[np.float32],
        qkv: Sequence[Matrix],
        qkv_bias: npt.NDArray[np.float32] | None,
        q_norm: npt.NDArray[np.float32] | None,
        k_norm: npt.NDArray[np.float32] | None,
        out: Matrix,
        out_bias: npt.NDArray[np.float32] | None,
        mlp_norm: npt.NDArray[np.float32],
        gate_up: Matrix,
        gate_up_bias: npt.NDArray[np.float32] | None,
        down: Matrix,
        down_bias: npt.NDArray[np.float32] | None,
    ) -> None:
        """`qkv`: q, k and v one below the other, in as many matrices as they have formats. `gate_up`: interleaved halves."""

@final
class LlamaModel:
    """A decoder of the Llama family: RMS norm, rope (rotate-half), grouped-query attention, SwiGLU. Used by one thread."""

    def __init__(
        self,
        pool: ThreadPool,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        embedding: Matrix,
        layers: Sequence[LlamaLayer],
        norm: npt.NDArray[np.float32],
        head: Matrix,
        rope: npt.NDArray[np.float32],
        page_tokens: int = 16,
        kv_dtype: Literal["float32", "bfloat16", "int8"] = "bfloat16",
        precision: Literal["int8", "exact"] | None = None,
        isa: str | None = None,
        attention_isa: str = "",
    ) -> None:
        """Shares the matrices. `head` may be the embedding.

        `rope` [context_length, head_dim]: of each position the cosines of its pairs, then the sines.
        `precision` of the inputs of quantised matrices; None: int8.
        Raises ValueError on sizes that don't fit, with the numbers.
        """

    @property
    def nbytes(self) -> int:
        """Memory of the matrices."""

    def step(
        self,
        token_ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        write_slots: npt.NDArray[np.int32],
        row_indptr: npt.NDArray[np.int32],
        levels: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]],
        logit_tokens: npt.NDArray[np.int64],
        kv: npt.NDArray[np.uint8],
        logits: npt.NDArray[np.float32],
    ) -> None:
        """Compute a step (see `branchline.engine.step`): writes its K/V into `kv`, the bytes of all pages, and the logits of
        `logit_tokens` into `logits` [N, vocab]. Levels: (qo_indptr, kv_indptr, kv_indices, last_page_len), root first.

        A token's logits depend on the tokens before it alone, bit for bit: not on the rest of the batch, the threads, or where
        its branch was forked.
        Raises ValueError, before anything is written, on arrays that don't fit or numbers out of range.
        """
