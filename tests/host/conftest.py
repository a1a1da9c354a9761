"""A prefix cache whose slots hold readable contents, so that a wrong slot is seen and not just counted."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.errors import OutOfSlots
from mambacache_jax.host import Inserted, Match, PrefixCache, TokenBuffer
from mambacache_jax.host.namespace import AnyNamespace


class Toy:
    """A cache, and what each slot was last written with: the tokens up to its position.

    Prompts are text, a letter a token. `request_kv` and `request_ssm` are the slots that are ours.
    """

    def __init__(
        self, num_kv_slots: int = 64, num_ssm_slots: int = 8, page_size: int = 1, **rules: Any
    ) -> None:
        config = CacheConfig(num_kv_slots, num_ssm_slots, page_size, track_interval=256, **rules)
        self.cache = PrefixCache(config)
        self.page_size = page_size
        self.kv: dict[int, str] = {}
        self.ssm: dict[int, str] = {}
        self.request_kv: set[int] = set()
        self.request_ssm: set[int] = set()
        self.skipped = 0

    @staticmethod
    def tokens(prompt: str) -> np.ndarray:
        return np.array([ord(letter) for letter in prompt], np.int32)

    def floor(self, position: int) -> int:
        return position - position % self.page_size

    def compute_kv(self, prompt: str, start: int = 0) -> np.ndarray:
        """New slots for positions `[start, len(prompt))` and the rest of the last page, written."""
        slots = self.cache.allocate_kv(-(-(len(prompt) - start) // self.page_size) * self.page_size)
        self.request_kv.update(slots.tolist())
        for position, slot in enumerate(slots.tolist()[: len(prompt) - start], start):
            self.kv[slot] = prompt[: position + 1]
        return slots

    def compute_state(self, prompt: str) -> int:
        """A new slot that holds the state after `prompt`."""
        slot = int(self.cache.allocate_ssm()[0])
        self.request_ssm.add(slot)
        self.ssm[slot] = prompt
        return slot

    def insert(
        self,
        prompt: str,
        kv_slots: Iterable[int],
        slot: int = 0,
        start: int = 0,
        namespace: AnyNamespace = None,
    ) -> Inserted:
        """Inserts, and frees the checkpoint if the tree had one."""
        kv_slots = np.array(kv_slots, np.int32)
        inserted = self.cache.insert(self.tokens(prompt), kv_slots, slot, namespace=namespace, kv_start=start)
        self.request_kv -= {*kv_slots[: inserted.position - start].tolist()}
        self.request_ssm.discard(slot)
        if slot and not inserted.adopted:
            self.cache.free_ssm([slot])
        for position, canonical in enumerate(inserted.kv_slots.tolist(), start):
            assert self.kv[canonical] == prompt[: position + 1]
        return inserted

    def put(self, prompt: str, checkpoint: bool = True, namespace: AnyNamespace = None) -> Inserted:
        """Computes a whole prompt and inserts it, with the state at its end."""
        kv_slots = self.compute_kv(prompt)
        slot = self.compute_state(prompt) if checkpoint else 0
        inserted = self.insert(prompt, kv_slots[: len(prompt)], slot, namespace=namespace)
        self.free(kv_slots[inserted.position :])
        return inserted

    def free(self, slots: Iterable[int]) -> None:
        """Frees KV slots of ours."""
        slots = np.array(slots, np.int32)
        self.cache.free_kv(slots)
        self.request_kv -= set(slots.tolist())

    def match(self, prompt: str, namespace: AnyNamespace = None, max_len: int | None = None) -> Match:
        """Matches, and reads every slot that the match names."""
        match = self.cache.match(self.tokens(prompt), namespace, max_len)
        assert [self.kv[slot] for slot in match.kv_slots.tolist()] == [
            prompt[: position + 1] for position in range(match.prefix_len)
        ]
        if match.prefix_len:
            assert self.ssm[match.checkpoint_slot] == prompt[: match.prefix_len]
        else:
            assert match.checkpoint_slot == 0
        return match

    def hit(self, prompt: str, namespace: AnyNamespace = None) -> int:
        """Tokens that a prompt can resume from, all of it allowed."""
        return self.match(prompt, namespace).prefix_len

    def serve(self, prompt: str, checkpoints: Iterable[int] | None = None) -> Match:
        """One request from its prompt to its end, no token generated.

        Publishes at `checkpoints`, or where the design's policy does: at the branch position and one token
        before the prompt's end.
        """
        match = self.match(prompt, max_len=len(prompt) - 1)
        lease = self.cache.lock(match)
        start = match.prefix_len
        table = np.concatenate([match.kv_slots, self.compute_kv(prompt, start)])
        buffer = TokenBuffer(self.tokens(prompt))
        wanted = (
            {self.floor(len(prompt) - 1), match.branch_position or 0} if checkpoints is None else checkpoints
        )
        for position in sorted(position for position in wanted if position > start):
            try:
                slot = self.compute_state(prompt[:position])
            except OutOfSlots:
                slot = 0
                self.skipped += 1
            assert not slot or buffer.stamp(position).position == position
            inserted = self.insert(prompt[:position], table[start:position], slot, start)
            table[start:position] = inserted.kv_slots
            self.cache.unlock(lease)
            lease, start = self.cache.lock(inserted, ssm=False), position
        self.free(table[start:])
        self.cache.unlock(lease)
        self.check()
        return match

    def everything(self) -> dict[str, Any]:
        """All that can be seen of the cache, to compare before and after."""
        return {"tree": self.cache.to_dict(), **vars(self.cache.stats()), **vars(self.cache.stats(None))}

    def check(self) -> None:
        self.cache.check_invariants(self.request_kv, self.request_ssm)


@pytest.fixture
def make_toy() -> type[Toy]:
    return Toy


@pytest.fixture(params=[1, 4], ids=lambda page_size: f"page{page_size}")
def page_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def toy() -> Toy:
    return Toy()
