"""A packed plan says exactly what its rows say, and plans whose slots would race are refused."""

import dataclasses

import numpy as np
import pytest

from mambacache_jax.host.plan import (
    GREEDY,
    Buckets,
    DecodeRow,
    ExtendRow,
    TableUpdate,
    build_plan,
    check_slots,
    pack_sampling,
)
from mambacache_jax.layout import TABLE_BLOCK

BUCKETS = Buckets(decode_rows=(0, 1, 4), blocks=(0, 1, 4), block_tokens=4, extend_rows=2, updates=8)


def decode(row=1, read=1, write=1, **changes):
    return dataclasses.replace(DecodeRow(row, 5, 0, read, write, GREEDY), **changes)


def extend(row=2, read=0, write=2, exports=(), start=0, count=6):
    return ExtendRow(row, start, np.arange(10, 10 + count), read, write, tuple(exports), True, GREEDY)


def test_a_chunk_is_cut_into_full_blocks_and_a_rest():
    shape = BUCKETS.shape(0, 2, 3)
    fields = shape.unpack(build_plan([], [extend(exports=[(4, 3), (5, 4)])], [], shape))
    assert fields["token"].tolist() == [[10, 11, 12, 13], [14, 15, 0, 0], [0] * 4, [0] * 4]
    assert fields["block_row"].tolist() == [0, 0, 2, 2]
    assert fields["block_first"].tolist() == [1, 0, 1, 1]
    assert fields["block_length"].tolist() == [4, 2, 0, 0]
    assert fields["block_start"].tolist() == [0, 4, 0, 0]
    assert fields["block_export"].tolist() == [[4, 0], [0, 1], [0, 0], [0, 0]]
    assert fields["export_slot"].tolist() == [[3, 4], [0, 0]]
    assert fields["export_position"].tolist() == [[4, 5], [0, 0]]
    assert fields["end"].tolist() == [6, 0]
    assert fields["last"].tolist() == [5, 0]


def test_a_second_row_starts_on_a_block_of_its_own():
    shape = BUCKETS.shape(1, 3, 0)
    plan = build_plan([decode()], [extend(), extend(row=3, write=5, count=1, start=8)], [], shape)
    fields = shape.unpack(plan)
    assert fields["row"].tolist() == [2, 3]
    assert fields["block_row"].tolist() == [0, 0, 1, 2]
    assert fields["last"].tolist() == [5, 8]
    assert fields["decode_row"].tolist() == [1]


def test_padding_names_the_null_row_and_the_null_slots():
    shape = BUCKETS.shape(4, 0, 0)
    fields = shape.unpack(build_plan([decode()], [], [], shape))
    for name in ("decode_row", "decode_read", "decode_write", "decode_page"):
        assert fields[name][1:].tolist() == [0, 0, 0], name


def test_table_updates_write_whole_runs():
    shape = BUCKETS.shape(0, 1, 1)
    fields = shape.unpack(build_plan([], [], [TableUpdate(2, 5, np.array([7, 8, 9]))], shape))
    assert fields["update_row"][:2].tolist() == [2, 0]
    assert fields["update_block"][:2].tolist() == [5, 0]
    assert fields["update_pages"][0, :4].tolist() == [7, 8, 9, 0]
    assert fields["update_pages"].shape == (8, TABLE_BLOCK)


def test_updates_bring_a_block_along_since_only_such_steps_have_room_for_them():
    assert BUCKETS.shape(1, 0, 0).updates == 0
    assert BUCKETS.shape(1, 0, 1).blocks == 1


def test_every_shape_that_can_be_asked_for_is_listed():
    listed = set(BUCKETS.shapes())
    asked = {BUCKETS.shape(d, b, u) for d in range(5) for b in range(5) for u in (0, 1) if d + b + u}
    assert asked <= listed
    assert len(listed) == len(BUCKETS.shapes()) == 8


def test_a_plan_larger_than_every_bucket_is_refused():
    with pytest.raises(ValueError, match="5 does not fit the largest bucket, 4"):
        BUCKETS.shape(5, 0, 0)


def test_sampling_fields_keep_their_bits():
    fields = pack_sampling(0.7, 0.9, 0.1, 40, 2**32 - 1)
    assert fields[:3].view(np.float32).tolist() == np.array([0.7, 0.9, 0.1], np.float32).tolist()
    assert fields[3] == 40
    assert fields[4].view(np.uint32) == 2**32 - 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([decode(row=1, write=3), decode(row=2, write=3)], "SSM slot 3 is written by row 1 and again"),
        (
            [decode(row=1, read=3), decode(row=2, read=4, write=3)],
            "Row 1 reads SSM slot 3, which row 2 writes",
        ),
        ([decode(write=0)], "null slot as write"),
        ([decode(read=0)], "reads the null slot"),
        ([decode(row=0)], "null row"),
        ([decode(row=1, read=1, write=1), decode(row=1, read=2, write=2)], "appears twice"),
        ([extend(write=3, exports=[(4, 3)])], "SSM slot 3 is written by row 2 and again, as export"),
        ([extend(exports=[(2, 5), (4, 5)])], "SSM slot 5 is written by row 2 and again, as export"),
        ([extend(read=5, exports=[(4, 5)])], "exports to slot 5, which it reads"),
        ([extend(exports=[(4, 0)])], "null slot as export"),
        ([decode(row=1, read=6), extend(exports=[(4, 6)])], "Row 1 reads SSM slot 6, which row 2 writes"),
    ],
)
def test_slot_hazards_are_refused(rows, message):
    decode_rows = [row for row in rows if isinstance(row, DecodeRow)]
    extend_rows = [row for row in rows if isinstance(row, ExtendRow)]
    with pytest.raises(ValueError, match=message):
        build_plan(decode_rows, extend_rows, [], BUCKETS.shape(4, 4, 0))


def test_a_row_may_write_the_slot_it_reads_and_two_rows_may_read_one_checkpoint():
    check_slots(
        [decode(row=1, read=3, write=3)], [extend(row=2, read=7, write=8), extend(row=3, read=7, write=9)]
    )


@pytest.mark.parametrize("position", [0, 7])
def test_an_export_outside_its_chunk_is_refused(position):
    with pytest.raises(ValueError, match="outside its chunk"):
        build_plan([], [extend(exports=[(position, 3)])], [], BUCKETS.shape(0, 2, 0))


def test_a_row_without_tokens_is_refused():
    with pytest.raises(ValueError, match="0 tokens"):
        build_plan([], [extend(count=0)], [], BUCKETS.shape(0, 1, 0))
