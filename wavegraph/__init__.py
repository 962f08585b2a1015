"""Wavegraph: a CUDA-graph-first execution engine for looped language models.

``from wavegraph import LLM, EngineConfig, SamplingParams`` is all that most programs need. Names are loaded at
first use, so that ``import wavegraph`` costs nothing and a scheduler without a model needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from wavegraph.errors import (
    BundleError,
    CaptureError,
    CheckpointError,
    ConfigError,
    EngineError,
    InputError,
    OutputError,
    RequestError,
    WavegraphError,
)

if TYPE_CHECKING:
    from wavegraph.config import EngineConfig
    from wavegraph.engine.engine import Engine
    from wavegraph.llm import LLM
    from wavegraph.outputs import RequestMetrics, RequestOutput
    from wavegraph.sampling import SamplingParams

    __version__: str

__all__ = [
    "LLM",
    "BundleError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineError",
    "InputError",
    "OutputError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "WavegraphError",
    "__version__",
]

_LAZY = {
    "LLM": "wavegraph.llm",
    "Engine": "wavegraph.engine.engine",
    "EngineConfig": "wavegraph.config",
    "RequestMetrics": "wavegraph.outputs",
    "RequestOutput": "wavegraph.outputs",
    "SamplingParams": "wavegraph.sampling",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = import_module("importlib.metadata").version("wavegraph")
    elif name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
