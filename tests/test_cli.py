"""The command line answers at once, and what a user can cause ends in one clear line and an exit code."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mambacache_jax import Engine, EngineConfig, SamplingParams, cli, plan_cache
from mambacache_jax.errors import OutOfSlots
from mambacache_jax.models import load

GOLDEN = Path(__file__).parent / "models" / "golden"


def run(monkeypatch, capfd, *args):
    """(exit code, standard output, standard error) of the command."""
    monkeypatch.setattr(sys, "argv", ["mambacache", *args])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code or 0, *capfd.readouterr()


def raising(error):
    def run(**_):
        raise error

    return run


@pytest.mark.parametrize(
    "args",
    [["--help"], ["-h"], ["demo", "--help"], ["generate", "--help"], ["plan", "--help"], ["--version"]],
)
def test_help_and_version_succeed(monkeypatch, capfd, args):
    code, out, err = run(monkeypatch, capfd, *args)
    assert (code, err) == (0, "")
    assert "mambacache" in out


def test_a_plan_names_the_mode_that_it_chose_for_each_model_and_size(monkeypatch, capfd):
    args = ["plan", "--spec", "--nodes", "4", "--nodes", "64", "--model", "tiny", "--model", "qwen3-next-80b"]
    code, out, err = run(monkeypatch, capfd, *args)
    assert (code, err) == (0, "")
    assert out.count("x decode") == 2 * 2 * 4
    assert "qwen3-next-80b, 32 rows, 64 nodes, h100\nreplay_parallel: 64 nodes > 8" in out
    assert "snapshots of all layers, kept         60.08 GiB" in out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['mambacache', '--help']\n"
        "from mambacache_jax import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'jax', 'numpy', 'matplotlib', 'rich'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate"], "'--prompt'"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature must be"),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "max_tokens must be"),
        (["generate", "--prompt", "x", "--stop", ""], "stop strings must not be empty"),
        (["generate", "--prompt", ""], "prompt"),
        (["generate", "--prompt", "x", "--model", "/no/such/model"], "/no/such/model"),
        (["demo", "--concurrency", "0"], "--concurrency"),
        (["plan"], "--spec"),
        (["plan", "--spec", "--device", "abacus"], "No figures for 'abacus'"),
        (["nonsense"], "nonsense"),
        (["plan", "--model", "tiny"], "Give one --model and --memory, or --spec"),
        (["plan", "--model", "tiny", "--memory", "80 apples"], "such as 80GiB or 500MB; got '80 apples'"),
        (["plan", "--model", "tiny", "--memory", "1MB"], "too little. Needed are: weights 5.97 MiB"),
        (["plan", "--model", "/no/such/model", "--memory", "1GB"], "/no/such/model"),
        (["plan", "--model", "tiny", "--memory", "1GB", "--max-context", "8192"], "4096 positions"),
        (["plan", "--model", "tiny", "--memory", "1GB", "--max-running", "0"], "max_running must be"),
        (["plan", "--model", "tiny", "--memory", "1GB", "--checkpoint-share", "2"], "checkpoint_share must"),
    ],
)
def test_a_wrong_call_is_one_line_and_an_exit_code(monkeypatch, capfd, args, message):
    code, out, err = run(monkeypatch, capfd, *args)
    assert code != 0
    assert out == ""
    assert err.startswith("mambacache: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    "error", [ValueError("too\nlong"), OutOfSlots("too long"), PermissionError(13, "too long")]
)
def test_an_error_inside_a_command_shows_no_traceback(monkeypatch, capfd, error):
    monkeypatch.setattr("mambacache_jax.bench.demo.run", raising(error))
    code, out, err = run(monkeypatch, capfd, "demo")
    assert (code, out) == (1, "")
    assert "too long" in err
    assert err.count("\n") == 1


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("mambacache_jax.bench.demo.run", raising(KeyError("ours")))
    monkeypatch.setattr(sys, "argv", ["mambacache", "demo"])
    with pytest.raises(KeyError):
        cli.main()


def test_an_interrupt_is_quiet(monkeypatch, capfd):
    monkeypatch.setattr("mambacache_jax.bench.demo.run", raising(KeyboardInterrupt()))
    code, _, err = run(monkeypatch, capfd, "demo")
    assert code == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(("equal", "whole", "code"), [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_the_demo_fails_when_tokens_differ_or_an_invariant_is_broken(monkeypatch, capfd, equal, whole, code):
    monkeypatch.setattr(
        "mambacache_jax.bench.demo.run", lambda **_: {"tokens_equal": equal, "invariants_ok": whole}
    )
    assert run(monkeypatch, capfd, "demo")[0] == code


def test_the_demo_passes_its_options_on(monkeypatch, capfd, tmp_path):
    given = {}

    def demo(**options):
        given.update(options)
        return {"tokens_equal": True, "invariants_ok": True}

    monkeypatch.setattr("mambacache_jax.bench.demo.run", demo)
    args = ["--requests", "3", "--concurrency", "2", "--json", str(tmp_path / "x.json"), "--deterministic"]
    run(monkeypatch, capfd, "demo", *args)
    assert (given["requests"], given["concurrency"], given["deterministic"]) == (3, 2, True)
    assert given["json_file"] == tmp_path / "x.json"
    assert given["report"].name == "demo-report.html"


def test_generate_streams_the_same_text_that_the_engine_gives(monkeypatch, capfd):
    engine = Engine("tiny")
    monkeypatch.setattr("mambacache_jax.engine.Engine", lambda model: {"tiny": engine}[model])
    args = ["--prompt", "import os\n", "--max-tokens", "12", "--temperature", "0.7", "--seed", "3"]
    code, out, err = run(monkeypatch, capfd, "generate", *args)
    assert (code, err) == (0, "")
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=3)
    (expected,) = engine.generate(["import os\n"], params)
    assert out == expected.text + "\n"


def planned(monkeypatch, capfd, tmp_path, *args):
    """(what `mambacache plan` shows, what it writes)."""
    monkeypatch.setenv("COLUMNS", "120")
    file = tmp_path / "new" / "plan.json"
    code, out, err = run(monkeypatch, capfd, "plan", "--json", str(file), *args)
    assert (code, err) == (0, "")
    return out, json.loads(file.read_text())


def test_a_plan_needs_no_weights_and_counts_those_that_load(monkeypatch, capfd, tmp_path):
    folder = tmp_path / "granite"
    folder.mkdir()
    shutil.copy(GOLDEN / "granite" / "config.json", folder)
    args = ["--model", str(folder), "--memory", "64MiB", "--dtype", "float32"]
    out, plan = planned(monkeypatch, capfd, tmp_path, *args)
    model = load(GOLDEN / "granite", dtype="float32")
    expected = plan_cache(
        model.specs,
        64 * 2**20,
        dtype="float32",
        engine=EngineConfig(),
        weight_bytes=model.weight_bytes,
        step_bytes=plan["step_bytes"],
    )
    assert plan == {"model": str(folder)} | json.loads(json.dumps(expected.figures()))
    for what, much, _ in expected.rows():
        assert any(what in line and much in line for line in out.splitlines())


def test_a_plans_options_reach_it(monkeypatch, capfd, tmp_path):
    args = ["--model", "tiny", "--memory", "500MB", "--max-running", "5", "--max-context", "100"]
    args += ["--page-size", "32", "--state-dtype", "bfloat16", "--checkpoint-share", "0.25"]
    _, plan = planned(monkeypatch, capfd, tmp_path, *args)
    assert plan["memory_bytes"] == 500 * 10**6
    assert (plan["engine"]["max_running"], plan["engine"]["max_context"]) == (5, 100)
    assert (plan["cache"]["page_size"], plan["cache"]["state_dtype"]) == (32, "bfloat16")
    assert plan["dtype"] == "float32"
    checkpoints = plan["num_checkpoints"] * plan["ssm_slot_bytes"]
    assert 0.24 < checkpoints / plan["pool_bytes"] < 0.25


@pytest.mark.parametrize("key", ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"])
def test_a_plan_stores_states_as_the_config_asks(monkeypatch, capfd, tmp_path, key):
    values = json.loads((GOLDEN / "qwen3_5" / "config.json").read_text())
    values.pop("mamba_ssm_dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(values | {key: "bfloat16"}))
    args = ["--model", str(tmp_path), "--memory", "64MiB"]
    assert planned(monkeypatch, capfd, tmp_path, *args)[1]["cache"]["state_dtype"] == "bfloat16"
    args += ["--state-dtype", "float32"]
    assert planned(monkeypatch, capfd, tmp_path, *args)[1]["cache"]["state_dtype"] == "float32"


def test_a_reader_that_leaves_early_is_no_error():
    """`mambacache generate ... | head -c 0`"""
    code = (
        "import sys; from mambacache_jax import cli, engine\n"
        "class Engine:\n"
        "    def __init__(self, model): pass\n"
        "    def stream(self, *_):\n"
        "        while True: yield engine.Delta('x' * 4096, [], None)\n"
        "engine.Engine = Engine\n"
        "sys.argv = ['mambacache', 'generate', '--prompt', 'x']\n"
        "cli.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1
