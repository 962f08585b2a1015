"""The optimised ladder is the best there is: against brute force, at full size, and under budgets."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.buckets.ladder import Ladder
from wavegraph.buckets.optimise import (
    Histogram,
    ladder_bytes,
    ladder_capture_seconds,
    optimise,
    padding,
    predicted_seconds,
)
from wavegraph.buckets.robust import BLOCKS, optimise_robust, smoothed
from wavegraph.buckets.rules import RULES, compare, powers_of_two, sglang, tensorrt_llm, vllm
from wavegraph.errors import ConfigError

SIZED = CostModel(ProgramCost((1, 100), (1.0, 10.9), (0.1, 0.199), (10, 1000)))
"""Seconds 0.9 + 0.1 a row, 10 bytes a row, capture seconds 0.099 + 0.001 a row."""


def best_by_force(
    histogram: Histogram, cost: CostModel, graphs: int, top: int, most_bytes: float, most_seconds: float
) -> float | None:
    scores = []
    for count in range(min(graphs, top)):
        for sizes in itertools.combinations(range(1, top), count):
            ladder = Ladder([*sizes, top])
            if ladder_bytes(ladder, cost) <= most_bytes and ladder_capture_seconds(ladder, cost) <= most_seconds:
                scores.append(predicted_seconds(histogram, ladder, cost))
    return min(scores, default=None)


@pytest.mark.parametrize(
    "budgets", [(), ("max_bytes",), ("max_capture_seconds",), ("max_bytes", "max_capture_seconds")]
)
def test_a_thousand_random_instances_equal_brute_force(budgets: tuple[str, ...]) -> None:
    """250 with each set of budgets. Measured cost need not grow with rows, and often does not here."""
    draw = random.Random(len(budgets))
    refused = 0
    for _ in range(250):
        top = draw.randint(1, 9)
        rows = sorted(draw.sample(range(1, top + 1), draw.randint(1, top)))
        cost = CostModel(
            ProgramCost(
                tuple(rows),
                tuple(float(draw.randint(1, 9)) for _ in rows),
                tuple(draw.random() for _ in rows),
                tuple(draw.randint(0, 9) for _ in rows),
            )
        )
        histogram = {size: draw.randint(0, 5) for size in draw.sample(range(1, top + 1), draw.randint(1, top))}
        graphs = draw.randint(1, 5)
        limits = {"max_bytes": draw.randint(5, 30), "max_capture_seconds": draw.random() * 3}
        given = {name: limits[name] for name in budgets}
        expected = best_by_force(
            histogram, cost, graphs, top, given.get("max_bytes", np.inf), given.get("max_capture_seconds", np.inf)
        )
        if expected is None:
            refused += 1
            with pytest.raises(ConfigError, match="is less than the top bucket"):
                optimise(histogram, cost, max_graphs=graphs, max_rows=top, **given)  # type: ignore[arg-type]
            continue
        ladder = optimise(histogram, cost, max_graphs=graphs, max_rows=top, **given)  # type: ignore[arg-type]
        assert predicted_seconds(histogram, ladder, cost) == pytest.approx(expected, rel=1e-12)
        assert ladder.max == top
        assert len(ladder.sizes) <= graphs
        assert ladder_bytes(ladder, cost) <= given.get("max_bytes", np.inf)
        assert ladder_capture_seconds(ladder, cost) <= given.get("max_capture_seconds", np.inf)
    assert refused < 125


def best_by_bytes(histogram: Histogram, cost: CostModel, graphs: int, top: int, most: int) -> float:
    """Least seconds of a ladder within ``most`` bytes, byte by byte: for sizes that brute force cannot do."""
    # By the rows up to which steps are served, buckets used and bytes used.
    best = {(0, 0, 0): 0.0}
    for size in range(1, top + 1):
        found: dict[tuple[int, int, int], float] = {}
        for (below, count, used), seconds in best.items():
            key = size, count + 1, used + cost.core.bytes(size)
            if key[1] <= graphs and key[2] <= most:
                steps = sum(histogram.get(rows, 0) for rows in range(below + 1, size + 1))
                found[key] = min(found.get(key, np.inf), seconds + steps * cost.core.replay(size))
        best |= found
    return min(seconds for (served, _, _), seconds in best.items() if served == top)


@pytest.mark.parametrize(("seed", "least_graphs", "most_graphs", "spare"), [(0, 3, 6, 16), (5, 2, 4, 20)])
def test_budgets_bind_as_they_do_byte_by_byte(seed: int, least_graphs: int, most_graphs: int, spare: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        top, graphs = draw.randint(10, 20), draw.randint(least_graphs, most_graphs)
        rows = tuple(range(1, top + 1))
        program = ProgramCost(
            rows,
            tuple(sorted(float(draw.randint(1, 40)) for _ in rows)),
            (0.0,) * top,
            tuple(draw.randint(1, 12) for _ in rows),
        )
        cost, histogram = CostModel(program), {size: draw.randint(0, 9) for size in rows}
        most = program.bytes(top) + draw.randint(2, spare)
        ladder = optimise(histogram, cost, max_graphs=graphs, max_bytes=most, max_rows=top)
        assert ladder_bytes(ladder, cost) <= most
        expected = best_by_bytes(histogram, cost, graphs, top, most)
        assert predicted_seconds(histogram, ladder, cost) == pytest.approx(expected)


def test_4096_row_counts_and_16_graphs() -> None:
    steps = np.random.default_rng(0).integers(1, 100, 4096)
    histogram = {rows: int(count) for rows, count in enumerate(steps, 1)}
    ladder = optimise(histogram, SIZED, max_graphs=16)
    assert len(ladder.sizes) == 16
    assert ladder.max == 4096


def test_binding_budgets_on_256_row_counts() -> None:
    steps = np.random.default_rng(0).integers(1, 100, 256)
    histogram = {rows: int(count) for rows, count in enumerate(steps, 1)}
    free = optimise(histogram, SIZED, max_graphs=12)
    tight = optimise(histogram, SIZED, max_graphs=12, max_bytes=9000, max_capture_seconds=1.3)
    assert ladder_bytes(free, SIZED) > 9000
    assert ladder_bytes(tight, SIZED) <= 9000
    assert ladder_capture_seconds(tight, SIZED) <= 1.3
    # No single move of a bucket, up or down, and no bucket more or less, is allowed and better.
    least = predicted_seconds(histogram, tight, SIZED)
    for size in tight.sizes[:-1]:
        rest = set(tight.sizes) - {size}
        for moved in ({size - 1}, {size + 1}, set()):
            other = Ladder(rest | {rows for rows in moved if rows > 0})
            fits = ladder_bytes(other, SIZED) <= 9000 and ladder_capture_seconds(other, SIZED) <= 1.3
            assert not fits or predicted_seconds(histogram, other, SIZED) >= least - 1e-9


def test_the_top_is_the_largest_batch_and_need_not_be_wanted() -> None:
    assert optimise({3: 1}, SIZED, max_graphs=5) == Ladder([3])
    assert optimise({3: 1}, SIZED, max_graphs=5, max_rows=64) == Ladder([3, 64])
    assert optimise({3: 1}, SIZED, max_graphs=1, max_rows=64) == Ladder([64])
    assert optimise({}, SIZED, max_graphs=2, max_rows=8) == Ladder([8])


def test_a_bucket_that_replays_faster_than_a_smaller_one_is_taken() -> None:
    cost = CostModel(ProgramCost((1, 5, 8, 16), (1.0, 5.0, 2.0, 9.0), (0.0,) * 4, (0,) * 4))
    assert optimise({5: 10, 16: 1}, cost, max_graphs=2) == Ladder([8, 16])


@pytest.mark.parametrize(
    ("histogram", "options", "words"),
    [
        ({1: 1}, {"max_graphs": 0}, "max_graphs: a ladder has at least 1 bucket, got 0"),
        ({}, {}, "histogram: holds no step"),
        ({1: 0}, {}, "histogram: holds no step"),
        ({9: 1}, {"max_rows": 8}, "wants 9 to 9 rows, but a step holds 1 to 8"),
        ({0: 1, 4: 1}, {}, "wants 0 to 4 rows, but a step holds 1 to 4"),
        ({1: -1, 2: 1}, {}, "steps must be positive"),
        ({64: 1}, {"max_bytes": 639}, "max_bytes: 639 is less than the top bucket of 64 rows takes, 640"),
        ({64: 1}, {"max_capture_seconds": 0.1}, "max_capture_seconds: 0.1 is less than the top bucket of 64 rows"),
    ],
)
def test_what_cannot_be_is_refused(histogram: Histogram, options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        optimise(histogram, SIZED, **{"max_graphs": 3, **options})  # type: ignore[arg-type]


# -- the rules of other engines ----------------------------------------------------------------------------


def test_rules_are_those_written_out() -> None:
    assert vllm(48).sizes == (1, 2, 4, 8, 16, 24, 32, 40, 48)
    assert vllm(300).sizes[-5:] == (248, 256, 272, 288, 300)
    assert sglang(48).sizes == (1, 2, 4, 8, 12, 16, 24, 32, 40, 48)
    assert sglang(600).sizes[-6:] == (480, 496, 512, 544, 576, 600)
    assert tensorrt_llm(1000).sizes[-4:] == (128, 256, 512, 1000)
    assert tensorrt_llm(100).sizes[:5] == (1, 2, 4, 8, 16)
    assert powers_of_two(100).sizes == (1, 2, 4, 8, 16, 32, 64, 100)
    for rule in RULES.values():
        for rows in range(1, 700):
            assert rule(rows).max == rows


def drawn(name: str) -> Histogram:
    """100,000 wanted row counts, seed 0, at most 64."""
    draw = np.random.default_rng(0)
    rows = draw.poisson(9, 100_000) if name == "poisson" else draw.geometric(1 / 6, 100_000)
    return dict(Counter(np.clip(rows, 1, 64).tolist()))


def test_an_optimised_ladder_of_twelve_wastes_a_third_of_what_sglangs_does() -> None:
    """Rows of Poisson(9) and of a geometric law with mean 6, each with a ladder of its own, together.

    `CostModel.assumed` is affine in rows, so the least seconds are the least padding. The geometric law alone comes to
    0.51: its tail is long, and no ladder of twelve does better.
    """
    cost, ours, theirs = CostModel.assumed(64), {}, {}
    for name in ("poisson", "geometric"):
        ladder = optimise(drawn(name), cost, max_graphs=12, max_rows=64)
        assert len(ladder.sizes) == len(sglang(64).sizes) == 12
        ours[name], theirs[name] = padding(drawn(name), ladder), padding(drawn(name), sglang(64))
    assert ours["poisson"] <= theirs["poisson"] / 7
    assert ours["geometric"] <= theirs["geometric"] / 1.9
    assert sum(ours.values()) <= sum(theirs.values()) / 3


def test_the_comparison_says_what_the_optimised_ladder_saves() -> None:
    ladder = optimise(drawn("poisson"), SIZED, max_graphs=12, max_rows=64)
    table = {each.name: each for each in compare(drawn("poisson"), SIZED, ladder)}
    assert list(table) == ["optimised", *RULES]
    ours, theirs = table["optimised"], table["powers of two"]
    assert ours.ladder == ladder
    assert ours.saving == 0
    assert theirs.seconds * (1 - theirs.saving) == pytest.approx(ours.seconds)
    assert theirs.padding_rows == padding(drawn("poisson"), powers_of_two(64))
    assert theirs.padding_share == pytest.approx(0.268, abs=1e-3)
    assert all(each.saving >= 0 for each in table.values() if len(each.ladder.sizes) <= 12)


# -- steps that were not seen ------------------------------------------------------------------------------


def in_blocks(first: list[int], second: list[int]) -> list[int]:
    """A trace whose halves are these two lists of equal length, a multiple of half of `BLOCKS`."""
    length = len(first) * 2 // BLOCKS
    cuts = range(0, len(first), length)
    return [rows for cut in cuts for half in (first, second) for rows in half[cut : cut + length]]


def test_a_robust_ladder_serves_rows_that_its_half_never_wanted() -> None:
    """One half wants what the other does not: a ladder of the other alone pads it to the top."""
    draw = random.Random(0)
    first = [draw.choice((2, 30)) for _ in range(320)]
    second = [draw.randint(1, 40) for _ in range(320)]
    found = optimise_robust(in_blocks(first, second), SIZED, max_graphs=6, max_rows=256)
    assert found.smoothing > 0
    assert found.held_out_seconds < found.unsmoothed_seconds
    assert found.held_out_seconds >= found.fitted_seconds
    assert found.loss == found.held_out_seconds / found.fitted_seconds - 1
    assert found.ladder.max == 256
    # The scores are those of the two halves, each on the other's ladder.
    ladders = [optimise(Counter(half), SIZED, max_graphs=6, max_rows=256) for half in (first, second)]
    crossed = predicted_seconds(Counter(first), ladders[1], SIZED) + predicted_seconds(
        Counter(second), ladders[0], SIZED
    )
    assert found.unsmoothed_seconds == pytest.approx(crossed)


def test_a_trace_that_repeats_itself_loses_nothing() -> None:
    draw = random.Random(0)
    half = [draw.randint(1, 40) for _ in range(200)]
    found = optimise_robust(in_blocks(half, half), SIZED, max_graphs=4, max_rows=64)
    assert found.smoothing == 0
    assert found.loss == 0
    assert found.ladder == optimise(Counter(half), SIZED, max_graphs=4, max_rows=64)
    with pytest.raises(ConfigError, match="1 steps cannot be halved"):
        optimise_robust([3], SIZED, max_graphs=4, max_rows=64)


def test_smoothing_keeps_the_number_of_steps() -> None:
    spread = smoothed({2: 30, 4: 10}, 0.1, 8)
    assert sum(spread.values()) == pytest.approx(40)
    assert spread[2] == pytest.approx(27.5)
    assert spread[8] == pytest.approx(0.5)


def test_host_seconds_change_no_choice() -> None:
    slow = replace(SIZED, host_seconds=5.0)
    assert optimise(drawn("poisson"), slow, max_graphs=5) == optimise(drawn("poisson"), SIZED, max_graphs=5)
    assert predicted_seconds({8: 2}, Ladder([8]), slow) == pytest.approx(10 + 2 * SIZED.core.replay(8))
