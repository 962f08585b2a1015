"""Prompts through the whole engine: ordinary against wavefront prefill."""

import random
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from wavegraph.bench.measure import Times, machine_facts
from wavegraph.bench.shape import Shape
from wavegraph.config import EngineConfig
from wavegraph.engine import Engine
from wavegraph.model.weights import model_from_tensors
from wavegraph.runner import make_runner
from wavegraph.sampling import SamplingParams
from wavegraph.sizing import derive

BUDGET = 256


def bench_prefill(
    shape: Shape, requests: Sequence[int], prompt_len: int, depths: int, repeats: int, backend: str
) -> dict[str, Any]:
    """Milliseconds until every request has its first token, for each number of requests that arrive together.

    ``shape.chunk`` is the chunk size of both. Both engines are alive at once, and runs of them are interleaved.
    """
    config = shape.config(depths=depths, max_len=prompt_len + 1)
    weights = shape.weights(config)
    engines = []
    for wavefront in (False, True):
        runner = make_runner(backend, shape.torch_dtype)
        options = EngineConfig(
            wavefront=wavefront,
            prefill_chunk_size=shape.chunk,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=max(requests),
            max_model_len=prompt_len + 1,
            page_size=shape.page_size,
            num_pages=max(requests) * (2 + prompt_len // shape.page_size),  # with a spare page for each
            prefix_cache=False,
            async_scheduling=False,
        )
        sizes = derive(options, config, shape.torch_dtype)
        model = model_from_tensors(config, weights, ops=runner.ops, dtype=shape.torch_dtype)
        engines.append(Engine(model, sizes, backend=runner.backend))
    table = []
    for count in requests:
        for engine in engines:
            _run(engine, count, prompt_len)
        before = [(engine.stats().executor.core.rows, engine.stats().executor.steps) for engine in engines]
        rounds = [[_run(engine, count, prompt_len) for engine in engines] for _ in range(repeats)]
        chunks, waves = (Times.of(column) for column in zip(*rounds, strict=True))
        after = [(engine.stats().executor.core.rows, engine.stats().executor.steps) for engine in engines]
        means = [(now[0] - then[0]) / (now[1] - then[1]) for now, then in zip(after, before, strict=True)]
        table.append(
            {
                "requests": count,
                "ordinary_ms": chunks.to_dict(),
                "wavefront_ms": waves.to_dict(),
                "ratio": chunks.median / waves.median,
                "ordinary_rows": means[0],
                "wavefront_rows": means[1],
            }
        )
    for engine in engines:
        engine.close()
    return {
        **machine_facts(),
        "backend": runner.backend.name,
        "isa": getattr(runner.ops, "isa", None),
        "shape": {name: getattr(shape, name) for name in shape.__slots__},
        "prompt_len": prompt_len,
        "depths": depths,
        "requests": table,
    }


def _run(engine: Engine, requests: int, prompt_len: int) -> float:
    draw = random.Random(requests)
    started = perf_counter()
    for index in range(requests):
        prompt = draw.choices(range(engine.model.config.vocab_size), k=prompt_len)
        engine.add_request(str(index), prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    return (perf_counter() - started) * 1e3
