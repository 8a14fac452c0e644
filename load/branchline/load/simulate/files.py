"""Traces of real services, read from their files.

Two forms are known by their content: Mooncake's, JSON lines with `timestamp` (ms), `input_length`, `output_length` and
`hash_ids`, a prefix block of 512 tokens each (Qin et al., "Mooncake", FAST 2025); and Azure's, CSV with `TIMESTAMP`,
`ContextTokens` and `GeneratedTokens` (Patel et al., "Splitwise", ISCA 2024), which doesn't tell what prompts share.
"""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np

from branchline.engine.errors import ConfigError
from branchline.load.simulate.trace import Floats, Ints, Trace, make_trace

MOONCAKE_BLOCK_TOKENS = 512
# What a client asks for that doesn't know how long the answer will be, in multiples of it.
MAX_TOKENS_FACTOR = 2


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, *, length_scale: float = 1.0) -> Trace:
    """Read a trace.

    Args:
        length_scale: what lengths (and blocks) are multiplied with, for a smaller machine.

    Raises ConfigError: there is no such file, it has neither form, or the scale leaves no block.
    """
    if length_scale <= 0:
        raise ConfigError(f"length scale {length_scale}: expected more than 0", param="length_scale")
    try:
        with path.open(encoding="utf-8-sig") as file:
            first = file.readline()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"trace {path}: {err}", param="trace") from err
    try:
        if first.lstrip().startswith("{"):
            return _mooncake(path, length_scale)
        if "ContextTokens" in first:
            return _azure(path, length_scale)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, OSError) as err:
        raise ConfigError(f"trace {path}: {err}", param="trace") from err
    raise ConfigError(
        f"trace {path}: its first line is neither a JSON object nor a heading with ContextTokens: {first[:60]!r}", param="trace"
    )


def _mooncake(path: Path, length_scale: float) -> Trace:
    block_tokens = round(MOONCAKE_BLOCK_TOKENS * length_scale)
    if block_tokens < 1:
        least = 1 / MOONCAKE_BLOCK_TOKENS
        raise ConfigError(f"length scale {length_scale}: a block keeps no token; at least {least:g}", param="length_scale")
    decoder = msgspec.json.Decoder(_MooncakeLine)
    lines = decoder.decode_lines(path.read_bytes())
    return _trace(
        path,
        np.array([line.timestamp / 1000 for line in lines]),
        np.array([line.input_length for line in lines], np.int64),
        np.array([line.output_length for line in lines], np.int64),
        length_scale,
        block_tokens=block_tokens,
        blocks=[np.array(line.hash_ids, np.int64) for line in lines],
    )


def _azure(path: Path, length_scale: float) -> Trace:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    times = np.array([datetime.fromisoformat(row["TIMESTAMP"]).timestamp() for row in rows])
    inputs = np.array([int(row["ContextTokens"]) for row in rows], np.int64)
    outputs = np.array([int(row["GeneratedTokens"]) for row in rows], np.int64)
    return _trace(path, times, inputs, outputs, length_scale, block_tokens=16, blocks=None)


def _trace(
    path: Path,
    times: Floats,
    inputs: Ints,
    outputs: Ints,
    length_scale: float,
    *,
    block_tokens: int,
    blocks: list[Ints] | None,
) -> Trace:
    if not len(times):
        raise ConfigError(f"trace {path} has no request", param="trace")
    outputs = _scaled(outputs, length_scale)
    return make_trace(
        path.stem,
        arrival_s=times - times.min(),
        prompt_tokens=_scaled(inputs, length_scale),
        output_tokens=outputs,
        max_tokens=MAX_TOKENS_FACTOR * outputs,
        block_tokens=block_tokens,
        blocks=blocks,
    )


def _scaled(lengths: Ints, scale: float) -> Ints:
    scaled: Ints = np.maximum(np.rint(lengths * scale), 1).astype(np.int64)
    return scaled
