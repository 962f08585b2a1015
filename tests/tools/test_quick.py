"""`make quick`: what it selects for a change, and that it keeps its time and says what it left out."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from tools import rooms
from tools.deadline import VERDICT
from tools.quick import ALWAYS, ROOMS, _report, build_operators, changed_files, lint, select

ROOT = Path(__file__).parents[2]

NOT_A_ROOMS = {"e2e", "gpu", "goldens", "mutations", "packaging"}
"""Folders of tests that belong to no one room; `make test` runs them."""


def sources() -> list[str]:
    folders = ("benchmarks", "buckets", "capture", "examples", "model", "scheduler", "tools", "wavegraph")
    return [
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".html") and "build" not in path.parts
    ]


def test_every_source_has_tests_of_its_own() -> None:
    assert len(sources()) > 100
    for path in sources():
        assert set(select([path], ROOT)) > set(ALWAYS), path


def test_every_room_has_an_entry() -> None:
    folders = {place for room in rooms.ROOMS for place in room.places if place.endswith("/")}
    assert len(folders) > 10
    assert folders <= set(ROOMS)


def test_every_entry_is_there() -> None:
    for folder, tests in ROOMS.items():
        assert (ROOT / folder).is_dir(), folder
        for entry in tests:
            assert (ROOT / entry).exists(), entry
            assert (ROOT / entry).is_file() or list((ROOT / entry).glob("test_*.py")), entry
    assert all((ROOT / file).is_file() for file in ALWAYS)


def test_every_folder_of_tests_is_some_rooms() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if list(path.glob("test_*.py"))}
    used = {entry.split("/")[1] for tests in ROOMS.values() for entry in tests}
    assert folders - used <= NOT_A_ROOMS


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        (["scheduler/packing.py"], "tests/scheduler/test_packing.py"),
        (["wavegraph/engine/handover.py"], "tests/engine/test_handover.py"),
        (["wavegraph/config.py", "tests/text/test_chat.py"], "tests/text/test_chat.py"),
        (["tests/text/anything.py"], "tests/text/test_chat.py"),
        (
            ["model/ops/triton/kernels/rows.py"],
            "tests/model/test_triton_interpreted.py::test_interpreted[test_rows]",
        ),
        (
            ["tests/model/interpreted/test_rows.py"],
            "tests/model/test_triton_interpreted.py::test_interpreted[test_rows]",
        ),
    ],
)
def test_the_most_telling_tests_are_the_first(changed: list[str], first: str) -> None:
    selected = select(changed, ROOT)
    assert selected[: len(ALWAYS)] == list(ALWAYS)
    assert selected[len(ALWAYS)] == first
    assert len(selected) == len(set(selected))


@pytest.mark.parametrize("changed", [["README.md"], ["tests/gone/test_gone.py", "gone/gone.py"], []])
def test_what_belongs_to_no_room_needs_only_the_tests_of_the_house(changed: list[str]) -> None:
    assert select(changed, ROOT) == list(ALWAYS)


def test_the_innermost_room_counts() -> None:
    assert "tests/engine/test_stats.py" in select(["wavegraph/engine/stats.py"], ROOT)
    assert "tests/wavegraph/test_llm.py" not in select(["wavegraph/engine/stats.py"], ROOT)
    assert "tests/wavegraph/test_llm.py" in select(["wavegraph/llm.py"], ROOT)


def git(folder: Path, *words: str) -> None:
    options = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize("branch", ["main", "trunk"])
def test_changes_are_those_since_main(branch: str, tmp_path: Path) -> None:
    """Committed, edited, deleted, renamed or unknown to git; without a `main` since the last commit."""
    git(tmp_path, "init", "-q", "-b", branch)
    for name in ("same", "edited", "deleted", "before"):
        (tmp_path / name).write_text(f"{name}\n" * 9)
    (tmp_path / ".gitignore").write_text("ignored\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    git(tmp_path, "checkout", "-q", "-b", "other")
    (tmp_path / "committed").touch()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "two")
    (tmp_path / "edited").write_text("new")
    (tmp_path / "deleted").unlink()
    git(tmp_path, "mv", "before", "after")
    (tmp_path / "unknown").touch()
    (tmp_path / "ignored").touch()
    since = ["after", "before", "deleted", "edited", "unknown"]
    assert changed_files(tmp_path) == sorted([*since, *["committed"] * (branch == "main")])


MARKER, MADE = "begun", "made"

TESTS = """
import time
from pathlib import Path
import pytest

def test_quick(): pass
def test_longer():
    Path({marker!r}).touch()
    time.sleep({seconds})
@pytest.fixture
def costly(): Path({made!r}).touch()

def test_late(costly): assert {late}
"""


def start(folder: Path, end: float, seconds: float, late: bool = True) -> "subprocess.Popen[str]":
    (folder / "test_it.py").write_text(
        TESTS.format(marker=str(folder / MARKER), made=str(folder / MADE), seconds=seconds, late=late)
    )
    command = [sys.executable, "-m", "tools.deadline", str(time.time() + end), "-q", "-s", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.Popen(
        [*command, str(folder), "--rootdir", str(folder), "-c", os.devnull],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(("late", "code"), [(True, 0), (False, 1)])
def test_within_the_time_all_tests_count(late: bool, code: int, tmp_path: Path) -> None:
    process = start(tmp_path, 60, 0, late)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == code, out
    assert "left out" not in out
    assert (tmp_path / MADE).exists()


def test_nothing_begins_after_the_time(tmp_path: Path) -> None:
    process = start(tmp_path, -1, 0, late=False)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, out
    assert re.search(r"left out: 3 of \S*test_it.py", out)
    assert not (tmp_path / MADE).exists()


def test_what_is_under_way_can_be_stopped(tmp_path: Path) -> None:
    end = time.time() + 3
    process = start(tmp_path, 3, 60)
    while time.time() < end + 0.1 or (process.poll() is None and not (tmp_path / MARKER).exists()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, out
    assert re.search(r"left out: [23] of \S*test_it.py", out)


def test_lint_looks_at_what_changed(tmp_path: Path) -> None:
    for name, text in (("bad", "import os"), ("ugly", "x = [ 1 ]"), ("good", "x = [1]")):
        (tmp_path / f"{name}.py").write_text(f'"""A module."""\n\n{text}\n')
    assert lint(["README.md", "gone.py", str(tmp_path / "good.py")])
    assert not lint([str(tmp_path / "bad.py")])
    assert not lint([str(tmp_path / "ugly.py")])
    assert lint([])


def test_operators_are_compiled_if_they_changed_or_are_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there is no compiler, that is no fault unless there is something to compile."""
    monkeypatch.setenv("WAVEGRAPH_CACHE", str(tmp_path))
    monkeypatch.setattr("subprocess.run", lambda command, cwd: subprocess.CompletedProcess(command, 1))
    assert not build_operators(["model/csrc/linear.h"])
    assert build_operators(["model/core.py"])
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "there.so").touch()
    assert not build_operators(["model/core.py", "model/csrc/linear.h"])
    monkeypatch.setattr("subprocess.run", None)
    assert build_operators(["model/core.py"])


def finished(code: int, printed: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    command = [sys.executable, "-c", f"import sys; print({printed!r}); sys.exit({code})"]
    with TemporaryFile("w+") as output, subprocess.Popen(command, stdout=output) as process:
        process.wait()
        return _report(process, output), capsys.readouterr().out.strip()


def test_the_verdict_counts_even_if_the_process_does_not_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert finished(3, "..\nall said", capsys) == (3, "..\nall said")
    assert finished(9, f"{VERDICT}0", capsys) == (0, "")
    assert finished(9, f"..\n{VERDICT}7\n{VERDICT}0\nKeyboardInterrupt", capsys) == (
        0,
        f"..\n{VERDICT}7\nKeyboardInterrupt",
    )
    assert finished(0, f"..\nleft out\n{VERDICT}1\nFAILED test", capsys) == (1, "..\nleft out\nFAILED test")


def test_the_command() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    command = [sys.executable, "-m", "tools.quick", "--budget", "0", "README.md"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "quick: passed" in done.stdout
    assert all(f"of {file}" in done.stdout for file in ALWAYS)
