"""Rounds of speculation on a small hybrid model, beside plain decoding through the same program."""

import dataclasses
import functools

import jax
import numpy as np
from flax import nnx

from mambacache_jax.config import CacheConfig, EngineConfig, RecurrentSpec
from mambacache_jax.device import make_pools
from mambacache_jax.engine.sampler import sample
from mambacache_jax.host.plan import pack_sampling
from mambacache_jax.models.tiny.network import TinyConfig, TinyLM
from mambacache_jax.models.tiny.weights import as_model
from mambacache_jax.models.verify import verify
from mambacache_jax.spec import DraftTree, choose, cut, walk
from mambacache_jax.spec.replay import ReplayPlan, fold, make_pending, shorten

ROWS, NODES, DEPTH, PAGE, INTERVAL = 3, 8, 4, 4, 8
START = (6, 9, 0)
WORKING, TRACK = (1, 2, 3), (4, 5, 6)
MODES = ("snapshot", "one_layer", "replay_exact", "replay_parallel")


@functools.cache
def small_model():
    config = TinyConfig(
        layers=("mamba2", "attention", "gdn", "kda"),
        size=32,
        mlp_size=48,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mamba_heads=2,
        mamba_head_dim=16,
        mamba_state_dim=8,
        mamba_groups=1,
        delta_key_heads=1,
        delta_heads=2,
        delta_dim=16,
    )
    network = TinyLM(config, nnx.Rngs(3))
    graphdef, params = nnx.split(network)
    return as_model(network, params, graphdef)


def recurrent_specs():
    return [spec for spec in small_model().specs if isinstance(spec, RecurrentSpec)]


@functools.cache
def start():
    """Host pools in mid-decoding: random states, windows, K and V, and NaN where nobody reads.

    Row 2 is fresh: its first round reads the null slot.
    """
    model, rng = small_model(), np.random.default_rng(0)
    cache = CacheConfig(num_kv_slots=3 * 64 * PAGE, num_ssm_slots=8, page_size=PAGE, track_interval=INTERVAL)
    pools = make_pools(model.specs, cache, EngineConfig(max_running=ROWS, max_context=64), model.dtype)
    pools = jax.tree.map(np.array, pools)
    # Pages of a row lie scattered: page `i` of row `r` is `1 + r + 3 i`.
    pages = 1 + np.arange(ROWS)[:, None] + 3 * np.arange(pools.table.pages.shape[1])[None, :]
    pools.table.pages[1:] = np.where(pages <= cache.num_kv_slots // PAGE, pages, 0)
    pools.table.last_token[1:] = 90, 13, 40
    for leaf in (*pools.kv.k, *pools.kv.v, *pools.ssm.conv, *pools.ssm.state):
        leaf[...] = np.nan
    for r, length in enumerate(START):
        at = np.arange(length)
        slots = pools.table.pages[r + 1][at // PAGE] * PAGE + at % PAGE
        for leaf in (*pools.kv.k, *pools.kv.v):
            leaf[slots] = rng.standard_normal((length, *leaf.shape[1:]))
        for leaf in (*pools.ssm.conv, *pools.ssm.state) if length else ():
            leaf[WORKING[r]] = 0.5 * rng.standard_normal(leaf.shape[1:])
        pools.ssm.position[WORKING[r]] = length
    return pools


@functools.partial(jax.jit, static_argnames=("mode", "interval"), donate_argnames=("pools", "pending"))
def round_program(params, pools, pending, plan, tree, sampling, stops, limit, *, mode, interval):
    def judge(tree, logits, kv_len):
        chosen = choose(sample, logits, sampling, tree, kv_len, DEPTH)
        return cut(walk(tree, chosen, DEPTH), stops, limit)

    return verify(
        small_model(),
        params,
        pools,
        pending,
        plan,
        tree,
        judge,
        page_size=PAGE,
        depth=DEPTH,
        mode=mode,
        track_interval=interval,
    )


@functools.partial(jax.jit, static_argnames="interval", donate_argnames=("pools", "pending"))
def fold_program(pools, pending, plan, *, interval):
    return fold(recurrent_specs(), pools, pending, plan, interval)


shorten_program = jax.jit(shorten, donate_argnames="pending")


@dataclasses.dataclass
class Run:
    """Requests that decode side by side.

    Attributes:
      mode: state mode of each round.
      temperature: of all rows.
      stops: tokens that end a text.
      limit: tokens of a text.
      program: of a round.
      texts: tokens of each row so far, from the first sampled one on.
      stopped: rows whose text has ended.
      accepted: nodes accepted, by round and row.
    """

    mode: str = "replay_exact"
    temperature: float = 0.0
    stops: tuple[int, int] = (-1, -1)
    limit: int = 10**6
    program: object = round_program

    def __post_init__(self):
        pools = start()
        self.pools = jax.device_put(pools)
        self.pending = make_pending(recurrent_specs(), ROWS + 1, DEPTH, "float32")
        self.texts = [[int(t)] for t in pools.table.last_token[1:]]
        self.stopped = [False] * ROWS
        self.accepted = []
        self.sampling = np.stack([pack_sampling(self.temperature, 1.0, 0.0, 0, r) for r in range(ROWS)])

    def kv_len(self, r):
        return START[r] + len(self.texts[r]) - 1

    def plan(self, live):
        def column(values):
            return np.array([value if on else 0 for value, on in zip(values, live, strict=True)], np.int32)

        read = [slot if self.kv_len(r) else 0 for r, slot in enumerate(WORKING)]
        return ReplayPlan(column(range(1, ROWS + 1)), column(read), column(WORKING), column(TRACK))

    def round(self, drafts=None, live=(True,) * ROWS, order=None, mode=None):
        """One round. `drafts[r]` is `(tokens, parent)` without the bonus token; None decodes plainly."""
        tokens, parent = np.full((2, ROWS, NODES), 2**30, np.int32)
        node_len = np.zeros(ROWS, np.int32)
        for r in range(ROWS):
            of_row, of_parent = drafts[r] if drafts else ([], [])
            tokens[r, : 1 + len(of_row)] = [self.texts[r][-1], *of_row]
            parent[r, : 1 + len(of_row)] = [-1, *(p + 1 for p in of_parent)]
            node_len[r] = (1 + len(of_row)) * live[r]
        plan, tree = self.plan(live), DraftTree(tokens, parent, node_len)
        limit = np.array([self.limit - len(text) for text in self.texts], np.int32)
        fields = (plan, tree, self.sampling, np.tile(np.int32(self.stops), (ROWS, 1)), limit)
        order = np.arange(ROWS) if order is None else np.asarray(order)
        fields = jax.tree.map(lambda x: x[order], fields)
        self.pools, self.pending, out = self.program(
            small_model().params,
            self.pools,
            self.pending,
            *fields,
            mode=mode or self.mode,
            interval=INTERVAL,
        )
        runs = jax.device_get(out.accepted)
        for at, r in enumerate(order):
            self.texts[r] += runs.tokens[at, : runs.length[at]].tolist()
            self.stopped[r] |= bool(runs.stopped[at])
        self.accepted.append([int(runs.length[list(order).index(r)]) for r in range(ROWS)])
        assert np.asarray(out.kv_len).tolist() == [self.kv_len(r) if live[r] else 0 for r in order]
        return out

    def fold(self, live=(True,) * ROWS):
        self.pools, self.pending = fold_program(self.pools, self.pending, self.plan(live), interval=INTERVAL)
        assert not np.asarray(self.pending.length)[1:][list(live)].any()

    def shorten(self, lengths):
        """Keeps so many pending tokens of each row at most."""
        self.pending = shorten_program(
            self.pending, np.arange(1, ROWS + 1, dtype=np.int32), np.array(lengths, np.int32)
        )

    def decode_to(self, lengths):
        """Plain decoding of each row until its text has so many tokens."""
        while any(len(text) < n for text, n in zip(self.texts, lengths, strict=True)):
            self.round(live=tuple(len(t) < n for t, n in zip(self.texts, lengths, strict=True)))
        return self

    def state(self, slots=WORKING):
        """Stamps, windows and states of slots, and each row's K and V by position."""
        pools = jax.device_get(self.pools)
        ssm = [leaf[list(slots)] for leaf in (pools.ssm.position, *pools.ssm.conv, *pools.ssm.state)]
        kv = []
        for r in range(ROWS):
            at = np.arange(self.kv_len(r))
            place = pools.table.pages[r + 1][at // PAGE] * PAGE + at % PAGE
            kv += [leaf[place] for leaf in (*pools.kv.k, *pools.kv.v)]
        return ssm, kv


@functools.cache
def plain_texts(temperature, mode="replay_exact", length=40):
    """What plain decoding writes, of each row."""
    run = Run(mode=mode, temperature=temperature)
    return [tuple(text) for text in run.decode_to([length] * ROWS).texts]


def draft(kind, text, done, rng):
    """Drafts `(tokens, parent)` of a kind, from the text that plain decoding will write."""
    right = list(text[done : done + DEPTH - 1])
    wrong = [(token + 1) % 256 for token in right]
    chain = list(range(-1, len(right) - 1))
    if kind == "empty" or not right:
        return [], []
    if kind == "right":
        return right, chain
    if kind == "wrong":
        return wrong, chain
    if kind == "late":
        return [*right[:-1], wrong[-1]], chain
    if kind == "twins":
        # Every right token comes twice; the deeper nodes continue the second, then the first.
        tokens, parent = [right[0], right[0]], [-1, -1]
        for token in right[1:]:
            tokens += [token, token]
            parent += [len(parent) - 1, len(parent) - 2]
        return tokens[: NODES - 1], parent[: NODES - 1]
    size = int(rng.integers(0, NODES)) if kind == "changing" else NODES - 1
    if kind == "random":
        parents, depth = [], []
        for node in range(size):
            choices = [-1, *(n for n in range(node) if depth[n] < DEPTH - 2)]
            parents.append(int(rng.choice(choices)))
            depth.append(0 if parents[-1] < 0 else depth[parents[-1]] + 1)
        return rng.integers(0, 256, size).tolist(), parents
    # "tree", "changing": the right path at scattered node indices among wrong siblings.
    tokens, parent, last, depth = [], [], -1, 0
    while len(tokens) < size:
        if depth < len(right) and rng.random() < 0.5:
            tokens.append(right[depth])
            parent.append(last)
            last, depth = len(tokens) - 1, depth + 1
        else:
            behind = (
                -1 if not tokens or depth == 0 else int(rng.choice([-1, parent[last] if last >= 0 else -1]))
            )
            tokens.append(int(rng.integers(0, 256)))
            parent.append(behind)
    return tokens, parent


KINDS = ("right", "wrong", "late", "twins", "random", "empty", "tree", "changing")


def speculate(run, kinds, rounds, *, texts=None, rng=None, **options):
    """Rounds with a kind of draft each, row by row shifted."""
    texts, rng = texts or plain_texts(run.temperature), rng or np.random.default_rng(1)
    for n in range(rounds):
        drafts = [draft(kinds[(n + r) % len(kinds)], texts[r], len(run.texts[r]), rng) for r in range(ROWS)]
        run.round(drafts, **options)
    return run
