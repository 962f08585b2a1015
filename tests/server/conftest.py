"""One server for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.server.harness import Served, serving


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
