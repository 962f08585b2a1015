"""The figures of `gpu_check.py`: each section takes a `Bench` and returns what it measured, in JSON types."""

import platform
import random
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu_bench import PAGE_SIZE, Bench, Tensors, own_all_pages, set_spans
from wavegraph.capture.backends.base import Backend
from wavegraph.capture.device import CudaDevice
from wavegraph.capture.static import StaticSet
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine
from wavegraph.sampling import SamplingParams
from wavegraph.startup.sizing import derive

LAYERS = 4
"""Of attention alone: enough for the keys of all to be far more than the L2 holds."""

PACKAGES = ("torch", "triton", "cuda-bindings", "cuda-core", "numpy")


def machine(bench: Bench) -> dict[str, Any]:
    """What is here, and the two rates that bound everything: reading memory, and a bf16 product of random matrices."""
    sizes, device = bench.sizes, bench.device.target
    data = torch.randn(sizes.copy_bytes // 4, device=device)
    copy = torch.empty_like(data)
    read = bench.times(data.sum)
    copied = bench.times(lambda: copy.copy_(data))
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).to(bench.dtype) for _ in range(2))
    product = bench.times(lambda: a @ b)
    facts: dict[str, Any] = {
        "read_gbs": data.nbytes / read.median / 1e6,
        "copy_gbs": 2 * data.nbytes / copied.median / 1e6,
        "matrix_tflops": 2 * sizes.matrix**3 / product.median / 1e9,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }
    if isinstance(bench.device, CudaDevice):
        properties = torch.cuda.get_device_properties(bench.device.index)
        facts |= {"gpu": properties.name, "architecture": bench.device.architecture}
        facts |= {"multiprocessors": bench.device.multiprocessors, "memory": bench.device.memory().total}
    return facts


def _version(name: str) -> str | None:
    try:
        return version(name)
    except ModuleNotFoundError:
        return None


def capture(bench: Bench) -> dict[str, Any]:
    """A ladder of twelve buckets from nothing to ready; then the host's time for a replay, the device being idle."""
    sizes = bench.sizes
    _ = bench.model
    coda = [rows for rows in (1, 4, 16, 64) if rows <= sizes.coda_rows] or [1]
    executor = bench.executor(sizes.ladder, coda, slots=sizes.coda_rows, context=sizes.context)
    before = _free(bench)
    seconds = bench.seconds(executor.capture)
    core = executor.core
    facts = {
        "seconds": seconds,
        "bytes": before - _free(bench),
        "core_seconds": sum(fact.seconds for fact in core.facts.values()),
        "core_bytes": sum(fact.bytes for fact in core.facts.values()),
        "buckets": {
            rows: {"seconds": fact.seconds, "bytes": fact.bytes, "nodes": fact.nodes}
            for rows, fact in sorted(core.facts.items())
        },
        "replay_host_us": {
            rows: bench.host_microseconds(partial(core.replay, rows, rows))
            for rows in (min(sizes.ladder), max(sizes.ladder))
        },
    }
    executor.close()
    return facts


def _free(bench: Bench) -> int:
    return bench.device.memory().free if isinstance(bench.device, CudaDevice) else 0


def core(bench: Bench) -> dict[str, Any]:
    """CORE at each row count, against the time to read its weights once and the time of its products."""
    sizes = bench.sizes
    slots = max(-(-rows // sizes.chunk) for rows in sizes.rows)
    executor = bench.executor(sizes.rows, [1], slots=slots, context=sizes.context)
    executor.capture()
    own_all_pages(executor.io, executor.pools)
    rates = machine(bench)
    floor = bench.layer_bytes / rates["read_gbs"] / 1e6
    table = {}
    for rows in sizes.rows:
        set_spans(executor.io, rows, sizes.chunk, sizes.context)
        replay = partial(executor.core.replay, rows, rows)
        times = bench.times(replay)
        flops = 2 * rows * bench.layer_bytes / bench.dtype.itemsize
        table[rows] = {
            "ms": times.to_dict(),
            "weight_floor_ms": floor,
            "ratio_to_floor": times.median / floor,
            "tflops": flops / times.median / 1e9,
            "of_matrix_rate": flops / times.median / 1e9 / rates["matrix_tflops"],
        }
    kernels = {}
    for rows in {16, max(sizes.rows)} & set(sizes.rows):
        set_spans(executor.io, rows, sizes.chunk, sizes.context)
        kernels[rows] = _kernels(bench, partial(executor.core.replay, rows, rows))
    executor.close()
    return {"read_gbs": rates["read_gbs"], "matrix_tflops": rates["matrix_tflops"], "rows": table, "kernels": kernels}


def _kernels(bench: Bench, replay: Callable[[], object]) -> dict[str, Any]:
    """By the profiler, for one replay: calls and microseconds of each kernel, and what lies between them.

    Empty where no GPU is profiled.
    """
    if not isinstance(bench.device, CudaDevice):
        return {}
    rounds = 5
    bench.device.settle()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), bench.device.running(), torch.profiler.profile(activities=activities) as profile:
        for _ in range(rounds):
            replay()
        bench.device.synchronize()
    found = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    names = sorted({event.name for event in found})
    busy = {name: [e.time_range.elapsed_us() for e in found if e.name == name] for name in names}
    total = sum(sum(column) for column in busy.values())
    span = max(e.time_range.end for e in found) - min(e.time_range.start for e in found)
    table = {name: {"calls": len(column) / rounds, "us": sum(column) / rounds} for name, column in busy.items()}
    return {"kernels": table, "busy_us": total / rounds, "gaps_us": (span - total) / rounds}


def attention(bench: Bench) -> dict[str, Any]:
    """Attention of four layers in one graph: a chunk of one request, and one row each of many, at each context."""
    sizes = bench.sizes
    table: dict[int, dict[str, Any]] = {}
    for context in sizes.contexts:
        table[context] = {}
        for name, rows, chunk in (("chunk", sizes.chunk, sizes.chunk), ("decode", sizes.decodes, 1)):
            tensors = bench.tensors(bench.limits(rows, 1, slots=rows // chunk, context=context), layers=LAYERS)
            own_all_pages(tensors.io, tensors.pools)
            tensors.work.qkv.normal_()
            set_spans(tensors.io, rows, chunk, context)
            backend = bench.make_graphs()
            with backend.session():
                program = partial(_attend, bench, tensors, rows)
                recorded = backend.capture(program, StaticSet.of(tensors=tensors), "attention")
            times = bench.times(recorded.replay)
            nbytes = rows // chunk * context * 2 * bench.shape.kv_size * bench.dtype.itemsize
            table[context][name] = {
                "rows": rows,
                "us_a_layer": times.median * 1e3 / LAYERS,
                "gbs": nbytes * LAYERS / times.median / 1e6,
            }
            backend.release()
    return {"contexts": table}


def _attend(bench: Bench, tensors: Tensors, rows: int) -> None:
    io, pools, work = tensors.io, tensors.pools, tensors.work
    bench.ops.prepare(io, pools, rows)
    for layer in range(LAYERS):
        bench.ops.attention(work.attn, work.qkv, io, pools, layer, rows)


def _engine(bench: Bench, options: EngineConfig, backend: Backend) -> Engine:
    memory = bench.device.memory().total if isinstance(bench.device, CudaDevice) else None
    sizes = derive(options, bench.shape, bench.dtype, dense_attention=False, memory=memory)
    return Engine(bench.model, sizes, backend=backend, run_ahead=options.run_ahead_steps)


def _run(engine: Engine, requests: int, prompt_len: int, tokens: int) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    vocab = engine.model.config.vocab_size
    outputs: dict[str, tuple[int, ...]] = {}
    for index in range(requests):
        prompt = draw.choices(range(vocab), k=prompt_len)
        engine.add_request(str(index), prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.request_id] = tuple(output.token_ids)
    return [outputs[str(index)] for index in range(requests)]


def wavefront(bench: Bench) -> dict[str, Any]:
    """The RFC's case: requests that arrive together, until each has its first token, for each chunk size."""
    sizes = bench.sizes
    pages = sizes.requests * (2 + sizes.prompt_len // PAGE_SIZE)
    table: dict[int, dict[str, Any]] = {}
    for chunk in sizes.chunks:
        table[chunk] = {}
        for name, wave in (("ordinary", False), ("wavefront", True)):
            options = EngineConfig(
                wavefront=wave,
                prefill_chunk_size=chunk,
                max_num_batched_tokens=sizes.budget,
                buckets=tuple(sorted({sizes.requests * chunk, sizes.budget // 4, sizes.budget // 2, sizes.budget})),
                max_num_seqs=sizes.requests,
                max_model_len=sizes.prompt_len + 1,
                page_size=PAGE_SIZE,
                num_pages=pages,
                prefix_cache=False,
            )
            engine = _engine(bench, options, bench.make_graphs())
            _run(engine, sizes.requests, min(sizes.prompt_len, 4 * chunk), 1)
            before = engine.stats().executor
            seconds = bench.seconds(partial(_run, engine, sizes.requests, sizes.prompt_len, 1))
            after = engine.stats().executor
            engine.close()
            steps = after.steps - before.steps
            tokens = sizes.requests * sizes.prompt_len
            table[chunk][name] = {
                "seconds": seconds,
                "steps": steps,
                "rows_per_step": (after.core.rows - before.core.rows) / steps,
                "tokens_per_second": tokens / seconds,
            }
        table[chunk]["ratio"] = table[chunk]["ordinary"]["seconds"] / table[chunk]["wavefront"]["seconds"]
    return {"requests": sizes.requests, "prompt_len": sizes.prompt_len, "chunks": table}


def decode(bench: Bench) -> dict[str, Any]:
    """Tokens of one and of many requests, eager against graphs, and whether they are the same tokens."""
    sizes = bench.sizes
    options = EngineConfig(
        buckets=tuple(sorted({1, sizes.decodes, sizes.decodes * 2})),
        max_num_seqs=sizes.decodes,
        max_model_len=sizes.chunk + sizes.tokens,
        page_size=PAGE_SIZE,
        num_pages=sizes.decodes * (2 + (sizes.chunk + sizes.tokens) // PAGE_SIZE),
        prefix_cache=False,
    )
    table: dict[int, dict[str, Any]] = {1: {}, sizes.decodes: {}}
    tokens: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    for name, make in (("eager", bench.make_eager), ("graphs", bench.make_graphs)):
        engine = _engine(bench, options, make())
        for requests in table:
            _run(engine, requests, sizes.chunk, 2)
            start = perf_counter()
            tokens[requests, name] = _run(engine, requests, sizes.chunk, sizes.tokens)
            seconds = perf_counter() - start
            table[requests][name] = {"tokens_per_second": requests * sizes.tokens / seconds}
        engine.close()
    for requests, row in table.items():
        row["same_tokens"] = tokens[requests, "eager"] == tokens[requests, "graphs"]
        row["ratio"] = row["graphs"]["tokens_per_second"] / row["eager"]["tokens_per_second"]
    return {"requests": table}


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "machine": machine,
    "capture": capture,
    "core": core,
    "attention": attention,
    "wavefront": wavefront,
    "decode": decode,
}
"""Figures in their order; `gpu_check` adds what runs in processes of its own."""
