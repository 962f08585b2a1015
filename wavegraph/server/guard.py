"""What stands before every request: its id, the API key, limits on its body, and an eye on whether the client is there.

uvicorn cancels no handler when its client leaves, so the guard does, streaming or not; and whatever the handler left
in ``scope["state"].on_end`` is called in any case. It logs one line a request.
"""

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wavegraph.server.errors import ApiError, error_response
from wavegraph.server.settings import Settings

logger = logging.getLogger("wavegraph.server.access")

REQUEST_ID = b"x-request-id"
CLIENT_GONE = 499
"""The status in the log for a client that left before its answer; nginx's."""

_VALID_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class Exchange:
    """One request and its answer, for handlers as ``request.state.exchange``.

    ``deadline`` is in the event loop's time. Handlers put what the log should say into ``facts``, and what must happen
    at the end, however that comes, into ``on_end``.
    """

    request_id: str
    deadline: float
    began: float
    status: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    on_end: list[Callable[[], None]] = field(default_factory=list)


class _GoneError(Exception):
    """The client is not there any more."""


class Guard:
    """ASGI middleware; see the module's words."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(REQUEST_ID, b"")
        now = time.perf_counter()
        exchange = Exchange(
            given.decode() if _VALID_ID.fullmatch(given) else uuid4().hex,
            asyncio.get_running_loop().time() + self._settings.request_timeout,
            now,
        )
        scope.setdefault("state", {})["exchange"] = exchange

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, exchange.request_id.encode())]
            await send(message)

        try:
            await self._serve(scope, headers, receive, answer)
        except ApiError as error:
            await error_response(error)(scope, receive, answer)
        except _GoneError:
            exchange.facts["sent"] = exchange.status
            exchange.status = CLIENT_GONE
        finally:
            for function in exchange.on_end:
                function()
            exchange.on_end.clear()
            _log(scope, exchange)

    async def _serve(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/v1"):
            self._authorize(headers)
        body = await self._read(headers, receive)
        handler = asyncio.ensure_future(self._app(scope, _replay(body), send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((handler, gone), return_when=asyncio.FIRST_COMPLETED)
            if not handler.done():
                raise _GoneError
            handler.result()
        finally:
            gone.cancel()
            handler.cancel()
            await asyncio.wait((handler, gone))

    def _authorize(self, headers: dict[bytes, bytes]) -> None:
        if not self._keys:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # Every key is compared, and each in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(key, given.strip()) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._settings.max_body_bytes
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            raise _too_long(limit)
        chunks, size = [], 0
        try:
            async with asyncio.timeout(self._settings.receive_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    chunk = message.get("body", b"")
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > limit:
                        raise _too_long(limit)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError as error:
            raise ApiError(
                408,
                f"body: did not arrive within {self._settings.receive_timeout:g} seconds; send it faster",
                param="body",
                headers={"Connection": "close"},
            ) from error


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"body: is longer than {limit} bytes, the most there may be; shorten it", param="body")


def _replay(body: bytes) -> Receive:
    """The body once more, and then nothing: it is the guard who waits for the client to leave."""
    rest = [body]

    async def receive() -> Message:
        if rest:
            return {"type": "http.request", "body": rest.pop(), "more_body": False}
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return receive


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _log(scope: Scope, exchange: Exchange) -> None:
    seconds = round(time.perf_counter() - exchange.began, 4)
    fields = {
        "request_id": exchange.request_id,
        "client": ":".join(map(str, scope.get("client") or ())),
        "method": scope["method"],
        "path": scope["path"],
        "status": exchange.status,
        "seconds": seconds,
        **exchange.facts,
    }
    logger.info("request", extra={"fields": fields})
