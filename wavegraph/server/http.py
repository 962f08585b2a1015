"""uvicorn's HTTP protocol, with what it lacks: limits on a slow client, and error objects for what is no HTTP."""

from asyncio import Transport
from asyncio.events import TimerHandle
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from wavegraph.server.errors import ApiError, error_body
from wavegraph.server.settings import Settings

MAX_HEAD_BYTES = 64 << 10
"""The longest request line and headers."""

LINGER_SECONDS = 1.0
"""For a client to read why its connection ends."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. It ends when

    - the head of a request does not arrive within ``receive_timeout``, or is longer than `MAX_HEAD_BYTES`;
    - the client leaves a full buffer unread for ``stall_timeout``. Its handler is told that the client has left.
    """

    def __init__(self, settings: Settings, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._settings = settings
        self._head_bytes = 0
        self._in_body = False
        self._refused = False
        self._head_timer: TimerHandle | None = None
        self._stall_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """The client is there: it has so long to say what it wants."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._head_arrived()
        self._cancel_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse more of a request."""
        if self._refused:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._refused:
            return
        if self._head_timer is not None and not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"headers: are longer than {MAX_HEAD_BYTES} bytes", param="headers"))
        elif (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None:
            # uvicorn's own wait ended with the first byte, be it of a body whose answer is out, or a mere line end.
            self._expect_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """Its head is whole; the body is the guard's to wait for."""
        self._head_arrived()
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of it is there."""
        self._head_arrived()
        self._in_body = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The buffer is full: the client has so long to read some of it."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._settings.stall_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        self._cancel_stall()

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP."""
        self._refuse(ApiError(400, "request: is not valid HTTP", param="request"))

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            seconds = self._settings.receive_timeout
            error = ApiError(408, f"headers: did not arrive within {seconds:g} seconds; send faster", param="headers")
            self._head_timer = self.loop.call_later(seconds, self._refuse, error)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        if self._refused or (self._in_body and self.cycle.response_started):  # it has its answer
            self.transport.close()
            return
        self._refused = True
        body = error_body(error)
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        # Were it closed at once, what the client still sends would reset the connection before it has read this.
        self.transport.write_eof()
        self._head_arrived()
        self._head_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
