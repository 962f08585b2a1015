"""From outputs to answers: whole, or chunk by chunk. An answer knows what was asked, and nothing of HTTP."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from msgspec import UNSET, Struct

from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams
from wavegraph.server.logprobs import (
    Offsets,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    echo_offsets,
    prompt_logprobs,
)
from wavegraph.server.requests import ChatCompletionRequest, CompletionRequest
from wavegraph.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptDetails,
    Usage,
)
from wavegraph.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Cursor:
    """How much of one output has been given out: characters and tokens. ``begun``: whether anything was."""

    text: int = 0
    tokens: int = 0
    begun: bool = False
    offsets: Offsets | None = None


class Answer(ABC):
    """What one request gets. ``prompts`` are token ids; outputs are numbered prompt by prompt, ``params.n`` each."""

    def __init__(
        self, prefix: str, model: str, prompts: list[list[int]], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.id = f"{prefix}-{uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.prompts = prompts
        self.params = params
        self.tokenizer = tokenizer
        self.names = TokenNames(tokenizer)

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> Struct:
        """The answer at once."""

    @abstractmethod
    def chunk(self, place: int, output: RequestOutput, cursor: Cursor) -> Struct | None:
        """What is new of one output, which moves the cursor; None if that is nothing."""

    @abstractmethod
    def last_chunk(self, outputs: Sequence[RequestOutput]) -> Struct:
        """The chunk with the usage and no choice."""

    def usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        """Tokens of all outputs together."""
        prompt = sum(map(len, self.prompts))
        completion = sum(len(output.token_ids) for output in outputs)
        loops = sum(depth + 1 for output in outputs for depth in output.exit_depths)
        cached = sum(output.num_cached_tokens for output in outputs[:: self.params.n])
        mean = loops / completion if completion else None
        return Usage(prompt, completion, prompt + completion, PromptDetails(cached), mean)


class CompletionAnswer(Answer):
    """Of ``/v1/completions``. ``echoes`` are the texts of the prompts, if they are to be given back."""

    def __init__(
        self,
        body: CompletionRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        echoes: list[str] | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__("cmpl", body.model, prompts, params, tokenizer)
        self._body = body
        self._echoes = echoes

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        """The answer at once."""
        choices = [self._choice(place, output, Cursor()) for place, output in enumerate(outputs)]
        return self._completion(choices, self.usage(outputs))

    def chunk(self, place: int, output: RequestOutput, cursor: Cursor) -> Completion | None:
        """What is new of one output."""
        if not _has_news(self._body, output, cursor):
            return None
        return self._completion([self._choice(place, output, cursor)], None if self._body.include_usage else UNSET)

    def last_chunk(self, outputs: Sequence[RequestOutput]) -> Completion:
        """The usage."""
        return self._completion([], self.usage(outputs))

    def _completion(self, choices: list[CompletionChoice], usage: Any) -> Completion:
        return Completion(self.id, "text_completion", self.created, self.model, choices, usage)

    def _choice(self, place: int, output: RequestOutput, cursor: Cursor) -> CompletionChoice:
        first, text, ids = not cursor.begun, (output.text or "")[cursor.text :], output.token_ids[cursor.tokens :]
        echo = self._echoes[place // self.params.n] if self._echoes is not None else ""
        logprobs = self._logprobs(output, cursor, ids, echo)
        if first:
            text = echo + text
        choice = CompletionChoice(place, text, logprobs, _finish(output), output.stop_reason)
        if self._body.return_token_ids:
            choice.token_ids = list(ids)
            choice.prompt_token_ids = list(output.prompt_token_ids) if first else UNSET
        if self._body.return_exit_depths:
            choice.exit_depths = list(output.exit_depths[cursor.tokens :])
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self.names, output.prompt_logprobs)
        _move(cursor, output)
        return choice

    def _logprobs(
        self, output: RequestOutput, cursor: Cursor, ids: Sequence[int], echo: str
    ) -> CompletionLogprobs | None:
        if output.logprobs is None:
            return None
        prompt = output.prompt_token_ids
        if cursor.offsets is None:
            cursor.offsets = Offsets(self.tokenizer, self.params.skip_special_tokens, prompt, len(echo))
        offsets = list(map(cursor.offsets.next, ids))
        entries: list[Any] = list(output.logprobs[cursor.tokens :])
        if not cursor.begun and self._echoes is not None and output.prompt_logprobs is not None:
            ids, entries = [*prompt, *ids], [*output.prompt_logprobs, *entries]
            offsets = echo_offsets(self.tokenizer, prompt, echo) + offsets
        return completion_logprobs(self.names, offsets, ids, entries)


class ChatAnswer(Answer):
    """Of ``/v1/chat/completions``."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        prompt: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__("chatcmpl", body.model, [prompt], params, tokenizer)
        self._body = body

    def whole(self, outputs: Sequence[RequestOutput]) -> ChatCompletion:
        """The answer at once."""
        choices = [self._choice(place, output) for place, output in enumerate(outputs)]
        answer = ChatCompletion(
            self.id, "chat.completion", self.created, self.model, choices, usage=self.usage(outputs)
        )
        if self._body.return_token_ids:
            answer.prompt_token_ids = self.prompts[0]
        if self._body.prompt_logprobs is not None and outputs[0].prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(self.names, outputs[0].prompt_logprobs)
        return answer

    def chunk(self, place: int, output: RequestOutput, cursor: Cursor) -> ChatChunk | None:
        """What is new of one output; the first says whose turn it is."""
        if not _has_news(self._body, output, cursor):
            return None
        delta = ChatDelta(content=(output.text or "")[cursor.text :])
        if not cursor.begun:
            delta.role = "assistant"
        choice = ChatChunkChoice(
            place, delta, self._logprobs(output, cursor.tokens), _finish(output), output.stop_reason
        )
        self._add_ids(choice, output, cursor.tokens)
        chunk = self._chunk([choice], None if self._body.include_usage else UNSET)
        if self._body.return_token_ids and not cursor.begun:
            chunk.prompt_token_ids = self.prompts[0]
        _move(cursor, output)
        return chunk

    def last_chunk(self, outputs: Sequence[RequestOutput]) -> ChatChunk:
        """The usage."""
        return self._chunk([], self.usage(outputs))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Any) -> ChatChunk:
        return ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, choices, usage)

    def _choice(self, place: int, output: RequestOutput) -> ChatChoice:
        message = ChatMessage("assistant", output.text or "")
        choice = ChatChoice(place, message, self._logprobs(output, 0), _finish(output), output.stop_reason)
        self._add_ids(choice, output, 0)
        return choice

    def _add_ids(self, choice: ChatChoice | ChatChunkChoice, output: RequestOutput, start: int) -> None:
        if self._body.return_token_ids:
            choice.token_ids = list(output.token_ids[start:])
        if self._body.return_exit_depths:
            choice.exit_depths = list(output.exit_depths[start:])

    def _logprobs(self, output: RequestOutput, start: int) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        return ChatLogprobs(chat_logprobs(self.names, output.logprobs[start:]))


def _has_news(body: CompletionRequest | ChatCompletionRequest, output: RequestOutput, cursor: Cursor) -> bool:
    """Tokens that are not text yet are news only to those who asked for tokens."""
    if output.finished or not cursor.begun or len(output.text or "") > cursor.text:
        return True
    by_token = output.logprobs is not None or body.return_token_ids or body.return_exit_depths
    return bool(by_token) and len(output.token_ids) > cursor.tokens


def _move(cursor: Cursor, output: RequestOutput) -> None:
    cursor.begun = True
    cursor.text, cursor.tokens = len(output.text or ""), len(output.token_ids)


def _finish(output: RequestOutput) -> Any:
    return output.finish_reason
