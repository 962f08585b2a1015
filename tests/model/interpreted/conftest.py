"""Tests that run kernels through Triton's interpreter, in a process of their own (``test_triton_interpreted.py``).

``TRITON_INTERPRET=1`` must be set before Triton is imported. Without it they run on a GPU, compiled; without that
either, nothing here is collected.
"""

import pytest
import torch

from tests.model.interpreted.launcher import INTERPRETED, can_run, make_launcher
from wavegraph.model.ops.triton.ops import TritonOps

if INTERPRETED:
    from tests.model.interpreted.interpreter import adapt

    adapt()
elif not can_run():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def ops() -> TritonOps:
    """Interpreted kernels, few programs, and splits as short as they may be."""
    return TritonOps(make_launcher(), programs=5, min_split=64)


@pytest.fixture(params=(torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
