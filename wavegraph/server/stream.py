"""Server-sent events: an answer chunk by chunk."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from wavegraph.engine.fence import ANSWER
from wavegraph.errors import EngineError, RequestFailedError
from wavegraph.outputs import RequestOutput
from wavegraph.server.answers import Answer, Cursor
from wavegraph.server.async_engine import Generation
from wavegraph.server.errors import ApiError, engine_failed, error_body, request_failed, timed_out

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """A response made of events. A client that reads slowly is waited for; that one leaves is the guard's to see."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them all."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def events(
    generation: Generation, answer: Answer, *, include_usage: bool, keep_alive: float, deadline: float
) -> AsyncGenerator[bytes]:
    """The answer as events, all that a step brings in one piece; ends with ``[DONE]``, after an error too.

    ``keep_alive`` seconds without news make a comment, which clients skip and proxies count as life. ``deadline`` is
    in the event loop's time.
    """
    cursors: dict[int, Cursor] = {}
    latest: dict[int, RequestOutput] = {}
    try:
        while (news := await _news(generation, keep_alive, deadline)) != []:
            if news is None:
                yield KEEP_ALIVE
                continue
            latest.update(news)
            if any(output.error is not None for _, output in news):
                raise request_failed()
            with ANSWER:
                chunks = [answer.chunk(place, output, cursors.setdefault(place, Cursor())) for place, output in news]
                data = b"".join(_event(msgspec.json.encode(chunk)) for chunk in chunks if chunk is not None)
            if data:
                yield data
        with ANSWER:
            usage = answer.last_chunk([latest[place] for place in sorted(latest)]) if include_usage else None
            last = _event(msgspec.json.encode(usage)) if usage is not None else b""
    except EngineError:
        yield _event(error_body(engine_failed())) + DONE
    except RequestFailedError as error:
        logger.error("a stream: %s", error, exc_info=error)
        yield _event(error_body(request_failed())) + DONE
    except ApiError as error:
        yield _event(error_body(error)) + DONE
    else:
        yield last + DONE


async def _news(generation: Generation, keep_alive: float, deadline: float) -> list[tuple[int, RequestOutput]] | None:
    """News, or None after ``keep_alive`` seconds without. Raises `ApiError` at the deadline."""
    now = asyncio.get_running_loop().time()
    if now >= deadline:
        raise timed_out()
    try:
        async with asyncio.timeout(min(keep_alive, deadline - now)):
            return await generation.news()
    except TimeoutError:
        return None


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
