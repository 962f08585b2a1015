"""Which backend runs a model, over which operators.

``auto`` is `compiled` where the C++ operators can be had, else `recorded` over ATen operators, said once in the log.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from wavegraph.capture.backends.base import Backend
from wavegraph.capture.backends.registry import create_backend
from wavegraph.capture.bundle import Bundle
from wavegraph.errors import ConfigError
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.base import Ops
from wavegraph.model.ops.build import BuildError, find_compiler, loaded_library
from wavegraph.model.ops.cpu import DTYPES, CpuOps

logger = logging.getLogger(__name__)

AUTO = "auto"
"""The name of the default backend."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A backend and the operators of the model that it will run."""

    backend: Backend
    ops: Ops


def check_backend(name: str) -> None:
    """Raise `ConfigError` unless ``name`` is ``auto`` or a backend's."""
    if name != AUTO:
        create_backend(name)


def choose_backend(name: str, dtype: torch.dtype, bundle: Bundle | None = None) -> tuple[str, str]:
    """The backend that ``name`` means for a model in ``dtype``, and why it is not `compiled`, if ``auto`` fell back.

    Nothing is built. Raises `ConfigError` for `compiled` in a dtype that it lacks, or for a bundle of another backend.
    """
    if bundle is not None:
        if name not in (AUTO, "compiled"):
            raise ConfigError(f"backend: {name!r} runs no bundle; use 'compiled', or no bundle")
        return "compiled", ""
    if name not in (AUTO, "compiled"):
        return name, ""
    if dtype not in DTYPES:
        reason = f"the C++ operators compute in float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
        if name == AUTO:
            return "recorded", reason
        raise ConfigError(f"backend: {reason}; use backend 'recorded', or another dtype")
    if name == AUTO and loaded_library() is None:
        try:
            find_compiler()
        except BuildError as error:
            return "recorded", str(error)
    return "compiled", ""


def make_runner(
    name: str, dtype: torch.dtype, on_build: Callable[[int, int], None] | None = None, bundle: Bundle | None = None
) -> Runner:
    """The backend and operators for ``name``, which may first be compiled; ``on_build`` is told how far that is.

    Those of a bundle, which fits, are loaded and never compiled. Raises as `choose_backend`, and `BuildError` if
    `compiled` was asked for by name, or by a bundle, and cannot be had.
    """
    chosen, reason = choose_backend(name, dtype, bundle)
    if bundle is not None:
        return Runner(create_backend(chosen), CpuOps(bundle.isa, bundle.library))
    if chosen == "compiled":
        try:
            return Runner(create_backend(chosen), CpuOps(progress=on_build))
        except BuildError as error:
            if name != AUTO:
                raise
            chosen, reason = "recorded", str(error)
    if reason:
        logger.warning("backend: 'recorded', which is slower than 'compiled', since %s", reason)
    return Runner(create_backend(chosen), AtenOps())
