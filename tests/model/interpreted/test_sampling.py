"""The sampler and the scores through interpreted kernels, against the float64 reference and the ATen operators."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.interpreted.launcher import make_launcher
from tests.model.test_sampling import VOCAB, Bench, random_case
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.base import Ops
from wavegraph.model.ops.triton.ops import TritonOps
from wavegraph.model.reference_sampling import Settings, draw, uniform
from wavegraph.model.sampling import Action
from wavegraph.model.weights import model_from_tensors, random_weights

MARGIN = 1e-5
LENGTH = 24

MakeDriver = Callable[..., Any]
MakeConfig = Callable[..., OuroConfig]


@pytest.fixture(scope="module")
def bench(small_config: MakeConfig, make_driver: MakeDriver) -> Bench:
    return Bench(driver_of(TritonOps(make_launcher()), small_config, make_driver))


def driver_of(ops: Ops, small_config: MakeConfig, make_driver: MakeDriver, dtype: torch.dtype = torch.float32) -> Any:
    config = small_config(num_hidden_layers=1)
    model = model_from_tensors(config, dict(random_weights(config, 1)), ops=ops, dtype=dtype)
    return make_driver(model, slots=33, max_len=LENGTH, coda_rows=34)


def settings(noise: random.Random, history: Sequence[int]) -> Settings:
    """Any combination, each parameter off in half of the cases."""
    pick = noise.choice
    ids = [noise.randrange(VOCAB) for _ in range(noise.randrange(5))]
    return Settings(
        prompt_len=noise.randint(1, len(history)),
        seed=noise.getrandbits(64),
        temperature=pick([0.0, 0.01, 0.3, 1.0, 1.0, 4.0]),
        top_k=pick([0, 0, 0, 1, 2, 5, 40, VOCAB, 1000]),
        top_p=pick([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999]),
        min_p=pick([0.0, 0.0, 1e-3, 0.05, 0.5, 0.99, 1.0]),
        repetition_penalty=pick([1.0, 1.0, 0.5, 1.1, 2.0]),
        presence_penalty=pick([0.0, 0.0, 0.7, -1.0]),
        frequency_penalty=pick([0.0, 0.0, 0.3, -0.5]),
        min_tokens=noise.randint(0, LENGTH),
        stop_token_ids=tuple(ids),
        logit_bias={noise.randrange(VOCAB): noise.uniform(-5, 5) for _ in range(noise.randrange(5))},
    )


@pytest.mark.parametrize("rows", [20, pytest.param(330, marks=pytest.mark.slow)])
def test_draws_equal_the_reference(rows: int, bench: Bench) -> None:
    """Except where its decision margin is below 1e-5: of those there are few."""
    noise = random.Random(rows)
    near = 0
    for batch in range(rows // 10):
        logits, histories = random_case(batch, 10)
        wanted = [settings(noise, history) for history in histories]
        tokens = bench.draw(logits, histories, wanted, garbage=batch * 30 - 20)
        for token, row, history, one in zip(tokens, logits.double().numpy(), histories, wanted, strict=True):
            expected = draw(row, history, one)
            near += expected.margin < MARGIN
            assert token == expected.token or expected.margin < MARGIN, one
    assert near <= 0.05 * rows


def one(bench: Bench, logits: Sequence[float], history: Sequence[int] = (0,), **changes: Any) -> int:
    """The token of one row; logits beyond those given are low."""
    row = torch.full((1, VOCAB), -30.0)
    row[0, : len(logits)] = torch.tensor(logits)
    return bench.draw(row, [history], [Settings(**changes)])[0]


def test_ties(bench: Bench) -> None:
    """The lowest id first: for the largest, and for which of four equal tokens a quarter of the numbers each draws."""
    assert one(bench, [1.0, 3.0, 2.0, 3.0]) == 1
    assert one(bench, [-0.0, 0.0, -1.0]) == 0
    for seed in range(2):
        number = uniform(seed, 1)
        assert one(bench, [2.0] * 4, temperature=0.5, seed=seed) == int(number * 4)
        assert one(bench, [2.0] * 4, temperature=0.5, seed=seed, top_k=2) == int(number * 2)
        assert one(bench, [2.0] * 4, temperature=0.5, seed=seed, top_p=0.6) == int(number * 3)


def test_penalties_and_bans_at_their_edges(bench: Bench) -> None:
    assert one(bench, [4.0, 3.0], [0, 5], prompt_len=1, repetition_penalty=1.5) == 1
    assert one(bench, [-1.0, -1.2], [0], prompt_len=1, repetition_penalty=1.5) == 1  # negative logits go down too
    assert one(bench, [4.0, 3.0], [0, 0], prompt_len=2, presence_penalty=1.5) == 0  # the prompt does not count
    assert one(bench, [4.0, 3.0], [7, 0, 0], prompt_len=1, frequency_penalty=0.6) == 1
    for least, token in ((1, 0), (2, 1)):  # one output so far
        assert one(bench, [4.0, 3.0], [9, 5], prompt_len=1, min_tokens=least, stop_token_ids=(0,)) == token


def test_the_seed_has_64_bits(bench: Bench) -> None:
    tokens = {one(bench, [0.0] * VOCAB, temperature=1.0, seed=seed) for seed in (1, 1 + 2**32, 1 + 2**63, 1 + 2**31)}
    assert len(tokens) == 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_still_give_a_token(value: float, bench: Bench) -> None:
    logits = torch.full((3, VOCAB), value)
    logits[2, 5] = 1.0
    wanted = [Settings(temperature=1.0), Settings(), Settings(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1)]
    assert all(0 <= token < VOCAB for token in bench.draw(logits, [[1], [2], [3]], wanted))


def test_rows_that_stay_draw_nothing(bench: Bench) -> None:
    bench.set_rows(torch.zeros(2, VOCAB), [[1, 2], [3]], [Settings(temperature=1.0), Settings()])
    bench.io.coda_left[0] = 0
    before = bench.io.token_table.clone()
    bench.driver.model.ops.draw(bench.io, 3)
    assert bench.io.coda_token[:3].tolist() == [-1, 0, -1]
    before[1, 1] = 0
    assert torch.equal(bench.io.token_table, before)


def test_scores_equal_aten(dtype: torch.dtype, small_config: MakeConfig, make_driver: MakeDriver) -> None:
    """Of drawn and of known tokens; tokens of equal logits are listed by id."""
    results: list[tuple[Tensor, ...]] = []
    logits = random_case(3, 4)[0].round(decimals=1).to(dtype)
    for ops in (TritonOps(make_launcher()), AtenOps()):
        driver = driver_of(ops, small_config, make_driver, dtype)
        driver.fill_inputs([], coda_rows=[(0, 3), (1, 0), (2, 5, 1, Action.SCORE), (3, 22)])
        io = driver.io
        io.token_table.fill_(VOCAB + 7)  # of padding: no token
        io.token_table[2, 6] = known = int(logits[2].argmax())
        assert logits[2, known] > logits[2, 0]  # else the row without a drawn token would have the same score
        io.logits[:4] = logits
        io.coda_token[:4] = torch.tensor([7, 96, -1, 0])
        driver.model.ops.score(io, 5)
        results.append((io.coda_rank[:4], io.top_ids[:4], io.coda_logprob[:4], io.top_logprobs[:4]))
    for name, got, expected in zip(("rank", "top_ids"), results[0], results[1], strict=False):
        assert torch.equal(got, expected), name
    for got, expected in zip(results[0][2:], results[1][2:], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
