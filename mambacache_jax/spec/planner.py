"""Chooses how the states of draft nodes are had, from byte counts, and says why.

A plan counts what a round holds in device memory and what it moves in the recurrent layers. Nothing here
runs on a device.
"""

import dataclasses
import math
from collections.abc import Sequence

from mambacache_jax.config import AttentionSpec, LayerSpec, RecurrentSpec
from mambacache_jax.spec.context import StateMode

_FLOAT32 = 4
_BYTES = {"float32": 4, "bfloat16": 2}

MODES: tuple[StateMode, ...] = ("snapshot", "one_layer", "replay_exact", "replay_parallel")


@dataclasses.dataclass(frozen=True)
class Device:
    """What a choice of mode depends on.

    Attributes:
      bandwidth: bytes a second of device memory.
      vector_flops: float32 operations a second outside matrix units, that recurrences reach.
    """

    bandwidth: float
    vector_flops: float


DEVICES = {
    "cpu": Device(bandwidth=20e9, vector_flops=50e9),
    "h100": Device(bandwidth=3.35e12, vector_flops=30e12),
    "h200": Device(bandwidth=4.8e12, vector_flops=30e12),
}
"""Bandwidths are the makers'; vector rates are half of their peak, and for "cpu" of two cores: estimates."""


@dataclasses.dataclass(frozen=True)
class ModeBytes:
    """What one mode costs.

    Attributes:
      node_states: states of draft nodes that are held at once.
      node_values: conv inputs, inputs of the recurrences, K and V of all nodes, until the verdict.
      pending: inputs of accepted tokens that stay from round to round.
      moved: bytes that a round moves in the recurrent layers: states, node values and pending inputs.
    """

    node_states: int
    node_values: int
    pending: int
    moved: int

    @property
    def peak(self) -> int:
        """Bytes beside pools, weights and what any forward pass holds."""
        return self.node_states + self.node_values + self.pending


@dataclasses.dataclass(frozen=True)
class SpecPlan:
    """A choice with its reasons.

    Attributes:
      mode: the mode chosen.
      by_mode: what each mode would cost.
      decode_moved: bytes that a plain decode step moves in the recurrent layers.
      reasons: sentences, the deciding one first.
    """

    mode: StateMode
    by_mode: dict[StateMode, ModeBytes]
    decode_moved: int
    reasons: tuple[str, ...]

    def explain(self) -> str:
        """The reasons and a table of all modes."""
        lines = [f"{self.mode}: {self.reasons[0]}", *self.reasons[1:]]
        lines.append(f"{'mode':<16}{'node states':>13}{'node values':>13}{'pending':>11}{'moved/round':>13}")
        for mode, cost in self.by_mode.items():
            columns = (cost.node_states, cost.node_values, cost.pending, cost.moved)
            cells = "".join(f"{show_bytes(n):>{w}}" for n, w in zip(columns, (13, 13, 11, 13), strict=True))
            lines.append(f"{mode:<16}{cells}   {cost.moved / self.decode_moved:.2f} x decode")
        return "\n".join(lines)


def state_bytes(spec: RecurrentSpec, dtype: str = "float32") -> int:
    """Bytes of one layer's recurrent state of one position."""
    return spec.num_heads * spec.state_dim * spec.head_dim * _BYTES[dtype]


def input_bytes(spec: RecurrentSpec, dtype: str) -> int:
    """Bytes that replay keeps of a token and layer: conv inputs in `dtype`, the recurrence's as float32."""
    decays = spec.num_heads * (spec.state_dim if spec.kind == "kda" else 1)
    beta = 0 if spec.kind == "mamba2" else spec.num_heads
    numbers = spec.num_key_heads * spec.state_dim + spec.num_heads * spec.head_dim + decays + beta
    return spec.conv_channels * _BYTES[dtype] + numbers * _FLOAT32


def mode_bytes(
    mode: StateMode,
    specs: Sequence[LayerSpec],
    *,
    num_rows: int,
    num_nodes: int,
    depth: int,
    table_rows: int | None = None,
    dtype: str = "bfloat16",
    state_dtype: str = "float32",
) -> ModeBytes:
    """What a mode costs.

    Args:
      mode: how states of nodes are had.
      specs: the model's layers.
      num_rows: rows of a round.
      num_nodes: nodes of a row's tree, the bonus token included.
      depth: most nodes of a path.
      table_rows: request-table rows, which pending inputs are kept for; by default `num_rows + 1`.
      dtype: the model's.
      state_dtype: the pool's.
    """
    recurrent = [spec for spec in specs if isinstance(spec, RecurrentSpec)]
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    table_rows = num_rows + 1 if table_rows is None else table_rows
    state = sum(state_bytes(spec, state_dtype) for spec in recurrent)
    largest = max((state_bytes(spec) for spec in recurrent), default=0)
    kept = sum(input_bytes(spec, dtype) for spec in recurrent)
    conv = sum(spec.conv_channels * _BYTES[dtype] for spec in recurrent)
    kv = sum(spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * _BYTES[dtype] for spec in attention)
    nodes = num_rows * num_nodes
    pending = table_rows * depth * kept
    if mode == "snapshot":
        # Read once; every node writes its state and reads its parent's; one is committed.
        moved = num_rows * ((2 * num_nodes + 3) * state + 2 * num_nodes * conv)
        return ModeBytes(nodes * state, nodes * (conv + kv), pending, moved)
    # Each node's inputs are written once, and those accepted are read, written, and read by the next fold.
    replayed = num_rows * (num_nodes + 3 * depth) * kept
    node_states = {
        "one_layer": num_rows * (num_nodes + 1) * largest,
        "replay_exact": num_nodes * largest,
        "replay_parallel": 0,
    }[mode]
    moved = num_rows * 2 * state + replayed
    if mode == "one_layer":
        moved += nodes * 2 * state
    return ModeBytes(node_states, nodes * (kept + kv), pending, moved)


def plan_spec(
    specs: Sequence[LayerSpec],
    *,
    num_rows: int,
    num_nodes: int,
    depth: int,
    device: str | Device,
    table_rows: int | None = None,
    dtype: str = "bfloat16",
    state_dtype: str = "float32",
) -> SpecPlan:
    """Chooses between the replay modes; the others are there to compare with.

    Node by node, the work on a state hides behind reading and writing it once for as long as
    `num_nodes * ops_per_number / vector_flops <= 2 * bytes_per_number / bandwidth`; above that the form in
    matmuls is faster.

    Raises:
      ValueError: the device is unknown, the model has no recurrent layer, or a number is below 1.
    """
    if isinstance(device, str):
        if device not in DEVICES:
            raise ValueError(f"No figures for {device!r}; there are {', '.join(DEVICES)}. Pass a Device.")
        device = DEVICES[device]
    recurrent = [spec for spec in specs if isinstance(spec, RecurrentSpec)]
    if not recurrent:
        raise ValueError("The model has no recurrent layers: there are no states to plan for.")
    if min(num_rows, num_nodes, depth) < 1 or depth > num_nodes:
        raise ValueError(
            f"A plan needs num_rows >= 1 and 1 <= depth <= num_nodes, got {num_rows}, {depth}, {num_nodes}."
        )
    by_mode: dict[StateMode, ModeBytes] = {
        mode: mode_bytes(
            mode,
            specs,
            num_rows=num_rows,
            num_nodes=num_nodes,
            depth=depth,
            table_rows=table_rows,
            dtype=dtype,
            state_dtype=state_dtype,
        )
        for mode in MODES
    }
    decode = num_rows * sum(2 * state_bytes(spec, state_dtype) for spec in recurrent)
    vector_bound = min(_nodes_hidden(spec, device, state_dtype) for spec in recurrent)
    mode: StateMode = "replay_exact" if num_nodes <= vector_bound else "replay_parallel"
    compare = "<=" if mode == "replay_exact" else ">"
    reasons = (
        f"{num_nodes} nodes {compare} {vector_bound}, up to where work node by node hides behind memory.",
        f"Snapshots would hold {show_bytes(by_mode['snapshot'].node_states)} of states; replay keeps "
        f"{show_bytes(by_mode[mode].pending)} of inputs, and {show_bytes(by_mode[mode].node_values)} until "
        f"the verdict.",
    )
    return SpecPlan(mode, by_mode, decode, reasons)


def _nodes_hidden(spec: RecurrentSpec, device: Device, state_dtype: str) -> int:
    """Nodes whose work, number by number of the state, takes no longer than moving the state in and out."""
    # Decay, update and read-out are 5 operations a number; the delta rules read the state once more and 8.
    ops = 5 if spec.kind == "mamba2" else 8
    move = 2 * _BYTES[state_dtype] / device.bandwidth
    return max(1, math.floor(move * device.vector_flops / ops))


def show_bytes(count: int) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.2f} {units[0]}"
