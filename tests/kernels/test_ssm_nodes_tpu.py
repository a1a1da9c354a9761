"""The TPU kernel of `ssm_nodes`, interpreted, is the recurrence, and its transfers do not race.

Interpreted means: XLA for the CPU computes its products, which are then as precise at "fast" as at
"float32"; `test_ssm_nodes_rounding` emulates what matrix units round. What Mosaic makes of the kernel is
compiled in `tests/aot`, and not run there.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.ssm_nodes import ssm_nodes
from kernels_pallas.ssm_nodes.packed import pack, unpack

from .nodes_round import KINDS, Row, assert_close, make_round
from .test_ssm_nodes import ROWS, TOLERANCE

make_round = functools.partial(make_round, state_dim=16)


def assert_same_bits(got, want):
    """Of pools but for the null slot, and of outputs."""
    assert got[0][1:].tobytes() == want[0][1:].tobytes()
    for x, y in zip(got[1:], want[1:], strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("kda", "bfloat16")], ids=str
)
def test_exact_has_the_bits_of_the_definition(kind, dtype):
    r = make_round(kind, ROWS, num_pending=5, num_nodes=7, tree="forest", dtype=dtype)
    assert_same_bits(r.call("tpu", precision="exact"), r.call("reference", precision="exact"))


# Heads that share keys, heads that do not, an odd number, and two tiles of heads with one key head.
@pytest.mark.parametrize(("kind", "heads"), [("mamba2", (1, 16)), ("gdn", (8, 16)), ("kda", (5, 5))], ids=str)
def test_masked_nodes_follow_the_recurrence_and_chains_keep_their_bits(kind, heads):
    r = make_round(kind, ROWS, num_pending=5, num_nodes=7, heads=heads)
    pool, pending_out, node_out = r.call("tpu", precision="float32")
    assert_same_bits((pool, pending_out), r.call("reference")[:2])
    assert_close(node_out, r.expected()[2], TOLERANCE)


def test_decoding_is_folding_one_token():
    """One token goes another way through the kernel than a chain does."""
    rows = [dataclasses.replace(row, pending=min(row.pending, 1), nodes=0, track=(0, 0)) for row in ROWS]
    rows[3] = Row(read=7, write=7, pending=1, track=(16, 1))
    r = make_round("gdn", rows, num_pending=1, num_nodes=0, dtype="bfloat16")
    assert_same_bits(r.call("tpu"), r.call("reference"))


def test_verifying_alone_copies_where_it_is_asked_to():
    rows = (Row(read=1, nodes=9), Row(read=2, write=3, nodes=3), Row(write=4), Row(), Row(read=5, write=6))
    r = make_round("gdn", rows, num_pending=0, num_nodes=9)
    pool, _, node_out = r.call("tpu", precision="float32")
    assert_same_bits((pool,), r.call("reference")[:1])
    assert_close(node_out, r.expected()[2], TOLERANCE)


@pytest.mark.parametrize(("kind", "precision"), [("mamba2", "float32"), ("gdn", "exact")])
def test_heads_side_by_side_change_no_bits(kind, precision):
    r = make_round(kind, ROWS, num_pending=5, num_nodes=7, heads=(2, 8))
    want = r.call("reference", precision="exact")
    packed = pack(jnp.asarray(r.pool), jnp.zeros((len(r.pool), 4, 16, 16)))
    packed = dataclasses.replace(r, pool=np.asarray(packed))
    for implementation in ("tpu", "xla"):
        pool, pending_out, node_out = packed.call(implementation, precision=precision)
        got = np.asarray(unpack(jnp.asarray(pool), 8)), pending_out
        assert_same_bits(got, want[:2])
        assert_close(node_out, want[2], TOLERANCE)
        assert precision == "float32" or node_out.tobytes() == want[2].tobytes()


# Two tiles of heads a row, so that transfers of one row's and of two rows' tiles overlap.
@pytest.mark.parametrize(("num_pending", "precision"), [(2, "exact"), (1, "float32"), (0, "float32")])
def test_transfers_do_not_race(num_pending, precision):
    rows = (
        Row(write=1, pending=2, nodes=3),
        Row(read=2, write=2, pending=2, track=(3, 1), nodes=1),
        Row(read=4, write=5, pending=1, track=(6, 1)),
        Row(read=7, nodes=3),
        Row(),
    )
    rows = [
        dataclasses.replace(
            row, pending=min(row.pending, num_pending), track=row.track if num_pending else (0, 0)
        )
        for row in rows
    ]
    r = make_round("gdn", rows, num_pending=num_pending, num_nodes=3, heads=(8, 16))
    want = r.call("reference", precision="exact")
    call = jax.jit(functools.partial(ssm_nodes, "gdn", precision=precision, implementation="tpu"))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        got = [np.asarray(x) for x in jax.block_until_ready(call(*r.arguments()[1:]))]
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found
    assert_same_bits(got[:2], want[:2])
    assert_close(got[2], want[2], TOLERANCE)


def test_the_null_slot_is_not_written():
    r = make_round("gdn", ROWS, num_pending=5, num_nodes=7)
    pool, _, _ = r.call("tpu", precision="float32")
    assert pool[0].tobytes() == r.pool[0].tobytes()


def test_what_it_cannot_do_is_refused_with_the_reason():
    def call(kind="gdn", nodes=3, state_dim=16, heads=(2, 4), **options):
        rows = [Row(read=1, nodes=nodes)]
        r = make_round(kind, rows, num_pending=0, num_nodes=nodes, state_dim=state_dim, heads=heads)
        jax.eval_shape(
            functools.partial(ssm_nodes, kind, implementation="tpu", **options), *r.arguments()[1:]
        )

    for message, arguments in (
        ("at most 64 nodes, got 65", {"nodes": 65}),
        (r"needs depth \* -min_log_decay <= 80.0, got depth 17", {"kind": "kda", "nodes": 17}),
        ("state_dim must be a power of two of at least 8 for float32, got 12", {"state_dim": 12}),
        ("a step's 1001 heads of 1001 take .* bytes of VMEM", {"heads": (1001, 1001)}),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call(**arguments)
    call("kda", 17, min_log_decay=-2.0, depth=17)
    call("kda", 64, precision="exact")
