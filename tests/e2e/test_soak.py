"""A thousand requests through a pool that holds twenty of them: all end, and nothing grows."""

import gc
import random
from pathlib import Path

import pytest

from tests.e2e.drive import build, check_drained
from wavegraph.sampling import SamplingParams

REQUESTS = 1000
WARM = 200
PAGES_EACH = 6  # of 4 tokens: at most 24 tokens a request


def resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


@pytest.mark.slow
def test_a_thousand_requests_through_a_pool_for_twenty() -> None:
    engine = build(
        num_pages=20 * PAGES_EACH,
        max_num_seqs=60,
        max_model_len=24,
        backend="recorded",
        check=False,
        swap_bytes=1 << 20,
    )
    rng = random.Random(1)
    added, ended, warm = 0, dict[str, str | None](), 0
    while len(ended) < REQUESTS:
        while added < REQUESTS and engine.stats().waiting < 8:
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 14))] if rng.random() < 0.7 else [5] * 9
            options = rng.choice([{}, {"exit_threshold": 0.5}, {"exit_at_step": 1, "exit_kv": "copy"}, {"logprobs": 1}])
            params = SamplingParams(
                max_tokens=rng.randint(1, 10), temperature=rng.choice([0, 1]), seed=added, **options
            )
            engine.add_request(str(added), prompt, params)
            added += 1
        if rng.random() < 0.02:
            name = rng.choice(list(engine._records))
            assert engine.abort(name)
            ended[name] = "abort"
        if rng.random() < 0.2 and engine.scheduler.residency.running:
            engine.preempt(rng.choice(list(engine.scheduler.residency.running)))
        for output in engine.step():
            if output.finished:
                assert output.request_id not in ended
                ended[output.request_id] = output.finish_reason
        if len(ended) >= WARM and not warm:
            gc.collect()
            warm = resident_kib()
    assert set(ended) == {str(index) for index in range(REQUESTS)}
    assert set(ended.values()) <= {"stop", "length", "abort"}
    check_drained(engine)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert sum(stats.finished.values()) == REQUESTS
    assert not engine.executor._store._copies or engine.scheduler._draft.swap_drop
    gc.collect()
    grown = resident_kib() - warm
    print(f"{REQUESTS} requests, {stats.scheduler.steps} steps, {stats.preemptions} preemptions, {grown} KiB more")
    assert grown < 5 * 1024
    engine.close()
