"""What a bundle depends on: everything that shapes code, packing or ladder, and nothing else."""

import hashlib
import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from wavegraph.capture.bundle import CPU, FEATURES, Bundle
from wavegraph.capture.device import CudaDevice
from wavegraph.errors import ConfigError
from wavegraph.model import ops
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops import build
from wavegraph.model.ops.triton.compile import SHARED_LIMITS

TARGETS = (CPU, *SHARED_LIMITS)

# Of a model, what code, packing or ladder may be specialised on; the rest is read from the checkpoint.
_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "total_ut_steps",
)  # fmt: skip


def check_target(target: str) -> None:
    """Raise `ConfigError` unless bundles can be made for ``target``."""
    if target not in TARGETS:
        raise ConfigError(f"target: {target!r} is unknown; use {', '.join(TARGETS)}")


def cpu_fingerprint(
    config: OuroConfig, dtype: torch.dtype, page_size: int, ladder: Sequence[int], isa: str
) -> dict[str, Any]:
    """All that a ``cpu`` bundle depends on, for a model and for this machine. JSON types."""
    shape = _model(config, dtype, page_size, ladder)
    return {**shape, "isa": isa, FEATURES: list(build.ISA_FEATURES[isa]), **_cpu_machine()}


def gpu_fingerprint(
    config: OuroConfig, dtype: torch.dtype, page_size: int, ladder: Sequence[int], target: str, *, deterministic: bool
) -> dict[str, Any]:
    """All that a bundle for the GPU ``target`` depends on but for which kernels are in it. JSON types."""
    shape = _model(config, dtype, page_size, ladder)
    return {**shape, "deterministic": deterministic, "target": target, **_gpu_sources()}


def machine_differences(bundle: Bundle) -> list[str]:
    """In what a bundle does not fit this machine and these versions, whatever the model."""
    if bundle.target == CPU:
        here = _cpu_machine() | {FEATURES: sorted(build.cpu_features())}
    else:
        here = _gpu_sources() | {"target": _architecture()}
    return bundle.differences({**bundle.fingerprint, **here})


def fingerprint_here(
    bundle: Bundle,
    config: OuroConfig,
    dtype: torch.dtype,
    page_size: int,
    ladder: Sequence[int] | None,
    *,
    deterministic: bool = False,
) -> dict[str, Any]:
    """What ``bundle``'s fingerprint should be for a model here; None takes any ladder.

    With all features of this CPU, or with the GPU that is here.
    """
    sizes = ladder or bundle.ladder.sizes
    if bundle.target != CPU:
        return gpu_fingerprint(config, dtype, page_size, sizes, _architecture(), deterministic=deterministic)
    isa = bundle.fingerprint.get("isa")
    known = isa if isa in build.ISA_FEATURES else "portable"
    here = cpu_fingerprint(config, dtype, page_size, sizes, known)
    return here | {FEATURES: sorted(build.cpu_features())}


def _model(config: OuroConfig, dtype: torch.dtype, page_size: int, ladder: Sequence[int]) -> dict[str, Any]:
    model = {f"model.{name}": getattr(config, name) for name in _SHAPE}
    options = {"dtype": str(dtype).removeprefix("torch."), "page_size": page_size, "ladder": list(ladder)}
    return {**model, **options, "wavegraph": version("wavegraph")}


def _cpu_machine() -> dict[str, Any]:
    return {
        "target": CPU,
        "machine": platform.machine(),
        "operators": build.sources_digest(),
        "cxx11_abi": torch.compiled_with_cxx11_abi(),
        "torch": torch.__version__,
        "wavegraph": version("wavegraph"),
    }


def _gpu_sources() -> dict[str, Any]:
    """The kernels' sources and those of their launches. A cubin needs neither Triton nor a version of torch."""
    return {"operators": _kernel_sources_digest(), "wavegraph": version("wavegraph")}


@cache
def _kernel_sources_digest() -> str:
    folder = Path(ops.__file__).parent / "triton"
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _architecture() -> str:
    return CudaDevice().architecture if torch.cuda.is_available() else "no GPU"
