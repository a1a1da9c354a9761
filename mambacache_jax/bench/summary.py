"""What the demo's two runs say: figures, a table and a verdict, for the terminal, the report and JSON."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from mambacache_jax.bench.replay import Replay
from mambacache_jax.bench.trace import Trace, common_prefixes, seen_before


def warm_prefixes(trace: Trace) -> list[tuple[int, int]]:
    """What several conversations begin with, as (request, length); computed before any of them arrives."""
    return common_prefixes(trace, min_sessions=2, min_tokens=64)


def tokens_seen(trace: Trace) -> list[int]:
    """For each request, how many tokens of its prompt a warm-up prefix or an earlier prompt begins with."""
    return seen_before(trace, warm_prefixes(trace))


def requests_seen(trace: Trace) -> list[int]:
    """The requests at least half of whose prompt had been seen."""
    pairs = zip(tokens_seen(trace), trace.requests, strict=True)
    return [i for i, (tokens, request) in enumerate(pairs) if 2 * tokens >= request.input_length]


def summarize(
    trace: Trace,
    cached: Replay,
    plain: Replay,
    differences: list[dict[str, Any]],
    *,
    concurrency: int,
    deterministic: bool,
    model: str,
) -> dict[str, Any]:
    """The demo's result, as its JSON file holds it."""
    seen = requests_seen(trace)
    both = {"cache": cached, "no_cache": plain}
    seen_ms = {name: _spread(one.ttft_ms(seen)) for name, one in both.items()} if seen else None
    stats = cached.stats
    return {
        "requests": len(trace.requests),
        "prompt_tokens": cached.prompt_tokens,
        "computed_tokens": cached.computed_tokens,
        "computed_tokens_no_cache": plain.computed_tokens,
        "cached_tokens": cached.cached_tokens,
        "generated_tokens": cached.generated_tokens,
        "hit_rate": cached.cached_tokens / cached.prompt_tokens,
        "tokens_equal": not differences,
        "differences": differences,
        "ttft_ms": {name: _spread(one.ttft_ms()) for name, one in both.items()},
        "seen": seen_ms
        and {
            "requests": len(seen),
            "ttft_ms": seen_ms,
            "median_ratio": seen_ms["no_cache"]["median"] / seen_ms["cache"]["median"],
        },
        "seconds": {name: one.seconds for name, one in both.items()},
        "tokens_per_second": {
            name: (one.prompt_tokens + one.generated_tokens) / one.seconds for name, one in both.items()
        },
        "kv_slots": {"peak": max(use.kv_used for use in cached.pool_use), "total": stats.kv_total},
        "ssm_slots": {"peak": max(use.ssm_used for use in cached.pool_use), "total": stats.ssm_total},
        "kv_evicted": stats.kv_evicted,
        "ssm_evicted": stats.ssm_evicted,
        "tombstones": stats.tombstones,
        "skipped_checkpoints": stats.skipped_checkpoints,
        "preemptions": {name: one.stats.preemptions for name, one in both.items()},
        "recompiles_after_warmup": sum(one.stats.recompiles_after_warmup for one in both.values()),
        "invariants_ok": not (cached.broken or plain.broken),
        "broken_invariants": [text for text in (cached.broken, plain.broken) if text],
        "concurrency": concurrency,
        "deterministic": deterministic,
        "model": model,
        "trace": {key: trace.header[key] for key in ("source", "licence", "cut", "note")},
        "machine": machine(),
    }


def _spread(milliseconds: np.ndarray) -> dict[str, float]:
    return {"median": float(np.median(milliseconds)), "p99": float(np.percentile(milliseconds, 99))}


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    import jax

    processor = platform.processor() or platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        names = [
            line.partition(":")[2].strip() for line in cpus.read_text().splitlines() if "model name" in line
        ]
        processor = names[0] if names else processor
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = jax.devices()[0]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": f"{processor}, {cores} cores",
        "device": f"{device.platform} ({device.device_kind})",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "mambacache-jax": version("mambacache-jax"),
    }


def rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The result as rows of (what, with the cache, without it)."""

    def both(label: str, values: dict[str, float], form: str) -> tuple[str, str, str]:
        return label, form.format(values["cache"]), form.format(values["no_cache"])

    def ttft(label: str, spreads: dict[str, dict[str, float]]) -> list[tuple[str, str, str]]:
        return [
            both(f"{label}, {name}", {run: spread[name] for run, spread in spreads.items()}, "{:,.1f} ms")
            for name in ("median", "p99")
        ]

    def use(slots: dict[str, int]) -> str:
        return f"{slots['peak']:,} of {slots['total']:,}"

    seen = result["seen"]
    lines = [
        ("requests", f"{result['requests']:,}", f"{result['requests']:,}"),
        ("prompt tokens", f"{result['prompt_tokens']:,}", f"{result['prompt_tokens']:,}"),
        (
            "prompt tokens computed",
            f"{result['computed_tokens']:,}",
            f"{result['computed_tokens_no_cache']:,}",
        ),
        ("hit rate", f"{result['hit_rate']:.1%}", "-"),
        *ttft("time to first token", result["ttft_ms"]),
    ]
    if seen:
        lines += ttft(f"  prefix seen before ({seen['requests']})", seen["ttft_ms"])
        lines.append(("  how much sooner, median", f"{seen['median_ratio']:.1f}x", "-"))
    return [
        *lines,
        both("tokens served a second", result["tokens_per_second"], "{:,.0f}"),
        both("wall time", result["seconds"], "{:,.1f} s"),
        ("KV slots in use, most", use(result["kv_slots"]), "-"),
        ("SSM slots in use, most", use(result["ssm_slots"]), "-"),
        ("KV slots evicted", f"{result['kv_evicted']:,}", "-"),
        ("checkpoints evicted", f"{result['ssm_evicted']:,}", "-"),
        ("tombstones", f"{result['tombstones']:,}", "-"),
        both("preemptions", result["preemptions"], "{:,}"),
        ("recompilations after warm-up", f"{result['recompiles_after_warmup']:,}", "(both)"),
    ]


def table(result: dict[str, Any]) -> Table:
    """The result as a table for the terminal."""
    grid = Table(title="Prefix cache on and off", title_justify="left")
    grid.add_column("")
    grid.add_column("with the cache", justify="right")
    grid.add_column("without it", justify="right")
    for row in rows(result):
        grid.add_row(*row)
    return grid


def verdict(result: dict[str, Any]) -> list[str]:
    """Whether the runs agree and the cache is whole, in sentences."""
    if result["tokens_equal"]:
        lines = [f"All {result['generated_tokens']:,} generated tokens are equal."]
    else:
        lines = [
            f"Request {d['request']} differs from token {d['token']} on, where the two best logits are "
            f"{d['margin']:.2g} apart."
            for d in result["differences"]
        ]
    if result["invariants_ok"]:
        return [*lines, "Every slot is accounted for: the cache's invariants hold."]
    return [*lines, *(f"Broken invariant: {text}" for text in result["broken_invariants"])]
