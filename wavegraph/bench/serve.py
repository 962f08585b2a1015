"""Tokens per second of streams over HTTP, against the same work offline.

The server is a process of its own, as it would be; `LLM.generate` and the clients share this one. Runs are interleaved:
while one side works, the other waits.
"""

import asyncio
import json
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time, sleep
from typing import Any
from urllib.request import urlopen

from safetensors.torch import save_file

from wavegraph.bench.shape import Shape
from wavegraph.bench.sse import DONE, stream
from wavegraph.builtin import builtin_path
from wavegraph.config import EngineConfig
from wavegraph.errors import EngineError
from wavegraph.llm import LLM
from wavegraph.model.config import OuroConfig
from wavegraph.sampling import SamplingParams
from wavegraph.study.measure import WARM_UPS, Times, machine_facts

HOST = "127.0.0.1"
MODEL = "bench"


def bench_serve(
    shape: Shape, streams: int, prompt_len: int, tokens: int, depths: int, repeats: int, backend: str
) -> dict[str, Any]:
    """``streams`` prompts of ``prompt_len`` tokens, all at once, ``tokens`` from each: over HTTP and offline.

    Also where the time goes: the steps of each run and the seconds in their replays, and the processor time of both
    engines' processes and of the clients. Raises `EngineError` if the server does not start, or answers with less than
    was asked.
    """
    options = {"max_num_seqs": streams, "max_model_len": prompt_len + tokens, "page_size": shape.page_size}
    prompts = [[1 + (7 * index + 3 * place) % 250 for place in range(prompt_len)] for index in range(streams)]
    with TemporaryDirectory() as folder:
        shape = _write_checkpoint(Path(folder), shape, depths, prompt_len + tokens)
        config = EngineConfig(**options, prefix_cache=False)  # type: ignore[arg-type]
        with LLM(folder, config, backend=backend) as llm, _server(folder, options, backend) as port:
            for _ in range(WARM_UPS):
                _offline(llm, prompts, tokens)
                _online(port, prompts, tokens)
            rounds = [(_offline(llm, prompts, tokens), _online(port, prompts, tokens)) for _ in range(repeats)]
            isa = getattr(llm.engine.model.ops, "isa", None)
    offline, http = (
        _side(name, [each[place] for each in rounds], streams * tokens)
        for place, name in enumerate(("offline", "http"))
    )
    return {
        "benchmark": "serve",
        **machine_facts(),
        "backend": backend,
        "isa": isa,
        "shape": {name: getattr(shape, name) for name in shape.__slots__},
        "streams": streams,
        "prompt_len": prompt_len,
        "tokens": tokens,
        "depths": depths,
        "ratio": http["tokens_s"]["median"] / offline["tokens_s"]["median"],
        "sides": [offline, http],
    }


def _side(name: str, runs: Sequence[dict[str, float]], tokens: int) -> dict[str, Any]:
    """One row of the table: what was measured of all runs of one side, medians but for rate and duration."""
    seconds = [run["seconds"] for run in runs]
    others = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "seconds"}
    return {
        "side": name,
        "tokens_s": Times.of([tokens / each for each in seconds]).to_dict(),
        "run_ms": Times.of([each * 1e3 for each in seconds]).to_dict(),
        **others,
    }


def _write_checkpoint(folder: Path, shape: Shape, depths: int, max_len: int) -> Shape:
    """Random weights under the built-in model's tokenizer, so that both sides make text; the shape with its size."""
    shape = replace(shape, vocab=OuroConfig.from_file(builtin_path()).vocab_size)
    config = shape.config_dict(depths=depths, max_len=max_len)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(builtin_path() / "tokenizer.json", folder)
    save_file(shape.weights(OuroConfig.from_dict(config)), folder / "model.safetensors")
    return shape


def _offline(llm: LLM, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    before, cpu, started = llm.engine.stats(), process_time(), perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
    seconds, cpu = perf_counter() - started, process_time() - cpu
    _require(sum(len(output.token_ids) for output in outputs), len(prompts) * tokens)
    after = llm.engine.stats()
    return {
        "seconds": seconds,
        "steps": after.scheduler.steps - before.scheduler.steps,
        "replay_seconds": after.executor.core.seconds - before.executor.core.seconds,
        "cpu_seconds": cpu,
        "client_cpu_seconds": 0.0,
    }


def _online(port: int, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    async def ask_all() -> int:
        bodies = ({**_BODY, "prompt": prompt, "max_tokens": tokens} for prompt in prompts)
        return sum(await asyncio.gather(*(_count(stream(HOST, port, "/v1/completions", body)) for body in bodies)))

    before, client, started = _scrape(port), process_time(), perf_counter()
    answered = asyncio.run(ask_all())
    seconds, client = perf_counter() - started, process_time() - client
    after = _scrape(port)
    _require(answered, len(prompts) * tokens)
    return {
        "seconds": seconds,
        **{name: after[name] - before[name] for name in after},
        "client_cpu_seconds": client,
    }


_BODY: dict[str, Any] = {
    "model": MODEL,
    "stream": True,
    "ignore_eos": True,
    "temperature": 0,
    "stream_options": {"include_usage": True},
}


async def _count(events: AsyncIterator[bytes]) -> int:
    """Tokens of a stream, as its usage says."""
    last = b"{}"
    async for event in events:
        if event == DONE:
            break
        last = event
    return int((json.loads(last).get("usage") or {}).get("completion_tokens", 0))


def _require(found: int, wanted: int) -> None:
    if found != wanted:
        raise EngineError(f"{found} tokens came where {wanted} were asked for; the runs cannot be compared")


def _scrape(port: int) -> dict[str, float]:
    with urlopen(f"http://{HOST}:{port}/metrics") as answer:
        page = answer.read().decode()
    patterns = {
        "steps": r"wavegraph:steps_total\{.*\}",
        "replay_seconds": r'wavegraph:replay_seconds_total\{.*program="core".*\}',
        "cpu_seconds": "process_cpu_seconds_total",
    }
    series = {name: re.findall(rf"^{pattern} (\S+)", page, re.MULTILINE) for name, pattern in patterns.items()}
    return {name: sum(map(float, values)) for name, values in series.items()}


@contextmanager
def _server(folder: str, options: dict[str, Any], backend: str) -> Iterator[int]:
    """`wavegraph serve` over a checkpoint; yields its port."""
    flags = [flag for name, value in options.items() for flag in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-P", "-m", "wavegraph", "serve", folder, "--port", "0", "--served-model-name", MODEL]
    command += [*flags, "--backend", backend, "--no-prefix-cache"]
    log = Path(folder, "log")
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            yield _port(process, log)
        finally:
            process.terminate()


def _port(process: "subprocess.Popen[bytes]", log: Path) -> int:
    while process.poll() is None:
        if match := re.search(rf"http://{HOST}:(\d+)", log.read_text()):
            return int(match[1])
        sleep(0.1)
    raise EngineError(f"the server did not start: {log.read_text().strip()[-500:]}")
