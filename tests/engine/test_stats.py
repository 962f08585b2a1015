"""`Engine.stats`: a snapshot that adds up."""

import json

from tests.e2e.drive import build, generate
from wavegraph.sampling import SamplingParams

PROMPT = list(range(1, 12))


def test_a_snapshot_stays_what_it_was() -> None:
    engine = build()
    before = engine.stats()
    words = json.dumps(before.to_dict())
    generate(engine, [(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True, temperature=1.0, seed=1))])
    assert json.dumps(before.to_dict()) == words
    assert json.dumps(engine.stats().to_dict()) != words
    engine.close()


def test_counts_add_up() -> None:
    engine = build(num_pages=40)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    engine.add_request("gone", PROMPT, params)
    engine.step()
    running = engine.stats()
    assert (running.running, running.waiting) == (1, 0)
    assert running.free_pages == 40 - 3
    engine.abort("gone")
    generate(engine, [(PROMPT, params), (PROMPT[:3], params)])
    generate(engine, [(PROMPT, params)])
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.swapped_pages) == (0, 0, 0)
    assert stats.free_pages == stats.pages == 40
    assert stats.cached_pages >= 2
    assert stats.finished == {"abort": 1, "length": 3}
    assert stats.output_tokens == 15
    assert stats.prompt_tokens == 3 * len(PROMPT) + 3
    assert stats.prefix_hits == 8  # the last of them found two pages
    assert stats.prefix_queries == stats.prompt_tokens
    scheduler, executor = stats.scheduler, stats.executor
    assert executor.steps == scheduler.steps
    assert (executor.core.rows, executor.core.padding_rows) == (scheduler.rows, scheduler.padding_rows)
    assert sum(scheduler.padding_reasons.values()) == scheduler.padding_rows > 0
    assert sum(executor.core.hits.values()) == scheduler.core_steps
    assert executor.coda.rows + executor.coda_full.rows == scheduler.coda_rows
    assert not executor.core.misses
    engine.close()
