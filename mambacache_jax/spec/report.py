"""What speculation costs, as text: by model, tree size and state mode, and the design's first outline."""

from collections.abc import Mapping, Sequence

from mambacache_jax.config import LayerSpec
from mambacache_jax.spec.planner import DEVICES, plan_spec, show_bytes
from mambacache_jax.spec.shapes import Outline


def report(
    models: Mapping[str, Sequence[LayerSpec]], *, rows: int, nodes: Sequence[int], depth: int, device: str
) -> str:
    """A plan for each model and tree size, and the outline.

    Args:
      models: layers by name.
      rows: requests in a round.
      nodes: tree sizes, the bonus token included.
      depth: most nodes of a path; less where a tree is smaller.
      device: a name of `planner.DEVICES`.

    Raises:
      ValueError: see `plan_spec`.
    """
    parts = []
    for name, specs in models.items():
        for count in nodes:
            plan = plan_spec(specs, num_rows=rows, num_nodes=count, depth=min(depth, count), device=device)
            parts.append(f"{name}, {rows} rows, {count} nodes, {device}\n{plan.explain()}")
    return "\n\n".join([*parts, _outline()])


def _outline() -> str:
    outline = Outline()
    peak = outline.one_layer + outline.node_inputs
    bandwidth = DEVICES["h100"].bandwidth
    lines = [
        f"The outline: {outline.layers} layers, {outline.rows} rows, {outline.nodes} nodes, "
        f"{outline.accepted} accepted, {outline.state_numbers} numbers a state, {outline.input_numbers} a "
        f"token's inputs, {outline.number_bytes} bytes each",
        f"  snapshots of all layers, kept         {show_bytes(outline.snapshots)}",
        f"  one layer's, used again               {show_bytes(outline.one_layer)}",
        f"  inputs of all nodes till the verdict  {show_bytes(outline.node_inputs)}",
        f"  inputs of accepted tokens, kept       {show_bytes(outline.pending)} "
        f"({outline.snapshots / outline.pending:.0f}x less than snapshots)",
        f"  peak of the delayed update            {show_bytes(peak)} ({outline.snapshots / peak:.1f}x less)",
        f"  a replay of its own moves             {show_bytes(outline.replay_moved)}: "
        f"{1e3 * outline.replay_moved / bandwidth:.2f} ms at an H100's bandwidth; folded into the next pass, "
        f"its inputs alone",
    ]
    return "\n".join(lines)
