"""The source document's worked examples, at the level of the tree, with the numbers that are right.

Slots carry the document's own numbers: everything is allocated up front, and an example uses what it names.
Where the document is wrong, the test's docstring says how.
"""

from collections.abc import Iterable

import numpy as np
import pytest

from mambacache_jax.config import CacheConfig
from mambacache_jax.host import Inserted, PrefixCache

ABCDEFGH = list(b"ABCDEFGH")
# 30 tokens, of which the first 10 are "You are a ".
ASSISTANT = list(range(30))


def slots(first: int, last: int) -> list[int]:
    """The document's `[first..last]`."""
    return list(range(first, last + 1))


class Document:
    """A cache all of whose slots are out with requests until an example inserts them."""

    def __init__(self) -> None:
        self.cache = PrefixCache(CacheConfig(num_kv_slots=256, num_ssm_slots=128))
        self.kv = set(self.cache.allocate_kv(256).tolist())
        self.ssm = set(self.cache.allocate_ssm(128).tolist())

    def insert(
        self, tokens: list[int], kv_slots: list[int], checkpoint_slot: int = 0, kv_start: int = 0
    ) -> Inserted:
        inserted = self.cache.insert(tokens, kv_slots, checkpoint_slot, kv_start=kv_start)
        self.kv -= set(kv_slots)
        if inserted.adopted:
            self.ssm.discard(checkpoint_slot)
        self.check()
        return inserted

    def evict(self, kv: int = 0, ssm: int = 0) -> tuple[int, int]:
        evicted = self.cache.evict(kv, ssm)
        self.check()
        return evicted

    def hit(self, tokens: list[int], max_len: int | None = None) -> tuple[list[int], int]:
        match = self.cache.match(tokens, max_len=max_len)
        return match.kv_slots.tolist(), match.checkpoint_slot

    def nodes(self) -> list[tuple[int, list[int], int]]:
        """Position, KV slots and checkpoint of each node, parents first."""
        found: list[tuple[int, list[int], int]] = []

        def visit(children: Iterable[dict]) -> None:
            for child in children:
                found.append((child["position"], child["kv_slots"], child["checkpoint_slot"]))
                visit(child["children"])

        visit(self.cache.to_dict()["roots"][0]["children"])
        return found

    def check(self) -> None:
        self.cache.check_invariants(self.kv, self.ssm)


@pytest.fixture
def document() -> Document:
    return Document()


def test_section_2_2_three_prompts_share_their_prefixes(document):
    """The document prints KV 10..39 for "helpful assistant.", which are the slots of the whole path.

    A node lists its own run's: the 10 tokens of "You are a " hold 10..19, a tombstone since no request ended
    there, and "helpful assistant." holds 20..39. The third prompt computed its first 10 tokens too, for want
    of a checkpoint at 10; those slots come back as duplicates.
    """
    r1, r2 = ASSISTANT, [*ASSISTANT, *range(100, 111)]
    r3 = [*ASSISTANT[:10], *range(200, 215)]
    document.insert(r1, slots(10, 39), 5)
    document.insert(r2, slots(40, 50), 8, kv_start=30)
    inserted = document.insert(r3, [*slots(80, 89), *slots(51, 65)], 12)
    assert inserted.freed_kv.tolist() == slots(80, 89)
    assert document.nodes() == [
        (10, slots(10, 19), 0),
        (30, slots(20, 39), 5),
        (41, slots(40, 50), 8),
        (25, slots(51, 65), 12),
    ]


def test_section_2_3_a_tombstone_keeps_its_kv_and_is_no_place_to_resume(document):
    """As printed; "KV can still be used" holds in that the next sharer is told where to put a checkpoint."""
    document.insert(ASSISTANT, slots(10, 39), 5)
    assert document.evict(ssm=1) == (0, 1)
    match = document.cache.match([*ASSISTANT, 99])
    assert (match.prefix_len, match.checkpoint_slot, match.kv_len, match.branch_position) == (0, 0, 30, 30)
    assert document.nodes() == [(30, slots(10, 39), 0)]


def test_section_3_1_two_requests_read_the_same_slots_under_two_locks(document):
    document.insert(ASSISTANT, slots(10, 39), 5)
    a, b = (document.cache.match([*ASSISTANT, token]) for token in (98, 99))
    assert a.kv_slots.tolist() == b.kv_slots.tolist() == slots(10, 39)
    leases = [document.cache.lock(match) for match in (a, b)]
    for lease in leases:
        assert document.evict(kv=256, ssm=128) == (0, 0)
        document.cache.unlock(lease)
    assert document.evict(kv=256) == (30, 1)


def test_section_3_3_the_two_evictions_are_independent_in_one_direction_only(document):
    """The document calls the lists independent. Evicting KV takes the checkpoint along; not the reverse."""
    document.insert(ASSISTANT, slots(10, 39), 5)
    document.insert([*ASSISTANT, 99], [40], 8, kv_start=30)
    assert document.evict(ssm=1) == (0, 1)
    assert document.nodes() == [(30, slots(10, 39), 0), (31, [40], 8)]
    assert document.evict(kv=1) == (1, 1)
    assert document.nodes() == [(30, slots(10, 39), 0)]


def test_section_4_1_a_short_prompt_resumes_and_publishes_its_end(document):
    """The document's server would cache nothing here: its checkpoints lie at multiples of 64 tokens.

    A checkpoint may lie anywhere in this cache, so the prompt's end is one.
    """
    document.insert(ASSISTANT[:10], slots(10, 19), 1)
    match = document.cache.match(ASSISTANT, max_len=29)
    assert (match.prefix_len, match.kv_slots.tolist(), match.checkpoint_slot) == (10, slots(10, 19), 1)
    lease = document.cache.lock(match)
    inserted = document.insert(ASSISTANT, slots(20, 39), 50, kv_start=10)
    document.cache.unlock(lease)
    assert (inserted.prefix_len, inserted.adopted) == (10, True)
    assert document.nodes() == [(10, slots(10, 19), 1), (30, slots(20, 39), 50)]


def chunked_first_half(document: Document) -> None:
    inserted = document.insert(ABCDEFGH[:4], slots(10, 13), 100)
    document.cache.lock(inserted, ssm=False)
    assert inserted.kv_slots.tolist() == slots(10, 13)


def test_section_4_2_a_chunked_prompt_hangs_its_second_chunk_under_its_first(document):
    """As printed, with one insert a chunk and no match afterwards: the insert says where the KV lies."""
    chunked_first_half(document)
    inserted = document.insert(ABCDEFGH, slots(20, 23), 101, kv_start=4)
    assert (inserted.prefix_len, inserted.kv_slots.tolist()) == (4, slots(20, 23))
    assert inserted.freed_kv.tolist() == []
    assert document.nodes() == [(4, slots(10, 13), 100), (8, slots(20, 23), 101)]


def test_section_4_3_what_another_request_published_meanwhile_replaces_ones_own(document):
    """As printed: 20 and 21 are freed, and the request's row becomes 10..13, 30, 31, 22, 23."""
    chunked_first_half(document)
    document.insert(ABCDEFGH[:6], [30, 31], 105, kv_start=4)
    inserted = document.insert(ABCDEFGH, slots(20, 23), 101, kv_start=4)
    assert inserted.freed_kv.tolist() == [20, 21]
    assert (inserted.prefix_len, inserted.kv_slots.tolist()) == (6, [30, 31, 22, 23])
    assert document.nodes() == [(4, slots(10, 13), 100), (6, [30, 31], 105), (8, [22, 23], 101)]
    assert document.hit([*ABCDEFGH, 99]) == ([*slots(10, 13), 30, 31, 22, 23], 101)


JOKE = [*ASSISTANT, *range(300, 310)]
PYTHON = [*ASSISTANT, *range(400, 415)]
ANSWER = list(range(500, 505))


def warm_up(document: Document) -> None:
    document.insert(ASSISTANT, slots(1, 30), 1)


def test_section_6_1_a_warm_up_publishes_its_prompt_and_not_the_token_it_sampled(document):
    """The document shows a node of 31 tokens. The sampled token was never fed back, so it has no KV: 30."""
    warm_up(document)
    assert document.nodes() == [(30, slots(1, 30), 1)]


def test_section_6_1_a_node_of_31_tokens_as_printed_would_serve_nobody(document):
    """With the document's own node every prompt leaves it at 30, where there is no state: its section 6.4."""
    document.insert([*ASSISTANT, 77], slots(1, 31), 1)
    for prompt in (JOKE, PYTHON):
        assert document.hit(prompt) == ([], 0)
        assert document.cache.match(prompt).branch_position == 30


def test_section_6_2_the_first_request_computes_10_of_its_40_tokens(document):
    """The document inserts 45 tokens and a sibling for the warm-up's sampled token.

    Of the five generated tokens the last has no KV, so 44 tokens are inserted, 14 of them new; and the
    warm-up's node has no child of its own, nor would a split leave the checkpoint on its upper part.
    """
    warm_up(document)
    match = document.cache.match(JOKE, max_len=39)
    assert (match.kv_slots.tolist(), match.checkpoint_slot) == (slots(1, 30), 1)
    lease = document.cache.lock(match)
    inserted = document.insert([*JOKE, *ANSWER[:4]], slots(100, 113), 50, kv_start=30)
    document.cache.unlock(lease)
    assert (inserted.prefix_len, inserted.freed_kv.tolist(), inserted.adopted) == (30, [], True)
    assert document.nodes() == [(30, slots(1, 30), 1), (44, slots(100, 113), 50)]


def test_section_6_3_the_second_request_computes_15_of_its_45_tokens(document):
    """As printed: the warm-up's checkpoint serves every prompt that starts with it, whoever came before."""
    warm_up(document)
    document.insert([*JOKE, *ANSWER[:4]], slots(100, 113), 50, kv_start=30)
    assert document.hit(PYTHON, max_len=44) == (slots(1, 30), 1)
    document.insert(PYTHON, slots(200, 214), 60, kv_start=30)
    assert document.nodes() == [
        (30, slots(1, 30), 1),
        (44, slots(100, 113), 50),
        (45, slots(200, 214), 60),
    ]


def test_section_6_4_a_long_prompt_serves_no_shorter_one_until_a_checkpoint_is_planted(document):
    """The document splits the node in the match, and says that the KV can still be reused.

    Matching changes nothing here, and the KV behind a missing checkpoint is computed again, into slots that
    are freed as duplicates. What is kept is the branch position: a checkpoint there serves the next one.
    """
    document.insert(ABCDEFGH, slots(1, 8), 1)
    match = document.cache.match(ABCDEFGH[:4], max_len=3)
    assert (match.kv_slots.tolist(), match.checkpoint_slot, match.branch_position) == ([], 0, 3)
    assert document.nodes() == [(8, slots(1, 8), 1)]

    inserted = document.insert(ABCDEFGH[:3], slots(11, 13), 2)
    assert inserted.freed_kv.tolist() == slots(11, 13)
    assert inserted.kv_slots.tolist() == slots(1, 3)
    assert document.nodes() == [(3, slots(1, 3), 2), (8, slots(4, 8), 1)]
    assert document.hit(ABCDEFGH[:4], max_len=3) == (slots(1, 3), 2)
    assert document.hit([*ABCDEFGH, 99]) == (slots(1, 8), 1)


def test_section_7_3_a_checkpoint_that_is_locked_has_its_kv_locked(document):
    """As printed; a tombstone may be locked as well, which the document does not say."""
    document.insert(ABCDEFGH, slots(1, 8), 1)
    leases = [
        document.cache.lock(document.cache.match(ABCDEFGH)),
        document.cache.lock(document.insert(ABCDEFGH[:4], [], kv_start=4)),
    ]
    stats = document.cache.stats()
    assert (stats.ssm_protected, stats.kv_protected) == (1, 8)
    for lease in leases:
        document.cache.unlock(lease)
        document.check()
    assert np.array_equal(document.cache.match(ABCDEFGH).kv_slots, slots(1, 8))
