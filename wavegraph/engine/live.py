"""What the engine keeps of a live request beside the scheduler: how to report it."""

from dataclasses import replace

from wavegraph.capture.ring import Logprobs
from wavegraph.engine.histograms import LatencyHistograms
from wavegraph.outputs import RequestMetrics, RequestOutput, TokenLogprob
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.plan import RequestSpec
from wavegraph.text.stream import OutputText


class LiveRequest:
    """Output of one request so far. ``index`` is its place among the ``n`` of its prompt; ``seed`` theirs."""

    def __init__(
        self,
        spec: RequestSpec,
        params: SamplingParams,
        prompt: str | None,
        text: OutputText | None,
        arrival: float,
        index: int,
        seed: int,
    ) -> None:
        self.spec = spec
        self.params = params
        self.prompt = prompt
        self.text = text
        self.index = index
        self.seed = seed
        self.metrics = RequestMetrics(arrival)
        self._last_token: float | None = None
        self.token_ids: list[int] = []
        self.exit_depths: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * len(spec.prompt_token_ids)
        self.cached_tokens = 0
        self.stop_reason: str | int | None = None

    def append(self, token_id: int, exit_depth: int, logprob: TokenLogprob | None, ended_by_id: bool) -> None:
        """Take the next token. One that ended the request by its id is no text."""
        self.token_ids.append(token_id)
        self.exit_depths.append(exit_depth)
        if logprob is not None:
            self.logprobs.append(logprob)
        if ended_by_id:
            self.stop_reason = token_id
        elif self.text is not None:
            self.text.append(token_id)
            self.stop_reason = self.text.matched

    def mark_scheduled(self, now: float, latencies: LatencyHistograms) -> None:
        """The request was planned; a second time, if it was preempted, does not count."""
        if self.metrics.scheduled is None:
            self.metrics = replace(self.metrics, scheduled=now)
            latencies.queue.observe(now - self.metrics.arrival)

    def mark_token(self, now: float, latencies: LatencyHistograms) -> None:
        """The host saw a token."""
        if self._last_token is None:
            self.metrics = replace(self.metrics, first_token=now)
            latencies.started(self.metrics)
        else:
            latencies.inter_token.observe(now - self._last_token)
        self._last_token = now

    def complete(self) -> None:
        """No token follows: let go of text that was held back, in which a stop string may turn up."""
        if self.text is not None:
            self.text.finish()
            self.stop_reason = self.text.matched or self.stop_reason

    def finish(self, now: float) -> None:
        """The request has ended."""
        self.metrics = replace(self.metrics, finished=now)

    def output(self, finish_reason: str | None, error: str | None = None) -> RequestOutput:
        """The request as its caller sees it now."""
        scored = self.params.prompt_logprobs is not None and None not in self.prompt_logprobs[1:]
        return RequestOutput(
            request_id=self.spec.request_id,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.spec.prompt_token_ids),
            token_ids=tuple(self.token_ids),
            text=self.text.text if self.text is not None else None,
            finish_reason=finish_reason,
            metrics=self.metrics,
            index=self.index,
            stop_reason=self.stop_reason,
            exit_depths=tuple(self.exit_depths),
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=tuple(self.prompt_logprobs) if scored else None,
            num_cached_tokens=self.cached_tokens,
            error=error,
        )


def token_logprob(logprobs: Logprobs, row: int, token_id: int, top: int) -> TokenLogprob:
    """Row ``row`` of a step's log-probabilities, with ``top`` alternatives."""
    ids = logprobs.top_ids[row][:top].tolist()
    values = logprobs.top_logprobs[row][:top].tolist()
    return TokenLogprob(
        token_id, float(logprobs.logprob[row]), int(logprobs.rank[row]), dict(zip(ids, values, strict=True))
    )
