"""GGUF files: what is read, what is refused, and with which words."""

from __future__ import annotations

import contextlib
import inspect
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
from branchline.engine.model.gguf_file import DirectoryReader, GGUFFile
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


def test_an_array_makes_three_objects_however_long_it_is(smollm2: str) -> None:
    reader = DirectoryReader(resolve_model(smollm2).path)
    for name, num_items in (("tokens", 49_152), ("merges", 48_900), ("token_type", 49_152)):
        field = reader.fields[f"tokenizer.ggml.{name}"]
        assert len(field.parts) == 3 + 3  # the key's, the array's
        assert field.parts[-2].tolist() == [num_items]


@pytest.mark.parametrize("name", ["_get", "_get_field_parts", "_get_tensor_info_field", "_build_tensors"])
def test_the_library_has_what_is_overridden(name: str) -> None:
    """They are the library's own affair: one that it renames would be overridden no more."""
    ours, theirs = (list(inspect.signature(vars(kind)[name]).parameters) for kind in (DirectoryReader, gguf.GGUFReader))
    assert ours == theirs


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


@pytest.mark.parametrize(("at", "text"), [(8, "has 0 dimensions"), (16, "truncated or damaged")], ids=["tensors", "keys"])
def test_a_huge_count_allocates_nothing(tmp_path: Path, gguf_bytes: bytearray, at: int, text: str) -> None:
    gguf_bytes[at : at + 8] = struct.pack("<Q", 2**60)
    with pytest.raises(CorruptModelError, match=text):
        load(write(tmp_path, gguf_bytes))


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def tensor(*dims: int, kind: int = 0, offset: int = 0) -> bytes:
    entry = struct.pack("<Q", 1) + b"t" + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return entry + struct.pack("<IQ", kind, offset)


def of_one_key(entry: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry


def of_tensors(*entries: bytes, keys: bytes = b"") -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), 1 if keys else 0)
    return head + keys + b"".join(entries) + b"\0" * 256


@pytest.mark.parametrize(
    ("kind", "value", "error", "text"),
    [
        (77, b"\0" * 16, CorruptModelError, "77 is not a valid GGUFValueType"),
        (9, struct.pack("<IQ", 77, 1) + b"\0" * 16, CorruptModelError, "77 is not a valid GGUFValueType"),
        (8, struct.pack("<Q", 9), CorruptModelError, r"9 bytes should follow byte 47, the file ends at byte 47"),
        (9, struct.pack("<IQ", 9, 1) + b"\0" * 16, UnsupportedModelError, "array of arrays"),
        (9, struct.pack("<IQ", 8, 2**50), CorruptModelError, f"{2**53} bytes should follow"),
        (9, struct.pack("<IQQQ", 8, 2, 2**63, 0), CorruptModelError, "8 bytes should follow byte 9223372036854775867"),
        (9, struct.pack("<IQQQ", 8, 2, 0, 2**63), CorruptModelError, f"{2**63 + 16} bytes should follow"),
        (9, struct.pack("<IQ", 4, 2**62), CorruptModelError, f"{2**64} bytes should follow"),
    ],
)
def test_values_that_cannot_be(tmp_path: Path, kind: int, value: bytes, error: type[ModelError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        GGUFFile(write(tmp_path, of_one_key(key(b"key", kind, value))))
    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize("value", [(8, b""), (9, struct.pack("<IQQ", 8, 2, 0))])
def test_text_is_decoded_when_it_is_asked_for(tmp_path: Path, value: tuple[int, bytes]) -> None:
    kind, before = value
    gguf_file = GGUFFile(write(tmp_path, of_one_key(key(b"key", kind, before + struct.pack("<Q", 2) + b"\xff\xfe"))))
    assert list(gguf_file.metadata) == ["key"]
    with pytest.raises(CorruptModelError, match=r"bad.gguf: the value of key isn't UTF-8 \(b'\\xff\\xfe'\)"):
        gguf_file.metadata["key"]


def test_a_key_twice(tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    with pytest.raises(CorruptModelError, match="Duplicate a already in list"):
        GGUFFile(write(tmp_path, header + key(b"a", 0, b"1") * 2))


@pytest.mark.parametrize(
    ("entry", "error", "text"),
    [
        (tensor(4, kind=999), UnsupportedModelError, "tensor t has type 999"),
        (tensor(33, kind=8), CorruptModelError, r"row size \(33\) is not a multiple of Q8_0 block size \(32\)"),
        (tensor(*[1] * 9), CorruptModelError, "tensor t has 9 dimensions: expected 1 to 4"),
        (tensor(), CorruptModelError, "tensor t has 0 dimensions: expected 1 to 4"),
        (tensor(2**61), CorruptModelError, f"truncated: tensor t ends at byte {2**63 + 64}, the file at"),
        (tensor(2**32, 2**32), CorruptModelError, f"truncated: tensor t ends at byte {2**66 + 96}, the file at"),
        (tensor(0, 2**63), CorruptModelError, "damaged"),
        (tensor(1, offset=2**64 - 32), CorruptModelError, "truncated: tensor t ends at byte"),
        (tensor(1, offset=8), CorruptModelError, "begins 8 bytes into the data, which is no multiple of the alignment 32"),
    ],
)
def test_tensor_entries_that_cannot_be(tmp_path: Path, entry: bytes, error: type[ModelError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        GGUFFile(write(tmp_path, of_tensors(entry)))
    assert str(tmp_path) in caught.value.message


def test_a_tensor_twice(tmp_path: Path) -> None:
    with pytest.raises(CorruptModelError, match="duplicated tensor with name t"):
        GGUFFile(write(tmp_path, of_tensors(tensor(1), tensor(1))))


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (4, struct.pack("<I", 0), "must be a non-zero power of two"),
        (4, struct.pack("<I", 48), "must be a non-zero power of two"),
        (4, struct.pack("<I", 128), "begins 64 bytes into the data, which is no multiple of the alignment 128"),
        (8, struct.pack("<Q", 2) + b"32", "Bad type for general.alignment"),
    ],
)
def test_alignments_that_cannot_be(tmp_path: Path, kind: int, value: bytes, text: str) -> None:
    with pytest.raises(CorruptModelError, match=text):
        GGUFFile(write(tmp_path, of_tensors(tensor(1, offset=64), keys=key(b"general.alignment", kind, value))))
