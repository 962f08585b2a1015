"""The count of near ties is shown however the tests are run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_the_summary_counts_near_ties(workers: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("__init__.py", "conftest.py", "e2e/__init__.py", "e2e/conftest.py"):
        (tmp_path / "tests" / name).parent.mkdir(exist_ok=True)
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\ntestpaths = tests\n")
    (tmp_path / "tests/e2e/test_tie.py").write_text("def test_tie(count_near_ties): count_near_ties(3)\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goldens: 1 generations compared, 3 parted at a near tie (expected: 0)" in done.stdout
