"""A pin keeps a prefix without a request, until it is ended, its time has come, or the cache is reset."""

import math

import pytest

from mambacache_jax.host import EVERY


def test_a_pin_keeps_kv_and_checkpoint_until_it_is_ended(toy):
    pin = toy.cache.pin(toy.put("ABCD"))
    assert toy.cache.evict(kv=64, ssm=8) == (0, 0)
    toy.check()
    assert toy.cache.unpin(pin)
    assert toy.cache.evict(kv=64, ssm=8) == (4, 1)
    toy.check()


def test_a_pin_of_kv_alone_lets_the_checkpoint_go(toy):
    toy.cache.pin(toy.put("ABCD"), ssm=False)
    assert toy.cache.evict(kv=64, ssm=8) == (0, 1)
    toy.check()


def test_a_pin_needs_nobody_who_keeps_it(toy):
    toy.put("ABCD")
    toy.cache.pin(toy.match("ABCD"))
    assert toy.cache.evict(kv=64) == (0, 0)


def test_pins_end_when_their_time_has_come_and_others_stay(toy):
    pins = {at: toy.cache.pin(toy.put(name), at) for name, at in (("A", 5), ("B", 3), ("C", 3), ("D", None))}
    forever = toy.cache.pin(toy.put("E"), math.inf)
    assert toy.cache.expire(2.9) == 0
    assert toy.cache.stats().pins == 5
    assert toy.cache.expire(3) == 2
    assert toy.cache.expire(3) == 0
    assert toy.cache.evict(kv=64).kv == 2
    assert toy.cache.expire(1e9) == 1
    assert not toy.cache.unpin(pins[5])
    assert toy.cache.unpin(pins[None])
    assert toy.cache.unpin(forever)
    toy.check()
    assert toy.cache.stats().pins == 0


def test_an_ended_pin_does_not_end_again_when_its_time_comes(toy):
    inserted = toy.put("ABCD")
    first, second = toy.cache.pin(inserted, 1.0), toy.cache.pin(inserted, 9.0)
    assert toy.cache.unpin(first)
    assert not toy.cache.unpin(first)
    assert toy.cache.expire(1.0) == 0
    assert toy.cache.evict(kv=64) == (0, 0)
    assert toy.cache.expire(9.0) == 1
    assert not toy.cache.unpin(second)
    toy.check()


def test_a_reset_ends_pins_and_asks_only_for_other_leases(toy):
    pin = toy.cache.pin(toy.put("ABCD"), 1.0)
    lease = toy.cache.lock(toy.match("ABCD"))
    with pytest.raises(ValueError, match="1 leases hold"):
        toy.cache.reset()
    assert toy.cache.stats().pins == 1
    toy.cache.unlock(lease)
    toy.cache.reset()
    assert toy.cache.stats().leases == toy.cache.stats().pins == 0
    assert not toy.cache.unpin(pin)
    assert toy.cache.expire(2.0) == 0
    toy.check()


def test_a_reset_of_one_namespace_ends_its_pins_alone(toy):
    gone, stays = (toy.cache.pin(toy.put("ABCD", namespace=name)) for name in ("gone", "stays"))
    toy.cache.reset("gone")
    assert (toy.cache.stats("gone").pins, toy.cache.stats("stays").pins) == (0, 1)
    assert not toy.cache.unpin(gone)
    assert toy.cache.evict(kv=64) == (0, 0)
    toy.cache.reset(EVERY)
    assert not toy.cache.unpin(stays)
    toy.check()


def test_pins_are_counted_with_the_leases_and_apart(toy):
    inserted = toy.put("ABCD", namespace="tenant")
    toy.cache.pin(inserted)
    toy.cache.lock(inserted)
    stats = toy.cache.stats()
    assert (stats.leases, stats.pins, stats.kv_protected) == (2, 1, 4)
    assert (toy.cache.stats(None).pins, toy.cache.stats("tenant").pins) == (0, 1)


def test_a_pin_is_ended_by_unpin_and_a_lease_by_unlock(toy, make_toy):
    inserted = toy.put("ABCD")
    pin, lease = toy.cache.pin(inserted), toy.cache.lock(inserted)
    for call in (
        toy.cache.unlock,
        toy.cache.relax,
        lambda pin: toy.cache.renew(pin, inserted),
    ):
        with pytest.raises(ValueError, match="is a pin: end it with unpin"):
            call(pin)
    with pytest.raises(ValueError, match="no pin; give it back with unlock"):
        toy.cache.unpin(lease)
    other = make_toy()
    other.put("ABCD")
    with pytest.raises(ValueError, match="a pin of another cache"):
        other.cache.unpin(pin)
    toy.check()
    assert toy.cache.stats().leases == 2


def test_what_cannot_be_pinned_is_refused_and_nothing_changes(toy):
    toy.put("ABCD")
    stale = toy.match("ABCD")
    before = toy.everything()
    with pytest.raises(ValueError, match="nothing to pin"):
        toy.cache.pin(toy.cache.probe(toy.tokens("XYZ")))
    with pytest.raises(ValueError, match="expires_at must be a number, got nan"):
        toy.cache.pin(stale, math.nan)
    assert toy.everything() == before
    toy.cache.evict(kv=4)
    before = toy.everything()
    with pytest.raises(ValueError, match="evicted since"):
        toy.cache.pin(stale)
    assert toy.everything() == before
    toy.check()
