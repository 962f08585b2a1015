"""Which backend runs a model, over which operators.

``auto`` is `cuda` on a GPU; without one, `compiled` where the C++ operators can be had, else `recorded` over ATen
operators. That it is not the best one that the machine could run is said once in the log.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from wavegraph.capture.backends.base import Backend
from wavegraph.capture.backends.cuda import CudaBackend
from wavegraph.capture.backends.registry import backend_names, create_backend
from wavegraph.capture.bundle import Bundle
from wavegraph.capture.device import CudaDevice
from wavegraph.errors import ConfigError
from wavegraph.model import cuda_driver
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.base import Ops
from wavegraph.model.ops.build import BuildError, find_compiler, loaded_library
from wavegraph.model.ops.cpu import DTYPES, CpuOps
from wavegraph.model.ops.triton.cubin import CubinLauncher
from wavegraph.model.ops.triton.launch import JitLauncher, Launcher
from wavegraph.model.ops.triton.ops import TritonOps

logger = logging.getLogger(__name__)

AUTO = "auto"
"""The name of the default backend."""

_DETERMINISTIC = ("cuda", "compiled")
_PROGRAMS_PER_MULTIPROCESSOR = 2


@dataclass(frozen=True, slots=True)
class Runner:
    """A backend and the operators of the model that it will run. The model belongs on ``backend.device``."""

    backend: Backend
    ops: Ops


def check_backend(name: str) -> None:
    """Raise `ConfigError` unless ``name`` is ``auto`` or a backend's."""
    if name not in (AUTO, *backend_names()):
        raise ConfigError(f"backend: {name!r} is unknown; use one of {', '.join(backend_names())}")


def cuda_missing(*, compiler: bool = True) -> str:
    """Why the `cuda` backend cannot run here, or an empty string. With a bundle it needs no ``compiler``."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if compiler and find_spec("triton") is None:
        return "Triton is not installed; install wavegraph[cuda]"
    return cuda_driver.missing()


def choose_backend(
    name: str, dtype: torch.dtype, bundle: Bundle | None = None, *, deterministic: bool = False
) -> tuple[str, str]:
    """The backend that ``name`` means for a model in ``dtype``, and why it is not a faster one, if ``auto`` fell back.

    Nothing is built. Raises `ConfigError` for a backend that cannot run here or in this dtype, for a bundle of another
    one, or if it cannot be ``deterministic``.
    """
    chosen, reason = _choose(name, dtype) if bundle is None else (_runs_bundle(name, bundle), "")
    if deterministic and chosen not in _DETERMINISTIC:
        because = f" (taken since {reason})" if reason else ""
        raise ConfigError(
            f"deterministic=True: products of backend {chosen!r}{because} depend on the batch; use "
            f"{' or '.join(map(repr, _DETERMINISTIC))}"
        )
    return chosen, reason


def _runs_bundle(name: str, bundle: Bundle) -> str:
    chosen = "compiled" if bundle.target == "cpu" else "cuda"
    if name not in (AUTO, chosen):
        raise ConfigError(f"backend: {name!r} runs no bundle for {bundle.target}; use {chosen!r}, or no bundle")
    if chosen == "cuda":
        _require_cuda(compiler=False)
    return chosen


def _require_cuda(*, compiler: bool = True) -> None:
    missing = cuda_missing(compiler=compiler)
    if missing:
        raise ConfigError(f"backend: 'cuda' cannot run here, since {missing}")


def _choose(name: str, dtype: torch.dtype) -> tuple[str, str]:
    if name == AUTO and not cuda_missing():
        return "cuda", ""
    if name == "cuda":
        _require_cuda()
    if name not in (AUTO, "compiled"):
        return name, ""
    # A GPU that cannot be used is the greater loss, and so the reason to be told.
    unused_gpu = cuda_missing() if name == AUTO and torch.cuda.is_available() else ""
    if dtype not in DTYPES:
        reason = f"the C++ operators compute in float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
        if name == AUTO:
            return "recorded", unused_gpu or reason
        raise ConfigError(f"backend: {reason}; use backend 'recorded', or another dtype")
    if name == AUTO and loaded_library() is None:
        try:
            find_compiler()
        except BuildError as error:
            return "recorded", unused_gpu or str(error)
    return "compiled", unused_gpu


def make_runner(
    name: str,
    dtype: torch.dtype,
    on_build: Callable[[int, int], None] | None = None,
    bundle: Bundle | None = None,
    *,
    deterministic: bool = False,
) -> Runner:
    """The backend and operators for ``name``, which may first be compiled; ``on_build`` is told how far that is.

    Those of a bundle, which fits, are loaded and never compiled. Raises as `choose_backend`, and `BuildError` if
    `compiled` was asked for by name, or by a bundle, and cannot be had.
    """
    chosen, reason = choose_backend(name, dtype, bundle, deterministic=deterministic)
    if chosen == "cuda":
        return _cuda_runner(bundle, deterministic)
    if bundle is not None:
        return Runner(create_backend(chosen), CpuOps(bundle.isa, bundle.library))
    if chosen == "compiled":
        try:
            ops = CpuOps(progress=on_build)
        except BuildError as error:
            if name != AUTO or deterministic:
                raise
            chosen, reason = "recorded", reason or str(error)
        else:
            _say(chosen, reason)
            return Runner(create_backend(chosen), ops)
    _say(chosen, reason)
    return Runner(create_backend(chosen), AtenOps())


def _say(chosen: str, reason: str) -> None:
    if reason:
        faster = "cuda" if torch.cuda.is_available() else "compiled"
        logger.warning("backend: %r, which is slower than %r, since %s", chosen, faster, reason)


def _cuda_runner(bundle: Bundle | None, deterministic: bool) -> Runner:
    device = CudaDevice()
    launcher: Launcher = CubinLauncher(bundle.cubins()) if bundle is not None else JitLauncher()
    programs = _PROGRAMS_PER_MULTIPROCESSOR * device.multiprocessors
    return Runner(CudaBackend(device), TritonOps(launcher, deterministic=deterministic, programs=programs))
