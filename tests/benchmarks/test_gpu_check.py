"""The check for a GPU, as far as it goes without one: every section at a tiny shape, and what becomes of failures."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.capture.driver import tiny_config
from tests.checkout import ROOT

from benchmarks import gpu_check, gpu_start, gpu_worker  # isort: skip
from benchmarks.gpu_bench import OURO_1_4B, Bench, Sizes  # isort: skip
from benchmarks.gpu_sections import SECTIONS  # isort: skip
from benchmarks.gpu_table import table_of  # isort: skip
from benchmarks.shim import build_tree  # isort: skip
from wavegraph.capture.backends.eager import EagerBackend
from wavegraph.capture.backends.recorded import RecordedBackend
from wavegraph.capture.device import CpuDevice
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops.aten import AtenOps

TINY = Sizes(
    rows=(1, 4, 16), ladder=(1, 4, 8), coda_rows=2, context=16, contexts=(16, 32), decodes=2, chunk=4, chunks=(4, 2),
    budget=8, requests=2, prompt_len=12, tokens=3, repeats=2, copy_bytes=1 << 16, matrix=16,
)  # fmt: skip


def tiny_bench() -> Bench:
    config = tiny_config(max_position_embeddings=64)
    return Bench(config, torch.float32, CpuDevice(), AtenOps(), RecordedBackend, EagerBackend, TINY)


def run_worker(names: list[str], sections: dict[str, Callable[[Bench], dict[str, Any]]]) -> list[dict[str, Any]]:
    with redirect_stdout(io.StringIO()) as out:
        gpu_worker.run(names, tiny_bench(), sections)
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture(scope="module")
def entries() -> dict[str, dict[str, Any]]:
    return {entry.pop("name"): entry for entry in run_worker(list(SECTIONS), SECTIONS)}


# -- figures -------------------------------------------------------------------------------------------------


def test_every_section_runs(entries: dict[str, dict[str, Any]]) -> None:
    assert list(entries) == list(SECTIONS)
    for name, entry in entries.items():
        assert entry["ok"], (name, entry)
        assert not entry["broken"]


def test_the_sections_are_those_that_have_limits() -> None:
    assert [*gpu_check.OTHER_PROCESSES[:1], *SECTIONS, *gpu_check.OTHER_PROCESSES[1:]] == list(gpu_check.LIMITS)


def test_figures_are_what_they_say(entries: dict[str, dict[str, Any]]) -> None:
    results = {name: entry["result"] for name, entry in entries.items()}
    assert set(results["capture"]["buckets"]) == {"1", "4", "8"}
    assert all(bucket["nodes"] > 0 for bucket in results["capture"]["buckets"].values())
    assert set(results["core"]["rows"]) == {"1", "4", "16"}
    row = results["core"]["rows"]["4"]
    assert row["ratio_to_floor"] == pytest.approx(row["ms"]["median"] / row["weight_floor_ms"])
    assert set(results["attention"]["contexts"]) == {"16", "32"}
    waves = results["wavefront"]["chunks"]
    assert set(waves) == {"4", "2"}
    assert waves["2"]["ordinary"]["steps"] == 6 * 3, "chunks of two requests, through three depths"
    assert waves["2"]["wavefront"]["steps"] < 6 * 3
    assert waves["2"]["ordinary"]["rows_per_step"] == 4
    assert results["decode"]["requests"]["2"]["same_tokens"]


def test_the_shape_is_that_of_ouro() -> None:
    shape = OuroConfig.from_dict(OURO_1_4B)
    assert (shape.q_size, shape.kv_size, shape.num_hidden_layers) == (2048, 2048, 24)
    bench = tiny_bench()
    layers, hidden, inner = 2, 32, 48
    assert bench.layer_bytes == 4 * layers * (hidden * (64 + 64) + 64 * hidden + 3 * inner * hidden)


# -- failures ------------------------------------------------------------------------------------------------


def fails(bench: Bench) -> dict[str, Any]:
    raise RuntimeError("CUDA error: something\nmore")


def test_a_section_that_fails_is_reported_and_the_rest_go_on() -> None:
    first, second = run_worker(["bad", "good"], {"bad": fails, "good": lambda bench: {"value": 1}})
    assert (first["ok"], first["error"]) == (False, "RuntimeError: CUDA error: something")
    assert "in fails" in first["output"]
    assert (second["ok"], second["result"]) == (True, {"value": 1})


def test_a_broken_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(self: CpuDevice) -> None:
        raise RuntimeError("CUDA error: sticky")

    monkeypatch.setattr(CpuDevice, "synchronize", synchronize)
    (entry,) = run_worker(["bad", "good"], {"bad": fails, "good": lambda bench: {}})
    assert entry["broken"]


WORKER = """
import json, os, sys, time
from pathlib import Path

def say(name, **more):
    print(json.dumps({"name": name, "ok": True, "seconds": 0.0, "broken": False} | more), flush=True)

with Path(os.environ["STARTS"]).open("a") as file:
    print(sys.argv[1], file=file)
for name in sys.argv[1].split(","):
    if name == "crash":
        print("Segmentation fault", file=sys.stderr)
        os._exit(139)
    if name == "hang":
        time.sleep(60)
    print("noise of a library", flush=True)
    say(name, ok=name != "broken", broken=name == "broken", result={})
    if name == "broken":
        sys.exit()
"""


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """Runs sections of `WORKER` by name; returns their entries, and what each process was started for."""
    (tmp_path / "stub_worker.py").write_text(WORKER)
    starts = tmp_path / "starts"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "STARTS": str(starts)}
    monkeypatch.setattr(gpu_check, "START_UP", 20)
    monkeypatch.setitem(gpu_check.LIMITS, "hang", 1)

    def run(*names: str, seconds: float = 60.0) -> tuple[dict[str, Any], list[str]]:
        deadline = time.monotonic() + seconds
        entries = dict(gpu_check.run_figures(names, environment, deadline, "stub_worker"))
        return entries, starts.read_text().splitlines() if starts.exists() else []

    return run


def test_one_process_runs_all_that_is_well(figures: Callable[..., tuple[dict[str, Any], list[str]]]) -> None:
    entries, starts = figures("a", "b", "c")
    assert [entry["ok"] for entry in entries.values()] == [True] * 3
    assert starts == ["a,b,c"]


def test_another_process_goes_on_behind_what_breaks(
    figures: Callable[..., tuple[dict[str, Any], list[str]]],
) -> None:
    entries, starts = figures("a", "broken", "crash", "b")
    assert {name: entry["ok"] for name, entry in entries.items()} == {
        "a": True, "broken": False, "crash": False, "b": True
    }  # fmt: skip
    assert starts == ["a,broken,crash,b", "crash,b", "b"]
    assert "exit code" in entries["crash"]["error"]
    assert "Segmentation fault" in entries["crash"]["output"]


def test_a_section_that_takes_too_long_is_ended(figures: Callable[..., tuple[dict[str, Any], list[str]]]) -> None:
    started = time.monotonic()
    entries, _ = figures("a", "hang", "b")
    assert time.monotonic() - started < 40
    assert {name: entry["ok"] for name, entry in entries.items()} == {"a": True, "hang": False, "b": True}
    assert "no result after 1 s" in entries["hang"]["error"]


def test_no_time_is_left_at_the_end(figures: Callable[..., tuple[dict[str, Any], list[str]]]) -> None:
    entries, starts = figures("a", "b", seconds=0.0)
    assert {name: entry["error"] for name, entry in entries.items()} == dict.fromkeys("ab", "no time was left for it")
    assert starts == []


# -- the whole ------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return build_tree(tmp_path / "tree")


def test_the_tree_is_imported_without_an_installation(tree: Path, tmp_path: Path) -> None:
    """With only what the GPU's machine has: none of what the server needs."""
    script = """
import sys
for name in ("pydantic", "fastapi", "msgspec", "uvicorn", "uvloop", "httptools", "starlette"):
    sys.modules[name] = None
import importlib.metadata, wavegraph.llm, wavegraph.startup.precompile, wavegraph.cli, benchmarks.gpu_worker
import benchmarks.gpu_start, tests.gpu, tests.model.interpreted.steps
assert wavegraph.__file__.startswith(sys.argv[1]), wavegraph.__file__
assert sys.modules["wavegraph.model.ops.aten"].__file__.startswith(sys.argv[1])
print(importlib.metadata.version("wavegraph"))
"""
    path = os.pathsep.join((str(tree), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tree)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0.1.0"


REPORT = (
    '<?xml version="1.0"?><testsuites>'
    '<testsuite tests="3" failures="{failures}" errors="0" skipped="{skipped}" time="4.5">'
    '<testcase classname="tests.gpu.test_a" name="test_b">{failure}</testcase></testsuite></testsuites>'
)


def test_a_test_report_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(REPORT.format(failures=0, skipped=1, failure=""))
    result = gpu_check.read_report(path, "")
    assert result == {"tests": 3, "failures": 0, "errors": 0, "skipped": 1, "seconds": 4.5}
    path.write_text(REPORT.format(failures=1, skipped=0, failure='<failure message="no"/>'))
    with pytest.raises(RuntimeError, match=r"failed: tests\.gpu\.test_a::test_b: the end"):
        gpu_check.read_report(path, "the end")
    path.write_text(REPORT.format(failures=0, skipped=3, failure=""))
    with pytest.raises(RuntimeError, match="none ran"):
        gpu_check.read_report(path, "")


def test_a_whole_run_without_a_gpu_reports_every_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every section fails here, and says so; the report is complete, and so is the table."""
    monkeypatch.setattr(gpu_check, "LIMITS", dict.fromkeys(gpu_check.LIMITS, 60))
    with redirect_stdout(io.StringIO()) as out:
        code = gpu_check.main(["--out", str(tmp_path / "results"), "--only", "machine,decode,start"])
    assert code == 1
    (path,) = (tmp_path / "results").glob("gpu-check-*.json")
    report = json.loads(path.read_text())
    assert set(report) == {"started", "sections", "seconds", "not_shown"}
    assert list(report["sections"]) == ["machine", "decode", "start"]
    for entry in report["sections"].values():
        assert not entry["ok"]
        assert "error" in entry
    assert "torch sees no GPU" in report["sections"]["machine"]["output"]
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["machine", "decode", "start", "all"]
    assert lines[-1] == str(path)


def test_the_table_shows_every_section(entries: dict[str, dict[str, Any]]) -> None:
    tests = {"ok": True, "result": {"tests": 9, "skipped": 1}}
    start = dict.fromkeys(("beyond_weights_seconds", "trial_seconds", "capture_seconds"), 1.0)
    others = {"tests": tests, "start": {"ok": True, "result": {**start, "kernels": 15, "compilers": []}}}
    core = json.loads(json.dumps(entries["core"]))
    core["result"]["kernels"] = {"16": {"busy_us": 10.0, "gaps_us": 2.0, "kernels": {}}}
    table = table_of({"sections": {**entries, **others, "core": core}, "seconds": 12.3})
    assert {line.split()[0] for line in table.splitlines()} == {*gpu_check.LIMITS, "all"}
    assert "8 passed, 1 skipped" in table
    assert "kernels 10 us, gaps 2 us" in table
    assert "compilers: none" in table


def test_unknown_sections_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--only", "speed"])
    assert "no section is called speed" in capsys.readouterr().err


def test_a_bundle_is_made_from_a_shape_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`config.json` is enough; here at a smaller shape, for a GPU that is not here."""
    pytest.importorskip("triton")
    from benchmarks import gpu_bench
    from wavegraph.capture import device
    from wavegraph.capture.bundle import read_bundle

    monkeypatch.setattr(gpu_bench, "OURO_1_4B", OURO_1_4B | {"num_hidden_layers": 2, "hidden_size": 64})
    monkeypatch.setattr(device, "CudaDevice", lambda: type("Device", (), {"architecture": "sm_90"}))
    monkeypatch.setattr(gpu_start, "LADDER", (1, 8))
    gpu_start.make(str(tmp_path / "checkpoint"), str(tmp_path / "bundle"))
    assert read_bundle(tmp_path / "bundle").fingerprint["target"] == "sm_90"
