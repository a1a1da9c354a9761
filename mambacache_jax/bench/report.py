"""The demo's report: one HTML file with its plots inside, which needs nothing else to be read."""

import html
import io
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mambacache_jax.bench.replay import Replay
from mambacache_jax.bench.summary import requests_seen, rows, tokens_seen, verdict
from mambacache_jax.bench.trace import Trace

CACHE, PLAIN, MUTED = "#0f766e", "#b45309", "#64748b"

STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#94a3b8",
    "axes.grid": True,
    "axes.labelcolor": "#334155",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.color": "#e2e8f0",
    "legend.frameon": False,
    "svg.hashsalt": "mambacache",
    "xtick.color": "#475569",
    "ytick.color": "#475569",
}

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mambacache-jax: a real trace with the prefix cache and without it</title>
<style>
  body { font: 16px/1.55 system-ui, sans-serif; color: #1e293b; background: #f8fafc; margin: 0; }
  main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
  h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .6rem; }
  h2 { font-size: 1.15rem; margin: 0 0 .3rem; }
  p { margin: .4rem 0; }
  .good, .bad { border-left: 4px solid #0f766e; background: #ecfdf5; padding: .5rem .9rem; }
  .bad { border-color: #b91c1c; background: #fef2f2; }
  .tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem; }
  .tiles { margin: 1.4rem 0; }
  .tile, section { background: #fff; border: 1px solid #e2e8f0; border-radius: 8px; padding: 1rem 1.2rem; }
  .tile b { display: block; font-size: 1.6rem; color: #0f766e; }
  .tile span { color: #64748b; font-size: .9rem; }
  section { margin: 1rem 0; }
  svg { width: 100%; height: auto; }
  table { border-collapse: collapse; width: 100%; }
  th, td { text-align: right; padding: .28rem .5rem; border-bottom: 1px solid #e2e8f0; }
  th:first-child, td:first-child { text-align: left; white-space: pre; }
  .fine { color: #64748b; font-size: .88rem; overflow-wrap: anywhere; }
</style>
</head>
<body><main>
<h1>The same requests, with the prefix cache and without it</h1>
<p>$intro</p>
<div class="$mark">$verdict</div>
<div class="tiles">$tiles</div>
$figures
<section><h2>All figures</h2>
<table><thead><tr><th></th><th>with the cache</th><th>without it</th></tr></thead>
<tbody>$rows</tbody></table></section>
<section><h2>Where it ran, and on what</h2>$machine</section>
</main></body></html>
""")


def write_report(path: Path, result: dict[str, Any], trace: Trace, cached: Replay, plain: Replay) -> None:
    """Writes the report to `path`, whose folder exists."""
    seen = result["seen"]
    tiles = [
        (f"{result['hit_rate']:.0%}", "of all prompt tokens came from the cache"),
        (
            f"{result['computed_tokens_no_cache'] / result['computed_tokens']:.1f}x",
            "fewer prompt tokens went through the model",
        ),
        (
            f"{result['ttft_ms']['cache']['median']:.0f} ms",
            f"median time to first token, {result['ttft_ms']['no_cache']['median']:.0f} ms without the cache",
        ),
    ]
    if seen:
        tiles.append(
            (f"{seen['median_ratio']:.1f}x", "sooner, median of requests whose prefix had been seen")
        )
    text = PAGE.substitute(
        intro=_intro(result, trace),
        mark="good" if result["tokens_equal"] and result["invariants_ok"] else "bad",
        verdict="".join(f"<p>{html.escape(line)}</p>" for line in verdict(result)),
        tiles="".join(f'<div class="tile"><b>{value}</b><span>{what}</span></div>' for value, what in tiles),
        figures="".join(
            f"<section><h2>{title}</h2><p>{meaning}</p>{svg}</section>"
            for title, meaning, svg in _figures(trace, cached, plain)
        ),
        rows="".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows(result)
        ),
        machine=_machine(result),
    )
    path.write_text(text, encoding="utf-8")


def _intro(result: dict[str, Any], trace: Trace) -> str:
    conversations = len({request.session_id for request in trace.requests})
    return (
        f"{result['requests']:,} requests of {conversations} conversations, cut from recorded traffic, went "
        f"through the hybrid model <b>{html.escape(result['model'])}</b> twice, {result['concurrency']} at "
        "a time. A turn is sent when the turn before it has been answered. Both runs are the same code; "
        "one keeps what it computed in a radix tree: keys and values of every token, and checkpoints of "
        "the recurrent state at some positions."
    )


def _machine(result: dict[str, Any]) -> str:
    where = "; ".join(f"{name} {value}" for name, value in result["machine"].items())
    source = "; ".join(result["trace"]["source"])
    licence = ", ".join(result["trace"]["licence"])
    mode = "deterministic mode" if result["deterministic"] else "default mode"
    lines = [f"{where}; {mode}.", f"Trace: {source} ({licence}). {result['trace']['note']}"]
    return "".join(f'<p class="fine">{html.escape(line)}</p>' for line in lines)


def _figures(trace: Trace, cached: Replay, plain: Replay) -> list[tuple[str, str, str]]:
    with mpl.rc_context(STYLE):
        return [
            (
                "Hit rate",
                "Of the prompt tokens served so far, the share that came from the cache (line), and each "
                "request's own share (dots). The dashed line counts the tokens that a warmed-up prefix or "
                "an earlier prompt began with: no cache could reach more.",
                _svg(_draw_hit_rate, trace, cached),
            ),
            (
                "Prompt tokens through the model",
                "What the model had to compute, added up over the requests in the order in which they "
                "finished. The gap is the work that the cache saved.",
                _svg(_draw_work, cached, plain),
            ),
            (
                "Time to first token",
                "Share of requests whose first token came within a time, from admission on, on a "
                "logarithmic axis; further left is better. Dashed: only requests at least half of whose "
                "prompt had been seen.",
                _svg(_draw_ttft, trace, cached, plain),
            ),
            (
                "Slots in use",
                "How full the two pools were, as a share of each pool's size. A full pool evicts what was "
                "used longest ago: keys and values from the tree's leaves, checkpoints from anywhere in "
                "it.",
                _svg(_draw_pools, cached),
            ),
        ]


def _svg(draw: Any, *args: Any) -> str:
    figure = Figure(figsize=(8.6, 3.3), layout="constrained")
    draw(figure.subplots(), *args)
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue().partition("<!DOCTYPE")[2].partition(">")[2]


def _draw_hit_rate(axes: Axes, trace: Trace, cached: Replay) -> None:
    done = [cached.completions[i] for i in cached.order]
    prompt = np.array([c.prompt_len for c in done])
    hits = np.array([c.cached_tokens for c in done])
    seen = np.array(tokens_seen(trace))[cached.order]
    finished = np.arange(1, len(done) + 1)
    axes.plot(finished, 100 * hits / prompt, ".", color=CACHE, alpha=0.35, markersize=4, label="one request")
    axes.plot(finished, 100 * hits.cumsum() / prompt.cumsum(), color=CACHE, linewidth=2, label="so far")
    axes.plot(finished, 100 * seen.cumsum() / prompt.cumsum(), "--", color=MUTED, label="most possible")
    axes.set(xlabel="requests finished", ylabel="hit rate, %", ylim=(-3, 103))
    axes.legend(ncols=3, loc="lower right")


def _draw_work(axes: Axes, cached: Replay, plain: Replay) -> None:
    for label, one, color in (("without the cache", plain, PLAIN), ("with the cache", cached, CACHE)):
        computed = np.array([one.completions[i].computed_tokens for i in one.order]).cumsum() / 1000
        axes.fill_between(np.arange(1, len(computed) + 1), computed, color=color, alpha=0.18)
        axes.plot(np.arange(1, len(computed) + 1), computed, color=color, linewidth=2, label=label)
    axes.set(xlabel="requests finished", ylabel="thousand tokens", ylim=(0, None))
    axes.legend(loc="upper left")


def _draw_ttft(axes: Axes, trace: Trace, cached: Replay, plain: Replay) -> None:
    seen = requests_seen(trace)
    for label, one, color in (("with the cache", cached, CACHE), ("without it", plain, PLAIN)):
        for only, style in ((None, "-"), (seen, "--")):
            times = np.sort(one.ttft_ms(only))
            share = 100 * np.arange(1, len(times) + 1) / max(1, len(times))
            axes.step(times, share, style, where="post", color=color, label=label if only is None else None)
    axes.set(xscale="log", xlabel="milliseconds to first token", ylabel="requests, %", ylim=(0, 103))
    axes.legend(loc="lower right")


def _draw_pools(axes: Axes, cached: Replay) -> None:
    seconds = [use.seconds for use in cached.pool_use]
    kv = np.array([use.kv_used for use in cached.pool_use]) / cached.stats.kv_total
    ssm = np.array([use.ssm_used for use in cached.pool_use]) / cached.stats.ssm_total
    axes.plot(seconds, 100 * kv, color=CACHE, linewidth=2, label=f"KV, {cached.stats.kv_total:,} slots")
    axes.plot(seconds, 100 * ssm, color=PLAIN, linewidth=2, label=f"SSM, {cached.stats.ssm_total:,} slots")
    axes.set(xlabel="seconds from the start", ylabel="in use, %", ylim=(0, 103))
    axes.legend(loc="lower right")
