"""Text of one output as its tokens arrive: whole characters only, and never beyond a stop string."""

from collections.abc import Sequence

from wavegraph.text.decoders import held_length
from wavegraph.text.detokenizer import TextStream


class OutputText:
    """Detokenises one output and watches for stop strings. The one that is complete first counts, however the tokens
    cut the text; of those that end together, the longest.

    ``text`` is what is certain: it holds back bytes of an unfinished character and any tail that may turn out to
    begin a stop string. ``matched`` is the stop string that was found, None before. As in vLLM, what the first
    ``min_tokens`` tokens say ends nothing: a stop string counts if its end came with a later one.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str], include_stop: bool, min_tokens: int = 0) -> None:
        self._stream = stream
        self._stop = stop
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tokens = 0
        self._scanned = 0
        self.text = ""
        self.matched: str | None = None

    def append(self, token_id: int) -> None:
        """Take the next token; none counts behind a match."""
        if self.matched is None:
            self._tokens += 1
            self._stream.append(token_id)
            self._scan(final=False)

    def finish(self) -> None:
        """The output is complete: let go of what was held back, unless it holds a stop string."""
        if self.matched is None:
            self._stream.finish()
            self._scan(final=True)

    def _scan(self, final: bool) -> None:
        text = self._stream.text
        found = []
        if self._tokens > self._min_tokens:
            # A match ends in text that was not there before.
            found = [(text.find(stop, max(0, self._scanned - len(stop) + 1)), stop) for stop in self._stop]
            found = [(at, stop) for at, stop in found if at >= 0]
        self._scanned = len(text)
        if found:
            at, self.matched = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            self.text = text[: at + len(self.matched)] if self._include_stop else text[:at]
        else:
            self.text = text if final else text[: len(text) - held_length(text, self._stop)]
