"""Runs the tests of ``interpreted/``, a file at a time, in processes in which Triton interprets its kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


def run(file: Path, *options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    result = subprocess.run(
        [*command, str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_interpreted(file: Path) -> None:
    run(file, "-m", "not slow")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_interpreted_in_full() -> None:
    run(Path(__file__).parent / "interpreted", "-m", "slow")
