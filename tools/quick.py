"""What a change needs, within half a minute: ``python -m tools.quick``, or ``make quick``.

The files that differ from `main` (or, on `main`, from the last commit) are linted, and the quick tests of their rooms
are run, beside those of the layers, the pages and the public interface. After `BUDGET` seconds no test is started,
after `LIMIT` those under way are stopped; what is left out is named, and ``make test`` runs it.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from tools.deadline import VERDICT

ROOT = Path(__file__).parents[1]

BUDGET = 22.0
"""Seconds after which no test is started."""

LIMIT = 26.0
"""Seconds after which tests are stopped."""

PATIENCE = 3.0
"""Seconds that stopping may take."""

OPERATORS = "model/csrc/"
INTERPRETED = "tests/model/interpreted/"

ALWAYS = (
    "tests/packaging/test_layers.py",
    "tests/packaging/test_docs.py",
    "tests/packaging/test_packages.py",
    "tests/wavegraph/test_api.py",
)
"""Tests of the house as a whole, two seconds or so."""

ROOMS: Mapping[str, tuple[str, ...]] = {
    "benchmarks/": ("tests/benchmarks",),
    "buckets/": ("tests/buckets", "tests/scheduler/test_packing.py"),
    "capture/": ("tests/capture", "tests/faults"),
    "examples/": ("tests/examples",),
    "model/": (
        "tests/model/test_core.py",
        "tests/model/test_config.py",
        "tests/model/test_loading.py",
        "tests/model/test_reference.py",
        "tests/model/test_sampling.py",
        "tests/model/test_coda.py",
        "tests/model/test_hub.py",
        "tests/model/test_broken_checkpoints.py",
    ),
    "model/csrc/": (
        "tests/model/test_cpu_ops.py",
        "tests/model/test_cpu_core.py",
        "tests/model/test_cpu_invariance.py",
    ),
    "model/ops/": (
        "tests/model/test_core.py",
        "tests/model/test_coda.py",
        "tests/model/test_sampling.py",
        "tests/model/test_cpu_ops.py",
        "tests/model/test_cpu_build.py",
        "tests/model/test_cpu_core.py",
    ),
    "model/ops/triton/": (
        "tests/model/test_triton_launch.py",
        "tests/model/test_triton_cubin.py",
        "tests/capture/test_kernels.py",
        "tests/model/interpreted",
    ),
    "scheduler/": ("tests/scheduler", "tests/study/test_simulate.py", "tests/e2e/test_invariance.py"),
    "tools/": ("tests/tools", "tests/packaging/test_figures.py", "tests/builtin/test_training.py"),
    "wavegraph/": ("tests/wavegraph", "tests/engine/test_engine.py"),
    "wavegraph/bench/": ("tests/bench",),
    "wavegraph/builtin/": ("tests/builtin/test_builtin.py",),
    "wavegraph/cli/": ("tests/cli",),
    "wavegraph/engine/": ("tests/engine", "tests/e2e/test_engine_machine.py"),
    "wavegraph/server/": ("tests/server",),
    "wavegraph/startup/": ("tests/startup",),
    "wavegraph/static/": ("tests/server/test_dashboard.py", "tests/server/test_sight.py"),
    "wavegraph/study/": ("tests/study",),
    "wavegraph/text/": ("tests/text",),
}
"""Tests of each folder, the most telling first. Of folders within each other, the innermost counts."""


def changed_files(root: Path) -> list[str]:
    """Paths that differ from `main`, or that git does not know yet; deleted ones too."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    try:
        base = git("merge-base", "HEAD", "main")[0]
    except subprocess.CalledProcessError:  # there is no `main`
        base = "HEAD"
    return sorted({*git("diff", "--name-only", "--no-renames", base), *git("ls-files", "-o", "--exclude-standard")})


def select(changed: Iterable[str], root: Path) -> list[str]:
    """Tests that a change of these paths needs: `ALWAYS`, changed ones, those of the same name, those of the room."""
    itself, alike, room = [], [], []
    for path in map(Path, changed):
        if path.parts[0] == "tests":
            itself += _files(str(path if path.name.startswith("test_") else path.parent), root)
            continue
        inner = max((prefix for prefix in ROOMS if str(path).startswith(prefix)), key=len, default=None)
        files = [] if inner is None else [file for entry in ROOMS[inner] for file in _files(entry, root)]
        alike += [file for file in files if Path(file).stem == f"test_{path.stem}"]
        room += files
    return [_argument(file) for file in dict.fromkeys([*ALWAYS, *itself, *alike, *room])]


def _files(entry: str, root: Path) -> list[str]:
    """The test files of a folder, or the one that is meant, if it is there."""
    path = root / entry
    files = sorted(path.glob("test_*.py")) if path.is_dir() else [path] * (path.is_file() and path.suffix == ".py")
    return [file.relative_to(root).as_posix() for file in files]


def _argument(file: str) -> str:
    """How pytest runs a file: those that need Triton's interpreter are run by a test."""
    if not file.startswith(INTERPRETED):
        return file
    return f"tests/model/test_triton_interpreted.py::test_interpreted[{Path(file).stem}]"


def lint(changed: Sequence[str]) -> bool:
    """Whether ruff has nothing to say."""
    files = [path for path in changed if path.endswith(".py") and (ROOT / path).exists()]
    ruff = str(Path(sys.executable).parent / "ruff")
    steps = [["check", "--quiet"], ["format", "--quiet", "--check"]] if files else []
    return not [step for step in steps if subprocess.run([ruff, *step, "--force-exclude", *files], cwd=ROOT).returncode]


def build_operators(changed: Sequence[str]) -> bool:
    """Compile the C++ operators if they have changed, or never were, which takes longer than tests have.

    Returns whether it went well. Where there is no compiler, only a change of the sources needs one.
    """
    touched = any(path.startswith(OPERATORS) for path in changed)
    cache = Path(os.environ.setdefault("WAVEGRAPH_CACHE", str(ROOT / "build" / "cache")))  # as tests/conftest.py has it
    if not touched and list(cache.glob("ops/*.so")):
        return True
    print("Compiling operators (once)", flush=True)
    script = "from wavegraph.model.ops.build import cached_library; cached_library()"
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0 or not touched


def run_tests(tests: Sequence[str], jobs: int, began: float, budget: float) -> bool:
    """Deal the tests out to so many processes; whether none failed."""
    command = [sys.executable, "-m", "tools.deadline", str(began + budget), "-q", "-m", "not slow"]
    shares = [tests[first::jobs] for first in range(min(jobs, len(tests)))]
    with ExitStack() as files:
        outputs = [files.enter_context(TemporaryFile("w+")) for _ in shares]  # a pipe could fill while nobody reads
        running = [
            subprocess.Popen(
                [*command, "-p", "no:cacheprovider", *share],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that what a test has started is stopped with it
            )
            for share, output in zip(shares, outputs, strict=True)
        ]
        try:
            _wait(running, began + max(LIMIT, budget + LIMIT - BUDGET))
        finally:  # a Ctrl-C does not reach them
            for process in [each for each in running if each.poll() is None]:
                os.killpg(process.pid, signal.SIGKILL)
        codes = [_report(process, output) for process, output in zip(running, outputs, strict=True)]
    return not any(codes)


def _report(process: "subprocess.Popen[bytes]", output: IO[str]) -> int:
    """Show what a process has printed; returns the exit code that it came to, even if it was killed after that."""
    output.seek(0)
    text, found, rest = f"\n{output.read()}".rpartition(f"\n{VERDICT}")
    code, _, end = rest.partition("\n")
    print(f"{text}\n{end}" if found else rest)
    return int(code) if found else process.returncode


def _wait(running: Sequence["subprocess.Popen[bytes]"], limit: float) -> None:
    """Let processes come to their end, or bring them to it."""
    for stop in (signal.SIGINT, signal.SIGKILL):
        for process in [each for each in running if not _ends(each, limit)]:
            os.killpg(process.pid, stop)
        limit = time.time() + PATIENCE
    for process in running:
        process.wait()


def _ends(process: "subprocess.Popen[bytes]", limit: float) -> bool:
    try:
        process.wait(timeout=max(0.0, limit - time.time()))
    except subprocess.TimeoutExpired:
        return False
    return True


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.quick", description="Lint and test what a change needs.")
    parser.add_argument("files", nargs="*", help="act as if these had changed; none: ask git")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default: 2)")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds to start tests in (default: {BUDGET:g})")
    given = parser.parse_args()
    changed = given.files or changed_files(ROOT)
    tests = select(changed, ROOT)
    print(f"{len(changed)} changed files, {len(tests)} files of tests", flush=True)
    built = build_operators(changed)
    began = time.time()
    clean = lint(changed)
    passed = run_tests(tests, given.jobs, began, given.budget)
    failed = ["operators"] * (not built) + ["lint"] * (not clean) + ["tests"] * (not passed)
    print(f"quick: {'FAILED: ' + ', '.join(failed) if failed else 'passed'} in {time.time() - began:.0f} s", end="; ")
    print("`make test` runs all quick tests, `make check` everything")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
