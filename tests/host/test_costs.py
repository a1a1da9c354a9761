"""What a call costs grows with what it must do and with nothing else; counted in steps, never in seconds.

A step is a line of the host's Python or a call of a C function from there. Counts are compared with each
other, so they hold on any machine; what NumPy does inside of one call shows in the memory that it takes.
"""

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from mambacache_jax import host
from mambacache_jax.config import CacheConfig
from mambacache_jax.host import PrefixCache, SlotAllocator, TokenBuffer, token_bytes

RUN = 64
HOST = {str(path): path.name for path in Path(host.__file__).parent.glob("*.py")}


def steps(call: Callable[..., object], *args: Any, **kwargs: Any) -> Counter[str]:
    """Lines run by module, and C functions called by name."""
    counted: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, arg: object):
        module = HOST.get(frame.f_code.co_filename)
        if module is None:
            return None
        counted[module] += event == "line"
        return trace

    def profile(frame: FrameType, event: str, arg: object) -> None:
        # Other frames are those of the collector's callbacks.
        if event == "c_call" and frame.f_code.co_filename in HOST:
            counted[getattr(arg, "__name__", "")] += 1

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        call(*args, **kwargs)
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
    return counted


def taken_bytes(call: Callable[[], object]) -> int:
    """The most memory that a call has had at one time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Counted(bytes):
    """Tokens that count how often they are compared, and how many bytes are cut out of them."""

    compared = cut = 0

    def startswith(self, *args) -> bool:
        self.compared += 1
        return super().startswith(*args)

    def __getitem__(self, index):
        part = super().__getitem__(index)
        self.cut += len(part)
        return part


def tokens_of(number: int, length: int = RUN) -> np.ndarray:
    """A prompt that shares no first token with another number's."""
    return np.arange(number * length, (number + 1) * length, dtype=np.int32)


def put(cache: PrefixCache, tokens: np.ndarray, length: int | None = None):
    length = len(tokens) if length is None else length
    return cache.insert(tokens, cache.allocate_kv(length), int(cache.allocate_ssm()[0]), length=length)


def wide(num_nodes: int, **rules) -> PrefixCache:
    """So many leaves below one root, each with a checkpoint."""
    cache = PrefixCache(CacheConfig((num_nodes + 200) * RUN, num_nodes + 200, **rules))
    for number in range(num_nodes):
        put(cache, tokens_of(number))
    return cache


def deep(depth: int, run: int = RUN) -> tuple[PrefixCache, np.ndarray]:
    """A path of so many nodes, each with a checkpoint, and its tokens."""
    cache = PrefixCache(CacheConfig((depth + 4) * run * depth, depth + 4))
    tokens = np.arange(depth * run, dtype=np.int32)
    for end in range(run, depth * run + 1, run):
        kept = cache.match_kv(tokens[: end - run]).kv_slots
        slots = np.concatenate([kept, cache.allocate_kv(run)])
        cache.insert(tokens, slots, int(cache.allocate_ssm()[0]), length=end)
    return cache, tokens


@pytest.fixture(scope="module")
def small() -> PrefixCache:
    return wide(1000)


@pytest.fixture(scope="module")
def large() -> PrefixCache:
    return wide(10000)


@pytest.mark.parametrize("look", ["match", "probe", "match_kv"])
def test_a_match_costs_the_same_in_a_tree_of_any_size(small, large, look):
    tokens = TokenBuffer(tokens_of(500))
    first, second = (steps(getattr(cache, look), tokens) for cache in (small, large))
    assert first == second
    assert first.total() < 80


def test_a_match_compares_each_node_of_its_path_once_and_cuts_a_page_for_each():
    for depth in (1, 8, 64):
        cache, tokens = deep(depth)
        buffer = TokenBuffer()
        buffer._data = key = Counted(token_bytes(tokens))
        assert cache.match(buffer).prefix_len == depth * RUN
        assert (key.compared, key.cut) == (depth, depth * 4)


def test_the_steps_of_a_match_grow_by_as_many_for_each_node():
    totals = []
    for depth in (2, 4, 8, 16):
        cache, tokens = deep(depth)
        totals.append(steps(cache.match, TokenBuffer(tokens)).total())
    per_node = (totals[1] - totals[0]) // 2
    assert [b - a for a, b in pairwise(totals)] == [
        2 * per_node,
        4 * per_node,
        8 * per_node,
    ]
    assert per_node < 20


@pytest.mark.parametrize("form", [TokenBuffer, lambda t: bytes(token_bytes(t)), lambda t: t])
def test_no_loop_runs_over_the_tokens_of_a_match(form):
    counts = []
    for length in (1024, 8192):
        cache = PrefixCache(CacheConfig(4 * length, 4))
        put(cache, np.arange(length, dtype=np.int32))
        tokens = form(np.arange(length, dtype=np.int32))
        other = np.arange(length, dtype=np.int32)
        other[length // 2] = 7
        counts.append((steps(cache.match, tokens), steps(cache.match, form(other))))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("case", ["new", "known", "half known"])
def test_no_loop_runs_over_the_tokens_of_an_insert(page_size, case):
    counts = []
    for length in (1024, 8192):
        cache = PrefixCache(CacheConfig(8 * length, 8, page_size, track_interval=256))
        tokens = np.arange(length, dtype=np.int32)
        if case != "new":
            put(cache, tokens if case == "known" else tokens[: length // 2])
        buffer, slots, slot = TokenBuffer(tokens), cache.allocate_kv(length), int(cache.allocate_ssm()[0])
        counts.append(steps(cache.insert, buffer, slots, slot, stamp=buffer.stamp(length)))
    assert counts[0] == counts[1]


def test_an_insert_hashes_nothing_that_it_has_from_the_requests_own_buffer():
    cache = PrefixCache(CacheConfig(64, 2))
    buffer = TokenBuffer(np.arange(32, dtype=np.int32))
    slots, slot = cache.allocate_kv(32), int(cache.allocate_ssm()[0])
    counted = steps(cache.insert, buffer, slots, slot, stamp=buffer.stamp(32))
    assert counted["crc32"] == 0


def test_a_growing_buffer_hashes_what_is_new_and_at_most_one_mark_again():
    counts = []
    for length in (4096, 65536):
        buffer = TokenBuffer(np.arange(length, dtype=np.int32))
        assert buffer.stamp(length).token_hash
        buffer.extend(np.arange(1024, dtype=np.int32))
        counts.append(steps(getattr, buffer.stamp(length + 1024), "token_hash"))
    assert counts[0] == counts[1]
    assert counts[0]["crc32"] == 2


def test_an_insert_from_a_lease_does_not_look_at_the_path_above():
    counts = []
    for depth in (2, 32):
        cache, tokens = deep(depth)
        lease = cache.lock(cache.match(tokens))
        longer = TokenBuffer(np.concatenate([tokens, tokens_of(9999)]))
        assert longer.data
        slots = cache.allocate_kv(RUN)
        counts.append(steps(cache.insert, longer, slots, lease=lease))
    assert counts[0] == counts[1]


def test_a_lock_climbs_to_the_first_ancestor_that_is_held():
    cache, tokens = deep(64)
    top, middle, end = (cache.match(tokens, max_len=depth * RUN) for depth in (1, 32, 64))
    one = steps(lambda: cache.unlock(cache.lock(top))).total()
    whole = steps(lambda: cache.unlock(cache.lock(end))).total()
    half = steps(lambda: cache.unlock(cache.lock(middle))).total()
    assert (whole - half) == pytest.approx(half - one, rel=0.1)
    assert whole - one < 63 * 15
    held = cache.lock(cache.match(tokens, max_len=63 * RUN))
    assert steps(lambda: cache.unlock(cache.lock(end))).total() <= one + 15
    cache.unlock(held)


@pytest.mark.parametrize("what", [{"kv": RUN}, {"ssm": 1}, {"kv": RUN, "ssm": 3}])
def test_an_eviction_costs_the_same_in_a_tree_of_any_size(what):
    counts = [steps(wide(size).evict, **what) for size in (1000, 10000)]
    assert counts[0] == counts[1]
    assert counts[0].total() < 150


def test_uses_make_the_evictions_after_them_dearer_by_one_step_each_at_most():
    totals = []
    for size in (200, 2000):
        cache = wide(size)
        for number in range(0, size, 2):
            for _ in range(3):
                cache.match(tokens_of(number))
        totals.append(sum(steps(cache.evict, kv=RUN).total() for _ in range(size)) / size)
    assert totals[1] == pytest.approx(totals[0], rel=0.01)


def test_what_leases_hold_is_passed_over_once_and_not_at_every_eviction():
    totals = []
    for size in (200, 2000):
        cache = wide(size)
        for number in range(size // 2):
            cache.lock(cache.match(tokens_of(number)), ssm=False)
        cache.evict(kv=RUN)
        totals.append(steps(cache.evict, kv=RUN).total())
    assert totals[0] == totals[1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda cache: cache.stats(),
        lambda cache: (cache.evictable_kv(), cache.evictable_ssm()),
        lambda cache: cache.allocate_kv(1),
        lambda cache: cache.allocate_ssm(),
    ],
)
def test_sums_are_kept_and_not_counted(small, large, ask):
    first, second = (steps(ask, cache) for cache in (small, large))
    assert first == second


def test_a_reset_walks_over_no_node():
    counts = [steps(wide(size).reset) for size in (200, 2000)]
    assert counts[0] == counts[1]


def test_a_split_costs_the_same_in_a_run_of_any_length():
    counts = []
    for length in (1024, 8192):
        cache = PrefixCache(CacheConfig(4 * length, 4))
        put(cache, np.arange(length, dtype=np.int32))
        slots = cache.allocate_kv(length // 2)
        tokens = TokenBuffer(np.arange(length // 2, dtype=np.int32))
        counts.append(steps(cache.insert, tokens, slots))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_allocator_costs_the_same_in_a_pool_of_any_size(page_size):
    """A mask of the pool, or a sort, would take memory of its size."""
    work, counts = [], []
    for num_slots in (4096, 4194304):
        allocator = SlotAllocator(num_slots, page_size)
        scattered = allocator.allocate(1024)[:: 2 * page_size].repeat(page_size)
        scattered = scattered + np.tile(np.arange(page_size, dtype=np.int32), len(scattered) // page_size)

        def cycle(a=allocator, s=scattered):
            a.free(a.allocate(256))
            a.free(s)
            a.allocate(len(s))

        counts.append(steps(cycle))
        work.append(taken_bytes(cycle))
    assert counts[0] == counts[1]
    assert work[1] <= work[0] + 1024
    assert work[1] < 64 * 1024


def test_events_that_are_off_run_no_line_of_their_module():
    def turn(cache):
        put(cache, tokens_of(9999))
        put(cache, tokens_of(9999)[: RUN // 2])
        cache.evict(kv=RUN, ssm=2)

    off, on = (steps(turn, wide(8, events=events)) for events in (False, True))
    assert off["events.py"] == 0
    assert off["sha256"] == off["openssl_sha256"] == 0
    assert on["events.py"] > 0


def test_a_node_of_64_tokens_takes_no_more_than_1600_bytes():
    cache = PrefixCache(CacheConfig(4000 * RUN, 4000))
    prompts = [tokens_of(number) for number in range(3000)]
    for tokens in prompts[:1000]:
        put(cache, tokens)
    tracemalloc.start()
    try:
        for tokens in prompts[1000:]:
            put(cache, tokens)
        assert tracemalloc.get_traced_memory()[0] / 2000 <= 1600
    finally:
        tracemalloc.stop()
