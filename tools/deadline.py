"""pytest with an end: ``python -m tools.deadline TIME ARGUMENTS`` starts no test after TIME (seconds since the epoch).

After that an interrupt (SIGINT) ends it in good order. What was left out is named at the end, and is no failure.
"""

import signal
import sys
import time
from collections import Counter

import pytest

VERDICT = "exit code: "
"""Begins a line that holds it, as soon as it is known."""


class Deadline:
    """A plugin that skips what would begin too late, before any fixture of it is made."""

    def __init__(self, end: float) -> None:
        self._end = end
        self._failed = False
        self._collected = False
        self._left: dict[str, None] = {}  # tests that have not come to an end, in order
        self._begun: str | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All tests to run are known."""
        self._collected = True
        self._left = dict.fromkeys(item.nodeid for item in session.items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test once the time is up."""
        if time.time() > self._end:
            pytest.skip("the time is up")
        self._begun = item.nodeid

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has come to its end, unless it was skipped here."""
        if nodeid == self._begun:
            self._left.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test has come to its end."""
        self._failed = self._failed or report.failed

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file was looked through for tests."""
        self._failed = self._failed or report.failed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        """Say what was left out, and at once how it went: what comes after may be stopped too."""
        for file, count in Counter(nodeid.partition("::")[0] for nodeid in self._left).items():
            terminalreporter.write_line(f"left out: {count} of {file}")
        if not self._collected:
            terminalreporter.write_line("left out: all, stopped before the first test")
        terminalreporter.write_line(f"{VERDICT}{self.verdict(exitstatus)}")
        terminalreporter.flush()

    def verdict(self, code: int) -> int:
        """The exit code: 0 too if nothing was to run, or if an interrupt came after the end and nothing had failed."""
        if code == pytest.ExitCode.INTERRUPTED and time.time() > self._end:
            return int(self._failed)
        return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs this behind itself has it ignored
    deadline = Deadline(float(sys.argv[1]))
    sys.exit(deadline.verdict(pytest.main(sys.argv[2:], plugins=[deadline])))
