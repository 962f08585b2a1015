"""`LLM`: a checkpoint and an engine behind `generate` and `stream`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from wavegraph.buckets.cost import CostModel
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Progress
from wavegraph.errors import EngineError, RequestError
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams
from wavegraph.startup.backend_choice import AUTO
from wavegraph.startup.build import build_engine
from wavegraph.text.chat import Message
from wavegraph.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids as a list or tuple of integers."""


class LLM:
    """A model ready to generate. Use it from one thread, and close it, or use it in a ``with`` statement.

    - ``path``: a checkpoint folder (``config.json``, safetensors, ``tokenizer.json`` if there is text) or a
      Hugging Face Hub id.
    - ``config``: the engine's options.
    - ``dtype``: ``"auto"`` (the checkpoint's), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    - ``backend``: ``"compiled"`` replays our own C++ operators, recorded for each bucket, and gives a row the same bits
      in any company; ``"recorded"`` replays ATen operators, ``"eager"`` runs them from the model's Python each time.
      ``"auto"`` is ``"compiled"``, or ``"recorded"`` where there is neither a C++ compiler nor a build, or in float16.
    - ``bundle``: a folder that ``wavegraph precompile`` made: its operators are loaded, not compiled, and its ladder is
      used, and its cost model unless ``cost`` is given. One that is damaged, or does not fit, raises `BundleError`.
    - ``trace``: a file for a trace of every step in Chrome's format, for Perfetto; complete once closed.
    - ``cost``: what steps take here: a `CostModel`, or the JSON file that ``wavegraph profile-buckets`` wrote. None: an
      assumption.
    - ``on_build`` (only if operators must be compiled), ``on_load``, ``on_capture``: told about progress as
      ``(done, total)``.

    Tokens run through all depths unless their `SamplingParams` say otherwise. Raises `CheckpointError` or
    `ConfigError` for a model or an option that cannot be honoured.
    """

    def __init__(
        self,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        dtype: str = "auto",
        backend: str = AUTO,
        bundle: str | Path | None = None,
        trace: str | Path | None = None,
        cost: CostModel | str | Path | None = None,
        on_build: Progress | None = None,
        on_load: Progress | None = None,
        on_capture: Progress | None = None,
    ) -> None:
        self.config = config if config is not None else EngineConfig()
        self.engine = build_engine(
            path,
            self.config,
            dtype=dtype,
            backend=backend,
            bundle=bundle,
            trace=trace,
            cost=cost,
            on_build=on_build,
            on_load=on_load,
            on_capture=on_capture,
        )
        self._counter = 0
        self._mail: dict[str, RequestOutput | None] = {}  # latest unread output of each open stream

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Run one prompt, or a list of them, to the end; returns their finished outputs in order, ``n`` a prompt.

        ``params`` are those of all prompts, or one for each. ``on_progress`` is told how many requests are done.
        An output whose ``finish_reason`` is "error" says in ``error`` what failed; the others are whole.
        Raises `RequestError` that names the prompt's index if one cannot be served; nothing is run then, and the engine
        can be used again.
        """
        batch = _as_batch(prompts)
        ids: list[str] = []
        try:
            for index, (prompt, each) in enumerate(zip(batch, _params_of(params, len(batch)), strict=True)):
                try:
                    ids.extend(self._add(prompt, each))
                except RequestError as error:
                    raise RequestError(f"prompts[{index}]: {error}") from error
            finished = self._finish(ids, on_progress)
        finally:
            for request_id in ids:
                self.engine.abort(request_id)
        return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """The next turn of one conversation, or of a list of them; otherwise as `generate`.

        The prompt is made by the checkpoint's chat template, or ChatML; an output also ends at the id that ends a turn.
        """
        batch = _conversations(messages)
        each = [self.for_chat(given) for given in _params_of(params, len(batch))]
        return self.generate([self.encode_chat(one) for one in batch], each, on_progress=on_progress)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids that ask for the next turn of a conversation. Raises `RequestError`."""
        return self._tokenizer().encode_chat(messages)

    def for_chat(self, params: SamplingParams) -> SamplingParams:
        """``params`` that also end at the id that ends a turn, unless they ignore the model's own."""
        return with_turn_end(params, self._tokenizer())

    def _tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise RequestError("messages: chat needs a tokenizer, and the checkpoint has none; use token ids")
        return self.engine.tokenizer

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> "OutputStream":
        """Start one prompt; iterate over the result to get its output after each token.

        Raises `RequestError` at once if it cannot be served. The request runs while any stream or `generate` of
        this LLM is being waited for, and ends early when its stream is closed or no longer referred to.
        """
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params: must be SamplingParams, got {params!r}")
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream is of one output; start {params.n} streams")
        return OutputStream(self, self._add(prompt, params)[0])

    def close(self) -> None:
        """Free pools and recorded programs. May be called twice."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, prompt: Prompt, params: SamplingParams) -> list[str]:
        ids = self.engine.add_request(str(self._counter), prompt, params)
        self._counter += 1
        return ids

    def _finish(self, ids: list[str], on_progress: Progress | None) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        pending = set(ids)
        while pending:
            for output in self._step():
                if output.finished and output.request_id in pending:
                    finished[output.request_id] = output
                    pending.remove(output.request_id)
                    if on_progress is not None:
                        on_progress(len(finished), len(ids))
        return finished

    def _step(self) -> list[RequestOutput]:
        """One engine step. Outputs are cumulative, so of those for streams only the latest is kept."""
        if not self.engine.has_unfinished:
            raise EngineError("a request that is waited for is gone: it was aborted on the engine itself")
        outputs = self.engine.step()
        for output in outputs:
            if output.request_id in self._mail:
                self._mail[output.request_id] = output
        return outputs


class OutputStream(Iterator[RequestOutput]):
    """Outputs of one request as it grows, each cumulative; made by `LLM.stream`.

    ``request_id`` is its name on ``llm.engine``. Closing it, leaving its ``with`` statement, or letting go of
    it ends the request early.
    """

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm = llm
        self.request_id = request_id
        self._open = True
        llm._mail[request_id] = None

    def __next__(self) -> RequestOutput:
        """Run steps until the request has news."""
        if not self._open:
            raise StopIteration
        output = None
        try:
            while (output := self._llm._mail[self.request_id]) is None:
                self._llm._step()
            self._llm._mail[self.request_id] = None
        finally:
            if output is None or output.finished:
                self.close()
        return output

    def close(self) -> None:
        """End the request if it still runs. May be called twice."""
        if self._open:
            self._open = False
            del self._llm._mail[self.request_id]
            self._llm.engine.abort(self.request_id)

    def __enter__(self) -> "OutputStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt as a batch of one: text, or a list whose first entry is a token id."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(
            f"prompts: must be text, token ids, or a list of either, got {type(prompts).__name__}; convert it to a list"
        )
    if not prompts:
        raise RequestError("prompts: is empty; give at least one prompt, or one token")
    return prompts if isinstance(prompts[0], str | list | tuple) else [prompts]


def with_turn_end(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """``params`` that also end where a turn of a chat does, unless they ignore the model's own end ids."""
    if params.ignore_eos:
        return params
    return replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *tokenizer.chat_stop_ids))))


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation as a batch of one."""
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages: must be a list of messages, or of such lists, got {type(messages).__name__}")
    return list(messages) if messages and isinstance(messages[0], list | tuple) else [messages]


def _params_of(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise RequestError(f"params: must be SamplingParams, or a list of them, got {params!r}")
    if len(params) != count:
        raise RequestError(f"params: got {len(params)} for {count} prompts; give one, or one for each prompt")
    return params
