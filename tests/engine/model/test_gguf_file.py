"""GGUF files: what is read, what is refused, and with which words."""

from __future__ import annotations

import contextlib
import logging
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.engine.model.conftest import load
from tests.numerics import tiny_hf
from tests.numerics.tiny_gguf import write_gguf

from branchline.engine.errors import CorruptModelError, ModelError, UnsupportedModelError
from branchline.engine.model.gguf_file import GGUFFile
from branchline.engine.model.gguf_weights import read_gguf_config
from branchline.engine.model.resolve import resolve_model


def write(tmp_path: Path, data: bytes | bytearray) -> Path:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    return path


def tiny(tmp_path: Path, **how: Any) -> Path:
    return write_gguf(tmp_path / "m.gguf", tiny_hf.make("llama"), **how)


# --- what is read -------------------------------------------------------------------------------------------------------


def assert_same_as_the_library(path: Path) -> None:
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.kind, mine.begin, mine.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(ours.raw(mine).reshape(-1), tensor.data.reshape(-1).view(np.uint8))


def test_every_kind_of_value(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 水 🙂")
    writer.add_array("strings", ["", "a", "水"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -0.25])
    writer.add_custom_alignment(64)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(24, dtype=np.float16).reshape(2, 3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_as_the_library(path)


def test_the_default_model_as_the_library_reads_it(smollm2: str) -> None:
    assert_same_as_the_library(resolve_model(smollm2).path)


def test_shapes_and_ids(tmp_path: Path) -> None:
    config = read_gguf_config(GGUFFile(tiny(tmp_path)))
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 3, 4, 2)
    assert (config.head_dim, config.hidden_size, config.intermediate_size, config.context_length) == (16, 64, 96, 512)
    assert (config.vocab_size, config.bos_id, config.eos_ids, config.tied_embeddings) == (160, 1, (2,), False)


def test_the_context_never_exceeds_a_sliding_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny(tmp_path, metadata={"attention.sliding_window": 128})
    with caplog.at_level(logging.WARNING):
        assert load(path).model_config.context_length == 128
    assert "bounded to 128 of 512" in caplog.text


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"expert_count": 8}, "a mixture of 8 experts isn't supported"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "rope scaling 'yarn' isn't supported"),
        ({"rope.dimension_count": 8}, "head sizes 16 (key), 16 (value), 8 (rotated)"),
        ({"attention.value_length": 32}, "head sizes 16 (key), 32 (value), 16 (rotated)"),
    ],
)
def test_settings_that_are_not_implemented(tmp_path: Path, metadata: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load(tiny(tmp_path, metadata=metadata))
    assert text in caught.value.message


@pytest.mark.parametrize("arch", ["gemma3", "mistral", "base"])
def test_other_architectures(tmp_path: Path, arch: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"architecture '{arch}' isn't supported. There are: llama, qwen2, qwen3$"):
        load(tiny(tmp_path, arch=arch))


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"block_count": None}, "metadata key llama.block_count is missing"),
        ({"block_count": "three"}, "llama.block_count = three: expected int"),
        ({"block_count": 0}, "num_layers = 0: expected at least 1"),
        ({"block_count": 4}, "tensor blk.3.attn_norm.weight is missing: expected shape [64]"),
        ({"block_count": 2}, "9 tensors (30848 numbers) that this architecture doesn't have: blk.2.attn_k.weight, blk.2."),
        ({"feed_forward_length": 128}, "tensor blk.0.ffn_gate.weight has shape [96, 64]: expected [128, 64]"),
        ({"attention.head_count_kv": 3}, "4 query heads can't be shared out over 3"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, metadata: dict[str, Any], text: str) -> None:
    with pytest.raises(CorruptModelError) as caught:
        load(tiny(tmp_path, metadata=metadata))
    assert text in caught.value.message


def test_a_tensor_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match=r"tensor token_embd\.weight is missing"):
        load(tiny(tmp_path, tensors={"token_embd.weight": None}))


def test_rope_divisors_of_another_size(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="7 rope divisors for head_dim 16: expected 8"):
        load(tiny(tmp_path, tensors={"rope_freqs.weight": np.ones(7, np.float32)}))


def test_a_tensor_that_the_library_cannot_dequantise(tmp_path: Path) -> None:
    whole = np.zeros((96, 64), np.int32)
    with pytest.raises(UnsupportedModelError, match=r"tensor blk\.1\.ffn_up\.weight has type I32"):
        load(tiny(tmp_path, tensors={"blk.1.ffn_up.weight": whole}))


def test_a_part_of_a_split_file(tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="one of 3 parts: join them"):
        load(path)


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\x03\x04 a zip file", b"\x00" * 100])
def test_what_is_no_gguf_file(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CorruptModelError, match="not a GGUF file"):
        load(write(tmp_path, data))


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_other_versions(tmp_path: Path, gguf_bytes: bytearray, version: int) -> None:
    gguf_bytes[4:8] = struct.pack("<I", version)
    with pytest.raises(UnsupportedModelError, match=f"GGUF version {version} isn't supported"):
        load(write(tmp_path, gguf_bytes))


def test_truncated_anywhere(tmp_path: Path, gguf_bytes: bytearray) -> None:
    """At no length does a part of a file load, or fail with anything but a typed error that names the file."""
    directory = 3000
    for length in [*range(0, directory, 7), *range(directory, len(gguf_bytes) - 1, len(gguf_bytes) // 20)]:
        path = write(tmp_path, gguf_bytes[:length])
        with pytest.raises(CorruptModelError) as caught:
            load(path)
        assert str(path) in caught.value.message


def test_the_error_of_a_truncated_download_says_how_much_is_missing(tmp_path: Path, gguf_bytes: bytearray) -> None:
    cut = len(gguf_bytes) - 100
    with pytest.raises(
        CorruptModelError, match=rf"truncated: tensor .* ends at byte \d+, the file at {cut}: download it again"
    ):
        load(write(tmp_path, gguf_bytes[:cut]))


def test_damaged_directories_never_raise_anything_untyped(tmp_path: Path, gguf_bytes: bytearray) -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(gguf_bytes)
        for at in random.integers(4, 2500, 3):
            damaged[at] = random.integers(256)
        path = write(tmp_path, damaged)
        with contextlib.suppress(ModelError):  # many a damaged byte does no harm to the directory
            read_gguf_config(GGUFFile(path))


def test_a_huge_count_allocates_nothing(tmp_path: Path, gguf_bytes: bytearray) -> None:
    gguf_bytes[16:24] = struct.pack("<Q", 2**60)
    with pytest.raises(CorruptModelError, match="truncated or damaged"):
        load(write(tmp_path, gguf_bytes))


@pytest.mark.parametrize(
    ("entry", "error", "text"),
    [
        (struct.pack("<I", 77) + b"\0" * 16, CorruptModelError, "77 is no GGUF type"),
        (struct.pack("<II", 8, 0) + struct.pack("<I", 9), CorruptModelError, "truncated or damaged"),
        (struct.pack("<IIQ", 9, 9, 1) + b"\0" * 16, UnsupportedModelError, "array of arrays"),
        (struct.pack("<IIQ", 9, 8, 2**50), CorruptModelError, "truncated or damaged"),
        (struct.pack("<IIQ", 9, 4, 2**62), CorruptModelError, "truncated or damaged"),
        (struct.pack("<IQ", 8, 2) + b"\xff\xfe", CorruptModelError, "isn't UTF-8"),
    ],
)
def test_values_that_cannot_be(tmp_path: Path, entry: bytes, error: type[ModelError], text: str) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 3) + b"key"
    with pytest.raises(error, match=text):
        GGUFFile(write(tmp_path, header + entry))


@pytest.mark.parametrize(
    ("entry", "error", "text"),
    [
        (struct.pack("<IQIQ", 1, 4, 999, 0), UnsupportedModelError, "tensor t has type 999"),
        (struct.pack("<IQIQ", 1, 33, 8, 0), CorruptModelError, "rows of 33 numbers can't be cut into Q8_0's blocks of 32"),
        (struct.pack("<I", 9), CorruptModelError, "9 dimensions: expected 1 to 4"),
        (struct.pack("<IQIQ", 1, 2**61, 0, 0), CorruptModelError, "truncated: tensor t ends at byte"),
    ],
)
def test_tensor_entries_that_cannot_be(tmp_path: Path, entry: bytes, error: type[ModelError], text: str) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t"
    with pytest.raises(error, match=text):
        GGUFFile(write(tmp_path, header + entry))


def test_a_tensor_twice(tmp_path: Path) -> None:
    entry = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 1, 0, 0)
    with pytest.raises(CorruptModelError, match="tensor t is there twice"):
        GGUFFile(write(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + entry * 2 + b"\0" * 64))
