"""Text of one output as its tokens arrive: whole characters only, and never beyond a stop string."""

from collections.abc import Sequence

from wavegraph.text.tokenizer import TextStream


class OutputText:
    """Detokenises one output and watches for stop strings. The one that is complete first counts, however the tokens
    cut the text; of those that end together, the longest.

    ``text`` is what is certain: it holds back bytes of an unfinished character and any tail that may turn out to
    begin a stop string. ``matched`` is the stop string that was found, None before.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str], include_stop: bool) -> None:
        self._stream = stream
        self._stop = stop
        self._include_stop = include_stop
        self._scanned = 0
        self.text = ""
        self.matched: str | None = None

    def append(self, token_id: int) -> None:
        """Take the next token."""
        self._stream.append(token_id)
        self._scan(final=False)

    def finish(self) -> None:
        """The output is complete: let go of what was held back, unless it holds a stop string."""
        if self.matched is None:
            self._stream.finish()
            self._scan(final=True)

    def _scan(self, final: bool) -> None:
        text = self._stream.text
        # A match ends in text that was not there before, so it starts at most one stop string earlier.
        start = max(0, self._scanned - max((len(stop) for stop in self._stop), default=0))
        found = [(text.find(stop, start), stop) for stop in self._stop]
        found = [(at, stop) for at, stop in found if at >= 0]
        self._scanned = len(text)
        if found:
            at, self.matched = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            self.text = text[: at + len(self.matched)] if self._include_stop else text[:at]
        else:
            self.text = text if final else text[: len(text) - self._held(text)]

    def _held(self, text: str) -> int:
        """Length of the longest tail of ``text`` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
