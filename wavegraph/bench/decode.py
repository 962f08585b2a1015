"""Decode through the whole engine: tokens beside prompts that keep coming, and early exits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from wavegraph.bench.shape import Shape
from wavegraph.bench.shared_engine import SharedEngine, Watch
from wavegraph.errors import ConfigError
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.study.latency import Percentiles
from wavegraph.study.measure import Times
from wavegraph.study.workload import Workload

Progress = Callable[[int, int], None]
"""Called with the runs done, and in all."""

PROMPT = 16
"""Tokens of the prompts of requests that decode."""

LOADS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ordinary": {"wavefront": False},
    "wavefront, separate": {"step_mix": "separate"},
    "wavefront, fused": {"step_mix": "fused"},
}
"""What runs beside the decoding requests: nothing, or prompts, by these options of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """The work: ``requests`` decode ``tokens`` tokens each, beside ``prompts`` prompts of ``prompt_len`` tokens.

    As a prompt gets its first token, the next one arrives. ``thresholds`` are those of the gate, without prompts.
    """

    requests: int = 8
    tokens: int = 64
    prompts: int = 1
    prompt_len: int = 512
    thresholds: tuple[float, ...] = (1.0, 0.8, 0.6, 0.4)


@dataclass(frozen=True, slots=True)
class _Window:
    """What happened from when all requests decode until they have ended; times in seconds, one of the whole run."""

    seconds: float
    whole_seconds: float
    steps: int
    output_tokens: int
    prompt_tokens: float
    gaps: list[float]
    loops: float


def bench_decode(
    shape: Shape,
    work: Decode,
    chunk: int | str,
    *,
    depths: int,
    budget: int,
    packing: str,
    repeats: int,
    backend: str,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Gaps between tokens with and without prompts beside them; steps and tokens a second by the gate's threshold.

    Variants run in turn, ``repeats`` rounds after one that does not count. ``alone`` has the time of the whole run
    without prompts, prefill included, and what a simulation says to it by the cost of replays, measured between rounds.
    Raises `ConfigError` for work without two tokens, or without a prompt.
    """
    for name, least in (("requests", 1), ("tokens", 2), ("prompts", 1), ("prompt_len", 1)):
        if getattr(work, name) < least:
            raise ConfigError(f"{name}: must be at least {least}, got {getattr(work, name)}")
    longest = max(PROMPT + work.tokens, work.prompt_len + 1)
    shared = SharedEngine(shape, depths, longest, budget, work.requests + work.prompts, backend, span_rows=1)
    configs = [
        shared.variant(prefill_chunk_size=chunk, packing=packing, **(options or {})) for options in LOADS.values()
    ]
    loads = [
        (config, SamplingParams(), 0 if options is None else work.prompts)
        for config, options in zip(configs, LOADS.values(), strict=True)
    ]
    exits = [(threshold, kv) for threshold in work.thresholds for kv in ("exact", "copy")]
    leaving = [(configs[0], SamplingParams(exit_threshold=each, exit_kv=kv), 0) for each, kv in exits]
    total, done = (repeats + 1) * len(loads + leaving), count(1)
    rounds: list[list[_Window]] = []
    for _ in range(repeats + 1):
        shared.measure_cost()
        rounds.append([])
        for config, params, prompts in (*loads, *leaving):
            rounds[-1].append(_decode(shared, config, work, params, prompts))
            if progress is not None:
                progress(next(done), total)
    columns = list(zip(*rounds[1:], strict=True))
    alone = Times.of([window.whole_seconds * 1e3 for window in columns[0]])
    workload = Workload.at_once("decode", [PROMPT] * work.requests, work.tokens)
    shared.close()
    return {
        **shared.facts(),
        "benchmark": "decode",
        **{name: getattr(work, name) for name in ("requests", "tokens", "prompts", "prompt_len")},
        "chunk": chunk,
        "packing": packing,
        "alone": {"ms": alone.to_dict(), **shared.predict(configs[0], workload, alone.median)},
        "loads": [_load(name, column) for name, column in zip(LOADS, columns, strict=False)],
        "exits": [_exit(work, *each, column) for each, column in zip(exits, columns[len(loads) :], strict=True)],
    }


def _decode(
    shared: SharedEngine, config: SchedulerConfig, work: Decode, params: SamplingParams, prompts: int
) -> _Window:
    shared.use(config)
    engine, watch = shared.engine, Watch(shared.engine)
    decoding = [f"decode {index}" for index in range(work.requests)]
    for name, prompt in zip(decoding, shared.prompts([PROMPT] * work.requests), strict=True):
        watch.add(name, prompt, work.tokens, params)
    while not all(watch.timelines[name].tokens for name in decoding):
        watch.step()
    began, before = watch.seconds, watch.result()
    prompt_rows = engine.scheduler.stats.prompt_rows
    coming = (f"prompt {index}" for index in count())
    (long,) = shared.prompts([work.prompt_len])
    live = [next(coming) for _ in range(prompts)]
    for name in live:
        watch.add(name, long, 1)
    while not watch.outputs.keys() >= set(decoding):
        for output in watch.step():
            if output.request_id in live:
                live.remove(output.request_id)
                live.append(next(coming))
                watch.add(live[-1], long, 1)
    after = watch.result()
    for name in live:
        engine.abort(name)
    times = [[time for time in watch.timelines[name].tokens if time > began] for name in decoding]
    exits = [depth + 1 for name in decoding for depth in watch.outputs[name].exit_depths]
    return _Window(
        seconds=after.seconds - began,
        whole_seconds=after.seconds,
        steps=after.steps - before.steps,
        output_tokens=sum(map(len, times)),
        prompt_tokens=(engine.scheduler.stats.prompt_rows - prompt_rows) / shared.depths,
        gaps=[later - earlier for each in times for earlier, later in pairwise(each)],
        loops=sum(exits) / len(exits),
    )


def _load(name: str, windows: Sequence[_Window]) -> dict[str, Any]:
    gaps = Percentiles.of([gap * 1e3 for window in windows for gap in window.gaps])
    return {
        "beside": name,
        "itl_ms": gaps.to_dict() if gaps is not None else None,
        "output_tokens_per_s": Times.of([each.output_tokens / each.seconds for each in windows]).to_dict(),
        "prompt_tokens_per_s": Times.of([each.prompt_tokens / each.seconds for each in windows]).to_dict(),
    }


def _exit(work: Decode, threshold: float, kv: str, windows: Sequence[_Window]) -> dict[str, Any]:
    window = windows[0]  # all are equal in what is counted
    return {
        "threshold": threshold,
        "exit_kv": kv,
        "loops_per_token": window.loops,
        "steps_per_token": window.steps * work.requests / window.output_tokens,
        "output_tokens_per_s": Times.of([each.output_tokens / each.seconds for each in windows]).to_dict(),
    }
