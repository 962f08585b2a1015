"""Many clients at once, some of whom vanish: nobody else notices, and nothing is left behind."""

import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.harness import SETTINGS, Served, serving
from wavegraph.builtin import builtin_path
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine
from wavegraph.llm import LLM
from wavegraph.sampling import SamplingParams
from wavegraph.server import guard

CONFIG = EngineConfig(
    max_num_batched_tokens=128, prefill_chunk_size=16, max_num_seqs=48, max_model_len=256, num_pages=400
)
SCRIPT = Path(__file__).with_name("load.py")


def make_cases(count: int) -> list[dict[str, Any]]:
    """Bodies of completions: greedy and sampled, with early exit, penalties and stop strings; some begin alike."""
    draw = random.Random(7)
    shared = [draw.randrange(1, 200) for _ in range(40)]
    cases = []
    for index in range(count):
        prompt = shared[: draw.choice([0, 0, 16, 40])] + [draw.randrange(1, 200) for _ in range(draw.randrange(1, 100))]
        case: dict[str, Any] = {"prompt": prompt, "max_tokens": draw.randrange(4, 60), "ignore_eos": True}
        case |= {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0}
        case |= {0: {"exit_threshold": 0.5}, 1: {"presence_penalty": 0.7}, 2: {"stop": ["e"]}}.get(index % 5, {})
        cases.append(case)
    return cases


def offline(cases: list[dict[str, Any]]) -> list[str]:
    """What each case gives with no server, as `load.py` writes it."""
    params = [SamplingParams(**{name: value for name, value in case.items() if name != "prompt"}) for case in cases]
    with LLM(builtin_path(), CONFIG) as llm:
        outputs = llm.generate([case["prompt"] for case in cases], params)
    return [json.dumps([output.text, output.finish_reason]) for output in outputs]


def run_load(
    server: Served, cases: list[dict[str, Any]], seconds: float, streams: int, vanish: float
) -> dict[str, Any]:
    arguments = ["127.0.0.1", str(server.port), SETTINGS.model_name, str(seconds), str(streams), str(vanish)]
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], input=json.dumps(cases), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class Departures:
    """Steps of the engine from the moment the server sees that a client has left to the return of its pages."""

    def __init__(self, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.seen = 0
        self.left: dict[str, int] = {}
        self.waited: list[int] = []
        self._watch_clients(server, monkeypatch)
        server.on_engine(self._watch_engine)

    def _watch_clients(self, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        until_gone, abandon = guard._until_gone, server.engine._abandon

        async def noting_gone(receive: Any) -> None:
            await until_gone(receive)
            self.seen = self.steps

        def noting_abandon(names: set[str]) -> None:
            self.left |= dict.fromkeys(names, self.seen)
            abandon(names)

        monkeypatch.setattr(guard, "_until_gone", noting_gone)
        monkeypatch.setattr(server.engine, "_abandon", noting_abandon)

    def _watch_engine(self, engine: Engine) -> None:
        step, abort, residency = engine.step, engine.abort, engine.scheduler.residency

        def counting_step() -> Any:
            self.steps += 1
            return step()

        def noting_abort(name: str) -> bool:
            request = residency.running.get(name)
            alone = [page for page in request.pages if residency.pages._holders[page] == 1] if request else []
            free = residency.pages.num_free
            live = abort(name)
            if live:
                assert residency.pages.num_free == free + len(alone)
                self.waited.append(self.steps - self.left[name])
            return live

        engine.step, engine.abort = counting_step, noting_abort  # type: ignore[method-assign]


@dataclass(frozen=True)
class Held:
    """What the process holds while nobody asks."""

    pages: int
    descriptors: int
    tasks: int
    records: int

    @classmethod
    def by(cls, server: Served) -> "Held":
        def count(engine: Engine) -> tuple[int, int]:
            stats = engine.stats()
            return stats.pages - stats.free_pages, len(engine._records) + len(engine.scheduler.residency.live)

        async def tasks() -> int:
            return len(asyncio.all_tasks())

        pages, records = server.on_engine(count)
        return cls(pages, len(os.listdir("/proc/self/fd")), server.do(tasks()), records)


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


LONG = pytest.param(60, 64, 48, marks=[pytest.mark.slow, pytest.mark.timeout(400)])


@pytest.mark.parametrize(("seconds", "streams", "count"), [(3, 16, 12), LONG])
def test_many_streams_of_which_some_vanish(
    seconds: float, streams: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = make_cases(count)
    expected = offline(cases)
    with serving(config=CONFIG) as server:
        server.do(server.engine.ready())
        before = Held.by(server)
        warm_up = run_load(server, cases, max(1, seconds / 6), streams, 0.1)
        wait_until(lambda: Held.by(server) == before)
        departures = Departures(server, monkeypatch)
        memory = resident_bytes()
        result = run_load(server, cases, seconds, streams, 0.1)
        wait_until(lambda: Held.by(server) == before)
        assert Held.by(server) == before
        grown = resident_bytes() - memory
    assert warm_up["errors"] == result["errors"] == []
    for found in (warm_up, result):
        for case, answers in enumerate(found["answers"]):
            assert set(answers) <= {expected[case]}, f"case {case}"
    assert sum(sum(found.values()) for found in result["answers"]) >= streams
    assert result["vanished"] > 0
    assert len(departures.waited) > 0
    assert max(departures.waited) <= 2
    assert grown < 20 << 20, f"resident memory grew by {grown / 2**20:.1f} MB"
