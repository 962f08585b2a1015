"""Everything that only a GPU can show, in one run of at most six minutes: tests, then figures, then a table.

Run: ``python3 benchmarks/gpu_check.py [--out DIR] [--only NAME,...] [--seconds 345]``. Nothing has to be installed but
torch, Triton, cuda-python, NumPy, safetensors, tokenizers and pytest; no network is used. Sections are independent:
one that fails, or takes too long, is reported, and the rest go on. Writes ``DIR/gpu-check-TIME.json``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_table import table_of  # noqa: E402
from benchmarks.shim import build_tree  # noqa: E402

LIMITS = {
    "tests": 120,
    "machine": 25,
    "capture": 40,
    "core": 50,
    "attention": 40,
    "wavefront": 90,
    "decode": 50,
    "start": 45,
}
"""Sections in their order, and the most seconds that each may take."""

TESTS = ("tests/gpu", "tests/model/interpreted", "--ignore", "tests/model/interpreted/test_offsets.py")
"""What `tests/gpu` says of pages far into a pool, `test_offsets.py` says to the interpreter."""

OTHER_PROCESSES = ("tests", "start")
START_UP = 40
"""Seconds that a fresh process may take to import torch and to make the model."""

UNSEEN = (
    "races that this run did not meet",
    "other GPUs than the one named",
    "runs that are longer than some seconds",
)


def check(names: Sequence[str], seconds: float, folder: Path) -> dict[str, Any]:
    """All sections of ``names``: of each ``{"ok": True, "seconds": …, "result": …}`` or ``{"ok": False, "error": …}``.

    ``folder`` is for work files, the bundle among them.
    """
    started = time.monotonic()
    deadline = started + seconds
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(build_tree(folder / "tree")), str(ROOT)))}
    bundle = folder / "bundle"
    maker = _precompile(folder, bundle, environment) if "start" in names else None
    report: dict[str, Any] = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "sections": {}}
    sections: dict[str, Any] = report["sections"]
    if "tests" in names:
        sections["tests"] = _timed(_tests, folder, environment, _left("tests", deadline))
    figures = [name for name in LIMITS if name in names and name not in OTHER_PROCESSES]
    sections.update(run_figures(figures, environment, deadline))
    if maker is not None:
        sections["start"] = _timed(_start, maker, bundle, environment, _left("start", deadline))
    report["seconds"] = time.monotonic() - started
    report["not_shown"] = list(UNSEEN)
    return report


def _left(name: str, deadline: float) -> float:
    return max(0.0, min(LIMITS[name], deadline - time.monotonic()))


def _timed(section: Any, *arguments: Any) -> dict[str, Any]:
    """Run one section here, where what it starts can fail in these ways alone."""
    started = time.monotonic()
    try:
        entry = {"ok": True, "result": section(*arguments)}
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError, ElementTree.ParseError) as error:
        output = getattr(error, "stderr", None) or getattr(error, "output", None) or ""
        entry = {"ok": False, "error": f"{type(error).__name__}: {error}", "output": str(output)[-4000:]}
    return entry | {"seconds": time.monotonic() - started}


# -- sections in processes of their own ----------------------------------------------------------------------


def _tests(folder: Path, environment: dict[str, str], limit: float) -> dict[str, Any]:
    """`tests/gpu`, and the tests of kernels, which run on a GPU if there is one. Raises RuntimeError if one fails."""
    report = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    places = ["-m", "not slow", *TESTS]
    done = subprocess.run(
        [*command, f"--junitxml={report}", *places],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit,
    )
    if not report.exists():
        raise RuntimeError(f"pytest ended with {done.returncode} and no report: {(done.stdout + done.stderr)[-3000:]}")
    return read_report(report, done.stdout)


def read_report(report: Path, output: str) -> dict[str, Any]:
    """Counts and failures of a JUnit report. Raises RuntimeError, with the end of ``output``, if a test failed."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    if failed or counts["tests"] == counts["skipped"]:
        raise RuntimeError(f"{counts}, failed: {', '.join(failed) or 'none ran'}: {output[-6000:]}")
    return {**counts, "seconds": float(suite.get("time", "0"))}


def _precompile(folder: Path, bundle: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """Begin to make a bundle for this GPU, on the CPU, while the tests run."""
    script = "from benchmarks.gpu_start import make; import sys; make(*sys.argv[1:])"
    command = [sys.executable, "-c", script, str(folder / "checkpoint"), str(bundle)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _start(maker: "subprocess.Popen[str]", bundle: Path, environment: dict[str, str], limit: float) -> dict[str, Any]:
    """From a bundle to ready, in a fresh process in which Triton cannot be imported."""
    deadline = time.monotonic() + limit
    output, _ = maker.communicate(timeout=limit)
    if maker.returncode:
        raise RuntimeError(f"the bundle was not made: {output[-3000:]}")
    command = [sys.executable, "-m", "benchmarks.gpu_start", str(bundle)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=max(1.0, deadline - time.monotonic()),
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# -- figures -------------------------------------------------------------------------------------------------


def run_figures(
    names: Sequence[str], environment: dict[str, str], deadline: float, worker: str = "benchmarks.gpu_worker"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each of ``names`` and its entry, from a process that runs them in turn; a new one goes on behind one that ended.

    A process ends when a section broke the device, crashed or took longer than its limit.
    """
    pending = list(names)
    while pending:
        if time.monotonic() >= deadline:
            yield pending.pop(0), {"ok": False, "error": "no time was left for it"}
            continue
        command = [sys.executable, "-m", worker, ",".join(pending)]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            for name, entry in _entries(process, list(pending), deadline):
                pending.remove(name)
                yield name, entry


def _entries(
    process: "subprocess.Popen[str]", names: Sequence[str], deadline: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Entries from one process, as far as it comes; the section in which it ends has one too. Ends the process."""
    lines: Queue[str | None] = Queue()
    errors: list[str] = []
    readers = [
        threading.Thread(target=_read_lines, args=(process.stdout, lines)),
        threading.Thread(target=lambda: errors.extend(process.stderr or ())),
    ]
    for reader in readers:
        reader.start()
    missing = ""
    try:
        for place, name in enumerate(names):
            started = time.monotonic()
            allowed = LIMITS.get(name, 60) + (START_UP if place == 0 else 0)
            entry = _next_entry(lines, min(allowed, deadline - started))
            if entry is None:
                missing, spent = name, time.monotonic() - started
                break
            yield name, {key: value for key, value in entry.items() if key not in ("name", "broken")}
            if entry.get("broken"):
                break
    finally:
        process.kill()
        process.wait()
        for reader in readers:
            reader.join()
    if missing:
        reason = f"no result after {spent:.0f} s (exit code {process.returncode})"
        yield missing, {"ok": False, "error": reason, "output": "".join(errors)[-4000:], "seconds": spent}


def _read_lines(stream: Any, lines: "Queue[str | None]") -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _next_entry(lines: "Queue[str | None]", limit: float) -> dict[str, Any] | None:
    """The next line that is an entry; None if the process ends or the time is over before it comes."""
    end = time.monotonic() + limit
    while True:
        try:
            line = lines.get(timeout=max(0.01, end - time.monotonic()))
        except Empty:
            return None
        if line is None:
            return None
        if line.startswith('{"name"'):
            entry: dict[str, Any] = json.loads(line)
            return entry


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if every section did well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", metavar="DIR")
    parser.add_argument("--only", default=",".join(LIMITS), metavar="NAME,...")
    parser.add_argument("--seconds", type=float, default=345.0, help="The most that all may take.")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    unknown = sorted(set(names) - LIMITS.keys())
    if unknown:
        parser.error(f"--only: no section is called {', '.join(unknown)}; use {', '.join(LIMITS)}")
    with tempfile.TemporaryDirectory() as folder:
        report = check(names, options.seconds, Path(folder))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"gpu-check-{report['started'].replace(':', '')}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table_of(report))
    print(path)
    return 0 if all(entry["ok"] for entry in report["sections"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
