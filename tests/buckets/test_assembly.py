from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavegraph.buckets.assembly import Assembly, Outlook
from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import ConfigError

PATH = 3


def follows(rows: int) -> Outlook:
    """Work goes on, and ``rows`` follow."""
    return Outlook(rows, None, lambda left: 0)


def make_cost(sizes: Sequence[int], seconds: Sequence[float]) -> CostModel:
    zeros = (0,) * len(sizes)
    return CostModel(ProgramCost(tuple(sizes), tuple(seconds), tuple(map(float, zeros)), zeros), source="test")


def linear(fixed: float, per_row: float, top: int = 256) -> CostModel:
    return make_cost((1, top), (fixed + per_row, fixed + per_row * top))


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[int, float], int]:
    """Seconds by bucket, in any proportion to each other, and a budget."""
    sizes = sorted(draw(st.sets(st.integers(1, 24), min_size=1, max_size=6)))
    costs = {size: float(draw(st.integers(0, 40))) for size in sizes}
    return costs, draw(st.integers(1, max(sizes)))


def best_drain(costs: dict[int, float], budget: int) -> list[float]:
    """Least seconds for n rows, by trying every step first."""

    @cache
    def least(rows: int) -> float:
        if rows <= 0:
            return 0.0
        return min(seconds + least(rows - min(size, budget)) for size, seconds in costs.items())

    return [least(rows) for rows in range(2 * budget + 1)]


def step_seconds(costs: dict[int, float], rows: int) -> float:
    return min(seconds for size, seconds in costs.items() if size >= rows)


@given(cases())
def test_a_drain_takes_the_least_seconds_that_any_sequence_of_steps_takes(case: tuple[dict[int, float], int]) -> None:
    costs, budget = case
    assembly = Assembly(Ladder(costs), make_cost(list(costs), list(costs.values())), budget, PATH)
    best = best_drain(costs, budget)
    for ready in range(1, budget + 1):
        left, seconds = ready, 0.0
        while left:
            rows = assembly.rows(left, lambda: follows(0))
            assert 1 <= rows <= left
            seconds += step_seconds(costs, rows)
            left -= rows
        assert seconds == best[ready]


@given(cases())
def test_a_steady_stream_runs_the_most_live_rows_a_second(case: tuple[dict[int, float], int]) -> None:
    costs, budget = case
    assembly = Assembly(Ladder(costs), make_cost(list(costs), list(costs.values())), budget, PATH)
    for ready in range(1, budget + 1):
        chosen = assembly.rows(ready, lambda ready=ready: follows(ready))
        for rows in range(1, ready + 1):
            assert chosen * step_seconds(costs, rows) >= rows * step_seconds(costs, chosen)


def least(costs: dict[int, float], ready: int, rows: int, steps: int) -> float:
    """T by trying everything: filled buckets, and steps of as many rows as are ready."""
    sizes = {size for size in costs if size <= ready} | {ready}

    @cache
    def search(rows: int, steps: int) -> float:
        if rows <= 0 and steps <= 0:
            return 0.0
        return min(step_seconds(costs, size) + search(max(0, rows - size), max(0, steps - 1)) for size in sizes)

    return search(rows, steps)


def choices(assembly: Assembly, costs: dict[int, float], budget: int, ready: int) -> list[int]:
    """What is weighed: filled buckets of the drain and the best rate, and all that is ready."""
    return sorted({assembly.rows(ready, lambda: follows(0)), assembly.rows(ready, lambda: follows(ready)), ready})


@given(cases(), st.data())
def test_draining_takes_the_least_seconds_for_all_that_follows(
    case: tuple[dict[int, float], int], data: st.DataObject
) -> None:
    costs, budget = case
    costs = {min(size, budget): step_seconds(costs, min(size, budget)) for size in costs}
    assembly = Assembly(Ladder(costs), make_cost(sorted(costs), [costs[size] for size in sorted(costs)]), budget, PATH)
    ready = data.draw(st.integers(1, budget))
    follow = data.draw(st.integers(0, ready - 1))
    chosen = assembly.rows(ready, lambda: follows(follow))

    def seconds(rows: int) -> float:
        return step_seconds(costs, rows) + least(costs, ready, ready - rows + follow, 0)

    assert seconds(chosen) <= min(seconds(rows) for rows in choices(assembly, costs, budget, ready)) + 1e-9


@given(cases(), st.data())
def test_with_the_end_in_sight_the_critical_path_counts(
    case: tuple[dict[int, float], int], data: st.DataObject
) -> None:
    """Rows that are left out need more steps than those that run; no more rows than now can run in any of them."""
    costs, budget = case
    costs = {min(size, budget): step_seconds(costs, min(size, budget)) for size in costs}
    assembly = Assembly(Ladder(costs), make_cost(sorted(costs), [costs[size] for size in sorted(costs)]), budget, PATH)
    ready = data.draw(st.integers(1, budget))
    remaining = data.draw(st.integers(ready, (PATH + 1) * ready))
    paths = data.draw(st.lists(st.integers(0, PATH), min_size=ready + 1, max_size=ready + 1))
    chosen = assembly.rows(ready, lambda: Outlook(ready, remaining, lambda left: paths[left]))

    def seconds(rows: int) -> float:
        return step_seconds(costs, rows) + least(costs, ready, remaining - rows, paths[ready - rows])

    assert seconds(chosen) <= min(seconds(rows) for rows in choices(assembly, costs, budget, ready)) + 1e-9


def test_rows_that_would_need_another_step_later_run_now() -> None:
    """Rows of one request at the first of 4 depths: those left out are a step behind all the way."""
    assembly = Assembly(Ladder.default(32), linear(16, 1, 32), 32, 4)
    assert assembly.rows(19, lambda: Outlook(19, 76, lambda left: 4 if left else 3)) == 16
    assert assembly.rows(17, lambda: Outlook(17, 68, lambda left: 4 if left else 3)) == 16
    assert assembly.rows(23, lambda: Outlook(23, 92, lambda left: 4 if left else 3)) == 23
    assembly = Assembly(Ladder([2, 4, 8]), linear(0, 1), 8, 4)
    assert assembly.rows(5, lambda: Outlook(0, 5, lambda left: 1 if left else 0)) == 4
    assert assembly.rows(5, lambda: Outlook(0, 5, lambda left: 3 if left else 0)) == 5


@given(cases())
def test_a_step_runs_at_the_cheapest_bucket_that_holds_it(case: tuple[dict[int, float], int]) -> None:
    costs, budget = case
    assembly = Assembly(Ladder(costs), make_cost(list(costs), list(costs.values())), budget, PATH)
    for rows in range(1, budget + 1):
        bucket = assembly.bucket(rows)
        assert bucket >= rows
        assert costs[bucket] == step_seconds(costs, rows)
        assert bucket == min(size for size in costs if size >= rows and costs[size] == costs[bucket])


@given(cases(), st.integers(0, 30))
def test_fewest_is_what_a_step_that_leaves_rows_out_runs_at_least(
    case: tuple[dict[int, float], int], follow: int
) -> None:
    costs, budget = case
    assembly = Assembly(Ladder(costs), make_cost(list(costs), list(costs.values())), budget, PATH)
    for ready in range(1, budget + 1):
        chosen = assembly.rows(ready, lambda: follows(follow))
        assert chosen == ready or chosen >= assembly.fewest


@pytest.mark.parametrize(
    ("cost", "ready", "follow", "rows"),
    [
        (linear(9, 0.54), 9, 9, 8),  # 8 rows of a bucket of 8 are cheaper than 9 of one of 12
        (linear(9, 0.54), 11, 11, 11),  # 11 rows of a bucket of 12 are not
        (linear(9, 0.54), 33, 0, 33),  # one step of 48, not one of 32 and one of 1
        (linear(0.1, 0.54), 33, 0, 32),  # unless a step by itself costs next to nothing
        (linear(9, 0.0), 129, 500, 129),  # a step costs the same at any bucket: take all
        (linear(9, 0.54), 256, 0, 256),
    ],
)
def test_filling_padding_and_splitting_are_weighed(cost: CostModel, ready: int, follow: int, rows: int) -> None:
    assert Assembly(Ladder.default(256), cost, 256, PATH).rows(ready, lambda: follows(follow)) == rows


def test_what_follows_is_asked_only_where_it_matters() -> None:
    assembly = Assembly(Ladder.default(256), CostModel.assumed(256), 256, PATH)

    def never() -> Outlook:
        raise AssertionError

    for size in Ladder.default(256).sizes:
        assert assembly.rows(size, never) == size


def test_rows_of_a_step_grow_with_the_rows_that_are_ready() -> None:
    assembly = Assembly(Ladder.default(64), linear(9, 0.54), 64, PATH)
    chosen = [assembly.rows(ready, lambda: follows(1000)) for ready in range(1, 65)]
    assert all(before <= after for before, after in pairwise(chosen))
    assert chosen[-1] == 64


def test_a_ladder_that_does_not_reach_the_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="no step of 9 rows"):
        Assembly(Ladder([8]), linear(1, 1), 9, PATH)
