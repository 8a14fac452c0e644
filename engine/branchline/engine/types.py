"""What goes into an engine and what comes out: commands, events and their parts.

These are msgspec Structs. The same values travel in process, through a Ray handle and over HTTP; nothing here imports torch,
Ray or an HTTP library.

A client mints ids: a **branch id** (a counter within its session) and a **request id** (a counter within its session, one
for each `Generate` or `Inspect`). So a fork needs no answer before its children can be used. Commands of one session take
effect in the order in which they were submitted.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from branchline.engine.errors import BranchlineError, InvalidParameterError, from_wire

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20


def _check(ok: bool, param: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidParameterError(f"{param} = {value!r}: expected {expected}", param=param)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the next tokens are chosen, and when to stop.

    Attributes:
        max_tokens: most tokens to generate (>= 1); None: the engine's default, bounded by what is left of the context.
        temperature: 0 is greedy; else logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this (nucleus sampling, Holtzman et al. 2019).
        min_p: drop tokens below this share of the most likely one's probability.
        repetition_penalty: > 1 makes tokens that already stand in prompt or output less likely (Keskar et al. 2019).
        presence_penalty, frequency_penalty: as in OpenAI's API, over the generated tokens.
        seed: None draws one; the same seed on the same branch path gives the same tokens (see docs/reproducibility.md).
        stop: strings that end the output; the text given out never contains one, nor a part of one at its end.
        stop_token_ids: token ids that end the output, beside the model's own end tokens.
        ignore_eos: go on after the model's end token (for benchmarks).
        logprobs: None: none; k: log-probabilities of the chosen and of the k most likely tokens (0 <= k <= 20).
        logit_bias: token id to a number added to its logit.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None

    def validate(self) -> SamplingParams:
        """Return self. Raises InvalidParameterError that names the first parameter out of range."""
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
        _check(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "a number from 0 to 100")
        _check(self.top_k >= 0, "top_k", self.top_k, "an integer >= 0 (0 keeps all tokens)")
        _check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "a number in (0, 1]")
        _check(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "a number from 0 to 1")
        _check(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", self.repetition_penalty, "a number in (0, 100]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(-2.0 <= value <= 2.0, name, value, "a number from -2 to 2")
        _check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", self.seed, "an integer of 64 bits")
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", self.stop, f"at most {MAX_STOP_STRINGS} strings")
        _check(all(self.stop), "stop", self.stop, "strings that aren't empty")
        _check(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids >= 0")
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"an integer from 0 to {MAX_LOGPROBS}",
        )
        for token, bias in (self.logit_bias or {}).items():
            _check(token >= 0 and -100.0 <= bias <= 100.0, "logit_bias", {token: bias}, "token ids to numbers from -100 to 100")
        return self


# --- content ------------------------------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chat message, as the model's chat template sees it."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    tool_call_id: str | None = None


class Text(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """Plain text, tokenised as it stands. Special tokens written in it are parsed. At a root the model's own beginning
    token is put first if the tokenizer wants one."""

    text: str


class TokenIds(msgspec.Struct, frozen=True, tag="tokens", forbid_unknown_fields=True):
    """Token ids, taken as they stand."""

    ids: tuple[int, ...]


class Chat(msgspec.Struct, frozen=True, tag="chat", kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Chat messages, rendered by the model's chat template. Appended to a branch that already holds messages, only what is
    new is rendered: nothing that the branch holds is computed again."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = False
    tools: tuple[dict[str, Any], ...] | None = None


Content = Text | TokenIds | Chat

# --- commands -----------------------------------------------------------------------------------------------------------

QoS = Literal["interactive", "standard", "batch"]
MAX_PRIORITY = 100


class Service(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How soon work is to be served.

    Attributes:
        priority: higher goes first (-100 to 100).
        qos: class of service: "interactive" is worth ten steps of priority, "batch" ten less than none.
        deadline_ms: milliseconds from the moment when the command came; work that can no longer end in time is dropped with
            DeadlineError. None: no deadline.
    """

    priority: int = 0
    qos: QoS = "standard"
    deadline_ms: float | None = None

    def validate(self) -> Service:
        """Return self. Raises InvalidParameterError that names the first field out of range."""
        _check(-MAX_PRIORITY <= self.priority <= MAX_PRIORITY, "priority", self.priority, "an integer from -100 to 100")
        _check(self.deadline_ms is None or self.deadline_ms > 0, "deadline_ms", self.deadline_ms, "a number above 0, or none")
        return self


DEFAULT_SERVICE = Service()


class Context(msgspec.Struct, frozen=True, tag="context", tag_field="op", forbid_unknown_fields=True, omit_defaults=True):
    """Make the root branch `branch` and compute `content` on it. Answered by `Ready` (or `Failed`).

    What the prefix cache holds of the content isn't computed again. `pin`: its pages stay while the branch lives, also when
    memory is short; else an idle branch may have to be computed again when it's next used. `tenant`: whom the branch's work,
    and that of its forks, is done for; None: the session's. A session that was opened for a tenant works for no other."""

    branch: int
    content: Content
    pin: bool = False
    service: Service = DEFAULT_SERVICE
    tenant: str | None = None


class Fork(msgspec.Struct, frozen=True, tag="fork", tag_field="op", forbid_unknown_fields=True):
    """Make `count` children of `parent`, with ids `first`, `first + 1`, … Copies no K/V. Answered by `Forked`.

    Takes effect in its turn: when the parent's appended tokens are computed and a generation that was asked for earlier has
    ended. (To fork a running generation where it stands, `Cancel` it first.)"""

    parent: int
    first: int
    count: int = 1


class Attach(msgspec.Struct, frozen=True, tag="attach", tag_field="op", forbid_unknown_fields=True):
    """Make `branch` a fork of branch `source` of another session of the same engine. Answered by `Forked`."""

    branch: int
    source_session: str
    source: int


class Append(msgspec.Struct, frozen=True, tag="append", tag_field="op", forbid_unknown_fields=True, omit_defaults=True):
    """Put `content` at the end of `branch` (after a generation that runs there ended). Answered by `Ready`."""

    branch: int
    content: Content
    service: Service = DEFAULT_SERVICE


class Generate(msgspec.Struct, frozen=True, tag="generate", tag_field="op", forbid_unknown_fields=True, omit_defaults=True):
    """Generate on `branch`. Answered by `Delta`s and one `Finished` (or `Failed`), all with this `request` id."""

    branch: int
    request: int
    params: SamplingParams = SamplingParams()
    service: Service = DEFAULT_SERVICE


class Adopt(msgspec.Struct, frozen=True, tag="adopt", tag_field="op", forbid_unknown_fields=True):
    """Make the state of `child` the state of `branch` (of the same session, and any branch may be adopted). Copies no K/V.
    Takes effect in its turn on both; `child` is released by it, and what `branch` held is given up. Answered by `Adopted`."""

    branch: int
    child: int


class Race(msgspec.Struct, frozen=True, tag="race", tag_field="op", forbid_unknown_fields=True):
    """Keep the first `winners` of `branches` whose next generation ends by itself (not cancelled or failed). At that step the
    other branches are released, as `Release` does. Answered by `Raced` (or `Failed`) with this `request` id, also when too
    few can win any more. A branch can be in one race at a time."""

    branches: tuple[int, ...]
    request: int
    winners: int = 1


class Pin(msgspec.Struct, frozen=True, tag="pin", tag_field="op", forbid_unknown_fields=True):
    """Keep the pages of `branch` while it lives (`pinned`), or let them be given up while it's idle. In order."""

    branch: int
    pinned: bool = True


class Cancel(msgspec.Struct, frozen=True, tag="cancel", tag_field="op", forbid_unknown_fields=True):
    """Stop what runs or waits on `branch` by the next step; the branch keeps what was generated. Out of order: it isn't
    queued behind what it cancels. The stopped request ends with `Finished(reason="cancelled")`."""

    branch: int


class Release(msgspec.Struct, frozen=True, tag="release", tag_field="op", forbid_unknown_fields=True):
    """Give up branches: whatever runs on them is stopped and their own pages return. Children live on. Out of order like
    `Cancel`: a generation on them, also one that waits, ends as cancelled. Releasing a branch twice, or one that never was,
    is an error on that branch and touches no other."""

    branches: tuple[int, ...]


class Inspect(msgspec.Struct, frozen=True, tag="inspect", tag_field="op", forbid_unknown_fields=True):
    """Ask for a branch's sizes, in order with the other commands. Answered by `Info`."""

    branch: int
    request: int


Command = Context | Fork | Attach | Append | Generate | Adopt | Race | Pin | Cancel | Release | Inspect

# --- events -------------------------------------------------------------------------------------------------------------


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it travels."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, err: BranchlineError) -> ErrorInfo:
        """What travels of an exception."""
        return cls(err.code, err.message, err.param, err.retry_after_s)

    def exception(self) -> BranchlineError:
        """The exception again, as its own type."""
        return from_wire(self.code, self.message, self.param, self.retry_after_s)


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="ev"):
    """A `Context` or `Append` is computed.

    Attributes:
        num_tokens: tokens on the branch now, the shared ones included.
        computed_tokens: tokens that were prefilled for this command.
        prefill_s: seconds from the command's turn to its last chunk's end.
    """

    branch: int
    num_tokens: int
    computed_tokens: int
    prefill_s: float


class Forked(msgspec.Struct, frozen=True, tag="forked", tag_field="ev"):
    """A `Fork` or `Attach` took effect; `fork_s` is the time in the core for all children together."""

    parent: int
    first: int
    count: int
    fork_s: float


class Adopted(msgspec.Struct, frozen=True, tag="adopted", tag_field="ev"):
    """An `Adopt` took effect: `child` is released, and `branch` has `num_tokens` tokens."""

    branch: int
    child: int
    num_tokens: int


class Raced(msgspec.Struct, frozen=True, tag="raced", tag_field="ev"):
    """A `Race` is over: who won, in the order in which they ended, and who was released by it."""

    request: int
    winners: tuple[int, ...]
    losers: tuple[int, ...]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and its natural-log probability under the model (before temperature and filters)."""

    token: int
    text: str
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one generated position: the chosen token's and the most likely ones', likeliest first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Delta(msgspec.Struct, frozen=True, tag="delta", tag_field="ev", omit_defaults=True):
    """New output on a branch. `text` may lag behind `tokens`: it never holds half a character or a part of a stop string."""

    branch: int
    request: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] | None = None


FinishReason = Literal["stop", "length", "cancelled"]


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one generation. `shared_tokens` of the prompt lie in segments shared with the branch's ancestors."""

    prompt_tokens: int
    completion_tokens: int
    shared_tokens: int


class Timing(msgspec.Struct, frozen=True):
    """Seconds of one generation, from the moment when its command was submitted to the engine.

    Attributes:
        queue_s: until its first step began.
        first_token_s: until its first token was sampled.
        total_s: until it ended.
        preemptions: how often it had to yield.
        preempted_s: how long it had no place in the batch because of them.
    """

    queue_s: float
    first_token_s: float
    total_s: float
    preemptions: int = 0
    preempted_s: float = 0.0


class Finished(msgspec.Struct, frozen=True, tag="finished", tag_field="ev", omit_defaults=True):
    """A generation ended. `stop` tells what it was, if a stop string (its text) or a stop token (its id) ended it."""

    branch: int
    request: int
    reason: FinishReason
    usage: Usage
    timing: Timing
    stop: str | int | None = None


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="ev", omit_defaults=True):
    """A command on `branch` failed; with `request`, that generation or inspection did."""

    branch: int
    error: ErrorInfo
    request: int | None = None


class Info(msgspec.Struct, frozen=True, tag="info", tag_field="ev"):
    """A branch's sizes.

    Attributes:
        num_tokens: tokens on the branch, the shared ones included (the K/V of the last one is computed when it's needed).
        shared_tokens: those of them that other branches hold, too.
        shared_pages, private_pages: pages that other branches read, too; pages that only this one holds.
        depth: segments above the branch.
    """

    branch: int
    request: int
    num_tokens: int
    shared_tokens: int
    shared_pages: int
    private_pages: int
    depth: int


Event = Ready | Forked | Adopted | Raced | Delta | Finished | Failed | Info

# --- what an engine says of itself --------------------------------------------------------------------------------------


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model and the engine's limits.

    Attributes:
        name: what clients call it.
        architecture: e.g. "llama".
        dtype, attention, device: how it is computed: of the weights, e.g. "float32" or "q4_1/q8_0" (most bytes first);
            e.g. "cpu" or "native"; e.g. "cpu".
        kv_dtype: of K and V in the pages.
        page_bytes: bytes of one page: K and V of `page_tokens` tokens in all layers.
        max_batch: most branches in one step.
    """

    name: str
    architecture: str
    num_parameters: int
    vocab_size: int
    context_length: int
    dtype: str
    attention: str
    device: str
    page_tokens: int
    page_bytes: int
    num_pages: int
    max_batch: int
    kv_dtype: str = "float32"


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine's start, and what is there now. Seconds are wall time of the engine thread.

    Attributes:
        tensor_s: in the model's forward and the sampler's tensor work.
        plan_s: in the compiled core's plan and commit.
        python_s: in everything else that a step does.
        idle_s: waiting for work.
        waiting_interactive, waiting_batch: those of `waiting` in these classes of service; the rest are standard.
        pages_cached: pages that only the prefix cache holds; they are free as soon as they are needed.
        pages_private: pages that one branch alone holds, as they were within the last second. What is neither free, cached
            nor private is shared by branches.
        cached_tokens: tokens of contexts that the prefix cache had, so that they weren't computed.
        preemptions: how often running work had to yield.
        recomputed_tokens: tokens that were computed again because their pages had been given up.
        swapped_pages: pages that were copied out to swap space.
        dropped: work that could no longer meet its deadline.
        refused: work that a limit or the full queue refused.
    """

    steps: int
    prefill_tokens: int
    decode_tokens: int
    forks: int
    branches: int
    running: int
    waiting: int
    sessions: int
    pages_free: int
    pages_total: int
    copied_bytes: int
    tensor_s: float
    plan_s: float
    python_s: float
    idle_s: float
    waiting_interactive: int = 0
    waiting_batch: int = 0
    pages_cached: int = 0
    pages_private: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_pages: int = 0
    dropped: int = 0
    refused: int = 0
