"""From a checkpoint and options to a running engine: every part in its order."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from wavegraph.buckets.cost import CostModel
from wavegraph.capture.bundle import read_bundle
from wavegraph.capture.device import CudaDevice
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine, Progress
from wavegraph.engine.trace import TraceWriter
from wavegraph.errors import ConfigError
from wavegraph.model.config import OuroConfig
from wavegraph.model.loading import checkpoint_dtype, load_model, resolve_checkpoint
from wavegraph.scheduler.packing import require_measured
from wavegraph.startup.backend_choice import AUTO, check_backend, make_runner
from wavegraph.startup.fitting import fit_to_gpu
from wavegraph.startup.precompile import with_bundle
from wavegraph.startup.sizing import derive
from wavegraph.text.tokenizer import Tokenizer

_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")


def build_engine(
    path: str | Path,
    config: EngineConfig,
    *,
    dtype: str = "auto",
    backend: str = AUTO,
    bundle: str | Path | None = None,
    trace: str | Path | None = None,
    cost: CostModel | str | Path | None = None,
    on_build: Progress | None = None,
    on_load: Progress | None = None,
    on_capture: Progress | None = None,
) -> Engine:
    """Load a checkpoint and record its programs; the arguments are those of `LLM`.

    What can be refused without reading weights is refused first.
    """
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config must be an EngineConfig, got {type(config).__name__}; write EngineConfig(...)")
    check_backend(backend)
    if isinstance(cost, str | Path):
        cost = CostModel.from_file(cost)
    folder = resolve_checkpoint(path)
    tokenizer = Tokenizer.load(folder)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    shape = OuroConfig.from_file(folder)
    torch_dtype = checkpoint_dtype(folder, shape, dtype)
    package = read_bundle(bundle) if bundle is not None else None
    if package is not None:
        config = with_bundle(config, package, shape, torch_dtype)
        cost = cost if cost is not None else package.cost
    if config.target_itl_ms is not None:
        require_measured(cost)
    runner = make_runner(backend, torch_dtype, on_build, package, deterministic=config.deterministic)
    device = runner.backend.device
    gpu = device if isinstance(device, CudaDevice) else None
    memory = gpu.memory().total if gpu is not None else None
    sizes = derive(config, shape, torch_dtype, dense_attention=runner.ops.dense_attention, memory=memory)
    with _allocation_refused():
        model = load_model(
            folder,
            ops=runner.ops,
            dtype=dtype,
            max_model_len=config.max_model_len,
            device=device.target,
            progress=on_load,
        )
        if gpu is not None:
            sizes = fit_to_gpu(config, model, sizes, gpu, cost, on_capture)
        return Engine(
            model,
            sizes,
            backend=runner.backend,
            tokenizer=tokenizer,
            check=config.check,
            run_ahead=config.run_ahead_steps,
            trace=TraceWriter(trace, shape.total_ut_steps) if trace is not None else None,
            cost=cost,
            progress=on_capture,
        )


@contextmanager
def _allocation_refused() -> Iterator[None]:
    """Memory that the system does not give is a matter of options, not a fault."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0] or "MemoryError"
        if isinstance(error, RuntimeError) and not any(words in reason for words in _NO_MEMORY):
            raise
        raise ConfigError(
            f"the engine does not fit into memory ({reason}); lower kv_cache_bytes (or num_pages), max_num_seqs or "
            "max_num_batched_tokens"
        ) from error
