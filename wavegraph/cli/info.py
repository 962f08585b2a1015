"""``wavegraph info``: what is installed, and what a model would need."""

import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from wavegraph.cli.common import complete_model, emit, examples, json_output, to_json, write_json
from wavegraph.cli.engine import engine_options, import_engine, model_path, take_options
from wavegraph.config import EngineConfig

PACKAGES = ("wavegraph", "torch", "numpy", "safetensors", "tokenizers", "huggingface-hub")


@click.command("info", epilog=examples("info", "info builtin --max-num-seqs 64 --json -"))
@click.argument("model", required=False, shell_complete=complete_model)
@engine_options(without=("bundle", "cost"))
@json_output
def info_command(model: str | None, json_path: Path | None, **given: Any) -> None:
    """Show versions, device and backends and, for MODEL, its shape and the pools it would get.

    No weights are read. The engine's options are those of 'generate'.
    """
    import_engine()
    options = take_options(given)
    backend, dtype = _checked(options.arguments)
    facts = {"versions": _versions(), "device": _device()}
    if model is not None:
        facts["model"], facts["engine"] = _model(model, options.config, dtype, backend)
    if json_path is not None:
        write_json(json_path, to_json(facts))
        return
    for section, entries in facts.items():
        emit(section)
        for name, value in entries.items():
            emit(f"  {name:<26} {value:,}" if type(value) is int else f"  {name:<26} {value}")


def _checked(arguments: dict[str, str]) -> tuple[str, str]:
    """Names of backend and dtype. Raises `ConfigError` if one is none."""
    from wavegraph.model.loading import check_dtype
    from wavegraph.startup.backend_choice import AUTO, check_backend

    backend, dtype = arguments.get("backend", AUTO), arguments.get("dtype", "auto")
    check_backend(backend)
    check_dtype(dtype)
    return backend, dtype


def _versions() -> dict[str, Any]:
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def _device() -> dict[str, Any]:
    import torch

    from wavegraph.capture.backends.registry import backend_names
    from wavegraph.startup.backend_choice import AUTO, choose_backend, cuda_missing

    chosen, reason = choose_backend(AUTO, torch.float32)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "backends": ", ".join(backend_names()),
        "cuda backend": cuda_missing() or "ready",
        "default backend": chosen + f" ({reason})" * bool(reason),
    }


def _model(model: str, config: EngineConfig, dtype: str, backend: str) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    from wavegraph.capture.buffers import page_bytes, pool_bytes
    from wavegraph.model.config import OuroConfig
    from wavegraph.model.loading import checkpoint_dtype, resolve_checkpoint
    from wavegraph.model.weights import tensor_shapes
    from wavegraph.startup.backend_choice import choose_backend
    from wavegraph.startup.sizing import derive

    folder = resolve_checkpoint(model_path(model))
    shape = OuroConfig.from_file(folder)
    torch_dtype = checkpoint_dtype(folder, shape, dtype)
    chosen, reason = choose_backend(backend, torch_dtype, deterministic=config.deterministic)
    memory = torch.cuda.mem_get_info()[1] if chosen == "cuda" else None
    dense = chosen not in ("cuda", "compiled")
    sizes = derive(config, shape, torch_dtype, dense_attention=dense, memory=memory)
    parameters = sum(torch.Size(size).numel() for size in tensor_shapes(shape).values())
    facts = {
        "folder": str(folder),
        **asdict(shape),
        "dtype": str(torch_dtype).removeprefix("torch."),
        "parameters": parameters,
        "weight_bytes": parameters * torch_dtype.itemsize,
        "pool_bytes_per_token": page_bytes(shape, 1, torch_dtype),
    }
    engine = {
        "backend": chosen + f" ({reason})" * bool(reason),
        **{name: value for name, value in asdict(sizes.scheduler).items() if name != "depths"},
        "kv_pool_tokens": sizes.scheduler.num_pages * config.page_size,
        "pool_bytes": pool_bytes(shape, sizes.limits, torch_dtype),
        "buckets": ", ".join(map(str, sizes.ladder.sizes)),
        "coda_buckets": ", ".join(map(str, sizes.coda_ladder.sizes)),
    }
    return facts, engine
