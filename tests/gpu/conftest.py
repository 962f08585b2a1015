"""Tests that need a GPU; without one they are skipped. `benchmarks/gpu_check.py` runs them."""

import pytest

from wavegraph.startup.backend_choice import cuda_missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = cuda_missing()
    for item in items:
        if reason and "tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason=reason))
