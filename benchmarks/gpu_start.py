"""Start from a bundle: one process makes it, a fresh one, in which Triton cannot be imported, times the start."""

import json
import sys
import time
from pathlib import Path
from typing import Any

OPTIONS: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 2048}
LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024)
DTYPE = "bfloat16"


def make(checkpoint: str, bundle: str) -> None:
    """A bundle of Ouro-1.4B's shape for the GPU that is here."""
    from benchmarks.gpu_bench import OURO_1_4B
    from wavegraph.capture.device import CudaDevice
    from wavegraph.startup.precompile import precompile

    folder = Path(checkpoint)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OURO_1_4B))
    precompile(folder, bundle, target=CudaDevice().architecture, ladder=LADDER, dtype=DTYPE)


def measure(folder: str) -> dict[str, Any]:
    """Seconds from a model in memory to an engine that is ready, and to its first token."""
    sys.modules["triton"] = None  # type: ignore[assignment]  # importing it is an error from here on
    begun = time.perf_counter()
    import torch

    from benchmarks.gpu_bench import OURO_1_4B, Bench
    from wavegraph.capture.backends.cuda import CudaBackend
    from wavegraph.capture.bundle import read_bundle
    from wavegraph.capture.device import CudaDevice
    from wavegraph.config import EngineConfig
    from wavegraph.engine.engine import Engine
    from wavegraph.model.config import OuroConfig
    from wavegraph.sampling import SamplingParams
    from wavegraph.startup.backend_choice import make_runner
    from wavegraph.startup.fitting import fit_to_gpu
    from wavegraph.startup.precompile import with_bundle
    from wavegraph.startup.sizing import derive

    imported = time.perf_counter()
    bundle = read_bundle(folder)
    shape = OuroConfig.from_dict(OURO_1_4B)
    config = with_bundle(EngineConfig(**OPTIONS), bundle, shape, torch.bfloat16)
    runner = make_runner("auto", torch.bfloat16, bundle=bundle)
    device = runner.backend.device
    assert isinstance(device, CudaDevice)
    checked = time.perf_counter()
    bench = Bench(shape, torch.bfloat16, device, runner.ops, lambda: CudaBackend(device), lambda: CudaBackend(device))
    model = bench.model
    device.settle()
    loaded = time.perf_counter()
    sizes = derive(config, shape, torch.bfloat16, dense_attention=False, memory=device.memory().total)
    sizes = fit_to_gpu(config, model, sizes, device)
    fitted = time.perf_counter()
    engine = Engine(model, sizes, backend=runner.backend, run_ahead=config.run_ahead_steps)
    ready = time.perf_counter()
    engine.add_request("first", [1, 2, 3], SamplingParams(max_tokens=1, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    first = time.perf_counter()
    engine.close()
    return {
        "import_seconds": imported - begun,
        "bundle_seconds": checked - imported,
        "weights_seconds": loaded - checked,
        "trial_seconds": fitted - loaded,
        "capture_seconds": ready - fitted,
        "beyond_weights_seconds": checked - imported + ready - loaded,
        "first_token_seconds": first - ready,
        "buckets": list(sizes.ladder.sizes),
        "pages": sizes.limits.num_pages,
        "kernels": len(bundle.kernels),
        "compilers": [name for name in ("triton.compiler", "torch._inductor") if name in sys.modules],
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
