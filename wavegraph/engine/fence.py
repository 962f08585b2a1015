"""A fence around work that is one request's own: whatever goes wrong in it is that request's end, and nobody else's."""

import asyncio
from types import TracebackType

from wavegraph.errors import RequestFailedError, WavegraphError

CAUSES = ("admission", "text", "logprobs", "step")
"""Why requests end with ``finish_reason`` "error", as statistics count them: see `EngineStats.failures`."""

_NOT_FAILURES = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


class Fence:
    """Turns what a block raises into a `RequestFailedError`, even what is no `Exception`: that is how the tokenizers
    library reports a panic. ``what`` is said to have failed. ``refuses``: what Wavegraph raises on purpose passes.
    Has no state, so one may be entered any number of times at once.
    """

    def __init__(self, cause: str, what: str, *, refuses: bool = False) -> None:
        self._cause = cause
        self._what = what
        self._passing = (*_NOT_FAILURES, WavegraphError) if refuses else _NOT_FAILURES

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if value is not None and not isinstance(value, self._passing):
            # Only the type is named: the sentence may be shown to whoever asked, the log has the rest.
            sentence = f"{self._what} failed ({type(value).__name__}); the log has the traceback"
            raise RequestFailedError(sentence, self._cause) from value


ADMISSION = Fence("admission", "taking it in", refuses=True)
TEXT = Fence("text", "making its text")
LOGPROBS = Fence("logprobs", "reporting its log-probabilities")
ANSWER = Fence("answer", "writing its answer", refuses=True)
