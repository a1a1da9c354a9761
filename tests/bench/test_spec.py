"""`bench spec` times the same text with drafts and without, and counts what was accepted."""

from mambacache_jax.bench import spec
from mambacache_jax.config import SpecConfig


def test_a_run_compares_equal_texts_and_counts_tokens_of_a_pass(capsys):
    drafts = {"look-up": SpecConfig(draft="ngram", num_nodes=3, steps=2)}
    results = spec.run(drafts, prompts=1, prompt_len=64, max_tokens=16)
    assert list(results) == [spec.PLAIN, "look-up"]
    assert all(row["same_text"] and row["tokens_per_second"] > 0 for row in results.values())
    assert results[spec.PLAIN]["speedup"] == results[spec.PLAIN]["tokens_per_pass"] == 1
    row = results["look-up"]
    assert 1 <= row["tokens_per_pass"] <= 3
    assert len(row["accepted"]) == 2
    assert row["accepted"][0] >= row["accepted"][1]
    spec.show(results)
    assert "look-up" in capsys.readouterr().out
