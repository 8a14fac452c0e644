"""Randomness that depends on nothing but what it is asked for: a hash of (stream, position), not a state.

The same request draws the same numbers whatever else is in the batch, after preemption, and on another replica.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

ROOT_KEY = 0
_MASK = (1 << 64) - 1
# The constants of Philox 2x64 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") and of SplitMix64's
# finaliser (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
_PHILOX_MULTIPLIER = 0xD2B74407B1CE6E93
_PHILOX_WEYL = 0x9E3779B97F4A7C15
_PHILOX_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniform(stream_keys: UInt64Array, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), 53 bits each: the Philox2x64-10 block of counter (position, 0) under each stream's key.

    Args:
        stream_keys: [N] uint64, from `stream_key`.
        positions: [N] integers >= 0: the position on the branch of the token that is drawn.

    Returns:
        [N] float64, each a function of its own pair alone.
    """
    bits = philox2x64(positions.astype(np.uint64), np.zeros(len(positions), np.uint64), stream_keys)[0]
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def philox2x64(low: UInt64Array, high: UInt64Array, keys: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
    """Philox2x64-10: a keyed bijection of 128-bit counters (`low`, `high`), elementwise."""
    key = keys.astype(np.uint64)
    multiplier, weyl = np.uint64(_PHILOX_MULTIPLIER), np.uint64(_PHILOX_WEYL)
    for _ in range(_PHILOX_ROUNDS):
        low, high = _high_product(low, multiplier) ^ key ^ high, low * multiplier
        key = key + weyl
    return low, high


def stream_key(seed: int, branch_key: int) -> int:
    """The key of a branch's random stream under a request's seed (any integer of 64 bits, signed or not)."""
    return _mix(_mix(seed & _MASK) ^ branch_key)


def branch_key(parent_key: int, child_index: int) -> int:
    """The key of a branch: a hash of its path. `parent_key` of a root's parent is ROOT_KEY; `child_index` counts from 0."""
    return _mix((_mix(parent_key) + (child_index + 1) * _PHILOX_WEYL) & _MASK)


def _mix(value: int) -> int:
    """SplitMix64's step and finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    value = (value + _PHILOX_WEYL) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _high_product(a: UInt64Array, b: np.uint64) -> UInt64Array:
    """The upper 64 bits of a * b, from 32-bit halves."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    middle = a_high * b_low + (a_low * b_low >> _HALF)
    other = a_low * b_high + (middle & _LOW)
    high: UInt64Array = a_high * b_high + (middle >> _HALF) + (other >> _HALF)
    return high
