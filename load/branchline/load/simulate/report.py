"""What an outcome comes to, as plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from branchline.load.simulate.outcome import Fate, Outcome
from branchline.load.simulate.trace import Floats

# Of the time in which requests arrive: until then the engine fills.
WARM_UP = 0.25


def summarize(outcome: Outcome) -> dict[str, Any]:
    """Counts, rates and percentiles.

    Times are virtual. `tokens_per_s` and `goodput_tokens_per_s` are of the whole run; the latter counts the tokens of requests
    that were completed. `starved`: requests that had neither been completed nor got a typed error when nothing was left
    to do. `hit_ratio`: of the prompts' tokens; `hit_ratio_unlimited`: with a pool that never gives anything up.
    """
    trace, generated = outcome.trace, int(outcome.generated.sum())
    prompts = int(trace.prompt_tokens.sum())
    by_class = {
        service.qos: percentiles_ms(outcome.ttft_s(trace.service == index))
        for index, service in enumerate(trace.services)
        if np.any(trace.service == index)
    }
    return {
        "trace": trace.name,
        "requests": len(trace),
        "completed": outcome.count(Fate.COMPLETED),
        "refused": outcome.count(Fate.REFUSED),
        "dropped": outcome.count(Fate.DROPPED),
        "cancelled": outcome.count(Fate.CANCELLED),
        "starved": outcome.count(Fate.OPEN),
        "lost_pages": outcome.lost_pages,
        "duration_s": outcome.duration_s,
        "steps": outcome.steps,
        "tokens_per_s": generated / max(outcome.duration_s, 1e-9),
        "goodput_tokens_per_s": outcome.goodput(0.0, outcome.duration_s) if outcome.duration_s else 0.0,
        "hit_ratio": outcome.cached_tokens / max(outcome.prompt_tokens, 1),
        "hit_ratio_unlimited": trace.unlimited_hits() / max(prompts, 1),
        "ttft_ms": percentiles_ms(outcome.ttft_s()),
        "ttft_ms_by_class": by_class,
        "itl_ms": percentiles_ms(np.concatenate(outcome.gaps_s).astype(np.float64) if outcome.gaps_s else np.empty(0)),
        "longest_wait_s": outcome.longest_wait_s(),
        "fairness_gap_tokens": outcome.fairness_gap,
        "preemptions": outcome.preemptions,
        "wasted_tokens": outcome.recomputed_tokens,
        "wasted_share": outcome.recomputed_tokens / max(outcome.computed_tokens, 1),
        "digest": outcome.digest(),
    }


def goodput_under_load(outcome: Outcome) -> float:
    """Generated tokens a second of requests completed while others still arrived, the time to fill the engine apart."""
    span = outcome.trace.span_s
    return outcome.goodput(WARM_UP * span, span)


def percentiles_ms(seconds: Floats) -> dict[str, float | None]:
    """p50 and p99 in milliseconds; None where there is nothing."""
    if not len(seconds):
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(seconds * 1000, (50, 99)).tolist()
    return {"p50": p50, "p99": p99}
