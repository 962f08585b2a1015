"""Timing, and what the machine itself can do."""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

READ_BYTES = 256 << 20
MATRIX_SIZE = 1536
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Times:
    """Times of several runs, milliseconds unless said otherwise: the median, and the 10th and 90th percentiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float]) -> "Times":
        """Summarise at least one run."""
        ordered = sorted(times)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(last * 0.1)], ordered[round(last * 0.9)])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"

    def to_dict(self) -> dict[str, float]:
        """JSON types."""
        return asdict(self)


def milliseconds(run: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def interleaved(runs: Sequence[Callable[[], object]], repeats: int) -> list[Times]:
    """Times of each of ``runs``, called in turn, ``repeats`` rounds after two that do not count."""
    for _ in range(WARM_UPS):
        for run in runs:
            run()
    rounds = [[milliseconds(run) for run in runs] for _ in range(repeats)]
    return [Times.of(column) for column in zip(*rounds, strict=True)]


def read_rate() -> float:
    """GB/s of adding up 256 MiB on all threads, the best of five."""
    data = torch.ones(READ_BYTES // 4)
    return data.nbytes / min(milliseconds(data.sum) for _ in range(5)) / 1e6


def matrix_rate(dtype: torch.dtype) -> float:
    """TFLOP/s of a square matrix product that is large for a cache, the best of five."""
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE).to(dtype) for _ in range(2))
    return 2 * MATRIX_SIZE**3 / min(milliseconds(lambda: a @ b) for _ in range(5)) / 1e9


def machine_facts() -> dict[str, Any]:
    """What a result depends on: processor, threads, versions, and the commit if this is a checkout."""
    return {
        "cpu": _cpu_name(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "wavegraph": version("wavegraph"),
        "commit": _commit(),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None
