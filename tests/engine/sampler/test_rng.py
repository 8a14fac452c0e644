"""The counter-based generator: Philox's published answers, uniform, independent over streams and positions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from branchline.engine.model.rng import ROOT_KEY, branch_key, philox2x64, stream_key, uniform

from .statistics import assert_fits


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), 0, (0xCA00A0459843D731, 0x66C24222C9A845B5)),
        ((2**64 - 1, 2**64 - 1), 2**64 - 1, (0x65B021D60CD8310F, 0x4D02F3222F86DF20)),
        ((0x243F6A8885A308D3, 0x13198A2E03707344), 0xA4093822299F31D0, (0x0A5E742C2997341C, 0xB0F883D38000DE5D)),
    ],
)
def test_philox_gives_the_published_answers(counter: tuple[int, int], key: int, expected: tuple[int, int]) -> None:
    """The known-answer vectors of Random123, the authors' own library."""
    low, high = philox2x64(*(np.array([value], np.uint64) for value in (*counter, key)))
    assert (int(low[0]), int(high[0])) == expected


def keys(count: int, seed: int = 7) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([stream_key(seed, branch_key(ROOT_KEY, i)) for i in range(count)], np.uint64)


def test_a_number_depends_on_its_own_pair_alone() -> None:
    streams, positions = keys(50), np.arange(50, dtype=np.int32) * 3
    together = uniform(streams, positions)
    order = np.random.default_rng(0).permutation(50)
    assert np.array_equal(uniform(streams[order], positions[order]), together[order])
    assert [float(uniform(streams[i : i + 1], positions[i : i + 1])[0]) for i in range(50)] == together.tolist()


@pytest.mark.parametrize("along", ["positions", "streams"])
def test_uniform(along: str) -> None:
    count, bins = 40_000, 100
    streams = np.repeat(keys(1), count) if along == "positions" else keys(count)
    positions = np.arange(count) if along == "positions" else np.full(count, 5)
    numbers = uniform(streams, positions)
    assert 0.0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1.0
    assert_fits(np.bincount((numbers * bins).astype(int), minlength=bins), np.full(bins, 1 / bins))


@pytest.mark.parametrize("pair", ["next position", "next stream", "next seed", "child and parent"])
def test_neighbours_are_independent(pair: str) -> None:
    count, bins = 40_000, 10
    streams, positions = keys(count), np.arange(count) % 200
    first = uniform(streams, positions)
    if pair == "next position":
        second = uniform(streams, positions + 1)
    elif pair == "next stream":
        second = uniform(np.roll(streams, 1), positions)
    elif pair == "next seed":
        second = uniform(keys(count, seed=8), positions)
    else:
        children = [stream_key(7, branch_key(branch_key(ROOT_KEY, i), 0)) for i in range(count)]
        second = uniform(np.array(children, np.uint64), positions)
    cells = (first * bins).astype(int) * bins + (second * bins).astype(int)
    assert_fits(np.bincount(cells, minlength=bins * bins), np.full(bins * bins, 1 / bins**2))
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 4 / count**0.5


def test_no_two_branches_of_a_tree_share_a_key() -> None:
    found = {ROOT_KEY}
    layer = [branch_key(ROOT_KEY, i) for i in range(20)]
    for _ in range(3):
        found.update(layer)
        layer = [branch_key(parent, i) for parent, i in itertools.product(layer, range(20))][:20_000]
    found.update(layer)
    assert len(found) == 1 + 20 + 400 + 8000 + 20_000
    assert all(0 <= key < 2**64 for key in found)


def test_seeds_of_both_signs_are_streams() -> None:
    seeds = [0, 1, -1, 2**63, -(2**63), 2**64 - 1]
    streams = {stream_key(seed, 3) for seed in seeds}
    assert len(streams) == len(seeds) - 2  # of each 64-bit pattern there is one
