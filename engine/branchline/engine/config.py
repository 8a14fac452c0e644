"""The engine's settings, in one frozen Struct."""

from __future__ import annotations

import difflib
import math
from typing import Any, Literal

import msgspec

from branchline.engine.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tenant's share and limits; None: no limit.

    Attributes:
        weight: its share of the service while others wait too, in proportion to theirs.
        max_branches: alive at once.
        max_pages: that its branches own at once (shared segments count once).
        tokens_per_minute: computed and generated.
    """

    weight: float = 1.0
    max_branches: int | None = None
    max_pages: int | None = None
    tokens_per_minute: int | None = None


class SchedulingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who runs, who waits, who yields.

    Attributes:
        policy: "fcfs", "priority", "fair", "deadline", "shortest-remaining", or the import path "package.module:Class" of a
            class of your own (see `branchline.engine.scheduler.policies.base`).
        itl_target_ms: time between a branch's tokens that the prefill budget is adapted to hold; None: the budget is fixed.
        overcommit: pages that may be promised to running work, over the pages that there are. 1.0: running work yields only
            when outputs turn out longer than estimated.
        reserve: growth that is reserved for a generation: "estimate": from the output lengths seen so far, at most its
            max_tokens; "max": its max_tokens.
        ageing_s: seconds of waiting that are worth one step of priority.
        preemption: whether running work may have to yield to work of a higher rank.
        prefix_cache: keep released K/V until its pages are needed.
        isolate_tenants: whether the prefix cache keeps tenants apart, so that none can tell from timing what another computed.
        swap_bytes: host memory into which the K/V of work that yields is copied when that is cheaper than computing it again;
            0: never. On a CPU, and where a GPU shares the host's memory, it is memory that the pool could have had.
        tenants: by name. Others have `default_tenant`'s settings each.
    """

    policy: str = "fair"
    itl_target_ms: float | None = None
    overcommit: float = 1.0
    reserve: Literal["estimate", "max"] = "estimate"
    ageing_s: float = 5.0
    preemption: bool = True
    prefix_cache: bool = True
    isolate_tenants: bool = True
    swap_bytes: int = 0
    tenants: dict[str, TenantConfig] = {}
    default_tenant: TenantConfig = TenantConfig()

    def validate(self) -> SchedulingConfig:
        """Return self. Raises ConfigError that names the first setting out of range."""
        for name in ("itl_target_ms", "ageing_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"scheduling.{name} = {value}: expected more than 0", param=f"scheduling.{name}")
        if self.overcommit < 1.0:
            raise ConfigError(
                f"scheduling.overcommit = {self.overcommit}: expected at least 1.0", param="scheduling.overcommit"
            )
        if self.swap_bytes < 0:
            raise ConfigError(f"scheduling.swap_bytes = {self.swap_bytes}: expected at least 0", param="scheduling.swap_bytes")
        for name, tenant in (*self.tenants.items(), ("default_tenant", self.default_tenant)):
            if tenant.weight <= 0:
                raise ConfigError(
                    f"tenant {name!r}: weight = {tenant.weight}: expected more than 0", param="scheduling.tenants"
                )
            for limit in ("max_branches", "max_pages", "tokens_per_minute"):
                value = getattr(tenant, limit)
                if value is not None and value < 1:
                    raise ConfigError(f"tenant {name!r}: {limit} = {value}: expected at least 1", param="scheduling.tenants")
            if tenant.max_pages is not None and not self.isolate_tenants:
                raise ConfigError(
                    f"tenant {name!r}: max_pages needs isolate_tenants: pages that tenants share belong to none of them",
                    param="scheduling.isolate_tenants",
                )
        return self


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How one engine is built.

    Attributes:
        model: a built-in name, a .gguf file, a Hugging Face folder, or a Hugging Face repository id.
        served_name: what clients call the model; None: the model's own short name.
        dtype: of torch's weights, and of its K/V unless `kv_dtype` says otherwise. The native engine leaves weights as the
            model's files have them.
        device: "cpu" or "cuda".
        compute: "native": the CPU kernels, one call a step; "torch": any device, dtype and attention backend; "auto":
            native on the CPU where `attention` is "auto" and `dtype` is "float32", if it can take the model; else torch,
            which dequantises the weights.
        activations: inputs of quantised weights on native. "int8": rounded to 8 bits, as llama.cpp does; near ties between
            tokens may fall otherwise than in float32. "float32": not rounded, at half the speed.
        quantize: what the native engine makes of weights that the model's files have as plain numbers, while it loads them:
            "q8_0" (8 bits) or "q4_1" (4 bits; the embedding and the head get 8); None: they stay.
        weights: where the native engine has its packed weights. "private": in memory of its own, in huge pages; "mapped": in
            a file of the cache folder, which all engines of a machine share in memory, at up to an eighth less speed for a
            single stream; "auto": mapped by engines that are one of several replicas, else private.
        kv_dtype: of K and V in the page pool; "auto": on native float32 if all weights are, else bfloat16; on torch `dtype`.
            "int8": each token's vector of a head rounded to 8 bits of its own scale; half of bfloat16's memory.
        attention: a backend's module name in `branchline.engine.attention`; "auto" takes the device's best. Torch's only.
        pool_bytes: size of the K/V pool; None: room for `pool_tokens`.
        pool_tokens: tokens of the pool when `pool_bytes` is None.
        page_tokens: tokens a page.
        max_branches: most branches alive at once.
        max_batch: most branches in one step.
        max_step_tokens: token budget of a step: decoding rows first, the rest is prefill.
        max_waiting: most requests that may wait; one more is refused with EngineOverloadedError.
        default_max_tokens: output bound of a generation that gives none.
        context_length: bound on a branch's tokens; None: the model's own.
        threads: compute threads; None: the cores that this process may use.
        session_timeout_s: a session from which nothing was heard for so long is closed and its branches released.
        blocked_timeout_s: a request that lacks pages while nothing runs that could free some is refused after so long.
        min_step_s: a step takes at least so long: for load tests, which imitate a bigger model or a slower device by it.
        scheduling: who runs, who waits, who yields.
        deterministic_seed: the seed that requests without one draw theirs from; None: from the operating system.
    """

    model: str = DEFAULT_MODEL
    served_name: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    compute: Literal["auto", "native", "torch"] = "auto"
    activations: Literal["int8", "float32"] = "int8"
    quantize: Literal["q8_0", "q4_1"] | None = None
    weights: Literal["auto", "private", "mapped"] = "auto"
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    attention: str = "auto"
    pool_bytes: int | None = None
    pool_tokens: int = 32768
    page_tokens: int = 16
    max_branches: int = 65536
    max_batch: int = 512
    max_step_tokens: int = 1024
    max_waiting: int = 4096
    default_max_tokens: int = 512
    context_length: int | None = None
    threads: int | None = None
    session_timeout_s: float = 60.0
    blocked_timeout_s: float = 10.0
    min_step_s: float = 0.0
    scheduling: SchedulingConfig = SchedulingConfig()
    deterministic_seed: int | None = None

    def validate(self) -> EngineConfig:
        """Return self. Raises ConfigError that names the first setting out of range."""
        at_least_one = (
            "pool_bytes", "pool_tokens", "page_tokens", "max_branches", "max_batch", "max_step_tokens",
            "max_waiting", "default_max_tokens", "context_length", "threads",
        )  # fmt: skip
        for name in at_least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value}: expected at least 1", param=name)
        for name in ("session_timeout_s", "blocked_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: expected more than 0", param=name)
        if not 0 <= self.min_step_s < math.inf:
            raise ConfigError(f"min_step_s = {self.min_step_s}: expected a number of seconds, at least 0", param="min_step_s")
        self.scheduling.validate()
        if self.max_step_tokens < self.max_batch:
            raise ConfigError(
                f"max_step_tokens = {self.max_step_tokens}: expected at least max_batch = {self.max_batch}, "
                "since each decoding branch takes a token of every step",
                param="max_step_tokens",
            )
        if self.compute == "native" and (reason := self.why_not_native()):
            raise ConfigError(f"compute = 'native': {reason}", param="compute")
        if self.quantize is not None and (self.compute == "torch" or (reason := self.why_not_native())):
            reason = "compute = 'torch'" if self.compute == "torch" else reason
            raise ConfigError(f"quantize = {self.quantize!r} is the native engine's: {reason}", param="quantize")
        return self

    def why_not_native(self) -> str | None:
        """The setting that only torch can do, or None."""
        if self.device != "cpu":
            return f"device = {self.device!r}, and the native engine computes on the CPU"
        if self.attention != "auto":
            return f"attention = {self.attention!r}, and the native engine has its own: leave it 'auto'"
        if self.dtype != "float32":
            return f"dtype = {self.dtype!r} is torch's: leave it 'float32' (weights stay as they are in the files)"
        return None

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> EngineConfig:
        """Build from plain values. Raises ConfigError; an unknown key's error names the nearest known one."""
        known = cls.__struct_fields__
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known settings: {', '.join(known)}"
                raise ConfigError(f"unknown setting {key!r}: {hint}", param=key)
        try:
            return msgspec.convert(settings, cls).validate()
        except msgspec.ValidationError as err:
            raise ConfigError(f"engine settings: {err}") from err
