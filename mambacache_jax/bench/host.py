"""What the host core costs: each operation, growth with the tree, whole turns, beside primitive costs.

Times are processor time of this thread, the clock's own cost subtracted, so that a shared machine disturbs
them less; caches and memory are shared all the same. Compare ratios to the primitives of the same run, not
figures of two machines.
"""

import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mambacache_jax.bench.trace import Trace
from mambacache_jax.config import CacheConfig
from mambacache_jax.host import Namespace, PrefixCache, SlotAllocator, TokenBuffer

NAMESPACE = Namespace(adapter="adapter", salt="tenant")
VOCAB = 128_000

_clock = time.thread_time_ns


def run(sizes: Iterable[int], trace: Trace) -> dict[str, Any]:
    """Measures everything.

    Args:
      sizes: numbers of nodes at which eviction and memory are measured.
      trace: whose requests make the turns.

    Returns:
      Microseconds by name, `{"median": .., "p99": ..}`, and single figures by name.
    """
    parts: list[Callable[[], dict[str, Any]]] = [
        primitives,
        matches,
        inserts,
        *(lambda size=size: evictions(size) for size in sizes),
        allocators,
        lambda: turns(trace),
    ]
    results: dict[str, Any] = {}
    for part in track(parts, "measuring", transient=True):
        gc.collect()
        results |= part()
    return results


def primitives() -> dict[str, Any]:
    """What Python itself takes for the steps that everything here is made of."""
    run, known = _tokens(8192).tobytes(), {b"page": 1}
    key = run + _tokens(64).tobytes()
    rows = [_tokens(512)] * 64
    return {
        "compare 8k equal tokens": _time(lambda: key.startswith(run)),
        "look up a first page": _time(lambda: known.get(key[400:404])),
        "join 64 rows of 512 slots": _time(lambda: np.concatenate(rows)),
        "list of 8k tokens to int32": _time(lambda tokens=[7] * 8192: np.array(tokens, np.int32), 50),
    }


def matches() -> dict[str, Any]:
    """Full hits in one node, and over a chain with a checkpoint every 512 tokens; leases on them."""
    results = {}
    for length, step in ((128, 128), (1024, 1024), (8192, 8192), (32768, 32768), (8192, 512), (32768, 512)):
        cache, path = _cache(1 << 18, 1 << 11), _tokens(length)
        for _ in range(1000):
            _put(cache, _tokens(64))
        for end in range(step, length + 1, step):
            _put(cache, path[:end])
        key = TokenBuffer(np.concatenate([path, _tokens(64)]))
        match = cache.match(key, NAMESPACE)
        assert match.prefix_len == length, "the whole path should hit."
        name = f"{length:,} tokens in {length // step} node{'s' * (length > step)}"
        results[f"match, {name}"] = _time(lambda c=cache, k=key: c.match(k, NAMESPACE))
        if length // step in (1, 64):
            results[f"lock and unlock, {name}"] = _time(lambda c=cache, m=match: c.unlock(c.lock(m)))
    key = TokenBuffer(np.full(8192, VOCAB, np.int32))
    results["match, nothing known"] = _time(lambda: cache.match(key, NAMESPACE))
    return results


def inserts() -> dict[str, Any]:
    """New suffixes of a prefix of 2,048 tokens that a lease holds, each with a checkpoint."""
    results = {}
    for length, count in ((128, 200), (1024, 200), (8192, 60), (32768, 20)):
        cache, prefix = _cache(1 << 21, 1 << 11), _tokens(2048)
        lease = cache.lock(_put(cache, prefix))
        work = []
        for _ in range(count):
            buffer = TokenBuffer(np.concatenate([prefix, _tokens(length)]))
            work.append((buffer, cache.allocate_kv(length), int(cache.allocate_ssm()[0])))
        pending = iter(work)

        def insert(cache: PrefixCache = cache, lease: Any = lease, pending: Iterator[Any] = pending) -> None:
            buffer, slots, state = next(pending)
            cache.insert(
                buffer, slots, state, namespace=NAMESPACE, stamp=buffer.stamp(len(buffer)), lease=lease
            )

        results[f"insert {length:,} new tokens"] = _time(insert, count)
    return results


def evictions(size: int) -> dict[str, Any]:
    """A tree of `size` nodes of 64 tokens, in chains of four: its memory, and one eviction of either kind."""
    gc.collect()
    tracemalloc.start()
    cache = _cache(size * 80 + 256, size + 8)
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(size // 4):
        tokens = _tokens(256)
        for end in (64, 128, 192, 256):
            _put(cache, tokens[:end])
    gc.collect()
    node_bytes = (tracemalloc.get_traced_memory()[0] - before) / size
    tracemalloc.stop()
    return {
        f"evict 64 KV slots of {size:,} nodes": _time(lambda: cache.evict(kv=64), 100),
        f"evict 1 checkpoint of {size:,} nodes": _time(lambda: cache.evict(ssm=1), 100),
        f"bytes a node of {size:,} nodes": round(node_bytes),
    }


def allocators() -> dict[str, Any]:
    """Allocating and freeing 512 slots, by the size of the pool."""
    results = {}
    for size in (100_000, 1_000_000, 4_000_000):
        allocator = SlotAllocator(size)
        results[f"allocate and free 512 of {size:,} slots"] = _time(
            lambda a=allocator: a.free(a.allocate(512))
        )
    return results


def turns(trace: Trace) -> dict[str, Any]:
    """A scheduler's bookkeeping of every request of a trace, on pools that hold 30 % of it.

    A turn matches and locks, takes slots, publishes prompt and answer with a checkpoint each, and unlocks.
    """
    total = sum(len(set(request.block_ids)) for request in trace.requests) * trace.block_size
    longest = max(request.input_length + request.output_length for request in trace.requests)
    cache = _cache(max(int(total * 0.3), 3 * longest), max(64, int(0.6 * len(trace.requests))))
    spent, hits, asked = [], 0, 0
    for request in trace.requests:
        offsets = np.arange(trace.block_size, dtype=np.int64)
        ids = (np.array(request.block_ids)[:, None] * trace.block_size + offsets).ravel().astype(np.int32)
        full = TokenBuffer(ids[: request.input_length + request.output_length])
        start = _clock()
        hits += _turn(cache, full, request.input_length)
        spent.append(_clock() - start)
        asked += request.input_length
    return {
        f"turn of {len(trace.requests)} requests of the trace": _statistics(spent),
        "turns a second": round(len(spent) / (sum(spent) / 1e9)),
        "hit rate of the turns": round(hits / asked, 4),
    }


def table(results: dict[str, Any]) -> Table:
    """The results for a terminal."""
    shown = Table(title="Host core, processor time of one thread")
    shown.add_column("operation")
    shown.add_column("median", justify="right")
    shown.add_column("p99", justify="right")
    for name, value in results.items():
        if isinstance(value, dict):
            shown.add_row(name, f"{value['median']:.2f} µs", f"{value['p99']:.2f} µs")
        else:
            shown.add_row(name, f"{value:,}", "")
    return shown


def show(results: dict[str, Any]) -> None:
    """Prints the results."""
    Console().print(table(results))


def _turn(cache: PrefixCache, full: TokenBuffer, prompt_len: int) -> int:
    match = cache.match(full, NAMESPACE, max_len=prompt_len - 1)
    lease = cache.lock(match)
    slots = cache.allocate_kv(len(full) - match.prefix_len)
    start = match.prefix_len
    for end in (prompt_len, len(full)):
        state = int(cache.allocate_ssm()[0])
        own = slots[start - match.prefix_len : end - match.prefix_len]
        inserted = cache.insert(
            full, own, state, namespace=NAMESPACE, stamp=full.stamp(end), length=end, lease=lease
        )
        if not inserted.adopted:
            cache.free_ssm([state])
        cache.renew(lease, inserted, ssm=False)
        start = end
    cache.unlock(lease)
    return match.prefix_len


def _cache(kv: int, ssm: int) -> PrefixCache:
    return PrefixCache(CacheConfig(kv, ssm, track_interval=1, checkpoint_interval=0))


def _put(cache: PrefixCache, tokens: np.ndarray) -> Any:
    state = int(cache.allocate_ssm()[0])
    return cache.insert(tokens, cache.allocate_kv(len(tokens)), state, namespace=NAMESPACE)


_seeds = itertools.count()


def _tokens(count: int) -> np.ndarray:
    return np.random.default_rng(next(_seeds)).integers(1, VOCAB, count, dtype=np.int32)


def _time(call: Callable[[], object], count: int = 300) -> dict[str, float]:
    spent = []
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(count):
            start = _clock()
            call()
            spent.append(_clock() - start)
    finally:
        if collects:
            gc.enable()
    return _statistics(spent)


def _statistics(spent: list[int]) -> dict[str, float]:
    own = np.median([-_clock() + _clock() for _ in range(2001)])
    micros = np.maximum(np.array(spent) - own, 0) / 1e3
    return {
        "median": round(float(np.median(micros)), 2),
        "p99": round(float(np.percentile(micros, 99)), 2),
    }
