"""From a model to a bundle, and from a bundle to an engine's options."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.bundle import CPU, Bundle, read_bundle, write_bundle
from wavegraph.capture.fingerprint import check_target, cpu_fingerprint, fingerprint_here, gpu_fingerprint
from wavegraph.capture.needed_kernels import kernel_specs
from wavegraph.config import DEFAULT_BATCHED_TOKENS, EngineConfig
from wavegraph.errors import ConfigError
from wavegraph.model.config import OuroConfig
from wavegraph.model.loading import checkpoint_dtype, resolve_checkpoint
from wavegraph.model.ops import build
from wavegraph.model.ops.cpu import CpuOps
from wavegraph.model.ops.triton.compile import compile_kernel, resources
from wavegraph.model.ops.triton.launch import KernelSpec
from wavegraph.startup.backend_choice import choose_backend
from wavegraph.startup.sizing import derive

Progress = Callable[[int, int], None]

_ANY_MEMORY = 1 << 60  # a bundle is made for a GPU whose memory is not known


def precompile(
    path: str | Path,
    out: str | Path,
    *,
    target: str = CPU,
    ladder: Sequence[int] | None = None,
    dtype: str = "auto",
    page_size: int = EngineConfig.page_size,
    deterministic: bool = False,
    on_build: Progress | None = None,
) -> Bundle:
    """Write what a model needs to run without a compiler to the folder ``out``, in place of a bundle that is there.

    The arguments are those of `LLM` and `EngineConfig`; weights are not read. For the target ``cpu`` the bundle is for
    CPUs with this one's instruction set, or with the one that ``$WAVEGRAPH_CPU_ISA`` names. For a GPU such as
    ``sm_90``, which need not be here, it holds a cubin for every kernel that some program launches at some bucket.
    Raises `ConfigError` or `CheckpointError` for a model or option that cannot be honoured, `BuildError` without a C++
    compiler, `BundleError` if ``out`` cannot be written.
    """
    check_target(target)
    sizes = Ladder(ladder if ladder is not None else Ladder.default(DEFAULT_BATCHED_TOKENS).sizes).sizes
    config = EngineConfig(buckets=sizes, page_size=page_size, deterministic=deterministic)  # the engine's own rules
    folder = resolve_checkpoint(path)
    shape = OuroConfig.from_file(folder)
    torch_dtype = checkpoint_dtype(folder, shape, dtype)
    if target != CPU:
        if find_spec("triton") is None:
            raise ConfigError(f"target: {target!r} needs Triton, which is not installed; install wavegraph[cuda]")
        return _precompile_gpu(config, shape, torch_dtype, target, Path(out), on_build)
    choose_backend("compiled", torch_dtype)
    library = build.cached_library(on_build)
    fingerprint = cpu_fingerprint(shape, torch_dtype, page_size, sizes, CpuOps(library=library).isa)
    write_bundle(Path(out), fingerprint, {library.name: library})
    return read_bundle(out)


def _precompile_gpu(
    config: EngineConfig, shape: OuroConfig, dtype: torch.dtype, target: str, out: Path, on_build: Progress | None
) -> Bundle:
    sizes = derive(config, shape, dtype, dense_attention=False, memory=_ANY_MEMORY)
    ladders = sizes.ladder, sizes.coda_ladder
    specs = kernel_specs(shape, dtype, sizes.limits, *ladders, deterministic=config.deterministic)
    fingerprint = gpu_fingerprint(
        shape, dtype, config.page_size, sizes.ladder.sizes, target, deterministic=config.deterministic
    )
    with tempfile.TemporaryDirectory() as name:
        files, kernels = {}, []
        for done, spec in enumerate(specs):
            if on_build is not None:
                on_build(done, len(specs))
            facts, content = _compile(spec, target)
            path = files[facts["file"]] = Path(name) / facts["file"]
            path.write_bytes(content)
            kernels.append(facts)
        write_bundle(out, fingerprint, files, kernels)
    if on_build is not None:
        on_build(len(specs), len(specs))
    return read_bundle(out)


def _compile(spec: KernelSpec, target: str) -> tuple[dict[str, Any], bytes]:
    """A kernel's binary, and of it what the manifest says: how it is launched, and what a thread and a block take."""
    binary = compile_kernel(spec, target)
    taken = resources(binary.cubin)
    facts = {
        "name": spec.name,
        "file": f"{spec.name}.cubin",
        "kernel": spec.kernel,
        "entry": binary.entry,
        "arguments": [list(argument) for argument in spec.arguments],
        "constants": dict(spec.constants),
        "warps": spec.num_warps,
        "shared": binary.shared,
        "registers": taken.registers,
        "stack": taken.stack,
        "local": taken.local,
    }
    return facts, binary.cubin


def with_bundle(config: EngineConfig, bundle: Bundle, shape: OuroConfig, dtype: torch.dtype) -> EngineConfig:
    """``config`` with the bundle's ladder. Raises `BundleError` naming all in which model, machine, options differ."""
    wanted = sorted(set(config.buckets)) if config.buckets is not None else None
    here = fingerprint_here(bundle, shape, dtype, config.page_size, wanted, deterministic=config.deterministic)
    bundle.check_fits(here)
    return replace(config, buckets=bundle.ladder.sizes)


def read_profile(path: str | Path) -> tuple[CostModel, list[int] | None]:
    """The cost model in a file that ``wavegraph profile-buckets`` wrote, and the ladder it recommends, if any.

    Raises `ConfigError` if ``path`` cannot be read or holds something else.
    """
    cost = CostModel.from_file(path)
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    return cost, data.get("ladder")
