"""Workloads: files and traces are read back, broken ones are refused by line, named ones are what they say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.drive import build, generate
from wavegraph.errors import ConfigError, OutputError
from wavegraph.sampling import SamplingParams
from wavegraph.study.workload import NAMED, Arrival, Workload, chat, find_workload, read_workload

LINE = '{"arrival": 0.5, "prompt_tokens": 3, "output_tokens": 2}'

ARRIVALS = st.builds(
    Arrival, st.floats(0, 1e6, allow_nan=False), st.integers(1, 1 << 20), st.integers(1, 1 << 20)
)  # fmt: skip


@given(st.lists(ARRIVALS, min_size=1, max_size=20))
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, requests: list[Arrival]) -> None:
    path = tmp_path_factory.mktemp("workload") / "w.jsonl"
    first = min(each.arrival for each in requests)
    workload = Workload("w.jsonl", tuple(requests))
    workload.write(path)
    again = read_workload(path)
    assert [(r.prompt_tokens, r.output_tokens) for r in again.requests] == [
        (r.prompt_tokens, r.output_tokens) for r in workload.requests
    ]
    assert [r.arrival for r in again.requests] == [r.arrival - first for r in workload.requests]
    assert again.requests[0].arrival == 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "holds no request"),
        (f"{LINE}\n\n{{", "line 3: Expecting"),
        (f"{LINE}\n3", "line 2: must be an object with arrival, prompt_tokens, output_tokens, got 3"),
        ('{"arrival": 1}', "line 1: must have the keys arrival, prompt_tokens, output_tokens, got arrival"),
        (LINE.replace("0.5", "-1"), "line 1: arrival must be a finite number of seconds from 0 on, got -1"),
        (LINE.replace("0.5", "Infinity"), "line 1: arrival must be a finite number"),
        (LINE.replace("0.5", "true"), "line 1: arrival must be a finite number"),
        (LINE.replace("3", "0"), "line 1: prompt_tokens must be an integer of at least 1, got 0"),
        (LINE.replace("2}", "2.5}"), "line 1: output_tokens must be an integer of at least 1, got 2.5"),
        ('[\n{"ph": "M"},\nnonsense,\n{"ph": "M"}\n]', "line 3: is no event of a trace"),
        ('[\n{"ph": "b", "cat": "request", "ts": 1, "args": {"output_tokens": 1}}\n]', "lacks 'prompt_tokens'"),
        ("[\n]", "holds no request"),
    ],
)
def test_a_broken_file_is_refused_by_line(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^workload: .*w\.jsonl") as refused:
        read_workload(path)
    assert named in str(refused.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a file nor one of rfc, mixed-32, mixed-128, chat, decode, 4x512"):
        find_workload(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_workload(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_workload(str(tmp_path / "binary"))
    with pytest.raises(OutputError, match="cannot be written"):
        NAMED["rfc"]().write(tmp_path / "no" / "folder")


@pytest.mark.parametrize("complete", [True, False])
def test_a_trace_gives_its_workload_back(tmp_path: Path, complete: bool) -> None:
    path = tmp_path / "trace.json"
    engine = build(trace=path)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (5, 2)]
    generate(engine, [(list(range(1, 20)), params[0]), ([3, 4], params[1])])
    engine.add_request("never ran", [1], params[0])
    engine.abort("never ran")
    engine.close()
    if not complete:
        path.write_text(path.read_text().rstrip().removesuffix("]").rstrip() + ',\n{"pid": 1, "ph"')
    workload = read_workload(path)
    assert [(r.prompt_tokens, r.output_tokens) for r in workload.requests] == [(19, 5), (2, 2)]
    first, second = (r.arrival for r in workload.requests)
    assert first == 0 < second < 60


def test_a_traced_request_lasts_from_its_arrival_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine = build(trace=path)
    generate(engine, [([3, 4], SamplingParams(max_tokens=2, ignore_eos=True))])
    engine.close()
    events = json.loads(path.read_text())
    (begin,) = (event for event in events if event["ph"] == "b")
    (end,) = (event for event in events if event["ph"] == "e")
    steps = [event for event in events if event["ph"] == "X" and event["name"].startswith("step")]
    assert begin["id"] == end["id"]
    assert begin["args"] == {"prompt_tokens": 2, "output_tokens": 2, "finish_reason": "length"}
    assert begin["ts"] <= steps[0]["ts"] < steps[-1]["ts"] + steps[-1]["dur"] <= end["ts"] + 0.2


def test_named_workloads() -> None:
    for name in NAMED:
        assert find_workload(name).name == name
        assert find_workload(name) == find_workload(name)
    rfc = NAMED["rfc"]()
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in rfc.requests] == [(0.0, 8064, 1)] * 4
    assert (rfc.prompt_tokens, rfc.output_tokens, rfc.longest) == (4 * 8064, 4, 8065)
    assert find_workload("4x8064").requests == rfc.requests
    assert [len(NAMED[name]().requests) for name in ("mixed-32", "mixed-128")] == [32, 128]


def test_chat_arrives_at_its_rate() -> None:
    slow, fast = chat(1.0), find_workload("chat@4")
    assert [r.prompt_tokens for r in slow.requests] == [r.prompt_tokens for r in fast.requests]
    assert fast.requests[-1].arrival == pytest.approx(slow.requests[-1].arrival / 4)
    assert 90 < slow.requests[-1].arrival < 170  # 127 gaps of a second
    for text in ("chat@x", "chat@0", "chat@-1", "chat@inf", "chat@nan"):
        with pytest.raises(ConfigError, match="rate"):
            find_workload(text)


def test_scaled_and_limited() -> None:
    workload = Workload("w", (Arrival(0, 100, 10), Arrival(1, 2, 1)))
    assert workload.scaled(0.1).requests == (Arrival(0, 10, 1), Arrival(1, 1, 1))
    assert workload.limited(50).requests == (Arrival(0, 49, 1), Arrival(1, 2, 1))
    assert workload.limited(105).requests == (Arrival(0, 100, 5), Arrival(1, 2, 1))
    assert workload.limited(110) == workload


def test_workloads_bring_in_no_torch() -> None:
    script = "import sys, wavegraph.study.workload; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
