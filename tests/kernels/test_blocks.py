"""`cut_rows` lays rows out as the blocks that `Blocks` describes."""

import numpy as np
import pytest

from kernels_pallas import cut_rows


def test_rows_are_cut_into_full_blocks_and_a_rest():
    blocks = cut_rows([5, 0, 4], 4, exports=[[5, 4], [0, 0], [1, 0]], num_blocks=5)
    assert blocks.row.tolist() == [0, 0, 2, 3, 3]
    assert blocks.first.tolist() == [True, False, True, True, True]
    assert blocks.length.tolist() == [4, 1, 4, 0, 0]
    assert blocks.export.tolist() == [[0, 4], [1, 0], [1, 0], [0, 0], [0, 0]]


def test_valid_tokens_are_those_before_the_length():
    valid = cut_rows([3], 2, num_blocks=3).valid(2)
    assert np.asarray(valid).tolist() == [[True, True], [True, False], [False, False]]


def test_wrong_layouts_are_refused():
    with pytest.raises(ValueError, match="must lie in its 3 tokens"):
        cut_rows([3], 4, exports=[[4]])
    with pytest.raises(ValueError, match="as many exports"):
        cut_rows([3, 3], 4, exports=[[1], [1, 2]])
    with pytest.raises(ValueError, match="2 blocks are needed"):
        cut_rows([5], 4, num_blocks=1)
