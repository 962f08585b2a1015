"""One server for all tests that leave it as it was."""

from collections.abc import Iterator

import pytest

from tests.server.harness import Served, serving


@pytest.fixture(scope="session")
def session_server() -> Iterator[Served]:
    with serving() as served:
        served.do(served.engine.ready())
        yield served


@pytest.fixture
def server(session_server: Served) -> Iterator[Served]:
    """The server, whole after the test as before: no request left, no page lost."""
    yield session_server
    session_server.wait_idle()
    assert session_server.free_pages() == 640
    assert session_server.engine.error is None
