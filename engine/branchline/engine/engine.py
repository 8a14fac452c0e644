"""The engine: a model, its page pool and the thread that steps it. Usable alone, in process."""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from branchline.engine import openmp as _openmp  # noqa: F401  before torch is imported
from branchline.engine._core import BranchTree
from branchline.engine.attention.base import AttentionSpec, PagePool
from branchline.engine.attention.find import find_backend
from branchline.engine.attention.native import Backend as NativeAttention
from branchline.engine.branch import Session, Sink
from branchline.engine.config import EngineConfig
from branchline.engine.content import ContentEncoder
from branchline.engine.errors import ConfigError, EngineClosedError, EngineOverloadedError, SessionNotFoundError
from branchline.engine.loop import StepLoop
from branchline.engine.model.chat_template import ChatTemplate
from branchline.engine.model.native import NativeModel, NativeRunner, open_model
from branchline.engine.model.paced import PacedRunner
from branchline.engine.model.runner import DTYPES, LoadedModel, ModelRunner, Runner
from branchline.engine.model.sampler import Sampler
from branchline.engine.model.sampler_native import NativeSampler
from branchline.engine.model.tokenizer import Tokenizer, load_tokenizer
from branchline.engine.swap import SwapSpace
from branchline.engine.threads import set_compute_threads
from branchline.engine.types import Command, Content, EngineStats, Generate, ModelInfo

logger = logging.getLogger(__name__)
Progress = Callable[[str], None]


class Engine:
    """Serves one model to any number of sessions.

    All methods are thread-safe and none of them waits for a step. Results reach a session's `sink` from the engine thread:
    at most one call a step, with the events of all its branches. A sink must not block.

    Attributes:
        info: the model and the limits.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel | NativeModel, tokenizer: Tokenizer) -> None:
        """Allocate the pool and start the engine thread. `load` is what you want unless the model is there already."""
        config.validate()
        computed = _native(config, model) if isinstance(model, NativeModel) else _torch(config, model)
        context_length = config.context_length or model.model_config.context_length
        tree = BranchTree(
            computed.pool.num_pages,
            page_tokens=config.page_tokens,
            max_branches=config.max_branches,
            max_batch=config.max_batch,
            max_step_tokens=config.max_step_tokens,
            max_levels=computed.max_levels,
        )
        self._encoder = ContentEncoder(tokenizer, ChatTemplate.of(tokenizer))
        self.info = ModelInfo(
            name=config.served_name or model.name,
            architecture=model.model_config.architecture,
            num_parameters=model.num_parameters,
            vocab_size=model.model_config.vocab_size,
            context_length=context_length,
            dtype=computed.dtype,
            kv_dtype=str(computed.pool.spec.dtype).removeprefix("torch."),
            attention=computed.attention,
            device=config.device,
            page_tokens=config.page_tokens,
            page_bytes=PagePool.page_bytes(computed.pool.spec),
            num_pages=computed.pool.num_pages,
            max_batch=config.max_batch,
        )
        self._config = config
        self._loop = StepLoop(
            config,
            tree=tree,
            runner=PacedRunner(computed.runner, config.min_step_s) if config.min_step_s else computed.runner,
            sampler=computed.sampler,
            tokenizer=tokenizer,
            encoder=self._encoder,
            context_length=context_length,
            swap=SwapSpace(computed.pool, config.scheduling.swap_bytes) if config.scheduling.swap_bytes else None,
        )
        self._closed = threading.Event()
        self._thread = threading.Thread(target=_run, args=(self._loop, self._closed), name="branchline-engine", daemon=True)
        self._thread.start()
        # An engine that is dropped, or that lives when the interpreter exits, stops its thread between two steps.
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._thread)

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress | None = None) -> Engine:
        """Load the model that the settings name, and start.

        Args:
            progress: called with a line of text before each part that takes a while.

        Raises ModelError (not found, corrupt, unsupported), ConfigError.
        """
        say = progress or (lambda _: None)
        config.validate()
        set_compute_threads(config.threads)
        say(f"loading the weights of {config.model}")
        model = open_model(config)
        say("loading the tokenizer")
        tokenizer = load_tokenizer(model.files.kind, model.files.path)
        say("allocating the page pool")
        return cls(config, model, tokenizer)

    def open_session(self, sink: Sink, client: str = "", tenant: str = "") -> str:
        """Make a session. Returns its id, which nobody can guess.

        Args:
            client: who asked, for the logs.
            tenant: whom its work is done for: see `SchedulingConfig.tenants`.

        Raises EngineClosedError, TenantLimitError.
        """
        self._raise_if_closed()
        session_id = secrets.token_hex(16)
        self._loop.open_session(session_id, sink, client, tenant)
        return session_id

    def submit(self, session: str, commands: Sequence[Command]) -> None:
        """Take commands of a session, in order; they take effect before the next step.

        What is wrong with one command comes back as a `Failed` event on its branch.

        Raises SessionNotFoundError, EngineClosedError, and EngineOverloadedError when the queue is full; then none of the
        commands takes effect.
        """
        found = self._find(session)
        generations = sum(isinstance(command, Generate) for command in commands)
        if generations:
            try:
                self._loop.scheduler.require_room(generations)
            except EngineOverloadedError:
                self._loop.counters.refused += generations
                raise
        self._loop.post(found, tuple(commands))

    def touch(self, session: str) -> None:
        """Tell that the session's client lives. Raises SessionNotFoundError, EngineClosedError."""
        self._find(session).heard = time.monotonic()

    def close_session(self, session: str) -> None:
        """Release all branches of the session. Closing one that is gone does nothing."""
        found = self._loop.sessions.get(session)
        if found is not None:
            self._loop.close_session(found)

    def stats(self) -> EngineStats:
        """Counters since the start and what is there now."""
        return self._loop.stats()

    def count_tokens(self, content: Content) -> int:
        """How many tokens the content would have at the root of a new branch. Raises like a `Context` of it would."""
        tokens, _ = self._encoder.encode(content, None, None)
        return len(tokens)

    def check(self) -> None:
        """Verify the branch tree's invariants, between two steps. Raises CoreError; waits for the step under way."""
        self._raise_if_closed()
        outcome: list[Exception | None] = []
        done = threading.Event()

        def verify() -> None:
            try:
                self._loop.check()
                outcome.append(None)
            except Exception as err:  # handed to the caller's thread
                outcome.append(err)
            done.set()

        self._loop.call(verify)
        while not done.wait(0.2):
            self._raise_if_closed()
        if outcome[0] is not None:
            raise outcome[0]

    def close(self) -> None:
        """Stop after the step under way; all sessions are closed. Idempotent."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("Engine.close() was called from a sink, which runs in the engine thread: call it elsewhere")
        self._finalizer()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, session: str) -> Session:
        self._raise_if_closed()
        found = self._loop.sessions.get(session)
        if found is None or found.closed:
            raise SessionNotFoundError(
                f"no session {session[:8]}…: it was closed, or nothing was heard from its client for "
                f"{self._config.session_timeout_s:g} s; open a new one"
            )
        return found

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise EngineClosedError("the engine was closed")


def _run(loop: StepLoop, closed: threading.Event) -> None:
    try:
        loop.run()
    except Exception:
        logger.exception("the engine thread failed; the engine is closed")
    finally:
        closed.set()


def _stop(loop: StepLoop, thread: threading.Thread) -> None:
    loop.stop()
    if threading.current_thread() is not thread:
        thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """How an engine's model is computed; `dtype` and `attention` are for `ModelInfo`."""

    pool: PagePool
    runner: Runner
    sampler: Sampler
    max_levels: int
    dtype: str
    attention: str


def _torch(config: EngineConfig, model: LoadedModel) -> _Computed:
    attention_class = find_backend(config.attention, config.device)
    kv_dtype = model.dtype if config.kv_dtype == "auto" else DTYPES[config.kv_dtype]
    if kv_dtype != model.dtype and attention_class is not NativeAttention:
        raise ConfigError(
            f"kv_dtype = {config.kv_dtype!r} with dtype = {config.dtype!r} on torch: only attention = 'native' converts; "
            "leave kv_dtype 'auto'",
            param="kv_dtype",
        )
    pool = _make_pool(config, model.decoder.attention_spec(config.page_tokens, kv_dtype, model.device))
    backend = attention_class(pool.spec, pool)
    return _Computed(
        pool=pool,
        runner=ModelRunner(model, backend),
        sampler=Sampler(model.model_config.vocab_size, config.max_batch),
        max_levels=backend.max_levels,
        dtype=config.dtype,
        attention=attention_class.__module__.rpartition(".")[2],
    )


def _native(config: EngineConfig, model: NativeModel) -> _Computed:
    pool = _make_pool(config, model.attention_spec(config.page_tokens))
    return _Computed(
        pool=pool,
        runner=NativeRunner(model, NativeAttention(pool.spec, pool, threads=model.threads)),
        sampler=NativeSampler(model.model_config.vocab_size, config.max_batch, model.threads),
        max_levels=NativeAttention.max_levels,
        dtype=model.formats,
        attention="native",
    )


def _make_pool(config: EngineConfig, spec: AttentionSpec) -> PagePool:
    return PagePool(spec, _num_pages(config, PagePool.page_bytes(spec)))


def _num_pages(config: EngineConfig, page_bytes: int) -> int:
    if config.pool_bytes is not None:
        num_pages = config.pool_bytes // page_bytes
        if num_pages < 1:
            raise ConfigError(f"pool_bytes = {config.pool_bytes}: one page takes {page_bytes}", param="pool_bytes")
        return num_pages
    return -(-config.pool_tokens // config.page_tokens)
