"""A replay of CORE at each bucket, and attention alone, against eager torch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from wavegraph.bench.eager import EagerCore
from wavegraph.bench.shape import Shape
from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.buffers import Limits
from wavegraph.capture.executor import Executor
from wavegraph.errors import ConfigError
from wavegraph.model.weights import RopeTables, model_from_tensors
from wavegraph.startup.backend_choice import Runner, make_runner
from wavegraph.study.measure import interleaved, machine_facts, matrix_rate, read_rate


def bench_replay(shape: Shape, rows: Sequence[int], repeats: int, backend: str) -> dict[str, Any]:
    """For each row count: a replay and an eager pass, interleaved; memory and matrix rate of the same run.

    ``weights_gbs`` is the bytes of the layers' weights over the time of a replay, ``tflops`` their products. Raises
    `ConfigError` for a row count that is not a whole number of chunks.
    """
    for count in rows:
        if count < 1 or (count > shape.chunk and count % shape.chunk):
            raise ConfigError(
                f"rows: {count} rows are no whole number of chunks of {shape.chunk}; give multiples of it"
            )
    runner = make_runner(backend, shape.torch_dtype)
    executor, weights = _executor(shape, rows, runner)
    executor.capture()
    nbytes = sum(value.nbytes for name, value in weights.items() if "_proj" in name)
    rope = RopeTables.build(shape.config(), shape.context, shape.torch_dtype)
    table = []
    for count in rows:
        _set_rows(executor, shape, count)
        core = EagerCore(shape, weights, rope.cos, rope.sin, count)
        eager, replay = interleaved([core, partial(executor.core.replay, count, count)], repeats)
        seconds = replay.median / 1e3
        table.append(
            {
                "rows": count,
                "eager_ms": eager.to_dict(),
                "replay_ms": replay.to_dict(),
                "ratio": eager.median / replay.median,
                "weights_gbs": nbytes / seconds / 1e9,
                "tflops": 2 * count * nbytes / shape.torch_dtype.itemsize / seconds / 1e12,
            }
        )
    executor.close()
    return {**_facts(shape, runner), "benchmark": "replay", "rows": table}


def bench_attention(shape: Shape, rows: int, contexts: Sequence[int], repeats: int, backend: str) -> dict[str, Any]:
    """One chunk of ``rows`` rows at the end of each context: paged attention against gathering and SDPA.

    Raises `ConfigError` for a context shorter than the chunk.
    """
    runner = make_runner(backend, shape.torch_dtype)
    small = [
        replace(shape, hidden=64, layers=1, inner=64, context=context, chunk=min(rows, context)) for context in contexts
    ]
    if min(contexts) < rows:
        raise ConfigError(f"contexts: {min(contexts)} cannot end a chunk of {rows} rows; raise it")
    table = [_attention(each, runner, repeats) for each in small]
    return {**_facts(shape, runner), "benchmark": "attention", "rows": rows, "contexts": table}


def _attention(shape: Shape, runner: Runner, repeats: int) -> dict[str, Any]:
    rows, context = shape.chunk, shape.context
    executor, _ = _executor(shape, [rows], runner)
    _set_rows(executor, shape, rows)
    io, pools, work = executor.io, executor.pools, executor.work
    with torch.no_grad():
        runner.ops.prepare(io, pools, rows)
    work.qkv.normal_()
    mask = torch.arange(context)[None] <= io.row_pos[:rows, None]
    pages = io.page_table[0].long()

    def own() -> None:
        runner.ops.attention(work.attn, work.qkv, io, pools, 0, rows)

    def gathered() -> Tensor:
        query = work.qkv[:, : work.attn.shape[1]].view(rows, shape.heads, shape.head_dim).transpose(0, 1)
        key, value = (pool[pages, 0, 0].flatten(0, 1)[:context].transpose(0, 1) for pool in (pools.k, pools.v))
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    own()
    error = float((work.attn.float() - gathered().transpose(0, 1).flatten(1).float()).abs().max())
    other, paged = interleaved([gathered, own], repeats)
    return {
        "context": context,
        "gather_sdpa_ms": other.to_dict(),
        "attention_ms": paged.to_dict(),
        "ratio": other.median / paged.median,
        "largest_difference": error,
    }


def _executor(shape: Shape, rows: Sequence[int], runner: Runner) -> tuple[Executor, dict[str, Tensor]]:
    """An executor with random keys, values and weights (which are returned too), whose slots own all pages."""
    config = shape.config()
    weights = shape.weights(config)
    slots = max(-(-count // shape.chunk) for count in rows)
    limits = Limits(
        max_num_seqs=slots,
        max_spans=slots,
        max_rows=max(rows),
        max_coda_rows=1,
        max_model_len=shape.context,
        page_size=shape.page_size,
        num_pages=slots * -(-shape.context // shape.page_size),
    )
    model = model_from_tensors(config, weights, ops=runner.ops, dtype=shape.torch_dtype)
    executor = Executor(model, limits, Ladder(rows), Ladder([1]), runner.backend)
    executor.pools.k.normal_()
    executor.pools.v.normal_()
    order = torch.randperm(limits.num_pages, generator=torch.Generator().manual_seed(0))
    table = executor.io.page_table[:-1]
    table.copy_(order.view(table.shape))
    return executor, weights


def _facts(shape: Shape, runner: Runner) -> dict[str, Any]:
    return {
        **machine_facts(),
        "backend": runner.backend.name,
        "isa": getattr(runner.ops, "isa", None),
        "shape": {name: getattr(shape, name) for name in shape.__slots__},
        "read_gbs": read_rate(),
        "matrix_tflops": matrix_rate(shape.torch_dtype),
    }


def _set_rows(executor: Executor, shape: Shape, rows: int) -> None:
    """One chunk at the end of the context for each slot that it takes, at depth 0."""
    io, count = executor.io, min(rows, shape.chunk)
    slots = rows // count
    io.span_count.zero_()
    io.span_depth.zero_()
    io.span_slot[:slots] = torch.arange(slots, dtype=torch.int32)
    io.span_start[:slots] = shape.context - count
    io.span_count[:slots] = count
