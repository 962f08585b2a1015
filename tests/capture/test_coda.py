"""The coda programs as the executor runs them: which one, what it leaves on the device, what reaches the host."""

import pytest
import torch

from tests.capture.driver import CodaRow, Driver, Step, make_executor, tiny_model
from tests.capture.verify import assert_same_bits
from wavegraph.capture.metadata import FEATURE_COPY_KV
from wavegraph.capture.ring import Logprobs
from wavegraph.model.sampling import FEATURE_SAMPLER, NEVER, Action, encode_params
from wavegraph.scheduler.plan import COPY_KV, CodaAction

BACKENDS = ["eager", "recorded", "compiled"]
PROMPT = [3, 9, 27, 11, 60, 2, 5]
LAST = len(PROMPT) - 1


def prompted(backend: str, params: dict[int, dict[str, float | bool]]) -> Driver:
    """Each slot's prompt at every depth, under its parameters."""
    driver = Driver(make_executor(tiny_model(backend), backend))
    for slot, chosen in params.items():
        driver.add(slot, PROMPT, encode_params(prompt_len=len(PROMPT), **chosen))  # type: ignore[arg-type]
        for depth in range(driver.depths):
            driver.run(driver.make_step([(slot, 0, len(PROMPT), depth)]))
    return driver


def submit(driver: Driver, rows: list[CodaRow], features: int) -> tuple[list[int], Logprobs | None]:
    step = driver.make_step([], rows)
    step.coda_features = features
    output = driver.executor.poll(driver.executor.submit(step))
    return output.tokens, output.logprobs


def test_words_of_the_scheduler_mean_the_same_here() -> None:
    assert FEATURE_COPY_KV == COPY_KV
    assert {entry.name: entry.value for entry in Action} == {entry.name: entry.value for entry in CodaAction}
    assert not FEATURE_SAMPLER & COPY_KV


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("features", [0, FEATURE_SAMPLER])
def test_actions(backend: str, features: int) -> None:
    """Who draws: SAMPLE always, GATE by its threshold or at the last depth, SCORE and REPLAY never."""
    driver = prompted(backend, {0: {"exit_threshold": 0.0}, 1: {"exit_threshold": NEVER}})
    table = driver.executor.io.token_table
    for slot, depth, action, draws in (
        (0, 0, Action.SAMPLE, True),
        (1, 0, Action.SAMPLE, True),
        (0, 0, Action.GATE, True),
        (1, 0, Action.GATE, False),
        (1, 2, Action.GATE, True),
        (0, 2, Action.SCORE, False),
        (0, 0, Action.REPLAY, False),
    ):
        table[slot, LAST + 1] = 63
        before = table[:-1].clone()
        tokens, _ = submit(driver, [(slot, LAST, depth, action)], features)
        assert (tokens[0] >= 0) == draws, (slot, depth, action)
        if draws:
            before[slot, LAST + 1] = int(driver.executor.io.logits[0].argmax())
            assert tokens == [before[slot, LAST + 1]]
        assert torch.equal(table[:-1], before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_rows_get_equal_tokens_from_both_programs(backend: str) -> None:
    runs = []
    for features in (0, FEATURE_SAMPLER):
        driver = Driver(make_executor(tiny_model(backend), backend))
        driver.features = features
        for slot in range(3):
            driver.add(slot, PROMPT[slot:])
        runs.append(driver.generate(6, chunk=3, budget=8))
        stats = driver.executor.stats
        assert bool(stats.coda.rows) == (features == 0)
        assert bool(stats.coda_full.rows) == (features != 0)
        assert not stats.copy_exits.rows
    assert runs[0] == runs[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [64, 12])
def test_log_probabilities_reach_the_host(backend: str, vocab_size: int) -> None:
    """Of drawn and of scored rows; a vocabulary smaller than the longest list shortens it."""
    driver = Driver(make_executor(tiny_model(backend, vocab_size=vocab_size), backend, max_in_flight=1))
    prompt = [token % vocab_size for token in PROMPT]
    driver.add(0, prompt)
    for depth in range(driver.depths):
        driver.run(driver.make_step([(0, 0, len(prompt), depth)]))
    rows: list[CodaRow] = [(0, 2, 2, Action.SCORE), (0, LAST, 2, Action.SAMPLE)]
    tokens, logprobs = submit(driver, rows, FEATURE_SAMPLER)
    assert logprobs is not None
    expected = torch.log_softmax(driver.executor.io.logits[:2].float(), dim=1)
    top = min(20, vocab_size)
    assert logprobs.logprob.shape == logprobs.rank.shape == (2,)
    assert logprobs.top_ids.shape == logprobs.top_logprobs.shape == (2, top)
    for row, token in enumerate((prompt[3], tokens[1])):
        assert logprobs.logprob[row] == pytest.approx(float(expected[row, token]), abs=1e-5)
        assert logprobs.rank[row] == int((expected[row] > expected[row, token]).sum())
        want = expected[row].topk(top)
        assert logprobs.top_ids[row].tolist() == want.indices.tolist()
        assert logprobs.top_logprobs[row] == pytest.approx(want.values.numpy(), abs=1e-5)
    kept = logprobs.logprob.copy()
    submit(driver, [(0, 0, 2, Action.SCORE)] * 2, FEATURE_SAMPLER)
    assert logprobs.logprob.tolist() == kept.tolist(), "results are the caller's own"
    assert submit(driver, rows, 0)[1] is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("features", [FEATURE_COPY_KV, FEATURE_COPY_KV | FEATURE_SAMPLER])
def test_kv_of_exits_is_copied_into_the_deeper_planes(backend: str, features: int) -> None:
    """Of rows that left or are replayed, and whose request wants it; nothing else changes."""
    params: dict[int, dict[str, float | bool]] = {
        0: {"exit_copy": True, "exit_threshold": 0.0}, 1: {"exit_threshold": 0.0}, 2: {"exit_copy": True}
    }  # fmt: skip
    driver = prompted(backend, params)
    pools = driver.executor.pools
    for rows, copied in (
        ([(0, 3, 0, Action.GATE), (1, 3, 0, Action.GATE), (2, 3, 0, Action.GATE)], [(0, 3, 0)]),
        ([(2, 4, 1, Action.SAMPLE), (0, 4, 1, Action.REPLAY), (0, 5, 0, Action.SCORE)], [(2, 4, 1), (0, 4, 1)]),
        ([(0, 2, 2, Action.SAMPLE)], []),
    ):
        want = [pool[:-1].clone() for pool in (pools.k, pools.v)]
        for slot, pos, depth in copied:
            page, offset = driver.requests[slot].pages[pos // 4], pos % 4
            for pool in want:
                pool[page, depth + 1 :, :, offset] = pool[page, depth, :, offset]
        submit(driver, list(rows), features)
        for pool, expected, name in zip((pools.k, pools.v), want, ("k", "v"), strict=True):
            assert_same_bits(pool[:-1], expected, f"{name} after {rows}")
    assert driver.executor.stats.copy_exits.rows == 7


def test_coda_alone_leaves_the_tables_as_they_are() -> None:
    executor = make_executor(tiny_model(), "recorded")
    step = Step(coda_slot=[0], coda_pos=[0], coda_depth=[0], coda_action=[Action.SCORE], coda_bucket=2)
    executor.poll(executor.submit(step))
    assert executor.stats.tables.hits == {}
