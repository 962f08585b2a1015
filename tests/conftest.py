"""Settings for all tests. Imports no room of the project: scheduler tests must run without torch."""

import os
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# Tests run side by side, a process a core. Set before anything imports torch; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Keep out of the user's cache folder, yet share what is made (by content) between processes and runs.
os.environ.setdefault("WAVEGRAPH_CACHE", str(Path(__file__).parents[1] / "build" / "cache"))
os.environ.setdefault("TRITON_CACHE_DIR", os.environ["WAVEGRAPH_CACHE"] + "/triton")

# The same examples in every run, on every machine. Whoever wants only a verdict need not wait for a small example.
PHASES = [Phase.explicit, Phase.generate] if "WAVEGRAPH_NO_SHRINKING" in os.environ else list(Phase)
settings.register_profile("wavegraph", derandomize=True, deadline=None, phases=PHASES)
settings.load_profile("wavegraph")

NEAR_TIES = "near_ties"
"""Property of a test in which tokens differed only because two logits were a rounding apart: how many."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the near ties; expected: none. Here, because with -n only the workers import the folders' conftest."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    counts = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == NEAR_TIES
    ]
    if counts:
        terminalreporter.write_line(
            f"goldens: {len(counts)} generations compared, {sum(counts)} parted at a near tie (expected: 0)"
        )
