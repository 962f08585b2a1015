"""The trace of steps: valid, complete, and it adds up."""

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.drive import build, generate
from wavegraph.engine.trace import DEVICE, FIRST_DEPTH, HOST, TraceWriter
from wavegraph.errors import OutputError
from wavegraph.sampling import SamplingParams


def traced(path: Path, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    engine = build(trace=path, prefill_chunk_size=4, max_num_batched_tokens=9, **options)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    generate(engine, [(list(range(1, 20)), params), ([3, 4], params)])
    stats = engine.stats()
    engine.close()
    engine.close()
    return json.loads(path.read_text()), stats


@pytest.mark.parametrize("run_ahead", [1, 2])
def test_lanes_by_depth_add_up_to_the_rows(tmp_path: Path, run_ahead: int) -> None:
    events, stats = traced(tmp_path / "trace.json", run_ahead=run_ahead)
    spans = [event for event in events if event["ph"] == "X"]
    lanes: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for span in spans:
        assert span["args"]["step"] not in lanes[span["tid"]], "two spans of one step in one lane"
        lanes[span["tid"]][span["args"]["step"]] = span
    assert set(lanes) == {HOST, DEVICE, *(FIRST_DEPTH + depth for depth in range(4))}
    assert sorted(lanes[DEVICE]) == sorted(lanes[HOST]) == list(range(stats.scheduler.steps))
    total = 0
    reasons: Counter[str] = Counter()
    for step, span in lanes[DEVICE].items():
        rows = 0
        for depth in range(4):
            at_depth = lanes[FIRST_DEPTH + depth].get(step)
            if at_depth is None:
                continue
            assert (at_depth["ts"], at_depth["dur"]) == (span["ts"], span["dur"])
            ranges = [text.rsplit("[", 1)[1].rstrip("]").split(":") for text in at_depth["args"]["spans"]]
            count = sum(int(end) - int(start) for start, end in ranges)
            assert at_depth["name"] == f"{count} rows"
            rows += count
        args = span["args"]
        assert args["rows"] == rows
        assert args["bucket"] == rows + args["padding"]
        assert bool(args["padding_reason"]) == (args["padding"] > 0)
        reasons[args["padding_reason"]] += args["padding"]
        total += rows
    assert total == stats.scheduler.rows
    assert +reasons == stats.scheduler.padding_reasons
    assert sum(span["args"]["coda_rows"] for span in lanes[DEVICE].values()) == stats.scheduler.coda_rows
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"host: plan", "device: step", *(f"depth {depth}" for depth in range(4))}


def test_device_steps_do_not_overlap(tmp_path: Path) -> None:
    events, _ = traced(tmp_path / "trace.json")
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == DEVICE]
    for before, after in pairwise(steps):
        assert after["ts"] >= before["ts"] + before["dur"] - 0.2  # microseconds, rounded


def test_an_engine_that_did_nothing_leaves_valid_json(tmp_path: Path) -> None:
    engine = build(trace=tmp_path / "trace.json")
    engine.close()
    assert all(event["ph"] == "M" for event in json.loads((tmp_path / "trace.json").read_text()))


@pytest.mark.parametrize("path", ["no/such/folder/trace.json", "."])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(OutputError, match=r"trace: .* cannot be written"):
        TraceWriter(tmp_path / path, 4)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said_so() -> None:
    writer = TraceWriter("/dev/full", 4)
    with pytest.raises(OutputError, match=r"trace: /dev/full cannot be written: No space left"):
        writer.close()
    writer.close()
