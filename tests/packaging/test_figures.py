"""docs/benchmarks.md says what the scheduler counts and what the committed results hold."""

import json
import re
from pathlib import Path

from tools.figures import MISSING, fill
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.study.simulate import SimulationResult, simulate
from wavegraph.study.workload import find_workload

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
SETS = {"rfc": 4, "mixed-32": 4, "mixed-128": 8}

ROW = re.compile(r"\| (\d+) \|[\d. ]+\| ([\d.]+) \((\d+)\) \|[\d. ]+\| ([\d.]+) \((\d+)\) \|")


def counted(name: str, chunk: int, wavefront: bool, run_ahead: int = 1) -> SimulationResult:
    workload, seqs = find_workload(name), SETS[name]
    config = SchedulerConfig(
        depths=4,
        page_size=16,
        num_pages=seqs * -(-workload.longest // 16),
        max_model_len=workload.longest,
        max_num_seqs=seqs,
        max_num_batched_tokens=1024,
        prefill_chunk_size=chunk,
        wavefront=wavefront,
    )
    return simulate(workload, config, run_ahead=run_ahead)


def test_the_counts_are_those_of_the_scheduler() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert [int(row[0]) for row in rows] == [128, 64, 32, 16] * 3
    for index, (chunk, *figures) in enumerate(rows):
        name = list(SETS)[index // 4]
        results = [counted(name, int(chunk), wavefront) for wavefront in (False, True)]
        assert figures == [text for each in results for text in (f"{each.rows_per_step:.2f}", str(each.steps))]


def test_the_readme_counts_as_the_scheduler_does() -> None:
    readme = (ROOT / "README.md").read_text()
    for words, wavefront in (("loop after loop", False), ("as a wavefront", True)):
        result = counted("rfc", 16, wavefront)
        assert f"| {words} | {result.steps:,} | {result.rows_per_step:.2f} |" in readme


def test_what_planning_ahead_changes() -> None:
    text = " ".join(PAGE.read_text().split())
    ordinary, wave = (counted("mixed-32", 128, wavefront, run_ahead=2) for wavefront in (False, True))
    assert f"takes {ordinary.steps} ordinary steps of {ordinary.rows_per_step:.2f} rows" in text
    assert f"and {wave.steps} of {wave.rows_per_step:.2f} as a wavefront" in text


def test_the_tables_are_those_of_the_committed_results() -> None:
    page = PAGE.read_text()
    assert fill(page, ROOT / "benchmarks" / "results") == page


def test_every_result_has_its_place() -> None:
    places = set(re.findall(r"<!-- figures: ([\w-]+) -->", PAGE.read_text()))
    written = set(re.findall(r"--json \$\(RESULTS\)/([\w-]+)\.json", (ROOT / "Makefile").read_text()))
    assert places == written


def test_filling(tmp_path: Path) -> None:
    times = {"median": 1.5, "low": 1.0, "high": 2000.0}
    tables = [
        {"workload": "w", "requests": 2, "prompt_tokens": 8, "variants": [{"chunk": 4, "ms": times, "error": 0.1}]}
    ]
    result = {"benchmark": "prefill", "cpu": "C", "commit": "abc", "workloads": tables}
    (tmp_path / "here.json").write_text(json.dumps(result))
    page = "a\n<!-- figures: here -->\nold\n<!-- end -->\nb\n<!-- figures: gone -->\n<!-- end -->\n"
    filled = fill(page, tmp_path)
    assert filled == (
        "a\n<!-- figures: here -->\nw: 2 requests, 8 prompt tokens\n\n| chunk | ms | error |\n| --- | --- | --- |\n"
        "| 4 | 1.5 (1, 2,000) | 10.0% |\n\n(cpu C, commit abc)\n<!-- end -->\nb\n<!-- figures: gone -->\n"
        f"{MISSING}<!-- end -->\n"
    )
    assert fill(filled, tmp_path) == filled
