"""What a caller gets back."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.perf_counter`; None until the event has happened."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival until the host saw the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished is None else self.finished - self.arrival


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's output so far: always cumulative, so the last one is the whole.

    - ``prompt``: the text that was given, or None if token ids were.
    - ``token_ids``: generated ids, with the one that ended the request.
    - ``text``: their text, without special tokens and the token that ended the request. While the request
      runs, bytes that do not form a whole character yet are held back. None if the checkpoint has no tokenizer.
    - ``finish_reason``: None while it runs; ``"stop"`` (a stop or end-of-sequence id), ``"length"``
      (``max_tokens`` or ``max_model_len``) or ``"error"``, when the step it was in could not be run.
    - ``error``: with ``"error"``, one sentence that says why.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str | None
    metrics: RequestMetrics
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last output of the request."""
        return self.finish_reason is not None

    def to_dict(self) -> dict[str, Any]:
        """The output as plain JSON types. Times are seconds since the request's arrival."""
        data = asdict(self)
        data["metrics"] = {
            "time_to_first_token": self.metrics.time_to_first_token,
            "latency": self.metrics.latency,
        }
        return data
