"""A cache comes back from a file as it was, and a file that is damaged is refused whole."""

import json

import numpy as np
import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.host import Namespace, PrefixCache
from mambacache_jax.host.storage import FORMAT

from .router import Router

NAMESPACES = [None, "tenant", b"\xff\x00", -7, Namespace("lora", "salt", 3), Namespace(2)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tree.npz"


def bare(cache, shard=0):
    """A tree as drawn, without its leases, which are not saved."""

    def strip(node):
        kept = {name: value for name, value in node.items() if name not in ("held", "ssm_lock", "children")}
        return kept | {"children": [strip(child) for child in node["children"]]}

    return sorted(map(strip, cache.to_dict(shard=shard)["roots"]), key=lambda root: repr(root["namespace"]))


def fill(toy):
    """Nodes that were cut, a tombstone, and an order of use that is not that of insertion."""
    for prompt in ("ABCDEFGH", "ABCDXYZW", "ABCD", "MNOP"):
        toy.put(prompt)
    toy.put("QRST", checkpoint=False)
    toy.hit("ABCDEFGH")
    toy.hit("MNOP")
    toy.hit("ABCD")


def edit(path, change):
    """Writes the file anew after `change(arrays, header)`."""
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(arrays["header"].tobytes())
    change(arrays, header)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **arrays)


def test_prefixes_slots_and_checkpoints_come_back(make_toy, page_size, path):
    toy = make_toy(page_size=page_size)
    fill(toy)
    toy.cache.save(path)
    loaded = PrefixCache.load(path)
    assert bare(loaded) == bare(toy.cache)
    assert loaded.config == toy.cache.config
    loaded.check_invariants()
    match = loaded.match(toy.tokens("ABCDXYZW"))
    assert (match.prefix_len, match.checkpoint_slot) == (8, toy.match("ABCDXYZW").checkpoint_slot)


def test_a_loaded_cache_picks_the_victims_that_the_saved_one_would(make_toy, page_size, path):
    toy = make_toy(page_size=page_size)
    fill(toy)
    toy.cache.save(path)
    loaded = PrefixCache.load(path)
    while toy.cache.stats().nodes:
        for cache in (toy.cache, loaded):
            cache.evict(ssm=1)
        assert bare(loaded) == bare(toy.cache)
        assert loaded.evict(kv=1) == toy.cache.evict(kv=1)
        assert bare(loaded) == bare(toy.cache)
        loaded.check_invariants()
    assert loaded.kv[0].num_used == loaded.ssm[0].num_used == 0


def test_what_is_used_after_loading_is_the_most_recent(toy, path):
    fill(toy)
    toy.cache.save(path)
    loaded = PrefixCache.load(path)
    loaded.match(toy.tokens("ABCDXYZW"))
    loaded.insert([1, 2], loaded.allocate_kv(2))
    loaded.evict(kv=loaded.stats().kv_cached - 10)
    assert loaded.probe(toy.tokens("ABCDXYZW")).prefix_len == 8
    loaded.check_invariants()


def test_namespaces_of_every_kind_come_back(toy, path):
    for namespace in NAMESPACES:
        toy.put("ABCD", namespace=namespace)
    toy.cache.save(path)
    loaded = PrefixCache.load(path)
    assert [loaded.match(toy.tokens("ABCD"), namespace).prefix_len for namespace in NAMESPACES] == [4] * 6
    assert loaded.probe(toy.tokens("ABCD"), "\xff\x00").kv_len == 0
    loaded.check_invariants()


def test_every_shard_comes_back(path):
    cache = PrefixCache(CacheConfig(8, 2, num_shards=3))
    for shard in (0, 2):
        cache.insert([1, 2, shard], cache.allocate_kv(3, shard=shard), shard=shard)
    cache.save(path)
    loaded = PrefixCache.load(path)
    assert [bare(loaded, shard) for shard in range(3)] == [bare(cache, shard) for shard in range(3)]
    for shard in range(3):
        loaded.check_invariants(shard=shard)


def test_an_empty_cache_comes_back_empty(toy, path):
    toy.cache.save(path)
    assert PrefixCache.load(path).stats().nodes == 0


def test_leases_pins_counts_and_requests_slots_are_not_saved(toy, path):
    inserted = toy.put("ABCD")
    toy.cache.lock(inserted)
    toy.cache.pin(inserted)
    toy.compute_kv("XY")
    toy.hit("ABCD")
    toy.cache.save(path)
    loaded = PrefixCache.load(path)
    stats = loaded.stats()
    assert (stats.leases, stats.pins, stats.matches, stats.kv_used) == (0, 0, 0, 4)
    assert loaded.evict(kv=64) == (4, 1)
    loaded.check_invariants()


def test_saving_changes_nothing(toy, path):
    fill(toy)
    before = toy.everything()
    toy.cache.save(path)
    assert toy.everything() == before
    toy.check()


def test_a_loaded_cache_tells_its_router_what_it_has(make_toy, path):
    toy = make_toy(events=True)
    fill(toy)
    known, told = Router(1), Router(1)
    known.replay(toy.cache.events())
    toy.cache.save(path)
    loaded = PrefixCache.load(path)
    told.replay(loaded.events())
    assert (told.blocks, told.checkpoints) == (known.blocks, known.checkpoints)
    loaded.check_invariants()


def test_the_pools_may_have_grown_and_the_rules_changed(toy, path):
    fill(toy)
    toy.cache.save(path)
    loaded = PrefixCache.load(path, CacheConfig(128, 16, max_checkpoints_per_path=1, events=True))
    assert bare(loaded) == bare(toy.cache)
    assert len(loaded.allocate_kv(100)) == 100
    small = CacheConfig(8, 16)
    with pytest.raises(ValueError, match=r"Slot \d+ is out of range"):
        PrefixCache.load(path, small)
    with pytest.raises(ValueError, match=r"Slot \d+ is out of range"):
        PrefixCache.load(path, CacheConfig(64, 2))


def test_pages_and_shards_must_be_the_same(toy, path):
    toy.put("ABCD")
    toy.cache.save(path)
    with pytest.raises(ValueError, match="Pages of 1 tokens were saved, and the cache has pages of 4"):
        PrefixCache.load(path, CacheConfig(64, 8, 4, track_interval=256))
    with pytest.raises(ValueError, match="1 shards were saved, and the cache has 2"):
        PrefixCache.load(path, CacheConfig(64, 8, num_shards=2))


def test_a_file_appears_whole_or_not_at_all(toy, path, monkeypatch):
    toy.put("ABCD")
    toy.cache.save(path)
    written = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space left"):
        toy.cache.save(path)
    assert path.read_bytes() == written
    assert [entry.name for entry in path.parent.iterdir()] == ["tree.npz"]


def test_a_file_that_is_not_there_is_said_to_be_missing(path):
    with pytest.raises(FileNotFoundError):
        PrefixCache.load(path)


@pytest.mark.parametrize("content", [b"", b"PK", b"no file of ours", bytes(range(256))])
def test_another_file_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="holds no saved prefix cache"):
        PrefixCache.load(path)


def test_an_array_or_an_archive_of_others_is_refused(path):
    with path.open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(ValueError, match="holds no saved prefix cache"):
        PrefixCache.load(path)
    with path.open("wb") as file:
        np.savez(file, header=np.arange(3))
    with pytest.raises(ValueError, match="holds no saved prefix cache"):
        PrefixCache.load(path)
    with path.open("wb") as file:
        np.savez(file, header=np.array([{}], object))
    with pytest.raises(ValueError, match="holds no saved prefix cache"):
        PrefixCache.load(path)


def test_a_file_that_was_cut_short_or_changed_anywhere_loads_the_same_or_not_at_all(make_toy, path):
    toy = make_toy(num_kv_slots=8, num_ssm_slots=2)
    toy.put("ABC")
    toy.put("ABD", namespace="a", checkpoint=False)
    toy.cache.save(path)
    whole, tree = path.read_bytes(), bare(toy.cache)
    for size in range(0, len(whole), 17):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="holds no saved prefix cache"):
            PrefixCache.load(path)
    for at in range(0, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            loaded = PrefixCache.load(path)
        except ValueError:
            continue
        assert bare(loaded) == tree


def test_another_format_is_named(toy, path):
    toy.cache.save(path)
    edit(path, lambda arrays, header: header.update(format="mambacache-tree-9"))
    with pytest.raises(ValueError, match=f"its format is 'mambacache-tree-9', not '{FORMAT}'"):
        PrefixCache.load(path)


def put(name, index, value):
    """A change of one number of a column."""

    def change(arrays, header):
        arrays[f"0/{name}"] = arrays[f"0/{name}"].copy()
        arrays[f"0/{name}"][index] = value

    return change


def cast(name, dtype):
    def change(arrays, header):
        arrays[f"0/{name}"] = arrays[f"0/{name}"].astype(dtype)

    return change


def both(first, second):
    def change(arrays, header):
        first(arrays, header)
        second(arrays, header)

    return change


def shorten(name):
    def change(arrays, header):
        arrays[f"0/{name}"] = arrays[f"0/{name}"][:-1]

    return change


# Rows: AB (a tombstone), CD and XY below it, MN in another namespace.
WRONG = {
    "a parent that comes later": (put("parent", 1, 2), "before its parent"),
    "a parent that is no row": (put("parent", 1, -2), "before its parent"),
    "a namespace that there is not": (put("namespace", 3, 2), "list index out of range"),
    "another namespace than the parent's": (put("namespace", 1, 1), "another namespace than its parent"),
    "an empty node": (both(put("count", 0, 0), put("count", 1, 4)), "has no tokens"),
    "a node that is too long": (put("count", 3, 3), "tokens are needed"),
    "a token too few": (shorten("tokens"), "tokens are needed"),
    "a slot too few": (shorten("kv_slots"), "KV slots are needed"),
    "a row too few": (shorten("stamp"), r"columns have \[3, 4\] rows"),
    "a negative token": (put("tokens", 0, -1), "a token is negative"),
    "siblings that begin alike": (put("tokens", 4, 67), "contradicts itself"),
    "a KV slot twice": (put("kv_slots", 1, 3), "Slot 3 is named twice"),
    "the null slot": (put("kv_slots", 1, 0), "Slot 0 is a null slot"),
    "a KV slot out of range": (put("kv_slots", 1, 65), "Slot 65 is out of range"),
    "a negative KV slot": (put("kv_slots", 1, -1), "Slot -1 is out of range"),
    "a checkpoint slot twice": (put("slot", 2, 1), "Slot 1 is named twice"),
    "a checkpoint slot out of range": (put("slot", 1, 9), "Slot 9 is out of range"),
    "a negative checkpoint slot": (put("slot", 1, -1), "Slot -1 is out of range"),
    "slots that are no integers": (cast("kv_slots", np.float64), r"its kv_slots are float64 of shape \(8,\)"),
    "numbers that are no integers": (cast("count", np.float64), "its count are float64"),
    "namespaces that are no integers": (cast("namespace", np.float64), "its namespace are float64"),
    "pages that do not fit": (lambda a, h: h["config"].update(page_size=0), "page_size must be at least 1"),
    "an unknown rule": (lambda a, h: h["config"].update(colour="red"), "unexpected keyword"),
    "a rule too few": (lambda a, h: h["config"].pop("num_kv_slots"), "missing 1 required"),
    "a namespace of no kind": (lambda a, h: h["namespaces"].__setitem__(1, {}), "holds no saved"),
    "a namespace that is a bool": (
        lambda a, h: h["namespaces"].__setitem__(1, {"plain": True}),
        "A namespace is None, a str",
    ),
    "a namespace that is a list": (
        lambda a, h: h["namespaces"].__setitem__(1, {"plain": []}),
        "A namespace is None, a str",
    ),
    "bytes that are no hex": (lambda a, h: h["namespaces"].__setitem__(1, {"bytes": "x"}), "holds no saved"),
    "one namespace twice": (lambda a, h: h["namespaces"].__setitem__(1, {"plain": None}), ""),
    "rows in two dimensions": (
        lambda a, h: a.update({"0/rank": a["0/rank"][None]}),
        r"its rank are int64 of shape \(1, 4\)",
    ),
    "a column too few": (lambda a, h: a.pop("0/rank"), "0/rank is not a file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_contradicts_itself_is_refused(toy, path, case):
    toy.put("MN", namespace="tenant", checkpoint=False)
    toy.put("ABCD")
    toy.put("ABXY")
    toy.cache.save(path)
    edit(path, lambda arrays, header: None)
    assert bare(PrefixCache.load(path)) == bare(toy.cache)
    change, message = WRONG[case]
    edit(path, change)
    if message:
        with pytest.raises(ValueError, match=message):
            PrefixCache.load(path)
    else:
        PrefixCache.load(path).check_invariants()
