"""The same tokens under another namespace are another prefix, and no two namespaces can be mixed up."""

import numpy as np
import pytest

from mambacache_jax.host import EVERY, Namespace


def test_the_same_tokens_under_another_namespace_never_match(toy):
    toy.put("ABCD", namespace="tenant")
    assert toy.hit("ABCD") == 0
    assert toy.hit("ABCD", "other") == 0
    assert toy.match("ABCD", b"tenant").kv_len == 0
    assert toy.hit("ABCD", "tenant") == 4
    toy.put("ABCD")
    assert toy.cache.stats().duplicate_kv == 0
    toy.check()


SPACES = [
    None,
    "",
    "0",
    b"",
    b"0",
    0,
    Namespace(),
    Namespace(""),
    Namespace("0"),
    Namespace(0),
    Namespace(salt=""),
    Namespace(salt="0"),
    Namespace("0", "0"),
    Namespace(0, "0"),
    Namespace(version=1),
    Namespace("0", version=1),
    "Namespace(adapter='0', salt=None, version=0)",
]


@pytest.mark.parametrize("namespace", SPACES, ids=repr)
def test_no_two_namespaces_share_a_prefix(toy, namespace):
    toy.put("ABCD", namespace=namespace)
    assert toy.hit("ABCD", namespace) == 4
    for other in SPACES:
        if other is not namespace:
            assert toy.match("ABCD", other).kv_len == 0
            assert toy.cache.probe(toy.tokens("ABCD"), other).kv_len == 0
            assert toy.cache.match_kv(toy.tokens("ABCD"), other).kv_len == 0
    assert toy.put("ABCD", namespace="another").prefix_len == 0
    toy.check()


def test_equal_namespaces_are_one(toy):
    toy.put("ABCD", namespace=Namespace("lora", "tenant", 3))
    assert toy.hit("ABCD", Namespace("lora", "tenant", 3)) == 4


class Name(str):
    pass


@pytest.mark.parametrize(
    "wrong", [True, 1.0, np.int64(1), ("a",), ("a", None, 0), ["a"], {}, Name("a"), Name("1")], ids=repr
)
def test_what_equals_a_namespace_and_is_none_is_refused_everywhere(toy, wrong):
    """Python holds `True`, `1.0` and `1` for one key: a prefix of one would be handed to the other."""
    toy.put("ABCD", namespace=1)
    toy.put("ABCD", namespace="a")
    toy.put("ABCD", namespace=Namespace("a"))
    own, before = toy.compute_kv("WXYZ"), toy.everything()
    tokens = toy.tokens("ABCD")
    for call in (
        lambda: toy.cache.match(tokens, wrong),
        lambda: toy.cache.probe(tokens, wrong),
        lambda: toy.cache.match_kv(tokens, wrong),
        lambda: toy.cache.insert(tokens, own, namespace=wrong),
        lambda: toy.cache.reset(wrong),
        lambda: toy.cache.stats(wrong),
        lambda: toy.cache.count_skipped("limit", namespace=wrong),
    ):
        with pytest.raises(ValueError, match=f"of type {type(wrong).__name__}"):
            call()
    assert toy.everything() | {"kv_used": 0} == before | {"kv_used": 0}
    toy.check()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter": True}, "adapter must be a str, an int or None, got True"),
        ({"adapter": 1.0}, "adapter must be"),
        ({"adapter": b"a"}, "adapter must be"),
        ({"salt": 1}, "salt must be a str or None, got 1"),
        ({"version": True}, "version must be an int, got True"),
        ({"version": "1"}, "version must be an int"),
    ],
)
def test_the_fields_of_a_namespace_have_types_that_cannot_be_mixed_up(fields, message):
    with pytest.raises(ValueError, match=message):
        Namespace(**fields)


def test_a_reset_of_one_namespace_leaves_the_others(toy):
    toy.put("ABCD", namespace="gone")
    toy.put("ABEF", namespace="gone")
    toy.put("ABCD", namespace="stays")
    toy.put("ABCD")
    stale = toy.match("ABEF", "gone")
    toy.cache.reset("gone")
    toy.check()
    assert [toy.hit("ABCD", name) for name in ("gone", "stays", None)] == [0, 4, 4]
    assert (toy.cache.kv[0].num_used, toy.cache.ssm[0].num_used) == (8, 2)
    with pytest.raises(ValueError, match="evicted since"):
        toy.cache.lock(stale)
    toy.cache.reset(None)
    assert [toy.hit("ABCD", name) for name in ("stays", None)] == [4, 0]
    toy.cache.reset("never seen")
    toy.put("ABCD", namespace="gone")
    assert toy.cache.evict(kv=64) == (8, 2)
    toy.check()


def test_a_reset_of_one_namespace_asks_only_for_its_own_leases(toy):
    lease = toy.cache.lock(toy.put("ABCD", namespace="held"))
    toy.put("ABCD", namespace="free")
    toy.cache.reset("free")
    for namespace in ("held", EVERY):
        with pytest.raises(ValueError, match="1 leases hold prefixes"):
            toy.cache.reset(namespace)
    assert toy.hit("ABCD", "held") == 4
    toy.cache.unlock(lease)
    toy.cache.reset("held")
    toy.check()
    assert toy.cache.stats().nodes == 0
