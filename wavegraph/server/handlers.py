"""What each endpoint does."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from fastapi import Request
from msgspec import Struct
from pydantic import BaseModel
from starlette.responses import Response

from wavegraph.engine.engine import Engine
from wavegraph.engine.fence import ADMISSION, ANSWER
from wavegraph.engine.inputs import checked_ids
from wavegraph.errors import EngineError, RequestError, RequestFailedError
from wavegraph.llm import with_turn_end
from wavegraph.sampling import SamplingParams
from wavegraph.server.answers import Answer, ChatAnswer, CompletionAnswer
from wavegraph.server.async_engine import AsyncEngine
from wavegraph.server.errors import RETRY_AFTER, ApiError, engine_failed, request_failed, timed_out, unavailable
from wavegraph.server.guard import Exchange
from wavegraph.server.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    from_request_error,
    parse,
)
from wavegraph.server.responses import ModelCard, ModelList, Text, Tokens
from wavegraph.server.settings import Settings
from wavegraph.server.stream import EventStream, events
from wavegraph.text.chat import Message
from wavegraph.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")

DEFAULT_MAX_TOKENS = 16
"""Of completions, as OpenAI's. A chat goes on to the end of the context."""

LONG_BODY = 32 << 10
"""Bytes of a request from which on its text is read and encoded in a thread, not on the event loop."""


class Handlers:
    """The endpoints over one engine."""

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    # -- generation ----------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """Complete prompts."""
        engine = self._available()
        body = await self._read(request, CompletionRequest)
        self._check_model(body.model)
        body.check_together()
        tokenizer = engine.tokenizer

        def encode() -> tuple[list[list[int]], list[str] | None]:
            names = [f"prompt[{index}]" for index in range(len(body.prompt))] if len(body.prompt) > 1 else ["prompt"]
            prompts = [_encode(engine, prompt, name) for prompt, name in zip(body.prompt, names, strict=True)]
            return prompts, [_echo(prompt, tokenizer) for prompt in body.prompt] if body.echo else None

        prompts, echoes = await self._off_loop(request, encode)
        scored = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            scored = max(body.logprobs, scored or 0)
        if body.stream and scored is not None:
            raise ApiError(400, "logprobs: of an echoed prompt cannot be streamed; leave out stream", param="logprobs")
        params = _sampling(body, body.max_tokens or DEFAULT_MAX_TOKENS, body.logprobs, scored)
        answer = CompletionAnswer(body, prompts, params, echoes, tokenizer)
        return await self._answer(request, body, answer)

    async def chat_completions(self, request: Request) -> Response:
        """Complete a conversation."""
        engine = self._available()
        body = await self._read(request, ChatCompletionRequest)
        self._check_model(body.model)
        body.check_together()
        tokenizer = _require(engine.tokenizer, "messages")
        prompt = await self._off_loop(request, lambda: _encode_chat(engine, tokenizer, body.messages))
        room = context_limit(engine) - len(prompt)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs=true; set it", param="top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = _sampling(body, body.max_completion_tokens or body.max_tokens or room, logprobs, body.prompt_logprobs)
        with _refusals():
            params = with_turn_end(params, tokenizer)
        return await self._answer(request, body, ChatAnswer(body, prompt, params, tokenizer))

    async def _answer(self, request: Request, body: GenerationRequest, answer: Answer) -> Response:
        exchange: Exchange = request.state.exchange
        params = answer.params
        self._check_room(len(answer.prompts) * params.n)
        exchange.facts |= {"stream": bool(body.stream), "prompt_tokens": sum(map(len, answer.prompts))}
        with _refusals():
            generation = await self._engine.generate(answer.prompts, params, body.priority or 0)
        exchange.on_end += (lambda: exchange.facts.update(generation.facts()), generation.close)
        if body.stream:
            keep_alive, deadline = self._settings.keep_alive, exchange.deadline
            return EventStream(
                events(generation, answer, include_usage=body.include_usage, keep_alive=keep_alive, deadline=deadline)
            )
        try:
            async with asyncio.timeout_at(exchange.deadline):
                outputs = await generation.finished()
        except TimeoutError as error:
            raise timed_out() from error
        except EngineError as error:
            raise engine_failed() from error
        if any(output.error is not None for output in outputs):
            raise request_failed()
        with _refusals(), ANSWER:
            return _json(answer.whole(outputs))

    # -- the rest ------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of a conversation."""
        engine = self._available()
        body = await self._read(request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages", param="prompt")
        if body.model is not None:
            self._check_model(body.model)
        tokenizer = _require(engine.tokenizer, "prompt")
        special = body.add_special_tokens is not False

        def encode() -> list[int]:
            if body.messages is not None:
                return tokenizer.encode_chat(body.messages)
            return tokenizer.encode(body.prompt or "", add_special_tokens=special)

        ids = await self._off_loop(request, encode)
        return _json(Tokens(len(ids), context_limit(engine), ids))

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        engine = self._available()
        body = await self._read(request, DetokenizeRequest)
        if body.model is not None:
            self._check_model(body.model)
        tokenizer = _require(engine.tokenizer, "tokens")
        skip = bool(body.skip_special_tokens)

        def decode() -> str:
            ids = checked_ids("tokens", body.tokens, engine.model.config.vocab_size)
            return tokenizer.decode(ids, skip_special_tokens=skip)

        return _json(Text(await self._off_loop(request, decode)))

    def models(self) -> ModelList:
        """The one model."""
        return ModelList("list", [self._card()])

    def model(self, name: str) -> ModelCard:
        """The model of that name. Raises `ApiError` for another."""
        self._check_model(name)
        return self._card()

    def _card(self) -> ModelCard:
        limit = context_limit(self._engine.engine) if self._engine.engine is not None else None
        return ModelCard(self._settings.model_name, "model", self._settings.created, "wavegraph", limit)

    # -- checks --------------------------------------------------------------------------------------------

    def _available(self) -> Engine:
        try:
            return self._engine.available()
        except EngineError as error:
            raise unavailable(error) from error

    def _check_model(self, name: str) -> None:
        if name != self._settings.model_name:
            raise ApiError(
                404,
                f"model: {name[:80]!r} does not exist; ask for {self._settings.model_name!r}, or GET /v1/models",
                param="model",
                code="model_not_found",
            )

    def _check_room(self, count: int) -> None:
        limit = self._settings.max_pending
        if count > limit:
            raise ApiError(
                400, f"n: prompts times n make {count} outputs, but at most {limit} fit; ask for less", param="n"
            )
        if self._engine.unfinished + count > limit:
            raise ApiError(
                429,
                f"the queue is full ({self._engine.unfinished} of {limit} outputs are waiting or running); try later",
                code="queue_full",
                headers=RETRY_AFTER,
            )

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        media = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if media != "application/json":
            raise ApiError(415, f"content-type: must be application/json, got {media[:40]!r}", param="content-type")
        body = await request.body()
        return await self._off_loop(request, lambda: parse(kind, body))

    async def _off_loop(self, request: Request, function: Callable[[], Result]) -> Result:
        """Run something whose time grows with the request's length, in a thread if that is long."""
        long = len(await request.body()) >= LONG_BODY
        with _refusals(), ADMISSION:
            if not long:
                return function()
            return await asyncio.to_thread(function)


def context_limit(engine: Engine) -> int:
    """The most tokens that prompt and output of one request can have together."""
    sizes = engine.sizes.scheduler
    return min(sizes.max_model_len, sizes.num_pages * sizes.page_size)


def _check_length(engine: Engine, count: int, field: str, about: str = "") -> None:
    """Raise `ApiError` if a prompt of ``count`` tokens leaves no room for a token more."""
    limit = context_limit(engine)
    if count >= limit:
        raise ApiError(
            400,
            f"{field}: has {about}{count} tokens, but the context of {limit} must hold them and the output; shorten it",
            param=field,
            code="context_length_exceeded",
        )


def _encode(engine: Engine, prompt: str | list[int], field: str) -> list[int]:
    """Token ids of a prompt that fits. Text that is far too long is not encoded to find that out."""
    if isinstance(prompt, str):
        tokenizer = _require(engine.tokenizer, field)
        _check_length(engine, tokenizer.fewest_tokens(prompt), field, "at least ")
        prompt = tokenizer.encode(prompt)
    _check_length(engine, len(prompt), field)
    return checked_ids(field, prompt, engine.model.config.vocab_size)


def _echo(prompt: str | list[int], tokenizer: Tokenizer | None) -> str:
    """The text of a prompt."""
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt) if tokenizer is not None else ""


def _encode_chat(engine: Engine, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation that fits."""
    text = tokenizer.chat.render(messages)
    _check_length(engine, tokenizer.fewest_tokens(text), "messages", "at least ")
    prompt = tokenizer.encode(text, field="messages", add_special_tokens=False)
    _check_length(engine, len(prompt), "messages")
    return prompt


def _require(tokenizer: Tokenizer | None, field: str) -> Tokenizer:
    if tokenizer is None:
        raise ApiError(400, f"{field}: text needs a tokenizer, and the model has none; give token ids", param=field)
    return tokenizer


def _sampling(
    body: GenerationRequest, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    with _refusals():
        return body.sampling(max_tokens, logprobs, prompt_logprobs)


@contextmanager
def _refusals() -> Iterator[None]:
    """What the core refuses, the client hears as status 400; what failed, as 500; an engine that is gone, as 503."""
    try:
        yield
    except RequestError as error:
        raise from_request_error(error) from error
    except RequestFailedError as error:
        logger.error("a request: %s", error, exc_info=error)
        raise request_failed() from error
    except EngineError as error:
        raise unavailable(error) from error


def _json(answer: Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
