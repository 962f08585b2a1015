import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import ConfigError


@given(st.sets(st.integers(1, 300), min_size=1))
def test_every_row_count_up_to_the_top_has_the_smallest_bucket_that_holds_it(sizes: set[int]) -> None:
    ladder = Ladder(sizes)
    assert ladder.max == max(sizes)
    for rows in range(1, ladder.max + 1):
        assert ladder.bucket(rows) == min(size for size in sizes if size >= rows)


@given(st.integers(1, 5000))
def test_the_default_ladder_is_closed_and_pads_by_at_most_half(max_rows: int) -> None:
    ladder = Ladder.default(max_rows)
    assert ladder.max == max_rows
    assert all(ladder.bucket(rows) < 2 * rows for rows in range(1, max_rows + 1))
    assert all(2 * ladder.bucket(rows) <= 3 * rows for rows in range(9, max_rows + 1))


@pytest.mark.parametrize("sizes", [[], [0], [-4, 8]])
def test_bad_ladders_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="ladder"):
        Ladder(sizes)


@pytest.mark.parametrize("rows", [0, -1, 9])
def test_rows_outside_the_ladder_are_refused(rows: int) -> None:
    with pytest.raises(ConfigError, match=r"1\.\.8"):
        Ladder([8]).bucket(rows)


def test_ladders_compare_by_their_sizes() -> None:
    assert Ladder([4, 2, 4]) == Ladder([2, 4])
    assert len({Ladder([1, 2]), Ladder([2, 1])}) == 1
