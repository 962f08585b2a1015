"""Every example runs as it stands, and its reader sees what its docstring says."""

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LONGEST = 55  # lines


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run an example; returns what it printed."""

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_a_batch_has_equal_tokens_in_fewer_fuller_steps(shown: Callable[[str], str]) -> None:
    out = shown("offline_batch")
    found = re.findall(r"(\w+): (\d+) steps of ([\d.]+)", out)
    steps = {name: (int(count), float(rows)) for name, count, rows in found}
    assert steps["wavefront"][0] < steps["ordinary"][0]
    assert steps["wavefront"][1] > steps["ordinary"][1]
    assert "tokens: equal" in out
    assert len(re.findall(r"\((\d+) tokens, (?:length|stop)\)", out)) == 4


def test_a_stream_shows_tokens_that_leave_early_and_others_that_do_not(shown: Callable[[str], str]) -> None:
    lines = shown("streaming").splitlines()
    tokens = [line.split(maxsplit=1) for line in lines if line.startswith("#")]
    loops = [len(mark) for mark, _ in tokens]
    assert max(loops) == 4
    assert min(loops) < 4
    assert lines[-1].startswith(f"{len(loops)} tokens, {sum(loops) / len(loops):.2f} loops each")
    text = "".join(ast.literal_eval(piece) for _, piece in tokens)
    assert f"for index in range({text}" in "\n".join(lines)


def test_a_schedule_of_ones_own_stands_beside_those_that_are_there_without_torch() -> None:
    script = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", script, str(EXAMPLES / "own_schedule.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["DecodeFirst", "Refill", "Fifo", "Turns"]
    assert len({tuple(row[1:]) for row in rows}) == len(rows)


def test_a_profile_makes_a_ladder_and_an_engine_runs_with_it(shown: Callable[[str], str]) -> None:
    out = shown("profile_to_ladder")
    measured = [int(rows) for rows in re.findall(r"^ +(\d+) +[\d.]+$", out, re.MULTILINE)]
    assert measured[0] == 1
    assert measured[-1] == 64
    best = ast.literal_eval(re.findall(r"five best: .* buckets (\(.*\))", out)[0])
    assert len(best) <= 5
    hits = ast.literal_eval(re.findall(r"replays by bucket: (\{.*\})", out)[0])
    assert hits.keys() <= set(best)


def test_a_request_that_moves_keeps_its_tokens(shown: Callable[[str], str]) -> None:
    out = shown("handover")
    tokens, frontier = re.findall(r"(\d+) prompt tokens, .* by depth: (\[.*\])", out)[0]
    done = ast.literal_eval(frontier)
    assert 0 < done[-1] < done[0] < int(tokens)
    assert "requests left in the first engine: 0" in out
    assert "sampled tokens, equal to those" in out


def test_every_example_is_short_introduced_listed_and_run() -> None:
    listed = (ROOT / "docs" / "library.md").read_text()
    here = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        source = path.read_text()
        assert len(source.splitlines()) <= LONGEST, path.name
        assert "The reader sees" in (ast.get_docstring(ast.parse(source)) or ""), path.name
        assert f"(../examples/{path.name})" in listed, path.name
        assert f'"{path.stem}' in here, path.name
