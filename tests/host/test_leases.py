"""A lease keeps exactly what it locked from eviction, whatever happens to the node meanwhile."""

import pytest


def test_a_lease_keeps_kv_and_checkpoint(toy):
    toy.put("ABCD")
    lease = toy.cache.lock(toy.match("ABCD"))
    assert (toy.cache.evictable_kv(), toy.cache.evictable_ssm()) == (0, 0)
    assert toy.cache.evict(kv=64, ssm=8) == (0, 0)
    toy.cache.unlock(lease)
    assert (toy.cache.evictable_kv(), toy.cache.evictable_ssm()) == (4, 1)
    assert toy.cache.evict(kv=1) == (4, 1)
    toy.check()


def test_a_lease_without_the_checkpoint_keeps_the_kv_only(toy):
    toy.put("ABCD")
    lease = toy.cache.lock(toy.match("ABCD"), ssm=False)
    assert toy.cache.evict(kv=64, ssm=8) == (0, 1)
    assert toy.match("ABCD").kv_len == 4
    toy.cache.unlock(lease)
    toy.check()


def test_relaxing_a_lease_releases_its_checkpoint_once(toy):
    toy.put("ABCD")
    match = toy.match("ABCD")
    lease, other = toy.cache.lock(match), toy.cache.lock(match)
    assert toy.cache.relax(lease) is lease
    toy.cache.relax(lease)
    assert toy.cache.evictable_ssm() == 0
    toy.check()
    toy.cache.relax(other)
    assert (toy.cache.evictable_ssm(), toy.cache.evictable_kv()) == (1, 0)
    toy.cache.unlock(lease)
    assert toy.cache.evictable_kv() == 0
    toy.cache.unlock(other)
    assert toy.cache.evictable_kv() == 4
    for call in (toy.cache.unlock, toy.cache.relax):
        with pytest.raises(ValueError, match="released already"):
            call(lease)
    toy.check()


def test_a_lease_on_a_miss_locks_nothing(toy):
    toy.put("ABCD")
    lease = toy.cache.lock(toy.match("XYZ"))
    assert toy.cache.evictable_kv() == 4
    toy.cache.reset()
    toy.cache.unlock(lease)
    with pytest.raises(ValueError, match="released already"):
        toy.cache.unlock(lease)


def test_a_match_that_is_no_longer_true_cannot_be_locked(toy):
    toy.put("ABCD")
    stale = toy.match("ABCD")
    toy.cache.evict(ssm=1)
    with pytest.raises(ValueError, match="checkpoint in slot 1 at position 4 has been evicted"):
        toy.cache.lock(stale)
    toy.cache.unlock(toy.cache.lock(stale, ssm=False))
    toy.cache.evict(kv=4)
    for ssm in (True, False):
        with pytest.raises(ValueError, match="has been evicted since"):
            toy.cache.lock(stale, ssm=ssm)
    toy.check()


def test_a_match_can_be_locked_after_its_node_was_split(toy):
    toy.put("ABCDEFGH")
    match = toy.match("ABCDEFGH")
    toy.put("ABCDXY")
    lease = toy.cache.lock(match)
    assert toy.cache.evict(kv=64) == (2, 1)
    assert toy.hit("ABCDEFGH") == 8
    toy.cache.unlock(lease)
    toy.check()


def test_a_lease_survives_the_split_of_its_node(toy):
    lease = toy.cache.lock(toy.put("ABCDEFGH"))
    toy.put("ABCDXY")
    toy.check()
    assert toy.cache.evict(kv=64, ssm=8).kv == 2
    assert toy.hit("ABCDEFGH") == 8
    toy.cache.unlock(lease)
    assert toy.cache.evict(kv=64) == (8, 1)
    toy.check()


def test_a_locked_tombstone_protects_the_checkpoint_that_it_receives(toy):
    lease = toy.cache.lock(toy.put("ABCD", checkpoint=False))
    toy.insert("ABCD", [], toy.compute_state("ABCD"), start=4)
    toy.check()
    assert toy.cache.evictable_ssm() == 0
    assert toy.cache.evict(ssm=8) == (0, 0)
    toy.cache.unlock(lease)
    assert toy.cache.evictable_ssm() == 1
    toy.check()


def test_a_tombstone_held_for_its_kv_alone_does_not_protect_it(toy):
    lease = toy.cache.lock(toy.put("ABCD", checkpoint=False), ssm=False)
    toy.insert("ABCD", [], toy.compute_state("ABCD"), start=4)
    assert toy.cache.evict(ssm=8) == (0, 1)
    toy.cache.unlock(lease)
    toy.check()
