"""A client for streamed answers that does little work itself: it shares the machine with the server."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from wavegraph.errors import WavegraphError

DONE = b"[DONE]"
"""The last data of an OpenAI stream."""


class AnswerError(WavegraphError):
    """The server answered with something else than a stream."""


async def stream(host: str, port: int, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Post ``body``; the data of each server-sent event, `DONE` included.

    Closing the iterator early cuts the connection. Raises `AnswerError` unless the status is 200, and OSError or
    EOFError if the connection breaks.
    """
    reader, writer = await asyncio.open_connection(host, port)
    try:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        status = int((await reader.readuntil(b"\r\n\r\n")).split(None, 2)[1])
        if status != 200:
            raise AnswerError(f"{path}: status {status}, {(await reader.read()).decode(errors='replace')[:500]}")
        rest = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            rest += await reader.readexactly(size + 2)
            *events, rest = rest[:-2].split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    yield event.removeprefix(b"data: ")
    finally:
        writer.transport.abort()
