"""One server for all tests that leave it as it was."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.server.harness import CONFIG, Served, Stream, serving
from wavegraph.builtin import builtin_path
from wavegraph.startup.build import build_engine


@pytest.fixture(scope="package")
def shared_server() -> Iterator[Served]:
    with serving() as served:
        served.do(served.engine.ready())
        yield served


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """The server, whole after the test as before: no request left, no page lost."""
    yield shared_server
    shared_server.wait_idle()
    assert shared_server.free_pages() == 640
    assert shared_server.engine.error is None


@pytest.fixture
def streams(server: Served) -> Iterator[list[Stream]]:
    opened: list[Stream] = []
    yield opened
    for stream in opened:
        stream.close()


@pytest.fixture(scope="module")
def shared_build() -> Any:
    return partial(build_engine, builtin_path(), CONFIG)
