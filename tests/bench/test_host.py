"""`bench host` measures what its names say: real hits, real evictions, in trees of the size asked for."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from mambacache_jax.bench import host, peer_driver
from mambacache_jax.bench.trace import sample
from mambacache_jax.cli import cli


def test_a_run_measures_every_part_and_grows_no_slower_than_it_should():
    results = host.run([64, 4096], sample())
    for name, value in results.items():
        if isinstance(value, dict):
            assert 0 < value["median"] <= value["p99"], name
    assert 0.5 < results["hit rate of the turns"] < 1
    assert results["turns a second"] > 100
    assert 500 < results["bytes a node of 4,096 nodes"] < 1600
    # Eight times the nodes of a path may cost eight times as much, and not the square of it.
    few, many = (
        results[f"match, {n} tokens in {k} nodes"]["median"] for n, k in (("8,192", 16), ("32,768", 64))
    )
    assert many < 8 * few
    small, large = (
        results[f"allocate and free 512 of {n} slots"]["median"] for n in ("100,000", "4,000,000")
    )
    assert large < 4 * small


def test_the_command_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / "out" / "host.json"
    result = CliRunner().invoke(cli, ["bench", "host", "--nodes", "8", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "match, 8,192 tokens in 1 node" in result.output
    assert json.loads(file.read_text())["hit rate of the turns"] > 0.5


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("page_size", [1, 64])
def test_the_driver_of_the_comparison_finds_what_it_inserted(checked, page_size):
    driver = peer_driver.PeerDriver(checked)
    driver.make_cache(4096, 16, page_size)
    tokens = np.arange(1, 257, dtype=np.int32)
    match_len, match = driver.match(driver.to_key(tokens[:-1]))
    assert match_len == 0
    lease = driver.lock(match)
    slots = driver.alloc_kv(256)
    assert slots is not None
    row = driver.to_idx(slots.astype(np.int64))
    state = driver.alloc_ssm()
    assert driver.insert(driver.to_key(tokens), row, driver.to_ssm(state), 0, True)[:2] == (0, True)
    driver.unlock(lease)
    match_len, match = driver.match(driver.to_key(np.concatenate([tokens, tokens])))
    assert (match_len, driver.indices(match, match_len).tolist()) == (256, row.tolist())
    assert (driver.kv_avail(), driver.ssm_avail()) == (4096 - 256, 15)
    assert driver.evict(1, 0) == (256, 1)
    assert (driver.kv_avail(), driver.ssm_avail()) == (4096, 16)
