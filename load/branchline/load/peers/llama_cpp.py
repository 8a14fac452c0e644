"""llama.cpp as a contestant: sequences that share the prefix's cells in one unified cache.

Its branches' tails are computed once; each branch gets a copy in cells of its own (llama_state_seq_set_data), since computing
64 × 256 tokens takes llama.cpp minutes. What a step costs depends on the cells, not on how they were filled.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np

from branchline.engine.config import DEFAULT_MODEL
from branchline.engine.model.resolve import resolve_model
from branchline.load.measure import BenchmarkError
from branchline.load.peers.base import CHUNK, GROUP_SEED, PREFIX_SEED, TAIL_SEED, Case, Contestant, clock_for, tokens

ROOT, SCRATCH, FIRST = 0, 1, 2  # sequences: the prefix, a tail that is being copied, the first branch


class Peer(Contestant):
    """K/V in float16, which is its default. Raises BenchmarkError where llama.cpp can't do what is asked."""

    def __init__(self, threads: int, num_tokens: int, branches: int, flash: bool) -> None:
        """`num_tokens`, `branches`: of the largest case."""
        api: Any = importlib.import_module("llama_cpp")
        most = api.llama_max_parallel_sequences() - FIRST
        if branches > most:
            raise BenchmarkError(f"llama.cpp takes {most} branches at most, not {branches}")
        api.llama_backend_init()
        path = str(resolve_model(DEFAULT_MODEL).path).encode()
        self._model = api.llama_model_load_from_file(path, api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx = num_tokens + 1024
        params.n_batch = params.n_ubatch = max(CHUNK, branches)
        params.n_seq_max = branches + FIRST
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash)
        params.kv_unified = True
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise BenchmarkError(f"llama.cpp made no context for {num_tokens} tokens and {branches} sequences")
        self._api = api
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(max(CHUNK, branches), 0, 1)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._clock = clock_for(threads)
        self._next: list[int] = []

    def prefill(self, prefix: int) -> float:
        self._api.llama_memory_clear(self._memory, True)
        self._prefix, self._next = prefix, []
        began = self._clock()
        self._compute(ROOT, 0, tokens(prefix, PREFIX_SEED).tolist())
        return self._clock() - began

    def branch(self, case: dict[str, Any]) -> dict[str, Any]:
        what, api = Case(**case), self._api
        if what.group_tail and what.tail:
            raise BenchmarkError(f"{what.name}: tails below groups aren't measured")
        self._forget()
        sequences = list(range(FIRST, FIRST + what.branches))
        members = what.branches // what.groups
        shared = self._prefix + what.group_tail
        if what.group_tail:
            state = self._tail(self._prefix, what.group_tail, GROUP_SEED)
            for first in sequences[::members]:
                self._restore(first, state)
                for sequence in range(first + 1, first + members):
                    api.llama_memory_seq_cp(self._memory, first, sequence, self._prefix, shared)
        elif what.tail:
            state = self._tail(self._prefix, what.tail, TAIL_SEED)
            for sequence in sequences:
                self._restore(sequence, state)
        for sequence in sequences:
            api.llama_memory_seq_cp(self._memory, ROOT, sequence, 0, self._prefix)
        self._next = [100 + slot for slot in range(what.branches)]
        self._length = shared + what.tail
        return {"tails": "computed once, copied into cells of each branch's own"}

    def step(self) -> float:
        began = self._clock()
        self._decode([(token, self._length, FIRST + i, True) for i, token in enumerate(self._next)])
        for i in range(len(self._next)):
            logits = np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, i), (self._vocab_size,))
            self._next[i] = int(logits.argmax())
        self._length += 1
        return self._clock() - began

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _forget(self) -> None:
        for sequence in range(SCRATCH, FIRST + len(self._next)):
            self._api.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def _tail(self, begin: int, count: int, seed: int) -> Any:
        """The state of `count` tokens after the prefix, computed in a sequence of their own and forgotten."""
        api = self._api
        api.llama_memory_seq_cp(self._memory, ROOT, SCRATCH, 0, begin)
        self._compute(SCRATCH, begin, tokens(count, seed).tolist())
        api.llama_memory_seq_rm(self._memory, SCRATCH, 0, begin)
        size = api.llama_state_seq_get_size(self._context, SCRATCH)
        state = (ctypes.c_uint8 * size)()
        if api.llama_state_seq_get_data(self._context, state, size, SCRATCH) != size:
            raise BenchmarkError(f"llama_state_seq_get_data gave another size than {size}")
        api.llama_memory_seq_rm(self._memory, SCRATCH, -1, -1)
        return state

    def _restore(self, sequence: int, state: Any) -> None:
        if self._api.llama_state_seq_set_data(self._context, state, len(state), sequence) != len(state):
            raise BenchmarkError(f"llama_state_seq_set_data took not all of {len(state)} bytes")

    def _compute(self, sequence: int, first: int, what: list[int]) -> None:
        for begin in range(0, len(what), CHUNK):
            piece = what[begin : begin + CHUNK]
            self._decode([(token, first + begin + i, sequence, i + 1 == len(piece)) for i, token in enumerate(piece)])
        # a decode only starts the work of its last graph where a backend is asynchronous; the logits are there when it's done
        self._api.llama_synchronize(self._context)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if (code := self._api.llama_decode(self._context, batch)) != 0:
            raise BenchmarkError(f"llama_decode returned {code} for {len(rows)} tokens")
