"""Events tell a router which blocks and checkpoints exist, in the shape that vLLM and SGLang publish."""

import hashlib
import struct

import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.host import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CheckpointRemoved,
    CheckpointStored,
    Namespace,
    PrefixCache,
    as_wire,
)
from mambacache_jax.host.events import MEDIUM, EventLog

from .router import Router, block_hash


@pytest.fixture
def toy(make_toy):
    return make_toy(events=True)


@pytest.fixture
def paged(make_toy):
    return make_toy(events=True, page_size=4)


def hashes(prompt, page_size=1, namespace=None):
    """Of every block of a prompt."""
    tokens = tuple(map(ord, prompt))
    ends = range(page_size, len(tokens) + 1, page_size)
    return [block_hash(namespace, tokens[:end], page_size) for end in ends]


def test_events_have_the_fields_of_the_serving_stacks_in_their_order():
    assert BlockStored._fields == (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    )
    assert BlockRemoved._fields == ("block_hashes", "medium")
    assert AllBlocksCleared._fields == ()
    assert CheckpointStored._fields == CheckpointRemoved._fields == ("block_hash", "position", "medium")
    assert MEDIUM == "GPU"


def test_on_the_wire_an_event_is_its_name_and_its_fields():
    stored = BlockStored([7, 8], 6, [1, 2, 3, 4], 2, None, "GPU", "lora")
    assert as_wire(stored) == ["BlockStored", [7, 8], 6, [1, 2, 3, 4], 2, None, "GPU", "lora"]
    assert as_wire(BlockRemoved([7], "GPU")) == ["BlockRemoved", [7], "GPU"]
    assert as_wire(AllBlocksCleared()) == ["AllBlocksCleared"]
    assert as_wire(CheckpointStored(7, 4, "GPU")) == ["CheckpointStored", 7, 4, "GPU"]


def test_a_block_hash_is_a_chain_of_sha256_that_anyone_can_compute(paged):
    paged.put("ABCDEFGH")
    (stored, _) = paged.cache.events()
    first = hashlib.sha256(struct.pack("<4i", *b"ABCD")).digest()[:8]
    second = hashlib.sha256(first + struct.pack("<4i", *b"EFGH")).digest()[:8]
    assert stored.block_hashes == [
        int.from_bytes(first, "big", signed=True),
        int.from_bytes(second, "big", signed=True),
    ]
    # Routers keep these numbers, so they must stay what they are.
    assert stored.block_hashes == [5600894200025076866, 3776191782168679139]


@pytest.mark.parametrize("namespace", ["tenant", b"tenant", 7, Namespace("lora", "salt", 2)])
def test_the_first_block_of_a_namespace_is_chained_to_its_name(toy, namespace):
    toy.put("A", namespace=namespace)
    seed = hashlib.sha256(repr(namespace).encode()).digest()[:8]
    expected = hashlib.sha256(seed + struct.pack("<i", ord("A"))).digest()[:8]
    assert toy.cache.events()[0].block_hashes == [int.from_bytes(expected, "big", signed=True)]


def test_a_new_leaf_is_stored_after_its_parent_and_a_split_is_nobodys_business(paged):
    paged.put("ABCDEFGH")
    paged.put("ABCDEFGHIJKL", checkpoint=False)
    paged.put("ABCDWXYZ", checkpoint=False)
    blocks = hashes("ABCDEFGHIJKL", 4)
    (fork,) = hashes("ABCDWXYZ", 4)[1:]
    assert paged.cache.events() == [
        BlockStored(blocks[:2], None, list(b"ABCDEFGH"), 4, None, "GPU", None),
        CheckpointStored(blocks[1], 8, "GPU"),
        BlockStored(blocks[2:], blocks[1], list(b"IJKL"), 4, None, "GPU", None),
        BlockStored([fork], blocks[0], list(b"WXYZ"), 4, None, "GPU", None),
    ]
    paged.check()


@pytest.mark.parametrize(
    ("namespace", "lora_id", "lora_name"),
    [
        (None, None, None),
        ("tenant", None, None),
        (7, None, None),
        (Namespace(), None, None),
        (Namespace(7), 7, None),
        (Namespace("lora"), None, "lora"),
        (Namespace(salt="lora"), None, None),
    ],
)
def test_the_adapter_of_the_namespace_is_told(toy, namespace, lora_id, lora_name):
    toy.put("AB", namespace=namespace, checkpoint=False)
    (stored,) = toy.cache.events()
    assert (stored.lora_id, stored.lora_name) == (lora_id, lora_name)


def test_what_is_there_already_is_not_told_again(toy):
    toy.put("ABCD")
    toy.cache.events()
    toy.put("ABCD")
    toy.put("AB", checkpoint=False)
    toy.hit("ABCD")
    assert toy.cache.events() == []


def test_evicting_a_checkpoint_removes_no_block_and_evicting_a_leaf_removes_both(toy):
    toy.put("AB")
    toy.put("ABCD")
    toy.cache.events()
    blocks = hashes("ABCD")
    toy.cache.evict(ssm=1)
    assert toy.cache.events() == [CheckpointRemoved(blocks[1], 2, "GPU")]
    toy.cache.evict(kv=1)
    assert toy.cache.events() == [
        CheckpointRemoved(blocks[3], 4, "GPU"),
        BlockRemoved(blocks[2:], "GPU"),
    ]
    toy.insert("AB", [], toy.compute_state("AB"), start=2)
    assert toy.cache.events() == [CheckpointStored(blocks[1], 2, "GPU")]
    toy.check()


def test_a_checkpoint_dropped_for_the_cap_is_told(make_toy):
    toy = make_toy(events=True, max_checkpoints_per_path=1)
    toy.put("A")
    toy.put("AB")
    first, second = hashes("AB")
    assert toy.cache.events()[1:] == [
        CheckpointStored(first, 1, "GPU"),
        BlockStored([second], first, [66], 1, None, "GPU", None),
        CheckpointStored(second, 2, "GPU"),
        CheckpointRemoved(first, 1, "GPU"),
    ]


def test_a_reset_clears_all_and_one_of_a_namespace_removes_its_blocks(toy):
    toy.put("AB", namespace="tenant")
    toy.put("AC", namespace="tenant")
    toy.put("AB")
    router = Router(1)
    router.replay(toy.cache.events())
    toy.cache.reset("tenant")
    router.replay(toy.cache.events())
    assert set(router.blocks) == set(hashes("AB"))
    assert router.checkpoints == {hashes("AB")[1]: 2}
    toy.cache.reset()
    assert toy.cache.events() == [AllBlocksCleared()]
    toy.put("AB", checkpoint=False)
    assert len(toy.cache.events()) == 1
    toy.check()


def test_a_router_that_did_not_listen_is_told_the_whole_tree(make_toy):
    toy = make_toy(events=True)
    log = toy.cache._shards[0].log
    assert isinstance(log, EventLog)
    log._limit = 4
    router = Router(1)
    for prompt in ("AB", "CD"):
        toy.put(prompt)
    router.replay(toy.cache.events())
    for prompt in ("ABCD", "ABXY", "EF"):
        toy.put(prompt)
    toy.cache.evict(kv=2)
    events = toy.cache.events()
    assert events[0] == AllBlocksCleared()
    assert not any(isinstance(event, BlockRemoved) for event in events)
    router.replay(events)
    assert set(router.blocks) == {*hashes("ABCD"), *hashes("ABXY"), *hashes("EF")}
    assert set(router.checkpoints) == {hashes(p)[-1] for p in ("AB", "ABCD", "ABXY", "EF")}
    toy.put("GH")
    events = toy.cache.events()
    assert [type(event) for event in events] == [BlockStored, CheckpointStored]
    toy.check()


def test_as_many_events_as_the_limit_are_kept_and_one_more_is_not(toy):
    toy.cache._shards[0].log._limit = 4
    toy.put("AB")
    toy.put("CD")
    assert [type(event) for event in toy.cache.events()] == [BlockStored, CheckpointStored] * 2
    toy.put("EF")
    toy.put("GH")
    toy.put("IJ", checkpoint=False)
    assert toy.cache.events()[0] == AllBlocksCleared()
    assert toy.cache.events() == []


def test_the_events_handed_out_are_the_callers(toy):
    toy.put("AB")
    events = toy.cache.events()
    events[0].block_hashes.clear()
    events.clear()
    toy.put("ABCD", checkpoint=False)
    assert toy.cache.events()[0].parent_block_hash == hashes("AB")[1]
    toy.check()


def test_each_shard_tells_its_own():
    cache = PrefixCache(CacheConfig(8, 2, num_shards=2, events=True))
    cache.insert([1], cache.allocate_kv(1, shard=1), shard=1)
    assert cache.events(shard=0) == []
    assert len(cache.events(shard=1)) == 1


def test_events_that_are_off_cost_nothing_and_say_so(make_toy):
    toy = make_toy()
    toy.put("ABCD")
    assert toy.cache._shards[0].log is None
    with pytest.raises(ValueError, match=r"Events are off: set CacheConfig\.events=True"):
        toy.cache.events()


def test_the_recount_sees_hashes_that_are_not_the_trees(toy):
    node = toy.put("AB").node
    toy.cache._shards[0].log._hashes[node].append(1)
    with pytest.raises(AssertionError, match="block hashes"):
        toy.check()
