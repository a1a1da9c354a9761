"""Speculation against plain decoding: the same held-out prompts, one request at a time, in one run.

Each prompt goes through every engine before the next one comes, so that other work on the machine slows all
alike. Nothing compiles while it is timed.
"""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from mambacache_jax.config import CacheConfig, EngineConfig, SamplingParams, SpecConfig
from mambacache_jax.engine import Engine
from mambacache_jax.models import load
from mambacache_jax.models.tiny.corpus import read_corpus, windows

PLAIN = "plain"

SPECS = {
    "mtp, chain of 3": SpecConfig(draft="mtp", num_nodes=4, steps=3),
    "mtp, tree of 8": SpecConfig(draft="mtp", num_nodes=8, topk=2, steps=3),
    "n-gram, chain of 3": SpecConfig(draft="ngram", num_nodes=4, steps=3),
    "n-gram, tree of 8": SpecConfig(draft="ngram", num_nodes=8, topk=2, steps=4),
}


def run(
    specs: Mapping[str, SpecConfig] = SPECS,
    *,
    prompts: int = 8,
    prompt_len: int = 192,
    max_tokens: int = 128,
) -> dict[str, Any]:
    """Decodes greedily from parts of files that `tiny` was not trained on.

    Args:
      specs: how to speculate, by name.
      prompts: how many; one more warms up.
      prompt_len: bytes of each.
      max_tokens: tokens generated for each.

    Returns:
      By engine: `tokens_per_second` of whole requests; `speedup`, over plain decoding; `tokens_per_pass`;
      `accepted`, the share of rounds that accepted a draft of each position; `same_text`.
    """
    model = load("tiny")
    length = prompt_len + max_tokens
    config = EngineConfig(max_running=1, max_context=512)
    cache = CacheConfig(num_kv_slots=4 * length, num_ssm_slots=16)
    engines = {PLAIN: Engine(model, cache, config)}
    engines |= {name: Engine(model, cache, config, spec) for name, spec in specs.items()}
    for engine in track(list(engines.values()), "compiling", transient=True):
        engine.warm_up()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    texts = windows(read_corpus().held_out, prompts + 1, prompt_len)
    seconds, tokens = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
    same = dict.fromkeys(engines, True)
    for index, text in enumerate(track(texts, "decoding", transient=True)):
        plain: list[int] = []
        for name, engine in engines.items():
            start = time.perf_counter()
            (done,) = engine.generate([text], params)
            if name == PLAIN:
                plain = done.token_ids
            same[name] &= done.token_ids == plain
            if index:
                seconds[name] += time.perf_counter() - start
                tokens[name] += len(done.token_ids)
    results = {}
    for name, engine in engines.items():
        stats = engine.stats()
        rate, base = tokens[name] / seconds[name], tokens[PLAIN] / seconds[PLAIN]
        rounds = stats.spec_rounds
        results[name] = {
            "tokens_per_second": round(rate, 1),
            "speedup": round(rate / base, 2),
            "tokens_per_pass": round(stats.spec_tokens / rounds, 2) if rounds else 1.0,
            "accepted": [round(count / rounds, 2) for count in stats.spec_accepted] if rounds else [],
            "same_text": same[name],
        }
    return results


def show(results: dict[str, Any]) -> None:
    """Prints the results."""
    shown = Table(title="Greedy decoding of held-out text, one request at a time")
    for column in ("drafts", "tokens/s", "of plain", "tokens a pass", "accepted at 1, 2, …", "same text"):
        shown.add_column(column, justify="left" if column == "drafts" else "right")
    for name, row in results.items():
        shown.add_row(
            name,
            f"{row['tokens_per_second']:,}",
            f"{row['speedup']}x",
            str(row["tokens_per_pass"]),
            " ".join(map(str, row["accepted"])),
            "yes" if row["same_text"] else "no",
        )
    Console().print(shown)
