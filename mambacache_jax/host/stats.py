"""What a prefix cache counts, and what it says about itself."""

import dataclasses

SKIPS = ("occupied", "no_slot", "limit", "path_cap")
"""Reasons why a checkpoint was not kept; `CacheStats.skipped` says what they mean."""


@dataclasses.dataclass(slots=True)
class Counts:
    """What is counted as it happens, for one namespace; `CacheStats` says what each means."""

    matches: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    kv_matched_tokens: int = 0
    inserts: int = 0
    duplicate_kv: int = 0
    adopted: int = 0
    occupied: int = 0
    no_slot: int = 0
    limit: int = 0
    path_cap: int = 0
    kv_evicted: int = 0
    ssm_evicted: int = 0
    ssm_lost_with_kv: int = 0

    def add(self, other: "Counts") -> None:
        """Adds another's counts to these."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclasses.dataclass(slots=True)
class Sizes:
    """What is there now; `CacheStats` says what each means."""

    nodes: int = 0
    tombstones: int = 0
    kv_cached: int = 0
    kv_protected: int = 0
    ssm_cached: int = 0
    ssm_protected: int = 0
    leases: int = 0
    pins: int = 0


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """Counts since the start, then sizes now: of one namespace or all, of one shard or all.

    Attributes:
      matches: calls of `match`, a request's retries included; probes are not counted.
      queried_tokens: tokens that they asked for.
      hit_tokens: of those, tokens with KV and a checkpoint.
      kv_matched_tokens: of those queried, tokens with KV, whether or not a checkpoint follows.
      inserts: calls of `insert`.
      duplicate_kv: KV slots freed by them because the tree had those tokens.
      adopted: checkpoints that the tree took over.
      skipped: checkpoints that were not kept, by reason: "occupied", the tree had one there; "no_slot", none
        could be had; "limit", the caller's own limit, such as exports a step; "path_cap", dropped for
        `CacheConfig.max_checkpoints_per_path`. The second and third are the caller's to report.
      kv_evicted: KV slots evicted.
      ssm_evicted: checkpoints evicted to free their slot; their KV stayed.
      ssm_lost_with_kv: checkpoints that went because their leaf's KV did.
      nodes: nodes of the tree.
      tombstones: of those, nodes without a checkpoint.
      kv_cached: KV slots of the tree; `kv_protected` of them are kept by leases.
      ssm_cached: checkpoints; `ssm_protected` of them are kept by leases.
      leases: leases not given back, those of pins included.
      pins: pins that have not ended.
      kv_total: KV slots that there are, whoever the namespace.
      kv_used: of those, slots that the tree or a request owns.
      ssm_total: SSM slots that there are, whoever the namespace.
      ssm_used: of those, slots that the tree or a request owns.
    """

    matches: int
    queried_tokens: int
    hit_tokens: int
    kv_matched_tokens: int
    inserts: int
    duplicate_kv: int
    adopted: int
    skipped: dict[str, int]
    kv_evicted: int
    ssm_evicted: int
    ssm_lost_with_kv: int
    nodes: int
    tombstones: int
    kv_cached: int
    kv_protected: int
    ssm_cached: int
    ssm_protected: int
    leases: int
    pins: int
    kv_total: int
    kv_used: int
    ssm_total: int
    ssm_used: int

    @property
    def kv_only_tokens(self) -> int:
        """Tokens whose KV matched beyond the deepest checkpoint, so that they were computed again."""
        return self.kv_matched_tokens - self.hit_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were hits; 0 before the first query."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0
