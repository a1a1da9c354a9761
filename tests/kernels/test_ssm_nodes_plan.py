"""`check_plan` takes every plan that keeps the contract of `ssm_nodes`, and names the rows that break it."""

import numpy as np
import pytest

from kernels_pallas.ssm_nodes import NodesPlan, check_plan

# Rows: in place with a tracked state, to another slot, fresh, pure verify of a shared slot, padding twice.
GOOD = {
    "read_slot": [1, 3, 0, 3, 0, 0],
    "write_slot": [1, 4, 5, 0, 0, 0],
    "track_slot": [2, 0, 6, 0, 0, 0],
    "track_len": [1, 0, 2, 0, 0, 0],
    "pending_len": [1, 2, 2, 0, 0, 0],
    "parent": [[-1, 0, 1], [-1, 0, -1], [0, 9, 9], [-1, 0, 0], [7, 7, 7], [7, 7, 7]],
    "node_len": [3, 3, 0, 2, 0, 0],
}


def plan(**changes):
    """`GOOD` with `(row, value)` put into the named fields."""
    fields = {name: np.array(value, np.int32) for name, value in GOOD.items()}
    for name, (row, value) in changes.items():
        fields[name][row] = value
    return NodesPlan(**fields)


def test_a_plan_that_keeps_the_contract_passes():
    check_plan(plan(), num_slots=7, num_pending=2, depth=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"read_slot": (1, 7)}, r"rows \[1\]: read_slot is not in \[0, 7\)"),
        ({"write_slot": (2, -1)}, r"rows \[2\]: write_slot is not in"),
        ({"track_slot": (0, 8)}, r"rows \[0\]: track_slot is not in"),
        ({"pending_len": (4, 3)}, r"rows \[4\]: pending_len is not in \[0, 2\]"),
        ({"node_len": (5, 4)}, r"rows \[5\]: node_len is not in \[0, 3\]"),
        ({"track_len": (0, 0)}, r"rows \[0\]: track_len is not in \[1, pending_len\]"),
        ({"track_len": (2, 3)}, r"rows \[2\]: track_len is not in \[1, pending_len\]"),
        ({"write_slot": (2, 4)}, r"rows \[1, 2\]: a slot is written twice"),
        ({"track_slot": (2, 5)}, r"rows \[2\]: a slot is written twice"),
        ({"track_slot": (0, 5)}, r"rows \[0, 2\]: a slot is written twice"),
        ({"write_slot": (1, 3)}, r"rows \[1\]: write_slot or track_slot is another row's read_slot"),
        ({"track_slot": (2, 3)}, r"rows \[2\]: write_slot or track_slot is another row's read_slot"),
        ({"parent": ((0, 1), 1)}, r"rows \[0\]: a parent is neither -1 nor an earlier node"),
        ({"parent": ((3, 1), -2)}, r"rows \[3\]: a parent is neither -1 nor an earlier node"),
    ],
)
def test_a_plan_that_breaks_it_is_refused_by_row(changes, message):
    with pytest.raises(ValueError, match=message):
        check_plan(plan(**changes), num_slots=7, num_pending=2)


def test_a_path_longer_than_the_bound_is_refused():
    with pytest.raises(ValueError, match=r"rows \[0\]: a path has more than depth = 2 nodes"):
        check_plan(plan(), num_slots=7, num_pending=2, depth=2)
