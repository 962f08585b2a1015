"""Break the code on purpose, one listed mutation at a time, and see that the tests notice.

    python tests/mutations/run.py scheduler [--only WORD] [--jobs 2]

Each list is a TOML file beside this script: which tests to run, and mutations as (file, old text, new text), perhaps
with the one ``test`` file of them that is to notice. A mutation is applied in a copy of the sources, never in the
tree. Exit code 1 if one survives or no longer applies.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST_SECONDS = 300
ROOMS = ("buckets", "capture", "model", "scheduler")


def make_copy(target: Path) -> Path:
    """A copy of the sources in which the rooms lie under ``wavegraph/``; returns the folder to put on the path."""
    ignore = shutil.ignore_patterns("__pycache__", ".*", "build")
    shutil.copytree(ROOT / "wavegraph", target / "wavegraph", ignore=ignore)
    for room in ROOMS:
        shutil.copytree(ROOT / room, target / "wavegraph" / room, ignore=ignore)
    shutil.copytree(ROOT / "tests", target / "tests", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def mutate(target: Path, mutation: dict[str, str]) -> str | None:
    """Apply one mutation to a copy; returns why it cannot be applied, if so."""
    name = mutation["file"]
    path = target / (f"wavegraph/{name}" if name.split("/")[0] in ROOMS else name)
    text = path.read_text()
    if text.count(mutation["old"]) != 1:
        return f"its text stands {text.count(mutation['old'])} times in {name}, not once"
    path.write_text(text.replace(mutation["old"], mutation["new"]))
    return None


def run_tests(target: Path, tests: list[str]) -> bool:
    """Whether the tests pass on the copy."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(target),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "WAVEGRAPH_NO_SHRINKING": "1",
        "WAVEGRAPH_CACHE": str(ROOT / "build" / "cache"),  # compiled operators, by their sources
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        result = subprocess.run(
            command, cwd=target, env=environment, capture_output=True, text=True, check=False, timeout=TEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False  # a mutation that makes the tests hang is noticed
    if result.returncode not in (0, 1):
        raise RuntimeError(f"the tests could not run: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return result.returncode == 0


def judge(mutation: dict[str, str] | None, tests: list[str]) -> str:
    """``caught``, ``survived`` or why the mutation could not be applied."""
    with tempfile.TemporaryDirectory() as folder:
        target = make_copy(Path(folder) / "tree")
        problem = mutate(target, mutation) if mutation else None
        if problem:
            return problem
        return "survived" if run_tests(target, tests) else "caught"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", help="name of a TOML file beside this script, such as 'scheduler'")
    parser.add_argument("--only", default="", help="run only mutations whose name holds this word")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    spec = tomllib.loads((Path(__file__).parent / f"{options.list}.toml").read_text())
    if judge(None, spec["tests"]) != "survived":
        print("the tests fail on the unchanged sources")
        return 1
    mutations = [m for m in spec["mutation"] if options.only in m["name"]]
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = pool.map(lambda m: judge(m, [m["test"]] if "test" in m else spec["tests"]), mutations)
        failed = 0
        for mutation, verdict in zip(mutations, verdicts, strict=True):
            print(f"{verdict:>10}  {mutation['name']}", flush=True)
            failed += verdict != "caught"
    print(f"{len(mutations)} mutations, {len(mutations) - failed} caught")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
