"""pytest with an end: ``python -m tools.deadline TIME ARGUMENTS`` starts no test after TIME (seconds since the epoch).

After that an interrupt (SIGINT) ends it in good order. What was left out is named at the end, and is no failure.
"""

import signal
import sys
import time
from collections import Counter

import pytest


class Deadline:
    """A plugin that skips what would begin too late, before any fixture of it is made."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.failed = False
        self.collected = False
        self._left: dict[str, None] = {}  # tests that have not come to an end, in order
        self._begun: str | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All tests to run are known."""
        self.collected = True
        self._left = dict.fromkeys(item.nodeid for item in session.items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test once the time is up."""
        if time.time() > self.end:
            pytest.skip("the time is up")
        self._begun = item.nodeid

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has come to its end, unless it was skipped here."""
        if nodeid == self._begun:
            self._left.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test has come to its end."""
        self.failed = self.failed or report.failed

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file was looked through for tests."""
        self.failed = self.failed or report.failed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was left out."""
        for file, count in Counter(nodeid.partition("::")[0] for nodeid in self._left).items():
            terminalreporter.write_line(f"left out: {count} of {file}")


def run(end: float, arguments: list[str]) -> int:
    """The exit code: 0 also if nothing was to run, or if an interrupt came after ``end`` when nothing had failed."""
    deadline = Deadline(end)
    try:
        code = pytest.main(arguments, plugins=[deadline])
    except KeyboardInterrupt:  # before or after the tests themselves
        code = pytest.ExitCode.INTERRUPTED
    if code == pytest.ExitCode.INTERRUPTED and time.time() > end:
        if not deadline.collected:
            print("left out: all, stopped before the first test")
        return int(deadline.failed)
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs this behind itself has it ignored
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
