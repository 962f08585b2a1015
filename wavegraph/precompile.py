"""From a model to a bundle, and from a bundle to an engine's options."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.bundle import Bundle, check_target, cpu_fingerprint, fingerprint_here, read_bundle, write_bundle
from wavegraph.config import DEFAULT_BATCHED_TOKENS, EngineConfig
from wavegraph.model.config import OuroConfig
from wavegraph.model.loading import checkpoint_dtype, resolve_checkpoint
from wavegraph.model.ops import build
from wavegraph.model.ops.cpu import CpuOps
from wavegraph.runner import choose_backend


def precompile(
    path: str | Path,
    out: str | Path,
    *,
    target: str = "cpu",
    ladder: Sequence[int] | None = None,
    dtype: str = "auto",
    page_size: int = EngineConfig.page_size,
    on_build: Callable[[int, int], None] | None = None,
) -> Bundle:
    """Write what a model needs to run without a compiler to the folder ``out``, in place of a bundle that is there.

    The arguments are those of `LLM` and `EngineConfig`; weights are not read. The bundle is for CPUs with this one's
    instruction set, or with the one that ``$WAVEGRAPH_CPU_ISA`` names. Raises `ConfigError` or `CheckpointError` for a
    model or option that cannot be honoured, `BuildError` without a C++ compiler, `BundleError` if ``out`` cannot be
    written.
    """
    check_target(target)
    sizes = Ladder(ladder if ladder is not None else Ladder.default(DEFAULT_BATCHED_TOKENS).sizes).sizes
    EngineConfig(buckets=tuple(sizes), page_size=page_size)  # the engine's own rules
    folder = resolve_checkpoint(path)
    shape = OuroConfig.from_file(folder)
    torch_dtype = checkpoint_dtype(folder, shape, dtype)
    choose_backend("compiled", torch_dtype)
    library = build.cached_library(on_build)
    fingerprint = cpu_fingerprint(shape, torch_dtype, page_size, sizes, CpuOps(library=library).isa)
    write_bundle(Path(out), fingerprint, {library.name: library})
    return read_bundle(out)


def with_bundle(config: EngineConfig, bundle: Bundle, shape: OuroConfig, dtype: torch.dtype) -> EngineConfig:
    """``config`` with the bundle's ladder. Raises `BundleError` naming all in which model, machine, options differ."""
    wanted = sorted(set(config.buckets)) if config.buckets is not None else None
    bundle.check_fits(fingerprint_here(bundle, shape, dtype, config.page_size, wanted))
    return replace(config, buckets=bundle.ladder.sizes)


def read_profile(path: str | Path) -> tuple[CostModel, list[int] | None]:
    """The cost model in a file that ``wavegraph profile-buckets`` wrote, and the ladder it recommends, if any.

    Raises `ConfigError` if ``path`` cannot be read or holds something else.
    """
    cost = CostModel.from_file(path)
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    return cost, data.get("ladder")
