"""Linear layers on packed weights: every format and instruction set against the `gguf` library's decoder and plain numpy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from branchline.engine import _kernels
from branchline.engine._kernels import Arena, Matrix, ThreadPool

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Precision = Literal["int8", "exact"]

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
DENSE = ["F32", "F16", "BF16"]
# Where the half-precision scales of a block lie.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
# The activations' 8 bits: the relative error (root mean square) of a product with independent inputs. A step of max/127 for
# 32 normal numbers (max about 2.4 sigma) has the error 2.4 / 127 / sqrt(12) = 0.55 %; some blocks have a larger maximum.
INT8_ERROR = 0.008

pytestmark = pytest.mark.filterwarnings("error")


def block_cols(name: str) -> int:
    return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0])


def make_weights(name: str, rows: int, cols: int, seed: int = 0) -> tuple[Bytes, Floats]:
    """The bytes of random weights, whole rows one after the other, and what `gguf` decodes them to."""
    rng = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[name]
    if name in DENSE:
        dense = rng.standard_normal((rows, cols)).astype(np.float32)
        data = gguf.quants.quantize(dense, kind) if name != "F32" else dense
        return data.reshape(rows, -1).view(np.uint8).reshape(-1), np.asarray(gguf.quants.dequantize(data, kind), np.float32)
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * cols // columns, size), dtype=np.uint8)
    for at in SCALES[name]:
        scales = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    data = blocks.reshape(rows, -1)
    return data.reshape(-1), np.asarray(gguf.quants.dequantize(data, kind), np.float32)


def make_inputs(tokens: int, cols: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal((tokens, cols)).astype(np.float32)


def quantise(x: Floats) -> npt.NDArray[np.float64]:
    """What the kernels take `x` for at int8: 32 columns share the scale max|x| / 127."""
    blocks = x.reshape(len(x), -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(blocks * np.where(scale > 0, 1 / np.maximum(scale, np.float32(1e-37)), 0).astype(np.float32))
    rounded: npt.NDArray[np.float64] = (codes.astype(np.float64) * scale).reshape(x.shape)
    return rounded


def relative(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    return ThreadPool(2)


@pytest.fixture(params=_kernels.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("name", QUANTISED + DENSE)
def test_packing_loses_nothing(name: str, rows: int) -> None:
    cols = 2 * block_cols(name) if name in QUANTISED else 37
    data, want = make_weights(name, rows, cols)
    matrix = Matrix.pack(name, [data], cols)
    assert (matrix.format, matrix.rows, matrix.cols) == (name, rows, cols)
    np.testing.assert_array_equal(matrix.dequantize(), want)
    np.testing.assert_array_equal(matrix.row(rows - 1), want[-1])


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("tokens", [1, 3, 16, 21])
def test_int8_product_is_that_of_the_rounded_inputs(name: str, tokens: int, isa: str, pool: ThreadPool) -> None:
    """The sums over 32 columns are whole numbers and exact, so that only the additions of blocks round."""
    cols = 768
    data, weights = make_weights(name, 40, cols)
    x = make_inputs(tokens, cols)
    got = Matrix.pack(name, [data], cols).multiply(x, pool, isa=isa)
    assert got.shape == (tokens, 40)
    assert relative(got, quantise(x) @ weights.astype(np.float64).T) < 1e-5
    assert relative(got, x.astype(np.float64) @ weights.astype(np.float64).T) < INT8_ERROR


@pytest.mark.parametrize("name", QUANTISED)
def test_extreme_codes_do_not_saturate(name: str, isa: str, pool: ThreadPool) -> None:
    """All bits set and all clear, against inputs of one size and any signs: the largest sums that there are."""
    cols = 512
    data, _ = make_weights(name, 4, cols)
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = data.reshape(4, -1, size).copy()
    scales = [byte for at in SCALES[name] for byte in (at, at + 1)]
    bodies = [0x00, 0xFF, 0x80, 0x7F]
    for row, body in enumerate(bodies):
        kept = blocks[row][:, scales]
        blocks[row] = body
        blocks[row][:, scales] = kept
    weights = gguf.quants.dequantize(blocks.reshape(4, -1), kind).astype(np.float64)
    signs = np.sign(np.random.default_rng(3).standard_normal(cols))
    x = np.stack([np.ones(cols), -np.ones(cols), signs, np.tile([1, -1], cols // 2)]).astype(np.float32)
    got = Matrix.pack(name, [blocks.reshape(-1)], cols).multiply(x, pool, isa=isa)
    want = x.astype(np.float64) @ weights.T
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(weights).sum(1).max())


@pytest.mark.parametrize("name", QUANTISED + DENSE)
@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_exact_product(name: str, tokens: int, isa: str, pool: ThreadPool) -> None:
    cols = 512 if name in QUANTISED else 77
    data, weights = make_weights(name, 33, cols)
    x = make_inputs(tokens, cols)
    got = Matrix.pack(name, [data], cols).multiply(x, pool, precision="exact", isa=isa)
    assert relative(got, x.astype(np.float64) @ weights.astype(np.float64).T) < 1e-6


@pytest.mark.parametrize("precision", ["int8", "exact"])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_a_token_does_not_depend_on_the_others(name: str, precision: Precision, isa: str, pool: ThreadPool) -> None:
    """Bit for bit, for every number of tokens up to more than two panels and for more than a unit of work."""
    cols = 256
    data, _ = make_weights(name, 33, cols)
    matrix = Matrix.pack(name, [data], cols)
    x = make_inputs(300, cols)
    alone = np.concatenate([matrix.multiply(x[t : t + 1], pool, precision=precision, isa=isa) for t in range(len(x))])
    for tokens in [*range(1, 36), 127, 128, 129, 300]:
        for first in {0, len(x) - tokens}:
            got = matrix.multiply(x[first : first + tokens], pool, precision=precision, isa=isa)
            np.testing.assert_array_equal(got, alone[first : first + tokens])


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "F32"])
def test_threads_do_not_change_the_result(name: str, isa: str) -> None:
    data, _ = make_weights(name, 500, 256)
    matrix = Matrix.pack(name, [data], 256)
    x = make_inputs(150, 256)
    results = [matrix.multiply(x, ThreadPool(n), isa=isa) for n in (1, 2, 3)]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "BF16"])
def test_parts_are_stacked(name: str, pool: ThreadPool) -> None:
    """Query, key and value of one layer, of odd sizes, as one matrix."""
    parts = [make_weights(name, rows, 96, seed=rows) for rows in (24, 5, 7)]
    matrix = Matrix.pack(name, [data for data, _ in parts], 96)
    np.testing.assert_array_equal(matrix.dequantize(), np.concatenate([weights for _, weights in parts]))
    x = make_inputs(5, 96)
    alone = [Matrix.pack(name, [data], 96).multiply(x, pool) for data, _ in parts]
    np.testing.assert_array_equal(matrix.multiply(x, pool), np.concatenate(alone, axis=1))


@pytest.mark.parametrize("precision", ["int8", "exact"])
@pytest.mark.parametrize("rows", [1, 16, 20, 48])
def test_gate(rows: int, precision: Precision, isa: str, pool: ThreadPool) -> None:
    parts = [make_weights("Q4_1", rows, 256, seed=seed) for seed in (5, 6)]
    matrix = Matrix.pack("Q4_1", [data for data, _ in parts], 256, interleave_halves=True)
    np.testing.assert_array_equal(matrix.dequantize(), np.concatenate([weights for _, weights in parts]))
    x = make_inputs(19, 256) * np.float32(20)
    both = matrix.multiply(x, pool, precision=precision, isa=isa)
    plain = Matrix.pack("Q4_1", [data for data, _ in parts], 256)
    np.testing.assert_array_equal(both, plain.multiply(x, pool, precision=precision, isa=isa))
    gate, up = both[:, :rows].astype(np.float64), both[:, rows:].astype(np.float64)
    assert gate.max() > 10
    assert gate.min() < -10
    got = matrix.multiply(x, pool, epilogue="silu_gate", precision=precision, isa=isa)
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-30)


def test_gate_far_out(isa: str, pool: ThreadPool) -> None:
    """Where e^x overflows or vanishes, the gate is x or zero."""
    gates = np.array([-1e4, -100, -88, -87, -1e-3, 0, 1e-3, 87, 100, 1e4], np.float32)
    parts = [np.repeat(gates[:, None], 1, 1), np.ones((len(gates), 1), np.float32)]
    matrix = Matrix.pack("F32", [p.view(np.uint8).reshape(-1) for p in parts], 1, interleave_halves=True)
    got = matrix.multiply(np.ones((1, 1), np.float32), pool, epilogue="silu_gate", isa=isa)[0]
    want = gates.astype(np.float64) * np.exp(-np.logaddexp(0, -gates.astype(np.float64)))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("rows", [16, 21])
def test_add_to_a_residual(rows: int, isa: str, pool: ThreadPool) -> None:
    data, _ = make_weights("Q4_1", rows, 64)
    matrix = Matrix.pack("Q4_1", [data], 64)
    x, residual = make_inputs(6, 64), make_inputs(6, rows, seed=9)
    before = residual.copy()
    got = matrix.multiply(x, pool, epilogue="add", onto=residual, isa=isa)
    np.testing.assert_array_equal(got, residual + matrix.multiply(x, pool, isa=isa))
    np.testing.assert_array_equal(residual, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_stays_in_its_token(bad: float, isa: str, pool: ThreadPool) -> None:
    data, _ = make_weights("Q4_1", 16, 64)
    matrix = Matrix.pack("Q4_1", [data], 64)
    x = make_inputs(3, 64)
    clean = matrix.multiply(x, pool, isa=isa)
    x[1, 40] = bad
    got = matrix.multiply(x, pool, isa=isa)
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-28, 1e28])
def test_inputs_of_any_size(size: float, isa: str, pool: ThreadPool) -> None:
    data, weights = make_weights("Q8_0", 16, 64)
    x = (np.sign(make_inputs(2, 64)) * size).astype(np.float32)
    got = Matrix.pack("Q8_0", [data], 64).multiply(x, pool, isa=isa)
    np.testing.assert_allclose(
        got, x.astype(np.float64) @ weights.astype(np.float64).T, rtol=1e-4, atol=max(size * 1e-5, 1e-28)
    )


def test_no_tokens(pool: ThreadPool) -> None:
    data, _ = make_weights("Q4_1", 16, 64)
    assert Matrix.pack("Q4_1", [data], 64).multiply(np.empty((0, 64), np.float32), pool).shape == (0, 16)


def test_memory_is_that_of_the_file() -> None:
    """4-bit and 8-bit formats with half-precision scales take as much as in the file."""
    for name in ("Q4_0", "Q4_1", "Q8_0"):
        data, _ = make_weights(name, 64, 1024)
        assert Matrix.pack(name, [data], 1024).nbytes == data.nbytes


def test_matrices_share_an_arena() -> None:
    """Small ones lie side by side, large ones alone; each outlives the arena."""
    arena = Arena()
    sizes = [1, 40, 3000, 500]
    packed = [make_weights("Q4_1", rows, 1024, seed=rows) for rows in sizes]
    matrices = [Matrix.pack("Q4_1", [data], 1024, arena=arena) for data, _ in packed]
    large = np.zeros((17 << 20) // 4, np.float32)
    zeros = Matrix.pack("F32", [large.view(np.uint8)], 1, arena=arena)
    assert arena.nbytes == sum(m.nbytes for m in [*matrices, zeros])
    del arena
    for matrix, (_, want) in zip(matrices, packed, strict=True):
        np.testing.assert_array_equal(matrix.dequantize(), want)
    assert not zeros.dequantize().any()


def refusals() -> list[tuple[str, Callable[[ThreadPool], object]]]:
    q4, _ = make_weights("Q4_1", 16, 64)
    x = np.zeros((2, 64), np.float32)
    f32 = np.zeros((16, 64), np.float32).view(np.uint8).reshape(-1)

    def matrix() -> Matrix:
        return Matrix.pack("Q4_1", [q4, q4], 64)

    return [
        (r"'IQ2_XS' has no kernel: expected one of F32,.*Q6_K", lambda _: Matrix.pack("IQ2_XS", [q4], 64)),
        (r"Q4_1 weights with 33 columns: expected a positive multiple of 32", lambda _: Matrix.pack("Q4_1", [q4], 33)),
        (r"0 columns", lambda _: Matrix.pack("F32", [f32], 0)),
        (r"-32 columns", lambda _: Matrix.pack("Q4_1", [q4], -32)),
        (r"part 1 .* has 639 bytes: expected a positive multiple of 40", lambda _: Matrix.pack("Q4_1", [q4, q4[:-1]], 64)),
        (r"has 0 bytes", lambda _: Matrix.pack("Q4_1", [q4[:0]], 64)),
        (r"at least one part", lambda _: Matrix.pack("Q4_1", [], 64)),
        (r"two parts of as many rows", lambda _: Matrix.pack("Q4_1", [q4, q4[:40]], 64, interleave_halves=True)),
        (r"63 columns: expected a multiple of 32", lambda pool: matrix().multiply(x[:, :63].copy(), pool)),
        (r"32 columns for weights with 64", lambda pool: matrix().multiply(x[:, :32].copy(), pool)),
        (r"interleaved halves", lambda pool: matrix().multiply(x, pool, epilogue="silu_gate")),
        (r"needs `onto`", lambda pool: matrix().multiply(x, pool, epilogue="add")),
        (r"onto is 1 x 32: expected 2 x 32", lambda pool: matrix().multiply(x, pool, epilogue="add", onto=x[:1, :32].copy())),
        (r"F32 weights have no 8-bit product", lambda p: Matrix.pack("F32", [f32], 64).multiply(x, p, precision="int8")),
        (r"unknown instruction set 'mmx'", lambda pool: matrix().multiply(x, pool, isa="mmx")),
        (r"row 32 of a matrix with 32 rows", lambda _: matrix().row(32)),
        (r"row -1", lambda _: matrix().row(-1)),
        (r"num_threads is 0", lambda _: ThreadPool(0)),
        (r"num_threads is 100000: expected 1 to 1024", lambda _: ThreadPool(100000)),
    ]


@pytest.mark.parametrize("case", range(len(refusals())))
def test_bad_input_is_refused(case: int, pool: ThreadPool) -> None:
    text, call = refusals()[case]
    with pytest.raises(ValueError, match=text):
        call(pool)


@pytest.mark.parametrize("wanted", [*_kernels.available_isas(), ""])
def test_environment_chooses_the_instruction_set(wanted: str) -> None:
    code = "from branchline.engine import _kernels; print(_kernels.isa())"
    environment = {**os.environ, "BRANCHLINE_ISA": wanted, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == (wanted or _kernels.available_isas()[-1])


def test_callers_share_a_pool() -> None:
    """Loops of several threads on one pool run one by one, and each gets its own result."""
    pool = ThreadPool(3)
    data, _ = make_weights("Q4_1", 300, 64)
    matrix = Matrix.pack("Q4_1", [data], 64)
    inputs = [make_inputs(5, 64, seed=seed) for seed in range(4)]
    wants = [matrix.multiply(x, ThreadPool(1)) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        wrong.extend(i for _ in range(200) if not np.array_equal(matrix.multiply(inputs[i], pool), wants[i]))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
