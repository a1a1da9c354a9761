"""Recurrent layers of models that people run, for plans without their weights; and of the plan's origin.

Sources: the models' `config.json`. Attention layers are left out: verification costs them a K and V a node.
"""

import dataclasses

from mambacache_jax.config import RecurrentSpec


def _layers(count: int, spec: RecurrentSpec) -> tuple[RecurrentSpec, ...]:
    return (spec,) * count


NEMOTRON_H_8B = _layers(
    24,
    RecurrentSpec("mamba2", num_heads=128, state_dim=128, head_dim=64, conv_channels=10240, conv_width=4),
)
QWEN3_NEXT_80B = _layers(
    36, RecurrentSpec("gdn", num_heads=32, state_dim=128, head_dim=128, conv_channels=8192, conv_width=4)
)
KIMI_LINEAR_48B = _layers(
    20, RecurrentSpec("kda", num_heads=32, state_dim=128, head_dim=128, conv_channels=12288, conv_width=4)
)

MODELS = {
    "nemotron-h-8b": NEMOTRON_H_8B,
    "qwen3-next-80b": QWEN3_NEXT_80B,
    "kimi-linear-48b": KIMI_LINEAR_48B,
}


@dataclasses.dataclass(frozen=True)
class Outline:
    """A plan on the back of an envelope: one number for a state, one for a token's inputs.

    The defaults are those of the Chinese-language note on delayed state updates that this design started
    from (its table 9.7): 32 layers, 32 requests, 63 nodes, 4 accepted tokens, 2-byte numbers.
    """

    layers: int = 32
    rows: int = 32
    nodes: int = 63
    accepted: int = 4
    state_numbers: int = 500_000
    input_numbers: int = 10_000
    number_bytes: int = 2

    @property
    def snapshots(self) -> int:
        """A state for every node of every layer, kept."""
        return self.layers * self.one_layer

    @property
    def one_layer(self) -> int:
        """A state for every node of one layer."""
        return self.rows * self.nodes * self.state_numbers * self.number_bytes

    @property
    def node_inputs(self) -> int:
        """Inputs of all nodes of all layers: which are accepted is known only after the last layer."""
        return self.layers * self.rows * self.nodes * self.input_numbers * self.number_bytes

    @property
    def pending(self) -> int:
        """Inputs of accepted tokens of all layers and of all requests."""
        return self.layers * self.rows * self.accepted * self.input_numbers * self.number_bytes

    @property
    def replay_moved(self) -> int:
        """Bytes that a replay of its own moves: each state in and out once, however many tokens it folds."""
        return 2 * self.layers * self.rows * self.state_numbers * self.number_bytes + self.pending
