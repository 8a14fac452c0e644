"""The native decoder by itself: what it refuses, what it writes, and that instruction sets agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from branchline.engine import _kernels
from branchline.engine._kernels import LlamaLayer, LlamaModel, Matrix, ThreadPool

HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS, HEAD_DIM, CONTEXT, PAGES = 64, 96, 50, 4, 2, 16, 128, 8
PAGE_BYTES = 2 * KV_HEADS * 16 * HEAD_DIM * 4
Floats = npt.NDArray[np.float32]


def random(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)


def matrix(rows: int, cols: int) -> Matrix:
    return Matrix.pack("F32", [random(rows, cols).view(np.uint8).reshape(-1)], cols)


def layer(**changed: Any) -> LlamaLayer:
    halves = [random(INTERMEDIATE, HIDDEN).view(np.uint8).reshape(-1) for _ in range(2)]
    tensors: dict[str, Any] = {
        "attention_norm": np.ones(HIDDEN, np.float32),
        "qkv": [matrix((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)],
        "qkv_bias": None,
        "q_norm": None,
        "k_norm": None,
        "out": matrix(HIDDEN, HEADS * HEAD_DIM),
        "out_bias": None,
        "mlp_norm": np.ones(HIDDEN, np.float32),
        "gate_up": Matrix.pack("F32", halves, HIDDEN, interleave_halves=True),
        "gate_up_bias": None,
        "down": matrix(HIDDEN, INTERMEDIATE),
        "down_bias": None,
    }
    return LlamaLayer(**(tensors | changed))


def model(**changed: Any) -> LlamaModel:
    angles = np.outer(np.arange(CONTEXT), 1.0 / 100 ** (np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
    settings: dict[str, Any] = {
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "embedding": matrix(VOCAB, HIDDEN),
        "layers": [layer()],
        "norm": np.ones(HIDDEN, np.float32),
        "head": matrix(VOCAB, HIDDEN),
        "rope": np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32),
        "kv_dtype": "float32",
    }
    return LlamaModel(ThreadPool(1), **(settings | changed))


def made(changed: dict[str, Any]) -> dict[str, Any]:
    """Matrices are made in the test, so that none lives as long as the interpreter."""
    return {name: value() if callable(value) else value for name, value in changed.items()}


class Call:
    """Arguments of a step of one new row of `num_tokens` tokens."""

    def __init__(self, num_tokens: int = 20, wanted: tuple[int, ...] = (19,)) -> None:
        pages = -(-num_tokens // 16)
        self.arguments: dict[str, Any] = {
            "token_ids": np.arange(num_tokens, dtype=np.int32) % VOCAB,
            "positions": np.arange(num_tokens, dtype=np.int32),
            "write_slots": np.arange(num_tokens, dtype=np.int32),
            "row_indptr": np.array([0, num_tokens], np.int32),
            "levels": [
                (
                    np.array([0, num_tokens], np.int32),
                    np.array([0, pages], np.int32),
                    np.arange(pages, dtype=np.int32),
                    np.array([num_tokens - (pages - 1) * 16], np.int32),
                )
            ],
            "logit_tokens": np.array(wanted, np.int64),
            "kv": np.full(PAGES * PAGE_BYTES, 0xFF, np.uint8),
            "logits": np.full((len(wanted), VOCAB), np.nan, np.float32),
        }

    def run(self, llama: LlamaModel, **changed: Any) -> Floats:
        llama.step(**(self.arguments | changed))
        logits: Floats = self.arguments["logits"]
        return logits

    @property
    def written(self) -> bool:
        return bool((self.arguments["kv"] != 0xFF).any())


def test_wanted_tokens_may_be_any_in_any_order() -> None:
    every = Call(wanted=tuple(range(20)))
    some = Call(wanted=(7, 19, 0, 7))
    np.testing.assert_array_equal(some.run(model()), every.run(model())[[7, 19, 0, 7]])


def test_without_wanted_tokens_the_keys_and_values_are_written() -> None:
    none, last = Call(wanted=()), Call()
    assert none.run(model()).shape == (0, VOCAB)
    last.run(model())
    assert none.written
    np.testing.assert_array_equal(none.arguments["kv"], last.arguments["kv"])


@pytest.mark.parametrize("isa", _kernels.available_isas())
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33])
def test_instruction_sets_agree(isa: str, num_tokens: int) -> None:
    wanted = (num_tokens - 1,)
    expected = Call(num_tokens, wanted).run(model(isa="baseline", attention_isa="baseline"))
    found = Call(num_tokens, wanted).run(model(isa=isa, attention_isa=isa))
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_steps_of_any_size_follow_each_other() -> None:
    """The scratch memory of a large step is not seen by a smaller one, nor the other way round."""
    llama = model()
    sizes = (3, 100, 1, 40, 128, 2)
    for size in sizes:
        np.testing.assert_array_equal(Call(size, (size - 1,)).run(llama), Call(size, (size - 1,)).run(model()))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_ids": np.full(20, VOCAB, np.int32)}, "token id 50: expected 0 to 49"),
        ({"token_ids": np.full(20, -1, np.int32)}, "token id -1"),
        ({"positions": np.full(20, CONTEXT, np.int32)}, "position 128: expected 0 to 127"),
        ({"positions": np.zeros(19, np.int32)}, "number of positions is 19: expected 20"),
        ({"write_slots": np.zeros(21, np.int32)}, "number of slots is 21: expected 20"),
        ({"write_slots": np.full(20, PAGES * 16, np.int32)}, "128"),
        ({"logit_tokens": np.array([20], np.int64)}, "wanted token is 20: expected 19"),
        ({"logit_tokens": np.array([0, 1], np.int64)}, "logits are 1 x 50: expected 2 x 50"),
        ({"logits": np.zeros((1, 49), np.float32)}, "logits are 1 x 49"),
        ({"kv": np.full(PAGE_BYTES, 0xFF, np.uint8)}, "outside the pool"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_and_writes_nothing(changed: dict[str, Any], message: str) -> None:
    call = Call()
    with pytest.raises(ValueError, match=message):
        call.run(model(), **changed)
    assert not call.written
    assert np.isnan(call.arguments["logits"]).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norm": np.ones(HIDDEN + 1, np.float32)}, "size of norm is 65: expected 64"),
        ({"head": lambda: matrix(VOCAB, 32)}, "head has 50 rows of 32: expected 50 of 64"),
        ({"layers": []}, "size of the model is 0"),
        ({"num_kv_heads": 3}, "query heads"),
        ({"page_tokens": 8}, "page_tokens"),
        ({"kv_dtype": "int3"}, "int3"),
        ({"precision": "int3"}, "int3"),
        ({"isa": "mmx"}, "mmx"),
    ],
)
def test_weights_that_do_not_fit_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**made(changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qkv": lambda: [matrix(64, HIDDEN)]}, "rows of qkv is 64: expected 128"),
        ({"q_norm": np.ones(HEAD_DIM, np.float32)}, "size of k_norm is 0: expected 16"),
        ({"gate_up": lambda: matrix(2 * INTERMEDIATE, HIDDEN)}, "interleaved"),
        ({"out": lambda: matrix(HIDDEN, HIDDEN - 32)}, "out has 64 rows of 32"),
        ({"down_bias": np.ones(3, np.float32)}, "down_bias is 3: expected 64"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(layers=[layer(**made(changed))])
