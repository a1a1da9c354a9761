"""The demo: a real multi-turn trace with the cache and without it, the same model and the same requests."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mambacache_jax.bench.prompts import text_prompts
from mambacache_jax.bench.replay import Replay, replay
from mambacache_jax.bench.summary import summarize, table, verdict, warm_prefixes
from mambacache_jax.bench.trace import Trace, sample
from mambacache_jax.config import CacheConfig, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from mambacache_jax.engine import Engine

MODEL = "tiny"

MakeEngine = Callable[..., "Engine"]
"""Called as `Engine` is: model, cache, config."""


def cache_config(concurrency: int) -> CacheConfig:
    """Pools too small for the whole trace: what each request in flight may need, and less than the rest."""
    return CacheConfig(
        num_kv_slots=20_480 + 2048 * concurrency,
        num_ssm_slots=128 + 4 * concurrency,
    )


def run(
    *,
    requests: int | None = None,
    concurrency: int = 4,
    report: Path = Path("out/demo-report.html"),
    json_file: Path | None = None,
    deterministic: bool = False,
    console: Console | None = None,
    make_engine: MakeEngine | None = None,
) -> dict[str, Any]:
    """Runs the demo, prints its table and writes its report.

    Args:
      requests: how many requests of the sample; all by default.
      concurrency: requests in flight.
      report: where the HTML report goes; its folder is made.
      json_file: where the result goes as JSON, if anywhere.
      deterministic: run the engine in deterministic mode.
      console: where to print; standard output by default.
      make_engine: builds the engine of a run; `Engine` by default.

    Returns:
      What the JSON file holds.
    """
    console = console or Console()
    trace = sample()
    if requests is not None:
        trace = trace.head(requests)
    for path in (report, json_file):  # a place that cannot be written is better found now than after the run
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    conversations = len({request.session_id for request in trace.requests})
    console.print(
        f"[bold]{len(trace.requests)} requests of {conversations} conversations[/], {concurrency} in flight, "
        f"model [bold]{MODEL}[/], with the prefix cache and without it."
    )
    with_cache = cache_config(concurrency)
    without = dataclasses.replace(with_cache, prefix_caching=False)
    config = EngineConfig(max_running=concurrency, deterministic=deterministic)
    if make_engine is None:
        from mambacache_jax.engine import Engine as make_engine
    model: Any = MODEL
    runs: list[Replay] = []
    with Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        for label, cache in (("with the cache", with_cache), ("without it", without)):
            engine = make_engine(model, cache, config)
            model = engine.model  # loaded once: the second engine runs the first one's programs
            runs.append(_run_one(trace, engine, concurrency, label, progress))
    cached, plain = runs
    differences = _differences(cached, plain)
    if differences:
        _add_margins(differences, trace, plain, make_engine(model, without, config))
    result = summarize(
        trace,
        cached,
        plain,
        differences,
        concurrency=concurrency,
        deterministic=deterministic,
        model=MODEL,
    )
    console.print(table(result))
    for line in verdict(result):
        console.print(line, markup=False)
    # Matplotlib takes a second to import: nobody should wait for it before the runs.
    from mambacache_jax.bench.report import write_report

    write_report(report, result, trace, cached, plain)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console.print(f"Report: {report}", markup=False, soft_wrap=True)
    return result


def _run_one(trace: Trace, engine: "Engine", concurrency: int, label: str, progress: Progress) -> Replay:
    prompts = text_prompts(trace)
    task = progress.add_task(f"{label}: compiling, warming up", total=None)
    # What several conversations begin with is computed once, before any of them arrives.
    engine.warm_up(prompts=[prompts[i][:length] for i, length in warm_prefixes(trace)])
    progress.reset(task, total=len(prompts), description=label)
    return replay(
        engine,
        prompts,
        [SamplingParams(max_tokens=request.output_length) for request in trace.requests],
        [request.session_id for request in trace.requests],
        concurrency,
        on_finish=lambda: progress.advance(task),
    )


def _differences(cached: Replay, plain: Replay) -> list[dict[str, Any]]:
    found = []
    for index, (one, other) in enumerate(zip(cached.completions, plain.completions, strict=True)):
        if one.token_ids != other.token_ids:
            pairs = zip(one.token_ids, other.token_ids, strict=False)
            token = next((k for k, (a, b) in enumerate(pairs) if a != b), len(other.token_ids))
            found.append({"request": index, "token": token})
    return found


def _add_margins(differences: list[dict[str, Any]], trace: Trace, plain: Replay, engine: "Engine") -> None:
    """How far apart the two best logits are where each request's tokens part."""
    prompts = text_prompts(trace)
    for difference in differences:
        answer = plain.completions[difference["request"]].token_ids[: difference["token"]]
        prompt = engine.model.tokenizer.encode(prompts[difference["request"]])
        logits = engine.logits([*prompt, *answer])[-1]
        second, best = np.partition(logits, -2)[-2:]
        difference["margin"] = float(best - second)
