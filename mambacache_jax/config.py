"""What a user chooses, and what a model tells the cache about its layers. Standard library only."""

import dataclasses
import numbers
from typing import Literal

RecurrentKind = Literal["mamba2", "gdn", "kda"]
StateDtype = Literal["float32", "bfloat16"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What one attention layer keeps of a token: K `[num_kv_heads, head_dim]`, V `[.., v_head_dim]`.

    Attributes:
      num_kv_heads: heads of K and V.
      head_dim: channels of a key.
      v_head_dim: channels of a value.
      values_in_keys: V is the first `v_head_dim` channels of K and is not kept apart, as in latent attention.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    values_in_keys: bool = False


@dataclasses.dataclass(frozen=True)
class RecurrentSpec:
    """What one recurrent layer keeps for a position.

    Attributes:
      kind: the recurrence; see `kernels_pallas.ssm_scan`.
      num_heads: heads of the state (value heads, where keys are grouped).
      state_dim: the axis of the state that the output sums over (Mamba-2's N, the delta rules' key axis).
      head_dim: the axis of the state that the output keeps (Mamba-2's P, the delta rules' value axis).
      conv_channels: channels of the causal conv before the recurrence.
      conv_width: taps of that conv; the window holds the last `conv_width - 1` inputs.
    """

    kind: RecurrentKind
    num_heads: int
    state_dim: int
    head_dim: int
    conv_channels: int
    conv_width: int

    @property
    def num_key_heads(self) -> int:
        """Heads of q and k (Mamba-2: groups of B and C): the conv runs over both and over v."""
        return (self.conv_channels - self.num_heads * self.head_dim) // (2 * self.state_dim)


LayerSpec = AttentionSpec | RecurrentSpec


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Sizes and rules of the cache.

    Attributes:
      num_kv_slots: usable KV slots, one a token; a multiple of `page_size`. The null page comes on top.
      num_ssm_slots: usable SSM slots, one a recurrent state; the null slot comes on top.
      page_size: KV slots a page. Prefixes are shared, and checkpoints taken, at multiples of it.
      prefix_caching: False runs the same code without a tree: nothing is matched or kept.
      track_interval: a decoding request exports its state every so many tokens.
      checkpoint_interval: prefill also exports at multiples of this position; 0 leaves only the branch
        position and the prompt's end.
      state_dtype: storage of recurrent states, "float32" or "bfloat16". They are summed in float32.
      num_shards: index spaces, one for each data-parallel rank. Each has pools of the sizes above.
      max_checkpoints_per_path: checkpoints kept from a root to where one is adopted; None for no limit. Past
        it the shallowest go that no lease holds and where paths do not part.
      events: keep what changes for `PrefixCache.events`.
    """

    num_kv_slots: int
    num_ssm_slots: int
    page_size: int = 1
    prefix_caching: bool = True
    track_interval: int = 256
    checkpoint_interval: int = 2048
    state_dtype: StateDtype = "float32"
    num_shards: int = 1
    max_checkpoints_per_path: int | None = None
    events: bool = False

    def __post_init__(self) -> None:
        _require(self.page_size >= 1, f"page_size must be at least 1, got {self.page_size}.")
        _require(
            self.num_kv_slots >= self.page_size and self.num_kv_slots % self.page_size == 0,
            f"num_kv_slots must be a positive multiple of page_size={self.page_size}, "
            f"got {self.num_kv_slots}.",
        )
        _require(
            self.num_kv_slots + self.page_size < 2**31,
            f"num_kv_slots must fit int32, got {self.num_kv_slots}.",
        )
        _require(self.num_ssm_slots >= 1, f"num_ssm_slots must be at least 1, got {self.num_ssm_slots}.")
        _require(
            self.track_interval >= 1 and self.track_interval % self.page_size == 0,
            f"track_interval must be a positive multiple of page_size={self.page_size}, "
            f"got {self.track_interval}.",
        )
        _require(
            self.checkpoint_interval >= 0 and self.checkpoint_interval % self.page_size == 0,
            f"checkpoint_interval must be 0 or a multiple of page_size={self.page_size}, "
            f"got {self.checkpoint_interval}.",
        )
        _require(
            self.state_dtype in ("float32", "bfloat16"),
            f"state_dtype must be 'float32' or 'bfloat16', got {self.state_dtype!r}.",
        )
        _require(self.num_shards >= 1, f"num_shards must be at least 1, got {self.num_shards}.")
        cap = self.max_checkpoints_per_path
        _require(cap is None or cap >= 1, f"max_checkpoints_per_path must be at least 1 or None, got {cap}.")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How the engine batches.

    Attributes:
      max_running: requests in flight, one request-table row each.
      max_context: most tokens of one request, prompt and answer together.
      token_budget: most prompt tokens of one step; a multiple of `block_tokens`. In deterministic mode a
        block for each running request comes on top.
      block_tokens: prompt tokens that are computed as one block; a row's last block may be part-filled.
      max_extend_rows: most requests whose prompts advance in one step.
      max_wait_steps: steps that a request waits for another one to publish their shared prefix.
      deterministic: a token's logits depend on its own prefix alone, bit for bit; slower. Engines of another
        `block_tokens` may have other bits.
      return_logits: keep the float32 logits of every sampled position in the output.
      debug: wait for the device at each adoption and compare its stamp. A difference raises StampMismatch,
        ends every request, and empties the cache: it means that a kernel is broken.
    """

    max_running: int = 16
    max_context: int = 2048
    token_budget: int = 512
    block_tokens: int = 64
    max_extend_rows: int = 4
    max_wait_steps: int = 64
    deterministic: bool = False
    return_logits: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("max_running", "max_context", "block_tokens", "max_extend_rows"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        _require(self.max_wait_steps >= 0, f"max_wait_steps must not be negative, got {self.max_wait_steps}.")
        _require(
            self.token_budget >= self.block_tokens and self.token_budget % self.block_tokens == 0,
            f"token_budget must be a positive multiple of block_tokens={self.block_tokens}, "
            f"got {self.token_budget}.",
        )


@dataclasses.dataclass(frozen=True)
class SpecConfig:
    """How an engine speculates. The text is that of plain decoding, whatever is drafted.

    Attributes:
      draft: "ngram" looks a request's last tokens up among its own; "mtp" asks the model's own head for
        multi-token prediction.
      num_nodes: nodes of a draft tree, the token that the target sampled last included; at most 64.
      topk: branches a step ("mtp"), or occurrences to draft from ("ngram"); 1 drafts chains.
      steps: most drafts of a path.
      state_mode: how states of nodes are had, see `spec.StateMode`; "auto" lets a plan choose.
    """

    draft: Literal["mtp", "ngram"] = "ngram"
    num_nodes: int = 4
    topk: int = 1
    steps: int = 3
    state_mode: Literal["auto", "snapshot", "one_layer", "replay_exact", "replay_parallel"] = "auto"

    def __post_init__(self) -> None:
        _require(self.draft in ("mtp", "ngram"), f"draft must be 'mtp' or 'ngram', got {self.draft!r}.")
        _require(2 <= self.num_nodes <= 64, f"num_nodes must be in [2, 64], got {self.num_nodes}.")
        _require(self.topk >= 1, f"topk must be at least 1, got {self.topk}.")
        _require(
            1 <= self.steps < self.num_nodes,
            f"steps must be in [1, num_nodes={self.num_nodes}), got {self.steps}.",
        )
        modes = ("auto", "snapshot", "one_layer", "replay_exact", "replay_parallel")
        _require(self.state_mode in modes, f"state_mode must be one of {modes}, got {self.state_mode!r}.")

    @property
    def depth(self) -> int:
        """Most nodes of a path, and so most tokens of a round."""
        return self.steps + 1


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen.

    Attributes:
      max_tokens: most tokens to generate.
      temperature: 0 takes the best token.
      top_k: keep the k best tokens; 0 keeps all.
      top_p: keep the smallest set of best tokens whose probabilities reach this.
      min_p: drop tokens less likely than this share of the best token's probability.
      seed: the coin of position p depends on (seed, p) alone.
      stop_token_ids: generation ends with any of these, as with the model's own end tokens; the token itself
        is kept in `token_ids`, not in `text`.
      ignore_eos: the model's own end tokens do not end generation.
      stop: generation ends when the text holds one of these strings; the text is cut before it.
      speculate: use drafts, where the engine speculates; the text is the same without.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    speculate: bool = True

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}.")
        _require(
            0 <= self.temperature <= 1e6,
            f"temperature must be in [0, 1e6], got {self.temperature}.",
        )
        _require(0 <= self.top_k < 2**31, f"top_k must be in [0, 2**31), got {self.top_k}.")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}.")
        _require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}.")
        _require(0 <= self.seed < 2**32, f"seed must be in [0, 2**32), got {self.seed}.")
        _require(
            isinstance(self.stop, tuple) and all(isinstance(stop, str) for stop in self.stop),
            f"stop must be a tuple of strings, got {self.stop!r}.",
        )
        _require(all(self.stop), "stop strings must not be empty.")
        _require(
            isinstance(self.stop_token_ids, tuple)
            and all(isinstance(token, numbers.Integral) for token in self.stop_token_ids),
            f"stop_token_ids must be a tuple of token ids, got {self.stop_token_ids!r}.",
        )
