"""How many slots fit in a number of bytes: arithmetic alone, so that it runs without the device or weights.

A slot is as large as its arrays in `device`; `pool_bytes` here and there agree to the byte. What an
accelerator adds by padding arrays to its tiles, and what its runtime keeps for itself, is not counted.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from mambacache_jax.config import (
    AttentionSpec,
    CacheConfig,
    EngineConfig,
    LayerSpec,
    RecurrentSpec,
    StateDtype,
)
from mambacache_jax.layout import MAX_EXPORTS, context_pages

STATES_PER_REQUEST = 3
"""SSM slots of a running request: its working slot and two track slots."""

CHECKPOINT_SHARE = 0.5
"""Share of the cache's bytes that checkpoints get where no other is given.

Of fixed splits replayed on two recorded traces, with three models and three budgets each, 0.47 had the best
mean hit rate (0.512, against 0.486 at 0.29). No split is best everywhere: long conversations in tight memory
want fewer checkpoints (0.46 at 0.17, against 0.28), short prompts that branch often want more.
"""

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_INT32_BYTES = 4
_UNITS = {"B": 1} | {
    prefix + unit: base**power
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "80GiB", "500MB" (1000 each) or "4096".

    Raises:
      ValueError: it is no such size, or less than a byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    factor = units.get((found[2] or "B").lower()) if found else None
    if found is None or factor is None or (size := int(float(found[1]) * factor)) < 1:
        raise ValueError(
            f"A size is a number with one of {', '.join(_UNITS)}, such as 80GiB or 500MB; got {text!r}."
        )
    return size


def show_bytes(size: int) -> str:
    """A size for people: three digits or so and a binary unit."""
    for power, prefix in reversed([*enumerate("KMGT", start=1)]):
        if abs(size) >= 1024**power:
            return f"{size / 1024**power:.2f} {prefix}iB"
    return f"{size} B"


def slot_bytes(spec: LayerSpec, dtype: str, state_dtype: str) -> int:
    """Bytes of one slot in one layer: a token's K and V, or a position's conv window and state.

    Args:
      spec: the layer.
      dtype: the model's, that of K, V and conv windows.
      state_dtype: of recurrent states.
    """
    if isinstance(spec, AttentionSpec):
        channels = spec.head_dim + (0 if spec.values_in_keys else spec.v_head_dim)
        return spec.num_kv_heads * channels * _ITEM_BYTES[dtype]
    window = (spec.conv_width - 1) * spec.conv_channels
    state = spec.num_heads * spec.state_dim * spec.head_dim
    return window * _ITEM_BYTES[dtype] + state * _ITEM_BYTES[state_dtype]


def kv_slot_bytes(specs: Sequence[LayerSpec], dtype: str) -> int:
    """Bytes of one KV slot, a token's K and V in all attention layers."""
    return sum(slot_bytes(spec, dtype, "float32") for spec in specs if isinstance(spec, AttentionSpec))


def ssm_slot_bytes(specs: Sequence[LayerSpec], dtype: str, state_dtype: str) -> int:
    """Bytes of one SSM slot in all recurrent layers, its stamp included."""
    recurrent = [spec for spec in specs if isinstance(spec, RecurrentSpec)]
    return sum(slot_bytes(spec, dtype, state_dtype) for spec in recurrent) + _INT32_BYTES


def pool_bytes(specs: Sequence[LayerSpec], cache: CacheConfig, dtype: str) -> int:
    """Bytes of the KV and SSM pools that `device.make_pools` makes, null page and null slot included."""
    kv = (cache.num_kv_slots + cache.page_size) * kv_slot_bytes(specs, dtype)
    return kv + (cache.num_ssm_slots + 1) * ssm_slot_bytes(specs, dtype, cache.state_dtype)


def table_bytes(engine: EngineConfig, page_size: int) -> int:
    """Bytes of the request table, the null row included."""
    return (engine.max_running + 1) * (context_pages(engine.max_context, page_size) + 1) * _INT32_BYTES


def estimate_step_bytes(
    specs: Sequence[LayerSpec], engine: EngineConfig, *, dtype: str, vocab_size: int, widest: int
) -> int:
    """Estimates the temporaries of the largest step, for layers of real width.

    What a compiler sets aside differs by platform and version. For one to four layers as wide as those of
    published models, this was 0.96 to 2 times what XLA took for an H200, 1.1 to 1.6 times for a TPU v6e.

    Counted are the sampled positions' logits in float32, three times (the sampler sorts them); five arrays of
    the widest layer's channels for every token, in the model's dtype; and in float32 the states that the
    largest recurrent layer reads and writes, for rows and exports.

    Args:
      specs: the model's layers.
      engine: rows and tokens of a step.
      dtype: the model's.
      vocab_size: channels of the logits.
      widest: the most channels that a layer makes of one token (`Model.widest`).
    """
    tokens, whole = engine.token_budget + engine.max_running, 0
    if engine.deterministic:
        # One block at a time, and the logits of every token of all blocks.
        tokens, whole = engine.block_tokens, engine.token_budget + engine.max_running * engine.block_tokens
    logits = (whole + 3 * (engine.max_running + engine.max_extend_rows)) * vocab_size
    states = engine.max_running + engine.max_extend_rows * (2 + MAX_EXPORTS)
    largest = max(s.num_heads * s.state_dim * s.head_dim for s in specs if isinstance(s, RecurrentSpec))
    channels = 5 * tokens * widest * _ITEM_BYTES[dtype]
    return channels + _ITEM_BYTES["float32"] * (logits + 2 * states * largest)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What fits in a number of bytes.

    Attributes:
      cache: sizes of the pools.
      engine: rows and context that they are meant for.
      specs: the model's layers.
      dtype: of the model.
      memory_bytes: what was to be filled.
      weight_bytes: of the model's parameters.
      step_bytes: set aside for what a step computes.
    """

    cache: CacheConfig
    engine: EngineConfig
    specs: tuple[LayerSpec, ...]
    dtype: str
    memory_bytes: int
    weight_bytes: int
    step_bytes: int

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of one slot in each layer."""
        return tuple(slot_bytes(spec, self.dtype, self.cache.state_dtype) for spec in self.specs)

    @property
    def kv_slot_bytes(self) -> int:
        """Bytes of a token's K and V."""
        return kv_slot_bytes(self.specs, self.dtype)

    @property
    def ssm_slot_bytes(self) -> int:
        """Bytes of a position's states."""
        return ssm_slot_bytes(self.specs, self.dtype, self.cache.state_dtype)

    @property
    def table_bytes(self) -> int:
        """Bytes of the request table."""
        return table_bytes(self.engine, self.cache.page_size)

    @property
    def pool_bytes(self) -> int:
        """Bytes of both pools."""
        return pool_bytes(self.specs, self.cache, self.dtype)

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that is planned for; at most `memory_bytes`."""
        return self.weight_bytes + self.step_bytes + self.table_bytes + self.pool_bytes

    @property
    def num_checkpoints(self) -> int:
        """SSM slots beside those of running requests; an idle request's slots hold checkpoints as well."""
        return self.cache.num_ssm_slots - STATES_PER_REQUEST * self.engine.max_running

    @property
    def num_contexts(self) -> int:
        """Requests of `max_context` tokens whose K and V fit at the same time."""
        page = self.cache.page_size
        return self.cache.num_kv_slots // (-(-self.engine.max_context // page) * page)

    def rows(self) -> list[tuple[str, str, str]]:
        """The plan for people: (what, how much, of what it is made), in the order of the bytes."""
        page, running = self.cache.page_size, self.engine.max_running
        kv, ssm = self.kv_slot_bytes, self.ssm_slot_bytes
        kv_total, ssm_total = (self.cache.num_kv_slots + page) * kv, (self.cache.num_ssm_slots + 1) * ssm
        active, left_over = STATES_PER_REQUEST * running, self.memory_bytes - self.total_bytes
        return [
            ("a token", show_bytes(kv), f"{self._layers(AttentionSpec)}; {self.dtype}"),
            (
                "a state",
                show_bytes(ssm),
                f"{self._layers(RecurrentSpec)}; {self.cache.state_dtype}; as much as {ssm / kv:,.0f} tokens",
            ),
            ("weights", show_bytes(self.weight_bytes), self.dtype),
            ("a step's temporaries", show_bytes(self.step_bytes), "an estimate, not a measurement"),
            ("request table", show_bytes(self.table_bytes), f"{running} rows of {self.engine.max_context:,}"),
            (
                "running requests",
                show_bytes(active * ssm),
                f"{active} SSM slots: {STATES_PER_REQUEST} for each of {running}",
            ),
            (
                "checkpoints",
                show_bytes(ssm_total - active * ssm),
                f"{self.num_checkpoints:,} SSM slots and the null slot",
            ),
            (
                "KV",
                show_bytes(kv_total),
                f"{self.cache.num_kv_slots:,} slots in pages of {page}, and the null page",
            ),
            (
                "left over",
                show_bytes(left_over),
                "less than a page" if left_over < page * kv else "no more KV slots fit int32",
            ),
            (
                "fits",
                f"{self.cache.num_kv_slots:,} tokens",
                f"{self.num_contexts:,} full contexts of {self.engine.max_context:,}; "
                f"a checkpoint for each {self.cache.num_kv_slots / self.num_checkpoints:,.0f} tokens",
            ),
        ]

    def _layers(self, kind: type[AttentionSpec] | type[RecurrentSpec]) -> str:
        """The layers of a kind: how many, what they are called, and the bytes of a slot in each."""
        counts: collections.Counter[tuple[str, int]] = collections.Counter()
        for spec, size in zip(self.specs, self.layer_bytes, strict=True):
            if isinstance(spec, kind):
                counts["attention" if isinstance(spec, AttentionSpec) else spec.kind, size] += 1
        return ", ".join(f"{count} {name} of {show_bytes(size)}" for (name, size), count in counts.items())

    def figures(self) -> dict[str, Any]:
        """Every number of the plan, for JSON."""
        names = ("layer_bytes", "kv_slot_bytes", "ssm_slot_bytes", "table_bytes", "pool_bytes", "total_bytes")
        derived = {name: getattr(self, name) for name in (*names, "num_checkpoints", "num_contexts")}
        return dataclasses.asdict(self) | derived

    def explain(self) -> str:
        """The plan as lines of text."""
        rows = self.rows()
        first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = [f"{what:<{first}}  {much:>{second}}  {of}" for what, much, of in rows]
        return "\n".join([f"Plan for {show_bytes(self.memory_bytes)}", *lines])


def plan_cache(
    specs: Sequence[LayerSpec],
    memory_bytes: int,
    *,
    dtype: str,
    engine: EngineConfig | None = None,
    weight_bytes: int = 0,
    step_bytes: int = 0,
    page_size: int = 1,
    state_dtype: StateDtype = "float32",
    checkpoint_share: float = CHECKPOINT_SHARE,
) -> Plan:
    """Sizes the pools so that they fill what the weights and a step leave of the memory.

    First come the request table, the null page and slot, and `STATES_PER_REQUEST` SSM slots for each running
    request. `checkpoint_share` of what is left goes to checkpoints, and the rest to KV, in whole pages; but
    there is always room for one checkpoint and for one full context.

    Args:
      specs: the model's layers, of both kinds.
      memory_bytes: what may be used of one device.
      dtype: the model's.
      engine: rows and context; by default as `EngineConfig()`.
      weight_bytes: of the model's parameters.
      step_bytes: to set aside for temporaries, as from `estimate_step_bytes`.
      page_size: KV slots a page.
      state_dtype: of recurrent states.
      checkpoint_share: see `CHECKPOINT_SHARE`; in `(0, 1)`.

    Raises:
      ValueError: a layer of one kind is missing, a share or size is out of range, or nothing fits: the
        message lists what is needed and how much is missing.
    """
    engine = engine or EngineConfig()
    for name, given in (("dtype", dtype), ("state_dtype", state_dtype)):
        if given not in _ITEM_BYTES:
            raise ValueError(f"{name} must be 'float32' or 'bfloat16', got {given!r}.")
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}.")
    if not 0 < checkpoint_share < 1:
        raise ValueError(f"checkpoint_share must be between 0 and 1, got {checkpoint_share}.")
    kinds = {type(spec) for spec in specs}
    if kinds != {AttentionSpec, RecurrentSpec}:
        raise ValueError("A plan splits memory between attention and recurrent layers; one kind is missing.")
    page_bytes = page_size * kv_slot_bytes(specs, dtype)
    state_bytes = ssm_slot_bytes(specs, dtype, state_dtype)
    running = STATES_PER_REQUEST * engine.max_running
    least_pages = math.ceil(engine.max_context / page_size)
    needs = {
        "weights": weight_bytes,
        "a step's temporaries": step_bytes,
        "the request table": table_bytes(engine, page_size),
        f"states of {engine.max_running} running requests": (running + 1) * state_bytes,
        "one checkpoint": state_bytes,
        f"K and V of one context of {engine.max_context} tokens": (least_pages + 1) * page_bytes,
    }
    if (missing := sum(needs.values()) - memory_bytes) > 0:
        way_out = "Give more memory, or fewer running requests, a shorter context or states in bfloat16."
        if weight_bytes >= memory_bytes:
            way_out = "The weights alone do not fit."
        listed = ", ".join(f"{what} {show_bytes(size)}" for what, size in needs.items() if size)
        raise ValueError(
            f"{show_bytes(memory_bytes)} is {show_bytes(missing)} too little. Needed are: {listed}. {way_out}"
        )
    split = memory_bytes - sum(needs.values()) + state_bytes + least_pages * page_bytes
    most = (split - least_pages * page_bytes) // state_bytes
    checkpoints = max(1, min(most, int(split * checkpoint_share) // state_bytes))
    pages = (split - checkpoints * state_bytes) // page_bytes
    # Slots are int32 in plans and in the tree.
    pages = min(pages, (2**31 - 1) // page_size - 1)
    return Plan(
        cache=CacheConfig(
            num_kv_slots=pages * page_size,
            num_ssm_slots=running + checkpoints,
            page_size=page_size,
            track_interval=_whole_pages(CacheConfig.track_interval, page_size),
            checkpoint_interval=_whole_pages(CacheConfig.checkpoint_interval, page_size),
            state_dtype=state_dtype,
        ),
        engine=engine,
        specs=tuple(specs),
        dtype=dtype,
        memory_bytes=memory_bytes,
        weight_bytes=weight_bytes,
        step_bytes=step_bytes,
    )


def _whole_pages(tokens: int, page_size: int) -> int:
    """`tokens` rounded up to whole pages."""
    return -(-tokens // page_size) * page_size
