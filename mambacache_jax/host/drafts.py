"""Drafts that the host proposes from tokens it knows."""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from mambacache_jax.host.draft_tree import prefix_tree


@runtime_checkable
class HostDraft(Protocol):
    """Proposes drafts for one request. Whatever it proposes, the text stays that of plain decoding."""

    def propose(self, tokens: np.ndarray, max_nodes: int, max_depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Candidates behind the last token.

        Args:
          tokens: int32, prompt and answer so far; the last one is the bonus token.
          max_nodes: candidates at most.
          max_depth: candidates of a path at most.

        Returns:
          int32 tokens and parents (-1: behind the bonus token); both empty for no drafts this round.
        """
        ...


@dataclasses.dataclass(frozen=True)
class NgramDraft:
    """Looks the last tokens up among all before them: longest match first, latest occurrence first.

    Attributes:
      longest: tokens to match at most.
      shortest: tokens to match at least.
      runs: occurrences to draft from; several make a tree, whose common beginnings are shared.
    """

    longest: int = 4
    shortest: int = 2
    runs: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest or self.runs < 1:
            raise ValueError(
                f"NgramDraft needs 1 <= shortest <= longest and runs >= 1, got shortest={self.shortest}, "
                f"longest={self.longest}, runs={self.runs}."
            )

    def propose(self, tokens: np.ndarray, max_nodes: int, max_depth: int) -> tuple[np.ndarray, np.ndarray]:
        """See `HostDraft.propose`. Costs one pass over `tokens` for each length that is tried."""
        starts: dict[int, None] = {}
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            hits = np.flatnonzero((windows == tokens[-size:]).all(axis=1))[::-1][: self.runs]
            starts.update(dict.fromkeys((hits + size).tolist()))
            if len(starts) >= self.runs:
                break
        runs = [tokens[start : start + max_depth] for start in list(starts)[: self.runs]]
        return prefix_tree(runs, max_nodes)
