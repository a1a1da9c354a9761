"""The `mambacache` command. Commands import what they run, so that `--help` is instant."""

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn, get_args

import click

from mambacache_jax.budget import CHECKPOINT_SHARE, estimate_step_bytes, parse_bytes, plan_cache, show_bytes
from mambacache_jax.config import EngineConfig, SamplingParams, StateDtype
from mambacache_jax.errors import MambaCacheError


class _Bytes(click.ParamType):
    """A size such as 80GiB, as bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See `parse_bytes`."""
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mambacache-jax", prog_name="mambacache")
def cli() -> None:
    """A prefix cache for hybrid attention and state-space language models, on JAX."""


@cli.command()
@click.option("--requests", type=click.IntRange(min=1), help="Only the first so many requests of the trace.")
@click.option(
    "--concurrency", type=click.IntRange(min=1), default=4, show_default=True, help="Requests in flight."
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("out/demo-report.html"),
    show_default=True,
    help="Where the report with plots goes.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the result here."
)
@click.option(
    "--deterministic", is_flag=True, help="Equal logits bit for bit, whatever the schedule; slower."
)
def demo(
    requests: int | None, concurrency: int, report: Path, json_file: Path | None, deterministic: bool
) -> int:
    """Replays a real multi-turn trace with the cache and without it.

    Shows that the tokens are the same and what the cache saves. Exit code 1 when a token differs or an
    invariant of the cache does not hold.
    """
    from mambacache_jax.bench.demo import run

    result = run(
        requests=requests,
        concurrency=concurrency,
        report=report,
        json_file=json_file,
        deterministic=deterministic,
    )
    return 0 if result["tokens_equal"] and result["invariants_ok"] else 1


@cli.command()
@click.option("--prompt", required=True, help="The text to go on from.")
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    help="`tiny`, or a checkpoint folder.",
)
@click.option("--max-tokens", type=int, default=SamplingParams.max_tokens, show_default=True)
@click.option(
    "--temperature", type=float, default=SamplingParams.temperature, show_default=True, help="0: greedy."
)
@click.option("--top-k", type=int, default=SamplingParams.top_k, show_default=True, help="0: all tokens.")
@click.option("--top-p", type=float, default=SamplingParams.top_p, show_default=True)
@click.option("--min-p", type=float, default=SamplingParams.min_p, show_default=True)
@click.option("--seed", type=int, default=SamplingParams.seed, show_default=True)
@click.option("--stop", multiple=True, help="End before this text; may be given several times.")
def generate(
    prompt: str,
    model: str,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    stop: tuple[str, ...],
) -> None:
    """Streams the text that a model writes after a prompt."""
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
    )
    from mambacache_jax.engine import Engine

    for delta in Engine(model).stream(prompt, params):
        click.echo(delta.text, nl=False)
        sys.stdout.flush()
    click.echo()


@cli.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    help="`tiny`, or a checkpoint folder; its config.json is enough. With --spec also a name that it shows, "
    "and several.",
)
@click.option("--memory", type=_Bytes(), help="Of one device, such as 80GiB or 500MB.")
@click.option(
    "--max-running", type=int, default=EngineConfig.max_running, show_default=True, help="Requests at once."
)
@click.option(
    "--max-context",
    type=int,
    help=f"Tokens of one request. By default {EngineConfig.max_context}, or the model's if fewer.",
)
@click.option("--page-size", type=click.IntRange(min=1), default=1, show_default=True, help="Tokens a page.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="bfloat16",
    show_default=True,
    help="Of a checkpoint's weights, K and V. `tiny` is float32.",
)
@click.option(
    "--state-dtype",
    type=click.Choice(get_args(StateDtype)),
    help="Of recurrent states. By default what the checkpoint's config asks for.",
)
@click.option(
    "--checkpoint-share",
    type=float,
    default=CHECKPOINT_SHARE,
    show_default=True,
    help="Of the bytes that checkpoints and KV divide.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the plan here."
)
@click.option("--spec", is_flag=True, help="Plan the states of speculative decoding instead.")
@click.option("--rows", type=click.IntRange(min=1), default=32, show_default=True, help="--spec: requests.")
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    multiple=True,
    default=(4, 8, 16, 64),
    show_default=True,
    help="--spec: nodes of a draft tree, the bonus token included; may be given several times.",
)
@click.option(
    "--depth", type=click.IntRange(min=1), default=4, show_default=True, help="--spec: nodes of a path."
)
@click.option("--device", default="h100", show_default=True, help="--spec: whose figures decide.")
def plan(
    models: tuple[str, ...],
    memory: int | None,
    max_running: int,
    max_context: int | None,
    page_size: int,
    dtype: str,
    state_dtype: StateDtype | None,
    checkpoint_share: float,
    json_file: Path | None,
    spec: bool,
    rows: int,
    nodes: tuple[int, ...],
    depth: int,
    device: str,
) -> None:
    """What fits in a device's memory: slots, checkpoints, conversations. Reads no weights.

    With --spec: what speculative decoding holds and moves by state mode, and which mode is chosen and why.
    """
    if spec:
        _plan_spec(models, rows, nodes, depth, device)
        return
    if len(models) != 1 or memory is None:
        raise click.UsageError("Give one --model and --memory, or --spec.")
    (model,) = models
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from mambacache_jax.models import abstract

    described = abstract(model, dtype=dtype)
    if max_context is None:
        max_context = min(EngineConfig.max_context, described.max_context)
    if max_context > described.max_context:
        raise ValueError(f"max_context={max_context} exceeds the model's {described.max_context} positions.")
    engine = EngineConfig(max_running=max_running, max_context=max_context)
    planned = plan_cache(
        described.specs,
        memory,
        dtype=described.dtype,
        engine=engine,
        weight_bytes=described.weight_bytes,
        step_bytes=estimate_step_bytes(
            described.specs,
            engine,
            dtype=described.dtype,
            vocab_size=described.vocab_size,
            widest=described.widest,
        ),
        page_size=page_size,
        state_dtype=state_dtype or described.state_dtype,
        checkpoint_share=checkpoint_share,
    )
    table = Table(title=f"{escape(model)} in {show_bytes(memory)}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for row in planned.rows():
        table.add_row(*row)
    Console().print(table)
    if json_file is not None:
        _write_json(json_file, {"model": model} | planned.figures())


def _plan_spec(models: tuple[str, ...], rows: int, nodes: tuple[int, ...], depth: int, device: str) -> None:
    from mambacache_jax.models import abstract
    from mambacache_jax.spec.report import report
    from mambacache_jax.spec.shapes import MODELS

    chosen = {
        name: MODELS[name] if name in MODELS else abstract(name).specs for name in models or tuple(MODELS)
    }
    click.echo(report(chosen, rows=rows, nodes=nodes, depth=depth, device=device))


@cli.group()
def bench() -> None:
    """Measures a part, beside what it is made of."""


@bench.command()
@click.option(
    "--nodes",
    type=click.IntRange(min=4),
    multiple=True,
    default=(1_000, 100_000),
    show_default=True,
    help="Measure eviction and memory in a tree of so many nodes; may be given several times.",
)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take the turns from this trace instead of the bundled one.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the result here."
)
def host(nodes: tuple[int, ...], trace_file: Path | None, json_file: Path | None) -> None:
    """The radix tree and its allocators, without any device."""
    from mambacache_jax.bench import host as host_bench
    from mambacache_jax.bench.trace import read_trace, sample

    results = host_bench.run(nodes, sample() if trace_file is None else read_trace(trace_file))
    host_bench.show(results)
    if json_file is not None:
        _write_json(json_file, results)


@bench.command(name="spec")
@click.option(
    "--prompts", type=click.IntRange(min=1), default=8, show_default=True, help="Prompts to go on from."
)
@click.option("--max-tokens", type=click.IntRange(min=1, max=256), default=128, show_default=True)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the result here."
)
def spec_command(prompts: int, max_tokens: int, json_file: Path | None) -> int:
    """Speculation with `tiny` against plain decoding; exit code 1 where a text differs."""
    from mambacache_jax.bench import spec as spec_bench

    results = spec_bench.run(prompts=prompts, max_tokens=max_tokens)
    spec_bench.show(results)
    if json_file is not None:
        _write_json(json_file, results)
    return 0 if all(row["same_text"] for row in results.values()) else 1


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> NoReturn:
    """Runs the command line; what a user can cause ends in one line on stderr, without a traceback."""
    try:
        code = cli.main(prog_name="mambacache", standalone_mode=False)
    except click.Abort:
        click.echo("\nInterrupted.", err=True)
        code = 130
    except click.exceptions.NoArgsIsHelpError as help_text:
        help_text.show()
        code = help_text.exit_code
    except click.ClickException as error:
        code = _complain(error.format_message(), error.exit_code)
    except BrokenPipeError:
        # The reader of our output is gone: nothing is left to say, not even when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (ValueError, OSError, MambaCacheError) as error:
        code = _complain(str(error), 1)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    click.echo(f"mambacache: {' '.join(message.split())}", err=True)
    return code
