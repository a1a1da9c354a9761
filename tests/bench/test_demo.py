"""The demo says what the two runs did, and its exit code and files follow from that."""

import dataclasses
import io
import json
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console

from mambacache_jax.bench import demo
from mambacache_jax.engine import Engine

KEYS = {
    "requests",
    "prompt_tokens",
    "computed_tokens",
    "cached_tokens",
    "hit_rate",
    "tokens_equal",
    "ttft_ms",
    "recompiles_after_warmup",
    "invariants_ok",
}


@pytest.fixture
def run(tmp_path, fake_engine):
    """Runs the demo on the fake engine; gives its result, what it printed and the engines it made."""

    def run(requests=12, **spoil):
        engines = []

        def make(*args):
            engines.append(fake_engine(*args))
            vars(engines[-1]).update(spoil)
            return engines[-1]

        screen = io.StringIO()
        result = demo.run(
            requests=requests,
            report=tmp_path / "new" / "report.html",
            json_file=tmp_path / "demo.json",
            console=Console(file=screen, width=120),
            make_engine=make,
        )
        return result, screen.getvalue(), engines

    return run


def test_the_result_counts_both_runs(run, tmp_path):
    result, _, engines = run()
    assert result.keys() >= KEYS
    assert result == json.loads((tmp_path / "demo.json").read_text())
    assert result["requests"] == 12
    assert result["computed_tokens_no_cache"] == result["prompt_tokens"]
    assert result["computed_tokens"] == 12
    assert result["cached_tokens"] + result["computed_tokens"] == result["prompt_tokens"]
    assert result["tokens_equal"]
    assert result["invariants_ok"]
    assert result["seen"]["median_ratio"] > 100
    assert [engine.cache.prefix_caching for engine in engines] == [True, False]
    assert engines[0].model is engines[1].model


def test_both_engines_are_warmed_up_with_the_prefixes_that_conversations_share(run):
    _, _, engines = run(requests=60)
    assert engines[0].warmed == engines[1].warmed
    assert [len(prefix) for prefix in engines[0].warmed] == [516]


def test_the_table_names_every_figure_of_the_main_job(run):
    _, screen, _ = run()
    for what in (
        "requests",
        "prompt tokens",
        "prompt tokens computed",
        "hit rate",
        "time to first token, median",
        "time to first token, p99",
        "prefix seen before (",
        "tokens served a second",
        "KV slots in use",
        "SSM slots in use",
        "KV slots evicted",
        "tombstones",
        "recompilations after warm-up",
    ):
        assert what in screen
    assert "generated tokens are equal" in screen
    assert "report.html" in screen


def test_a_request_whose_tokens_differ_is_named_with_its_margin(run):
    result, screen, engines = run(spoil_request=5)
    assert not result["tokens_equal"]
    (difference,) = result["differences"]
    assert difference["margin"] == 0.5
    assert f"Request {difference['request']} differs from token {difference['token']} on" in screen
    assert len(engines) == 3


def test_a_broken_invariant_is_printed(run):
    result, screen, _ = run(broken="slot 3 has two owners")
    assert not result["invariants_ok"]
    assert "Broken invariant: slot 3 has two owners" in screen


def test_the_report_is_one_file_with_its_plots_inside(run, tmp_path):
    result, _, _ = run()
    page = (tmp_path / "new" / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "src=" not in page.replace("xlink:href", "")
    assert "url(http" not in page
    assert "<script" not in page
    assert f"{result['prompt_tokens']:,}" in page
    assert result["machine"]["jax"] in page
    svgs = [f"<svg{part.partition('</svg>')[0]}</svg>" for part in page.split("<svg")[1:]]
    assert all(ET.fromstring(svg).tag.endswith("svg") for svg in svgs)


def test_a_report_that_cannot_be_written_stops_the_demo_before_it_runs(fake_engine, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        demo.run(report=tmp_path / "file" / "report.html", make_engine=fake_engine)


def test_the_pools_hold_what_is_in_flight_but_not_the_whole_trace():
    for concurrency in (1, 4, 8):
        config = demo.cache_config(concurrency)
        assert config.num_kv_slots >= 2048 * concurrency
        assert config.num_ssm_slots >= 4 * concurrency


def test_requests_through_the_real_engine_give_equal_tokens_for_less_work(tmp_path):
    def small_steps(model, cache, config):  # three programs to compile
        return Engine(model, cache, dataclasses.replace(config, token_budget=64, max_extend_rows=1))

    result = demo.run(
        requests=12,
        concurrency=1,
        report=tmp_path / "report.html",
        console=Console(file=io.StringIO()),
        make_engine=small_steps,
    )
    assert result["tokens_equal"], result["differences"]
    assert result["invariants_ok"], result["broken_invariants"]
    assert result["recompiles_after_warmup"] == 0
    # Two of the twelve begin with the prefix that warm-up published.
    assert result["cached_tokens"] >= 2 * 515
    assert result["cached_tokens"] + result["computed_tokens"] == result["prompt_tokens"]
    assert result["computed_tokens_no_cache"] == result["prompt_tokens"]
