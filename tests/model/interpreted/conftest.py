"""Tests that run kernels through Triton's interpreter, in a process of their own (``test_triton_interpreted.py``).

``TRITON_INTERPRET=1`` must be set before Triton is imported; without it nothing here is collected.
"""

import os

import pytest
import torch

from wavegraph.model.ops.triton.launch import JitLauncher
from wavegraph.model.ops.triton.ops import TritonOps

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.model.interpreted.interpreter import adapt

    adapt()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def ops() -> TritonOps:
    """Interpreted kernels, few programs, and splits as short as they may be."""
    return TritonOps(JitLauncher(), programs=5, min_split=64)


@pytest.fixture(params=(torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
