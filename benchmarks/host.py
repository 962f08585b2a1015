"""What a step costs the host when the device costs nothing: programs are recorded as no-ops.

Run: ``python benchmarks/host.py [--requests 128] [--spans 64] [--steps 400] [--sync] [--json FILE]``. All requests
decode, one row each, so a step of ``spans`` rows has as many spans; as many requests again wait. Prints the median wall
time of `Engine.step`, the CPU time of its thread (with asynchronous execution another thread runs the no-ops
meanwhile) and, measured apart, of its parts; and one line of JSON.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wavegraph.capture.backends.base import Backend, Program, Recording
from wavegraph.capture.static import StaticSet
from wavegraph.config import EngineConfig
from wavegraph.engine import Engine
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.weights import model_from_tensors, random_weights
from wavegraph.sampling import SamplingParams
from wavegraph.sizing import derive

SHAPE = {
    "model_type": "ouro", "hidden_act": "silu", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 24, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "total_ut_steps": 4,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "early_exit_threshold": 1.0, "eos_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip


class NullBackend(Backend):
    """Records programs as no-ops."""

    name = "null"

    def _record(self, program: Program, static: StaticSet, name: str) -> Recording:
        return Recording(lambda: None)


def build(requests: int, spans: int, run_ahead: int, tokens: int) -> Engine:
    """An engine of no-ops with ``requests`` running, as many waiting, all decoding for ``tokens`` positions."""
    config = OuroConfig.from_dict(SHAPE)
    weights = dict(random_weights(config, seed=0))
    model = model_from_tensors(config, weights, ops=AtenOps(), dtype=torch.float32, max_model_len=tokens)
    options = EngineConfig(
        max_num_seqs=requests,
        max_num_batched_tokens=spans,
        max_model_len=tokens,
        num_pages=requests * -(-tokens // 16),
        prefix_cache=False,
    )
    engine = Engine(model, derive(options, config, model.dtype), backend=NullBackend(), run_ahead=run_ahead)
    params = SamplingParams(max_tokens=tokens - 1, ignore_eos=True)
    for index in range(2 * requests):
        engine.add_request(str(index), [1], params)
    return engine


def timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """``call``, its CPU seconds in this thread appended to ``seconds``."""

    def measured(*arguments: Any, **named: Any) -> Any:
        started = time.thread_time()
        try:
            return call(*arguments, **named)
        finally:
            seconds.append(time.thread_time() - started)

    return measured


def measure(engine: Engine, steps: int) -> dict[str, float]:
    """Medians in microseconds: whole steps first, then the parts, whose clocks would weigh on the whole."""
    for _ in range(2 * steps):  # all requests decode, and caches are warm
        engine.step()
    wall, cpu = [], []
    for _ in range(steps):
        started, busy = time.perf_counter(), time.thread_time()
        engine.step()
        wall.append(time.perf_counter() - started)
        cpu.append(time.thread_time() - busy)
    parts: dict[str, list[float]] = {"plan": [], "submit": [], "poll": [], "apply": []}
    engine.scheduler.plan = timed(engine.scheduler.plan, parts["plan"])  # type: ignore[method-assign]
    engine.executor.submit = timed(engine.executor.submit, parts["submit"])  # type: ignore[method-assign]
    engine.executor.poll = timed(engine.executor.poll, parts["poll"])  # type: ignore[method-assign]
    engine.scheduler.apply = timed(engine.scheduler.apply, parts["apply"])  # type: ignore[method-assign]
    for _ in range(steps):
        engine.step()
    result = {"step_wall_us": statistics.median(wall), "step_cpu_us": statistics.median(cpu)}
    result |= {f"{name}_cpu_us": statistics.median(values) for name, values in parts.items()}
    return {name: round(value * 1e6, 1) for name, value in result.items()}


def commit() -> str:
    """The commit of the working folder, if it is a checkout."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--spans", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sync", action="store_true", help="take each result before the next step is planned")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = build(options.requests, options.spans, 1 if options.sync else 2, 4 * options.steps)
    result = measure(engine, options.steps)
    running = engine.stats().running
    engine.close()
    for name, value in result.items():
        print(f"{name:>14}  {value:8.1f}")
    record = {"benchmark": "host", "spans": options.spans, "running": running, "asynchronous": not options.sync}
    record |= result
    record |= {"machine": platform.machine(), "cpus": os.cpu_count(), "torch": torch.__version__, "commit": commit()}
    line = json.dumps(record)
    if options.json is not None:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
