"""Settings for all tests. Imports no room of the project: scheduler tests must run without torch."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Tests run side by side, a process a core. Set before anything imports torch; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples in every run, on every machine.
settings.register_profile("wavegraph", derandomize=True, deadline=None)
settings.load_profile("wavegraph")


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAVEGRAPH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
