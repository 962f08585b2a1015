"""Cost models: interpolation, what is refused, and the fit of measured replays."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.buckets.fit import BucketMeasure, ReplayTime, fit_cost, left_out_errors
from wavegraph.errors import ConfigError


def bucket(rows: int, seconds: dict[int, float]) -> BucketMeasure:
    """A bucket whose replays take the given seconds, by positions attended."""
    replays = tuple(ReplayTime(each, each, value, value, value, 9) for each, value in seconds.items())
    return BucketMeasure(rows, 0.5 * rows, 100 * rows, 7, replays)


def law(rows: int) -> float:
    return 0.01 + 0.002 * rows


def measured(*sizes: int) -> list[BucketMeasure]:
    """Buckets that obey a law to the letter: 3 microseconds a position attended, and `law` for the rest."""
    return [
        bucket(rows, {count * rows: law(rows) + 3e-6 * count * rows for count in (64, 256, 1000)}) for rows in sizes
    ]


def test_replays_are_interpolated_and_continued() -> None:
    program = ProgramCost((2, 4, 8), (1.0, 3.0, 4.0), (0.1, 0.1, 0.2), (10, 20, 50))
    assert [program.replay(rows) for rows in (1, 2, 3, 4, 6, 8, 12)] == [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert program.bytes(6) == 35
    assert program.capture(16) == pytest.approx(0.4)


def test_a_fit_finds_the_law_behind_its_measurements() -> None:
    model = fit_cost(measured(1, 16, 64, 256), [bucket(1, {0: 0.1}), bucket(32, {0: 0.4})], host_seconds=1e-4)
    assert model.seconds_per_position == pytest.approx(3e-6)
    assert model.core.seconds == pytest.approx([law(rows) for rows in (1, 16, 64, 256)])
    assert model.core.capture_seconds == (0.5, 8.0, 32.0, 128.0)
    assert model.core.capture_bytes == (100, 1600, 6400, 25600)
    assert model.coda is not None
    assert model.coda.rows == (1, 32)
    assert model.coda.seconds == pytest.approx([0.1, 0.4])
    assert model.error == pytest.approx(0, abs=1e-9)
    assert model.measured
    assert model.step_seconds(32, 5000, 32) == pytest.approx(1e-4 + law(32) + 5000 * 3e-6 + 0.4)


def test_the_error_is_that_of_buckets_left_out() -> None:
    """One of five buckets is twice as slow as its neighbours say: its own error is a half, and it spoils two more."""
    buckets = measured(1, 16, 64, 128, 256)
    buckets[2] = bucket(64, {64: 2 * law(64)})
    errors = left_out_errors(buckets)
    assert len(errors) == 3 + 1 + 3
    assert errors[3] == pytest.approx(0.5, abs=0.02)
    assert min(errors[:3]) > 0.1
    assert fit_cost(buckets).error == sorted(errors)[3]
    assert left_out_errors(measured(1, 256)) == []


def spread(rows: int, median: float, low: float, high: float) -> BucketMeasure:
    return BucketMeasure(rows, 0.0, 0, 0, (ReplayTime(8, 0, median, low, high, 9),))


def test_a_larger_bucket_is_faster_only_beyond_the_spread_of_both() -> None:
    noise = [spread(8, 0.30, 0.20, 0.40), spread(16, 0.20, 0.18, 0.25), spread(32, 0.90, 0.80, 1.00)]
    assert fit_cost(noise).core.seconds == pytest.approx((0.25, 0.25, 0.9))
    real = [spread(8, 0.30, 0.28, 0.32), spread(16, 0.20, 0.19, 0.21), spread(32, 0.90, 0.80, 1.00)]
    assert fit_cost(real).core.seconds == pytest.approx((0.3, 0.2, 0.9))
    # A mean of two may be less than what stands before it.
    chain = [spread(4, 0.28, 0.1, 0.5), spread(8, 0.30, 0.1, 0.5), spread(16, 0.20, 0.1, 0.5)]
    assert fit_cost(chain).core.seconds == pytest.approx((0.26, 0.26, 0.26))


def test_faster_replays_with_more_positions_are_noise_and_cost_nothing() -> None:
    model = fit_cost([bucket(8, {10: 0.5, 1000: 0.4})])
    assert model.seconds_per_position == 0
    assert 0.4 <= model.core.seconds[0] <= 0.5
    assert model.coda is None


def test_a_fit_needs_a_measurement() -> None:
    with pytest.raises(ConfigError, match="no bucket of the core was measured"):
        fit_cost([bucket(8, {})])


def test_replay_times_are_summarised() -> None:
    times = ReplayTime.of(64, 100, [5.0, 1.0, 2.0, 3.0, 4.0])
    assert (times.median, times.low, times.high, times.runs) == (3.0, 1.0, 5.0, 5)


def test_json_goes_there_and_back(tmp_path: Path) -> None:
    model = fit_cost(measured(1, 16, 64), source="a test")
    plain, whole = tmp_path / "cost.json", tmp_path / "profile.json"
    plain.write_text(json.dumps(model.to_dict()))
    whole.write_text(json.dumps({"cost": model.to_dict(), "workload": None}))
    assert CostModel.from_file(plain) == CostModel.from_file(whole) == model
    (one,) = measured(16)
    assert BucketMeasure.from_dict(json.loads(json.dumps(asdict(one)))) == one


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cost": 3}', '{"core": null, "coda": null}'])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(ConfigError, match="cost model"):
        CostModel.from_file(tmp_path / "cost.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        CostModel.from_file(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (((), (), (), ()), "give one value a measured bucket, not none"),
        (((1, 2), (1.0,), (0.0, 0.0), (0, 0)), "columns of lengths"),
        (((2, 1), (1.0, 1.0), (0.0, 0.0), (0, 0)), "rows must ascend"),
        (((1,), (float("nan"),), (0.0,), (0,)), "must be finite"),
        (((1,), (1.0,), (-1.0,), (0,)), "must be finite"),
    ],
)
def test_programs_without_sense_are_refused(columns: tuple[tuple[float, ...], ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ProgramCost(*columns)  # type: ignore[arg-type]
