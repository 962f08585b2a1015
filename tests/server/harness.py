"""A server in this process: uvicorn in a thread, the engine in another, and both within a test's reach."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from typing import Any, TypeVar

import uvicorn

from wavegraph.builtin import builtin_path
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine
from wavegraph.sampling import SamplingParams
from wavegraph.server.app import create_app
from wavegraph.server.async_engine import AsyncEngine
from wavegraph.server.serve import bind, uvicorn_config
from wavegraph.server.settings import Settings
from wavegraph.startup.build import build_engine

Result = TypeVar("Result")

CONFIG = EngineConfig(max_num_batched_tokens=32, max_num_seqs=8, max_model_len=1024, num_pages=640)
SETTINGS = Settings(model_name="builtin", receive_timeout=1.0, max_body_bytes=1 << 20)


class Served:
    """A server that runs. ``engine`` belongs to its loop: use `do` and `on_engine`."""

    def __init__(self, engine: AsyncEngine, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.connections: set[Any] = set()  # uvicorn's own
        self._loop = loop

    def do(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def on_engine(self, function: Callable[[Engine], Result]) -> Result:
        """Run a function on the engine thread."""
        return self.do(self.engine.call(function))

    def free_pages(self) -> int:
        return self.on_engine(lambda engine: engine.stats().free_pages)

    def offline(self, prompt: str | list[int], **params: Any) -> Any:
        """What the engine gives by itself: the last output of a request."""

        async def run() -> Any:
            engine = self.engine.available()
            ids = prompt if isinstance(prompt, list) else engine.tokenizer.encode(prompt)  # type: ignore[union-attr]
            generation = await self.engine.generate([ids], SamplingParams(**params))
            return await generation.finished()

        outputs = self.do(run())
        return outputs[0] if len(outputs) == 1 else outputs

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One plain request: status, headers (in lower case), body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, content: Any, **headers: str) -> tuple[int, Any]:
        """POST JSON, get JSON."""
        status, _, body = self.request("POST", path, json.dumps(content).encode(), headers | JSON)
        return status, json.loads(body)

    def wait_idle(self) -> None:
        self.do(asyncio.wait_for(self.engine.idle(), 30))


JSON = {"content-type": "application/json"}
COMPLETION: dict[str, Any] = {"model": "builtin", "prompt": "a", "max_tokens": 2, "temperature": 0}
LONG: dict[str, Any] = {**COMPLETION, "max_tokens": 1000, "ignore_eos": True}


class Stream:
    """A streamed completion over a bare socket."""

    def __init__(self, port: int, content: dict[str, Any], receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(60)
        self.socket.connect(("127.0.0.1", port))
        body = json.dumps({**content, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.socket.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.received = b""

    def read(self, until: bytes | None = None) -> bytes:
        """Up to some bytes, or to the end."""
        while until is None or until not in self.received:
            piece = self.socket.recv(65536)
            if not piece:
                break
            self.received += piece
        return self.received

    def events(self) -> list[Any]:
        """What came, comments left out."""
        data = re.findall(rb"data: (.*)\n\n", self.received)
        return [json.loads(each) if each != b"[DONE]" else "[DONE]" for each in data]

    def close(self) -> None:
        self.socket.close()

    def finish(self) -> list[Any]:
        """Read to the end; returns the events."""
        self.read()
        self.close()
        return self.events()


@contextmanager
def serving(
    settings: Settings = SETTINGS, config: EngineConfig = CONFIG, build: Any = None, send_buffer: int | None = None
) -> Iterator[Served]:
    """Start a server, and stop it."""
    engine = AsyncEngine(build if build is not None else partial(build_engine, builtin_path(), config))
    listener = bind("127.0.0.1", 0, settings)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    web = uvicorn_config(create_app(engine, settings), settings)
    server = uvicorn.Server(web)
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    def main() -> None:
        with asyncio.Runner(loop_factory=web.get_loop_factory()) as runner:
            runner.run(run())

    thread = threading.Thread(target=main)
    port = listener.getsockname()[1]
    thread.start()
    try:
        wait_until(lambda: server.started, "the server listens")
        served = Served(engine, port, loops[0])
        served.connections = server.server_state.connections
        yield served
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"in vain waited until {what}"
        time.sleep(0.005)
