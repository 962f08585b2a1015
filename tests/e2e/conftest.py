"""Counts tokens that differed only because two logits were a rounding apart; expected: none."""

from collections.abc import Callable, Iterator

import pytest
import torch

NEAR_TIES = "near_ties"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def count_near_ties(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """Add to the count that the summary shows."""

    def count(ties: int) -> None:
        record_property(NEAR_TIES, ties)

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
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
