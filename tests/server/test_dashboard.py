"""The dashboard: a page that asks nobody but its server, and a feed that costs the engine nothing unwatched."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from tests.e2e.drive import GOLDENS, build, generate
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine
from wavegraph.errors import EngineError
from wavegraph.sampling import SamplingParams
from wavegraph.server import dashboard
from wavegraph.server.async_engine import AsyncEngine
from wavegraph.server.dashboard import Feed, StepRing, dashboard_page, stats_point
from wavegraph.startup.build import build_engine

CONFIG = EngineConfig(max_model_len=64, max_num_batched_tokens=32, max_num_seqs=4, page_size=4, num_pages=40)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "TICK", 0.01)


@asynccontextmanager
async def serving() -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(partial(build_engine, GOLDENS / "tiny", CONFIG, backend="eager"))
    engine.start()
    await engine.ready()
    try:
        yield engine
    finally:
        await engine.close()


async def work(engine: AsyncEngine, prompt: int = 20) -> None:
    generation = await engine.generate([list(range(1, prompt + 1))], PARAMS)
    try:
        await generation.finished()
    finally:
        generation.close()


def parse(event: bytes) -> tuple[str, Any]:
    match = re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", event.decode())
    assert match, event
    return match[1], json.loads(match[2])


async def until(feed: AsyncIterator[bytes], name: str) -> Any:
    async with asyncio.timeout(30):
        async for event in feed:
            kind, data = parse(event)
            if kind == name:
                return data
    raise AssertionError(f"the feed ended without {name}")


async def observers(engine: AsyncEngine) -> int:
    return await engine.call(lambda each: len(each.observers))


def test_the_page_holds_all_that_it_needs() -> None:
    page = dashboard_page()
    assert "UPLOT" not in page
    assert "uPlot" in page
    assert "MIT licence" in page
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?!data:)", page)
    assert not re.search(r"@import|url\((?!data:)", page)
    assert re.findall(r"new EventSource\((.*?)\)", page) == ['"dashboard/events"']
    assert "fetch(" not in page.replace("prefetch(", "")


def test_the_policy_lets_the_page_ask_only_its_server() -> None:
    rules = dict(rule.split(" ", 1) for rule in dashboard.CONTENT_SECURITY_POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert not any("http" in rule or "*" in rule for rule in rules.values())


def test_rows_by_depth_add_up_to_the_rows() -> None:
    engine, ring = build(), StepRing(1000)
    engine.observers.append(ring)
    generate(engine, [(list(range(1, 20)), PARAMS), ([3, 4], PARAMS)])
    stats = engine.stats().scheduler
    steps = ring.take(4)
    assert [step for step, *_ in steps] == list(range(stats.steps))
    assert sum(sum(prompt) for *_, prompt, _ in steps) == stats.prompt_rows
    assert sum(sum(prompt) + sum(decode) for *_, prompt, decode in steps) == stats.rows
    assert sum(bucket for _, bucket, *_ in steps) == stats.rows + stats.padding_rows
    assert sum(coda for _, _, coda, *_ in steps) == stats.coda_rows
    assert all(seconds >= 0 for _, _, _, seconds, *_ in steps)
    assert all(len(prompt) == len(decode) == 4 for *_, prompt, decode in steps)
    assert ring.take(4) == []
    engine.close()


def test_a_ring_keeps_the_latest() -> None:
    engine, ring = build(), StepRing(3)
    engine.observers.append(ring)
    generate(engine, [([1, 2, 3], PARAMS)])
    last = engine.stats().scheduler.steps - 1
    assert [step for step, *_ in ring.take(4)] == [last - 2, last - 1, last]
    engine.close()


def test_a_point_is_what_lies_between_two_snapshots() -> None:
    engine = build()
    generate(engine, [([1, 2, 3], PARAMS)])
    before = engine.stats()
    generate(engine, [(list(range(5, 13)), PARAMS), ([9, 7], PARAMS)])
    after = engine.stats()
    point = stats_point(before, replace(after, running=3, waiting=2), 10.0, 14.0, 4)
    assert (point["time"], point["seconds"], point["running"], point["waiting"]) == (14.0, 4.0, 3, 2)
    assert point["prompt_rate"] == 10 / 4
    assert point["output_rate"] == 24 / 4
    assert point["steps"] == sum(point["hits"].values()) == after.scheduler.core_steps - before.scheduler.core_steps
    assert point["rows"] == 4 * (10 + 2 * 11)
    assert point["rows"] + point["padding"] == sum(int(size) * count for size, count in point["hits"].items())
    assert sum(point["reasons"].values()) == point["padding"] > 0
    assert point["ttft"]["count"] == 2
    assert point["itl"]["count"] == 22
    gaps = after.latencies.inter_token.total - before.latencies.inter_token.total
    assert point["itl"]["total"] == pytest.approx(gaps)
    assert point["finished"] == 3
    idle = stats_point(after, after, 14.0, 14.5, 4)
    assert (idle["rows"], idle["hits"], idle["ttft"]) == (0, {}, {"count": 0, "total": 0.0, "p95": None})
    engine.close()


def test_a_watcher_sees_facts_then_steps_and_statistics() -> None:
    async def run() -> None:
        async with serving() as engine:
            feed = Feed(engine, "a name")
            watch = feed.watch()
            name, facts = parse(await anext(watch))
            assert name == "hello"
            assert facts["model"] == "a name"
            assert (facts["depths"], facts["pages"], facts["page_size"], facts["max_num_seqs"]) == (4, 40, 4, 4)
            assert facts["ladder"][-1] == 32
            point = await until(watch, "stats")
            _, steps = await asyncio.gather(work(engine), until(watch, "steps"))
            assert len(steps) <= dashboard.RING
            assert all(after[0] == before[0] + 1 for before, after in pairwise(steps))
            before = point["finished"]
            while (point := await until(watch, "stats"))["finished"] == before:
                pass
            assert (point["running"], point["held_pages"]) == (0, 0)
            await watch.aclose()
            await feed.close()

    asyncio.run(run())


def test_the_engine_is_looked_at_only_while_somebody_watches() -> None:
    async def run() -> None:
        async with serving() as engine:
            feed = Feed(engine, "m")
            assert await observers(engine) == 0
            first, second = feed.watch(), feed.watch()
            for watch in (first, second):
                await until(watch, "stats")
            assert await observers(engine) == 1
            await first.aclose()
            await until(second, "stats")
            assert await observers(engine) == 1
            await second.aclose()
            while await observers(engine):
                await asyncio.sleep(0.01)
            assert feed._task is None
            third = feed.watch()
            await until(third, "stats")
            assert await observers(engine) == 1
            await third.aclose()
            await feed.close()
            assert await observers(engine) == 0

    asyncio.run(run())


def test_one_who_does_not_read_costs_a_bounded_backlog() -> None:
    async def run() -> None:
        async with serving() as engine:
            feed = Feed(engine, "m")
            slow, quick = feed.watch(), feed.watch()
            await anext(slow)
            await anext(slow)
            for _ in range(3 * dashboard.BACKLOG):
                await until(quick, "stats")
            assert max(queue.qsize() for queue in feed._watchers) == dashboard.BACKLOG
            latest = await until(quick, "stats")
            seen = [(await until(slow, "stats"))["time"] for _ in range(dashboard.BACKLOG)]
            assert seen == sorted(seen)
            assert latest["time"] in seen
            await feed.close()

    asyncio.run(run())


def test_only_so_many_may_watch() -> None:
    async def run() -> None:
        async with serving() as engine:
            feed = Feed(engine, "m")
            watches = []
            while not feed.is_full:
                watches.append(feed.watch())
                await anext(watches[-1])
            assert len(watches) == dashboard.MAX_WATCHERS
            await watches.pop().aclose()
            assert not feed.is_full
            await feed.close()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["close", "drain", "failure", "before"])
def test_feeds_end_when_the_server_does(how: str) -> None:
    async def run() -> None:
        async with serving() as engine:
            feed = Feed(engine, "m")
            watch = feed.watch()
            if how == "before":
                await feed.close()
            assert parse(await anext(watch))[0] == "hello"
            if how == "close":
                await until(watch, "stats")
                await feed.close()
            if how == "drain":
                await until(watch, "stats")
                engine.drain()
            if how == "failure":
                await until(watch, "stats")
                await engine.call(break_it)
                with pytest.raises(EngineError):
                    await work(engine)
            assert await until(watch, "end") == {}
            with pytest.raises(StopAsyncIteration):
                await anext(watch)
            assert not feed._watchers
            await feed.close()

    def break_it(engine: Engine) -> None:
        engine.executor._failure = "the device is gone"

    asyncio.run(run())
