"""The native engine computes what transformers and the torch path compute, up to what its inputs' 8 bits cost."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from tests.numerics import tiny_hf
from tests.numerics.conftest import Pair
from tests.numerics.rows import Rows
from tests.numerics.tiny_gguf import write_gguf

from branchline.engine.config import EngineConfig
from branchline.engine.engine import Engine
from branchline.engine.errors import ConfigError, UnsupportedModelError
from branchline.engine.model.native import NativeModel, load_native, open_model
from branchline.engine.model.runner import LoadedModel, find_model, load_model

LICENSE = Path(__file__).parents[2] / "LICENSE"
# Measured on SmolLM2's Q4_1 file over the texts below; llama.cpp rounds the inputs of its matrices alike.
INPUT_ERROR = 0.0055  # relative, root mean square, that rounding one product's inputs to 8 bits adds
MAX_RELATIVE_ERROR = INPUT_ERROR * (4 * 30 + 1) ** 0.5  # of the logits of 30 layers
MAX_PERPLEXITY_RATIO = 1.01
TIE = 2.0  # the torch path's two best logits are closer than this: 8 bits may decide otherwise
STARTS = (
    "The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in a village at the foot of a mountain,",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n", "Water boils at", "import numpy as np",
    "The first president of the United States was", "To bake bread, you need", "In 1969, astronauts", "SELECT name FROM users",
    "The mitochondria", "A haiku about the sea:\n", "Question: What is 7 times 8?\nAnswer:", "Dear Sir or Madam,\n", "水は",
    "The three laws of motion are", "Roses are red,", "<html>\n<head>", "My favourite food is", "List of planets:\n1. Mercury",
)  # fmt: skip


def native(model: str | Path, **settings: Any) -> NativeModel:
    config = EngineConfig.from_dict({"model": str(model), "threads": 1, "compute": "native", **settings})
    return load_native(config, *find_model(config))


# --- tiny models: every architecture and format ---------------------------------------------------------------------------


@pytest.mark.parametrize("variant", tiny_hf.VARIANTS)
def test_logits_equal_transformers(pair: Callable[[str], Pair], variant: str) -> None:
    """Weights and K/V in float32: the same arithmetic, in another order."""
    reference, model = pair(variant)
    rows = Rows.native(native(model.files.path))
    for prompt in tiny_hf.prompts():
        torch.testing.assert_close(rows.logits(prompt), tiny_hf.reference_logits(reference, prompt), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "llama-biases", "qwen3"])
def test_greedy_continuation_equals_transformers(pair: Callable[[str], Pair], variant: str) -> None:
    reference, model = pair(variant)
    prompts = tiny_hf.prompts()
    expected = [tiny_hf.reference_greedy(reference, prompt, 32) for prompt in prompts]
    assert Rows.native(native(model.files.path)).greedy(prompts, 32) == expected


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("variant", ["llama", "llama-biases", "qwen2"])
def test_a_gguf_file_gives_the_model_that_was_written(tmp_path: Path, variant: str, kind: str) -> None:
    """Inputs that aren't rounded: the reference's weights are what the file holds."""
    reference = tiny_hf.make(variant)
    path = write_gguf(tmp_path / "tiny.gguf", reference, GGMLQuantizationType[kind])
    model = native(path, activations="float32", kv_dtype="float32")
    assert model.formats == kind.lower()
    rows = Rows.native(model)
    for prompt in tiny_hf.prompts():
        torch.testing.assert_close(rows.logits(prompt), tiny_hf.reference_logits(reference, prompt), atol=1e-3, rtol=1e-3)


def test_q_and_k_may_have_another_format_than_v(tmp_path: Path) -> None:
    """As llama.cpp's mixed files have it: one product for q and k, one for v."""
    reference = tiny_hf.make("llama")
    values = reference.model.layers[1].self_attn.v_proj.weight.detach().numpy().copy()
    path = write_gguf(tmp_path / "tiny.gguf", reference, GGMLQuantizationType.Q8_0, tensors={"blk.1.attn_v.weight": values})
    model = native(path, activations="float32", kv_dtype="float32")
    assert model.formats == "q8_0/f32"
    prompt = tiny_hf.prompts()[-1]
    expected = tiny_hf.reference_logits(reference, prompt)
    torch.testing.assert_close(Rows.native(model).logits(prompt), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants(tmp_path: Path, kind: str) -> None:
    reference = tiny_hf.make("llama", hidden_size=256, intermediate_size=512)
    path = write_gguf(tmp_path / "tiny.gguf", reference, GGMLQuantizationType[kind])
    model = native(path, activations="float32", kv_dtype="float32")
    assert model.formats == kind.lower()
    rows = Rows.native(model)
    for prompt in tiny_hf.prompts():
        torch.testing.assert_close(rows.logits(prompt), tiny_hf.reference_logits(reference, prompt), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_what_inputs_of_8_bits_cost(tmp_path: Path, kind: str) -> None:
    """Each of a layer's four products, and the head, adds an error of its own, at random: they add up as their squares do.
    Softmax and gate of these random models, sharper than a trained one's, make up to 1.5 times as much of it (measured)."""
    reference = tiny_hf.make("llama", hidden_size=256, intermediate_size=512)
    path = write_gguf(tmp_path / "tiny.gguf", reference, GGMLQuantizationType[kind])
    rows = Rows.native(native(path, kv_dtype="float32"))
    prompts = tiny_hf.prompts()
    expected = torch.cat([tiny_hf.reference_logits(reference, prompt) for prompt in prompts])
    found = torch.cat([rows.logits(prompt) for prompt in prompts])
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < 1.6 * INPUT_ERROR * (4 * tiny_hf.SHAPES["num_hidden_layers"] + 1) ** 0.5


@pytest.mark.parametrize(("quantize", "formats"), [("q8_0", "q8_0"), ("q4_1", "q4_1/q8_0")])
def test_weights_are_quantised_at_load(pair: Callable[[str], Pair], quantize: str, formats: str) -> None:
    """Against the reference with the weights that the gguf library makes of its own."""
    original, model = pair("mistral")
    packed = native(model.files.path, quantize=quantize, activations="float32", kv_dtype="float32")
    assert packed.formats == formats
    assert packed.num_parameters == model.num_parameters
    reference = copy.deepcopy(original)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.ndim == 2:
                wanted = "q8_0" if "embed" in name or "lm_head" in name else quantize
                kind = GGMLQuantizationType[wanted.upper()]
                numbers = gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(np.array(numbers)))
    prompt = tiny_hf.prompts()[-1]
    expected = tiny_hf.reference_logits(reference, prompt)
    torch.testing.assert_close(Rows.native(packed).logits(prompt), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_a_row_depends_on_nothing_but_itself(tmp_path: Path, activations: str, kv_dtype: str) -> None:
    """Bit for bit: alone, in batches of any size, prefill beside it, and with any number of threads."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_hf.make("llama"), GGMLQuantizationType.Q4_1)
    prompts = [[5 + i, 9, 60 + i, 3] * (1 + i % 5) for i in range(40)]
    results: dict[tuple[int, int], torch.Tensor] = {}
    for threads in (1, 2, 3):
        model = native(path, activations=activations, kv_dtype=kv_dtype, threads=threads)
        for count in (1, 2, 5, 17, 40):
            rows = Rows.native(model)
            branches = [rows.tree.root() for _ in range(count)]
            for slot, branch in enumerate(branches):
                rows.tree.prefill(branch, slot, np.array(prompts[slot], np.int32))
            first = rows.step().clone()
            for slot, branch in enumerate(branches):
                rows.tree.join(branch, slot, 11)
            fresh = rows.tree.root()
            rows.tree.prefill(fresh, count, np.arange(3, 60, dtype=np.int32))
            results[threads, count] = torch.stack([first[0], rows.step()[rows.slots.index(0)]])
    assert all(torch.equal(result, results[1, 1]) for result in results.values())


# --- what it takes, and what it leaves to torch ----------------------------------------------------------------------------


def test_auto_takes_the_native_engine_where_it_can(tiny_model: Path) -> None:
    for settings in ({}, {"kv_dtype": "bfloat16"}, {"quantize": "q8_0"}):
        assert isinstance(open_model(EngineConfig.from_dict({"model": str(tiny_model), "threads": 1, **settings})), NativeModel)
    for settings in ({"compute": "torch"}, {"attention": "reference"}, {"dtype": "bfloat16"}):
        assert isinstance(open_model(EngineConfig.from_dict({"model": str(tiny_model), "threads": 1, **settings})), LoadedModel)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("F32", {"page_tokens": 8}, "page_tokens"),
        ("Q2_K", {}, "has type Q2_K"),
    ],
)
def test_what_it_cannot_take_goes_to_torch_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, settings: dict[str, Any], message: str
) -> None:
    reference = tiny_hf.make("llama", hidden_size=256, intermediate_size=256)
    data = None
    if kind == "Q2_K":  # the gguf library reads but doesn't write it
        data = {"blk.0.ffn_down.weight": np.zeros((256, 84), np.uint8)}
    path = tmp_path / "tiny.gguf"
    _write(path, reference, data)
    with caplog.at_level(logging.INFO):
        model = open_model(EngineConfig.from_dict({"model": str(path), "threads": 1, **settings}))
    assert isinstance(model, LoadedModel)
    (line,) = [record.getMessage() for record in caplog.records if "computed by torch" in record.getMessage()]
    assert message in line
    with pytest.raises(UnsupportedModelError, match=message):
        open_model(EngineConfig.from_dict({"model": str(path), "compute": "native", **settings}))
    with pytest.raises(UnsupportedModelError, match=message):
        open_model(EngineConfig.from_dict({"model": str(path), "quantize": "q8_0", **settings}))


def _write(path: Path, reference: Any, raw: dict[str, np.ndarray[Any, Any]] | None) -> None:
    tensors = raw or {}

    class Writer(gguf.GGUFWriter):  # type: ignore[misc]
        def add_tensor(self, name: str, tensor: Any, raw_dtype: Any = None) -> None:
            super().add_tensor(name, tensor, raw_dtype=GGMLQuantizationType.Q2_K if name in tensors else raw_dtype)

    original, gguf.GGUFWriter = gguf.GGUFWriter, Writer
    try:
        write_gguf(path, reference, tensors=dict(tensors))
    finally:
        gguf.GGUFWriter = original


@pytest.mark.parametrize(
    "settings",
    [{"device": "cuda"}, {"attention": "reference"}, {"dtype": "bfloat16"}],
)
def test_settings_that_only_torch_has_are_refused(settings: dict[str, str]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(ConfigError, match=f"compute = 'native': {name} = {value!r}"):
        EngineConfig.from_dict({"compute": "native", **settings})
    with pytest.raises(ConfigError, match=f"quantize = 'q8_0' .*{name} = {value!r}"):
        EngineConfig.from_dict({"quantize": "q8_0", **settings})


def test_the_engine_tells_how_it_computes(tiny_model: Path) -> None:
    settings = {"model": str(tiny_model), "pool_tokens": 256, "threads": 1}
    expected: list[tuple[dict[str, Any], tuple[str, str, str]]] = [
        ({}, ("f32", "native", "float32")),
        ({"quantize": "q4_1"}, ("q4_1/q8_0", "native", "bfloat16")),
        ({"kv_dtype": "int8"}, ("f32", "native", "int8")),
        ({"compute": "torch"}, ("float32", "cpu", "float32")),
        ({"compute": "torch", "attention": "native", "kv_dtype": "bfloat16"}, ("float32", "native", "bfloat16")),
    ]
    for more, told in expected:
        with Engine.load(EngineConfig.from_dict(settings | more)) as engine:
            assert (engine.info.dtype, engine.info.attention, engine.info.kv_dtype) == told
            token_bytes = {"float32": 16 * 4, "bfloat16": 16 * 2, "int8": 16 + 4}[told[2]]
            assert engine.info.page_bytes == 2 * 2 * 2 * 16 * token_bytes
    for kv_dtype in ("bfloat16", "int8"):
        with pytest.raises(ConfigError, match=f"kv_dtype = '{kv_dtype}'"):
            Engine.load(EngineConfig.from_dict(settings | {"compute": "torch", "kv_dtype": kv_dtype}))


# --- the default model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dequantised(smollm2: str) -> LoadedModel:
    return load_model(EngineConfig(model=smollm2))


@pytest.fixture(scope="module")
def encode(dequantised: LoadedModel) -> Callable[[str], list[int]]:
    from branchline.engine.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(dequantised.files.kind, dequantised.files.path)
    return lambda text: list(tokenizer.encode(text, add_bos=False))


def test_smollm2_equals_the_torch_path_where_nothing_is_rounded(
    smollm2: str, dequantised: LoadedModel, encode: Callable[[str], list[int]]
) -> None:
    ids = encode(LICENSE.read_text()[:400])
    expected = Rows(dequantised, "cpu").logits(ids)
    found = Rows.native(native(smollm2, activations="float32", kv_dtype="float32")).logits(ids)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_smollm2_predicts_a_text_as_well_as_the_torch_path(
    smollm2: str, dequantised: LoadedModel, encode: Callable[[str], list[int]]
) -> None:
    ids = encode(LICENSE.read_text()[:3000])
    expected = Rows(dequantised, "cpu").logits(ids)
    found = Rows.native(native(smollm2)).logits(ids)
    assert 0.001 < float((found - expected).norm() / expected.norm()) < MAX_RELATIVE_ERROR
    loss, expected_loss = (
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])) for logits in (found, expected)
    )
    assert float((loss - expected_loss).exp()) < MAX_PERPLEXITY_RATIO


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bfloat16", 0.01), ("int8", 0.04)])
def test_what_rounded_kv_costs_smollm2(smollm2: str, encode: Callable[[str], list[int]], kv_dtype: str, bound: float) -> None:
    ids = encode(LICENSE.read_text()[:1500])
    expected, found = (
        Rows.native(native(smollm2, activations="float32", kv_dtype=each)).logits(ids) for each in ("float32", kv_dtype)
    )
    assert 0 < float((found - expected).norm() / expected.norm()) < bound
    loss, expected_loss = (
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])) for logits in (found, expected)
    )
    assert abs(float((loss - expected_loss).exp()) - 1) < bound


@pytest.mark.parametrize(
    ("num_prompts", "num_tokens"), [(5, 24), pytest.param(20, 128, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_smollm2_takes_the_torch_paths_tokens_where_they_are_clear(
    smollm2: str, dequantised: LoadedModel, encode: Callable[[str], list[int]], num_prompts: int, num_tokens: int
) -> None:
    """Given the torch path's own continuation, the native likeliest token is the torch path's wherever that has a lead."""
    prompts = [encode(text) for text in STARTS[:num_prompts]]
    continuations = Rows(dequantised, "cpu", num_pages=512).greedy(prompts, num_tokens)
    exact, rows = Rows(dequantised, "cpu"), Rows.native(native(smollm2))
    clear = 0
    for prompt, continuation in zip(prompts, continuations, strict=True):
        whole = prompt + continuation[:-1]
        expected, found = (each.logits(whole)[len(prompt) - 1 :] for each in (exact, rows))
        best = expected.topk(2).values
        leads = best[:, 0] - best[:, 1] > TIE
        clear += int(leads.sum())
        assert found.argmax(-1)[leads].tolist() == expected.argmax(-1)[leads].tolist()
    assert clear > num_prompts * num_tokens // 4
