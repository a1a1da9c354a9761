"""Trains the built-in model: `python -m mambacache_jax.models.tiny.train --minutes 15`.

The text is the running interpreter's standard library. The schedule runs by the wall clock, compilation
apart: warm-up, then a cosine down to zero; its last part is on longer windows, so that positions up to
`LONG` have been seen. Loss is that of the model plus a share of the draft steps'. What is reported is
measured on the weights as they are stored.
"""

import datetime
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int32
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mambacache_jax.models import weights
from mambacache_jax.models.model import Model
from mambacache_jax.models.tiny.corpus import Corpus, read_corpus, windows
from mambacache_jax.models.tiny.evaluate import DRAFTS, all_logits, evaluate, losses
from mambacache_jax.models.tiny.network import TinyConfig, TinyLM
from mambacache_jax.models.tiny.optimiser import optimiser
from mambacache_jax.models.tiny.weights import as_model

STEP_WEIGHTS = (1.0, 0.3, 0.15)
"""Weights in the loss of the model and of each draft step."""

SHORT, LONG = 256, 1024
"""Bytes of a window, and of one in the last part of the run."""

WARM_UP = 0.03
"""Share of the run over which the learning rate rises."""

Update = Callable[[Any, Any, Array, Array], tuple[Any, Any, Array]]


class Outcome(NamedTuple):
    """What a run did.

    Attributes:
      params: the trained parameters.
      steps: updates made.
      num_bytes: bytes trained on, repeated ones counted again.
      seconds: wall clock, compilation apart.
      cpu_seconds: processor time over those seconds, all cores.
    """

    params: Any
    steps: int
    num_bytes: int
    seconds: float
    cpu_seconds: float


def learning_rate(progress: float, peak: float) -> float:
    """Warm-up, then half a cosine down to zero."""
    if progress < WARM_UP:
        return peak * (0.02 + 0.98 * progress / WARM_UP)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP))))


def train(
    model: Model,
    corpus: Corpus,
    *,
    minutes: float,
    batch_bytes: int,
    peak: float,
    long_share: float,
    seed: int,
) -> Outcome:
    """Trains from `model.params`, which are consumed.

    Args:
      model: a model with a multi-token-prediction head.
      corpus: what to train on.
      minutes: wall clock of the loop.
      batch_bytes: bytes of a step, a multiple of `LONG`.
      peak: highest learning rate.
      long_share: share of the run, at its end, on windows of `LONG` bytes.
      seed: of the choice of windows.
    """
    transform = optimiser(model.params)
    weighting = jnp.asarray(STEP_WEIGHTS, jnp.float32)

    def update(
        params: Any, state: Any, text: Int32[Array, "row window"], rate: Float32[Array, ""]
    ) -> tuple[Any, Any, Array]:
        def loss(params: Any) -> tuple[Array, Array]:
            bits = losses(all_logits(model, params, text), text)
            return (bits * weighting).sum() * math.log(2), bits

        gradients, bits = jax.grad(loss, has_aux=True)(params)
        steps, state = transform.update(gradients, state, params)
        return jax.tree.map(lambda p, s: p - rate * s, params, steps), state, bits

    random, params, state = np.random.default_rng(seed), model.params, transform.init(model.params)

    def draw(length: int) -> np.ndarray:
        starts = random.integers(0, len(corpus.train) - length - DRAFTS - 1, batch_bytes // length)
        return corpus.train[starts[:, None] + np.arange(length + DRAFTS + 1)].astype(np.int32)

    updates: dict[int, Update] = {}
    for length in (SHORT, LONG) if long_share > 0 else (SHORT,):
        began = time.monotonic()
        step = jax.jit(update, donate_argnums=(0, 1))
        updates[length] = step.lower(params, state, jnp.asarray(draw(length)), jnp.float32(0)).compile()
        print(f"compiled for windows of {length} bytes in {time.monotonic() - began:.0f} s", flush=True)

    steps, smooth, limit = 0, float("nan"), minutes * 60
    start, cpu_start = time.monotonic(), time.process_time()
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, refresh_per_second=2) as bar:
        task = bar.add_task("training", total=limit)
        while (elapsed := time.monotonic() - start) < limit:
            length = SHORT if elapsed < (1 - long_share) * limit else LONG
            rate = jnp.float32(learning_rate(elapsed / limit, peak))
            params, state, bits = updates[length](params, state, jnp.asarray(draw(length)), rate)
            steps, last = steps + 1, float(bits[0])
            smooth = last if math.isnan(smooth) else 0.95 * smooth + 0.05 * last
            bar.update(task, completed=elapsed, description=f"step {steps}, {smooth:.3f} bits per byte")
            if not bar.console.is_terminal and steps % 50 == 0:
                print(f"{elapsed:6.0f} s  step {steps}  {smooth:.3f} bits per byte", flush=True)
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu_start
    return Outcome(params, steps, steps * batch_bytes, seconds, cpu_seconds)


def training_record(
    model: Model, corpus: Corpus, outcome: Outcome, path: Path, options: str
) -> dict[str, Any]:
    """Measures the weights that were stored at `path`, and says how they came about."""
    import optax

    params = weights.load(path, model.params)
    text = windows(corpus.held_out, 128, 512 + DRAFTS + 1)
    bits, share = evaluate(model, params, text)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python -m mambacache_jax.models.tiny.train {options}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "platform": f"{platform.machine()} {jax.default_backend()}",
        "parameters": model.num_params,
        "file_bytes": path.stat().st_size,
        "train_files": corpus.num_train_files,
        "train_bytes": len(corpus.train),
        "held_out_files": corpus.num_held_out_files,
        "held_out_bytes": len(corpus.held_out),
        "steps": outcome.steps,
        "bytes_seen": outcome.num_bytes,
        "seconds": round(outcome.seconds, 1),
        "cpu_seconds": round(outcome.cpu_seconds, 1),
        "evaluation": f"{len(text)} windows of 512 bytes of held-out files; weights as stored",
        "bits_per_byte": round(float(bits[0]), 4),
        "bits_per_byte_mtp": [round(float(x), 4) for x in bits[1:]],
        "draft_agreement": [round(float(x), 4) for x in share],
        "draft_agreement_note": "best token of draft step s equals the model's own, true text fed in",
    }


@click.command()
@click.option("--minutes", default=15.0, show_default=True, help="Wall clock, compilation apart.")
@click.option("--batch-bytes", default=2048, show_default=True, help="Bytes of a step; a multiple of 1024.")
@click.option("--peak", default=4e-3, show_default=True, help="Highest learning rate.")
@click.option(
    "--long-share", default=0.15, show_default=True, help="Share of the run on windows of 1024 bytes."
)
@click.option("--seed", default=0, show_default=True, help="Of first weights and windows.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(__file__).parent,
    help="Folder for tiny.safetensors and training_record.json; default: the package's own.",
)
def main(minutes: float, batch_bytes: int, peak: float, long_share: float, seed: int, out: Path) -> None:
    """Trains the built-in model and writes its weights and their record."""
    if batch_bytes < LONG or batch_bytes % LONG:
        raise click.BadParameter(f"must be a multiple of {LONG}", param_hint="--batch-bytes")
    corpus = read_corpus()
    network = TinyLM(TinyConfig(), nnx.Rngs(seed))
    graphdef, params = nnx.split(network)
    model = as_model(network, params, graphdef)
    print(f"{model.num_params:,} parameters; {len(corpus.train):,} bytes of text", flush=True)
    outcome = train(
        model,
        corpus,
        minutes=minutes,
        batch_bytes=batch_bytes,
        peak=peak,
        long_share=long_share,
        seed=seed,
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / "tiny.safetensors"
    weights.save(path, outcome.params, dtype="bfloat16")
    options = f"--minutes {minutes:g} --batch-bytes {batch_bytes} --peak {peak:g} --long-share {long_share:g}"
    trained = as_model(network, outcome.params, graphdef)
    record = training_record(trained, corpus, outcome, path, f"{options} --seed {seed}")
    (out / "training_record.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2), flush=True)


if __name__ == "__main__":
    main()
