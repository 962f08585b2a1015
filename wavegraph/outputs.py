"""What a caller gets back."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wavegraph.errors import RequestFailedError


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.perf_counter`; None until the event has happened.

    ``scheduled`` is when it was first planned, ``first_token`` when the host saw its first token.
    """

    arrival: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival until it was first planned."""
        return None if self.scheduled is None else self.scheduled - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival until the host saw the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def prefill_time(self) -> float | None:
        """Seconds from the first plan until the host saw the first token."""
        return None if self.scheduled is None or self.first_token is None else self.first_token - self.scheduled

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first token to the end."""
        return None if self.first_token is None or self.finished is None else self.finished - self.first_token

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished is None else self.finished - self.arrival


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the model's raw distribution.

    ``rank`` is 0 for the most likely token; ``top`` maps the most likely token ids, as many as were asked for, to
    their log-probabilities.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's output so far: always cumulative, so the last one is the whole.

    - ``prompt``: the text that was given, or None if token ids were.
    - ``index``: which of the ``n`` outputs of its prompt this is.
    - ``token_ids``: generated ids, with the one that ended the request.
    - ``text``: their text, without the token that ended the request. While the request runs, bytes that do not
      form a whole character yet, and what may turn out to begin a stop string, are held back. None if the
      checkpoint has no tokenizer.
    - ``finish_reason``: None while it runs; ``"stop"`` (a stop string, stop or end-of-sequence id), ``"length"``
      (``max_tokens`` or ``max_model_len``) or ``"error"``, when the step it was in could not be run, or work for this
      request alone failed; ``text`` is then what was certain before.
    - ``stop_reason``: with ``"stop"``, the string or id that did it.
    - ``exit_depths``: zero-based depth at which each token left the loop.
    - ``logprobs``: one entry a token, if asked for. ``prompt_logprobs``: one entry a prompt token, None for the
      first, if asked for; None until all are known.
    - ``num_cached_tokens``: prompt tokens that the prefix cache had.
    - ``error``: with ``"error"``, one sentence that says why.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str | None
    metrics: RequestMetrics
    index: int = 0
    stop_reason: str | int | None = None
    exit_depths: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last output of the request."""
        return self.finish_reason is not None

    @property
    def mean_loops(self) -> float | None:
        """Mean number of loops after which its tokens left."""
        return sum(depth + 1 for depth in self.exit_depths) / len(self.exit_depths) if self.exit_depths else None

    def to_dict(self) -> dict[str, Any]:
        """The output as plain JSON types. Times are seconds since the request's arrival."""
        data = asdict(self)
        data["metrics"] = {
            "time_to_first_token": self.metrics.time_to_first_token,
            "latency": self.metrics.latency,
        }
        return data


def require_whole(outputs: Sequence[RequestOutput]) -> None:
    """Raise `RequestFailedError`, with what the first of them says, if any output ended with "error"."""
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        raise RequestFailedError(f"{len(errors)} of {len(outputs)} outputs failed: {errors[0]}", "output")
