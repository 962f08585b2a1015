"""The profiler drives callables, keeps every sample at once, and goes on where it was."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from wavegraph.buckets import profile as module
from wavegraph.buckets.profile import ROUNDS, RUNS, Profile, candidate_rows, points_of, profile
from wavegraph.buckets.samples import Captured, Point, Samples
from wavegraph.errors import ConfigError, OutputError

FINGERPRINT = {"model.hidden_size": 64, "dtype": "float32", "threads": 2}
POINTS = points_of([1, 8], [1], [16, 64])


class FakeClock:
    """Moves only when a replay does."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeProbe:
    """Two core buckets, one of the coda. A replay takes 1 ms a row, 1 us a position; Ctrl-C after ``limit`` visits."""

    def __init__(self, clock: FakeClock, limit: int = 1000) -> None:
        self._clock = clock
        self._limit = limit
        self.prepared: list[Point] = []
        self.replays = 0

    def captured(self) -> Iterator[Captured]:
        for program, rows in (("core", 8), ("core", 1), ("coda", 1)):
            yield Captured(program, rows, rows / 4, rows * 1000, 5)

    def host_seconds(self) -> list[float]:
        return [2e-4, 1e-4, 9e-4]

    def rates(self) -> dict[str, float]:
        return {"read_gbs": 10.0}

    def prepare(self, point: Point) -> int:
        if len(self.prepared) == self._limit:
            raise KeyboardInterrupt
        self.prepared.append(point)
        return point.rows * point.context

    def replay(self, point: Point) -> None:
        assert point == self.prepared[-1]
        self.replays += 1
        self._clock.now += 1e-3 * point.rows + 1e-6 * point.rows * point.context


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def run(probe: FakeProbe, path: Path, **options: Any) -> Profile:
    return profile(lambda: probe, POINTS, Samples(path, FINGERPRINT), source="a fake", **options)


def test_everything_is_measured_in_rounds_of_different_order(clock: FakeClock, tmp_path: Path) -> None:
    probe, told = FakeProbe(clock), []
    found = run(probe, tmp_path / "samples.jsonl", progress=lambda done, total: told.append((done, total)))
    count = len(POINTS)
    rounds = [probe.prepared[start : start + count] for start in range(0, ROUNDS * count, count)]
    assert all(sorted(each) == sorted(POINTS) for each in rounds)
    assert rounds[0] != rounds[1]
    assert told == [(done, ROUNDS * count) for done in range(1, ROUNDS * count + 1)]
    assert probe.replays == ROUNDS * count * (RUNS + 1)  # the first of a visit does not count
    assert [bucket.rows for bucket in found.core] == [1, 8]
    eight = found.core[1]
    assert (eight.capture_seconds, eight.capture_bytes, eight.nodes) == (2.0, 8000, 5)
    assert [(each.context, each.positions, each.runs) for each in eight.replays] == [(16, 128, 24), (64, 512, 24)]
    assert eight.replays[0].median == pytest.approx(8e-3 + 128e-6)
    assert found.host_seconds == 2e-4
    assert found.rates == {"read_gbs": 10.0}
    cost = found.cost()
    assert cost.source == "a fake"
    assert cost.step_seconds(8, 512, 1) == pytest.approx(2e-4 + 8e-3 + 512e-6 + 1e-3)


def test_a_visit_is_short_where_a_replay_is_long(
    clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VISIT_SECONDS", 0.015)
    found = run(FakeProbe(clock), tmp_path / "samples.jsonl")
    assert [bucket.replays[0].runs for bucket in found.core] == [ROUNDS * RUNS, ROUNDS * 2]


def test_an_interrupted_run_goes_on_where_it_was(clock: FakeClock, tmp_path: Path) -> None:
    path, whole = tmp_path / "samples.jsonl", run(FakeProbe(clock), tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run(FakeProbe(clock, limit=4), path)
    assert Samples(path, FINGERPRINT).measures("core")  # what was measured is there
    with path.open("a") as file:
        file.write('{"program": "core", "rows"')  # and a writer that was killed in the middle of a line
    told: list[int] = []
    rest = FakeProbe(clock)
    found = run(rest, path, progress=lambda done, total: told.append(done))
    assert len(rest.prepared) == ROUNDS * len(POINTS) - 4
    assert told[0] == 5
    for ours, theirs in zip(found.core, whole.core, strict=True):
        assert [each.runs for each in ours.replays] == [each.runs for each in theirs.replays] == [ROUNDS * RUNS] * 2
        assert ours.replays[0].median == pytest.approx(theirs.replays[0].median)

    def never() -> FakeProbe:
        raise AssertionError("nothing is missing")

    again = profile(never, POINTS, Samples(path, FINGERPRINT), source="a fake")
    assert again == found


def test_more_candidates_are_added_to_what_is_there(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    profile(lambda: FakeProbe(clock), points_of([1], [1], [16]), Samples(path, FINGERPRINT), source="")
    probe = FakeProbe(clock)
    found = profile(lambda: probe, POINTS, Samples(path, FINGERPRINT), source="")
    assert Point("core", 1, 16) not in probe.prepared
    assert [bucket.rows for bucket in found.core] == [1, 8]


def test_samples_of_other_conditions_are_refused_and_can_be_dropped(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "samples.jsonl"
    run(FakeProbe(clock), path)
    other = {**FINGERPRINT, "threads": 4, "isa": "avx2"}
    with pytest.raises(ConfigError, match=r"\(isa: None there, avx2 now; threads: 2 there, 4 now\)"):
        Samples(path, other)
    assert Samples(path, FINGERPRINT).host_seconds  # still there
    assert Samples(path, other, fresh=True).host_seconds == []
    with pytest.raises(ConfigError, match="threads: 4 there"):
        Samples(path, FINGERPRINT)


@pytest.mark.parametrize("content", ["hello\n", '{"rows": 3}\n', "[1]\n", '{"host_seconds": [1]}\n', "\xff\n"])
def test_other_files_are_refused_and_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match="is no samples"):
        Samples(path, FINGERPRINT)
    assert path.read_text(encoding="latin-1") == content


def test_a_folder_that_cannot_be_written_is_said() -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        Samples(Path("/proc/folder/samples.jsonl"), FINGERPRINT)  # where not even root may write


def test_a_file_in_the_place_of_the_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        Samples(tmp_path / "file" / "samples.jsonl", FINGERPRINT)


def test_samples_are_lines_of_json(clock: FakeClock, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    run(FakeProbe(clock), path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"fingerprint": FINGERPRINT}
    assert sum("context" in line for line in lines) == ROUNDS * len(POINTS)


@pytest.mark.parametrize("top", [1, 2, 3, 16, 17, 100, 256, 1000])
def test_candidates_are_an_eighth_of_an_octave_apart(top: int) -> None:
    rows = candidate_rows(top)
    assert rows[0] == 1
    assert rows[-1] == top
    assert rows == sorted(set(rows))
    for low, high in pairwise(rows):
        assert high - low <= max(2, low / 8)


def test_points_need_rows_and_contexts() -> None:
    assert points_of([4], [2], [8, 9]) == [Point("core", 4, 8), Point("core", 4, 9), Point("coda", 2, 0)]
    with pytest.raises(ConfigError, match=r"candidates: .* got \[0, 1\]"):
        points_of([0], [1], [8])
    with pytest.raises(ConfigError, match=r"contexts: .* got \[\]"):
        points_of([1], [1], [])
    with pytest.raises(ConfigError, match="at least 1 row, got 0"):
        candidate_rows(0)
