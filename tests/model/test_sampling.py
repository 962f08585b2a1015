"""The sampler: its random numbers, each of its stages, and its choice against the float64 reference."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wavegraph.errors import RequestError
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.aten_sampling import philox
from wavegraph.model.reference_sampling import Settings, draw, philox4x32, uniform
from wavegraph.model.sampling import (
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    PARAMS_WIDTH,
    Action,
    Column,
    encode_params,
)
from wavegraph.model.weights import Model, model_from_tensors, random_weights
from wavegraph.scheduler.plan import CodaAction

VOCAB = 97
LENGTH = 24
MARGIN = 1e-5


@pytest.fixture(scope="module")
def model(small_config: Callable[..., OuroConfig]) -> Model:
    config = small_config()
    return model_from_tensors(config, dict(random_weights(config, 1)), ops=AtenOps(), dtype=torch.float32)


class Bench:
    """Draws tokens for rows that each have a slot of their own; everything else on the device is garbage."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.io = driver.io

    def set_rows(
        self, logits: Tensor, histories: Sequence[Sequence[int]], wanted: Sequence[Settings], garbage: int = -5
    ) -> None:
        self.io.token_table.fill_(garbage)
        self.io.logits.fill_(torch.nan)
        for slot, (history, one) in enumerate(zip(histories, wanted, strict=True)):
            self.io.token_table[slot, : len(history)] = torch.tensor(history, dtype=torch.int32)
            self.io.params[slot] = torch.tensor(encode_params(**asdict(one)), dtype=torch.int32)
        rows = [(slot, len(history) - 1) for slot, history in enumerate(histories)]
        self.driver.fill_inputs([], coda_rows=rows)
        self.io.logits[: len(logits)] = logits
        self.io.coda_left[:] = 0
        self.io.coda_left[: len(rows)] = 1

    def draw(self, *args: Any, padding: int = 1, **options: Any) -> list[int]:
        self.set_rows(*args, **options)
        rows = len(args[0])
        self.driver.model.ops.draw(self.io, rows + padding)
        tokens: list[int] = self.io.coda_token[:rows].tolist()
        for slot, (token, history) in enumerate(zip(tokens, args[1], strict=True)):
            assert self.io.token_table[slot, len(history)] == token
        assert (self.io.coda_token[rows : rows + padding] == -1).all()
        return tokens


@pytest.fixture(scope="module")
def bench(model: Model, make_driver: Callable[..., Any]) -> Bench:
    return Bench(make_driver(model, slots=33, max_len=LENGTH, coda_rows=34))


def one(bench: Bench, logits: Sequence[float], history: Sequence[int] = (0,), **changes: Any) -> int:
    """The token of one row; logits beyond those given are low."""
    row = torch.full((1, VOCAB), -30.0)
    row[0, : len(logits)] = torch.tensor(logits)
    return bench.draw(row, [history], [Settings(**changes)])[0]


# --- random numbers ----------------------------------------------------------------------------------------

# Known answers of Random123: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_reference_philox_gives_the_known_answers(counter: str, key: str, result: str) -> None:
    words = [[int(word, 16) for word in text.split()] for text in (counter, key, result)]
    assert list(philox4x32(words[0], words[1])) == words[2]


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=20))
def test_device_philox_equals_the_reference(cases: list[tuple[int, int]]) -> None:
    key = torch.tensor([[seed % 2**32, seed >> 32] for seed, _ in cases])
    words = philox(key, torch.tensor([position for _, position in cases]))
    expected = [philox4x32((position, 0, 0, 0), (seed % 2**32, seed >> 32))[0] for seed, position in cases]
    assert words.tolist() == expected


def test_device_philox_gives_the_known_answer() -> None:
    assert philox(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).tolist() == [0x6627E8D5]


# --- the row of parameters ---------------------------------------------------------------------------------


def test_parameters_lie_where_the_columns_say() -> None:
    row = encode_params(
        prompt_len=5,
        seed=-(2**63) + 7,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        min_tokens=4,
        stop_token_ids=[9, 8],
        logit_bias={6: -1.5, 2: 100.0},
        top_logprobs=20,
        exit_threshold=0.75,
        exit_copy=True,
    )
    assert len(row) == PARAMS_WIDTH
    assert row[: Column.TEMPERATURE] == (7, -(2**31), 5, 4, 3, 20, 2, 2, 1)
    real = np.array(row, dtype=np.int32).view(np.float32)
    assert real[Column.TEMPERATURE : Column.STOP_IDS].tolist() == [0.5, 0.25, 0.125, 1.5, -0.5, 2.0, 0.75]
    assert row[Column.STOP_IDS : Column.BIAS_IDS] == (9, 8, *[0] * (MAX_STOP_IDS - 2))
    assert row[Column.BIAS_IDS : Column.BIAS_VALUES] == (6, 2, *[0] * (MAX_LOGIT_BIAS - 2))
    assert real[Column.BIAS_VALUES :].tolist() == [-1.5, 100.0, *[0.0] * (MAX_LOGIT_BIAS - 2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_len": -1}, "prompt_len: must be in 0..2147483647, got -1"),
        ({"min_tokens": 2**31}, "min_tokens: must be in 0..2147483647, got 2147483648"),
        ({"top_k": -1}, "top_k: must be in"),
        ({"top_p": 0.0}, "top_p: must be in"),
        ({"top_p": float("nan")}, r"top_p: must be in .*, got nan"),
        ({"min_p": 1.5}, r"min_p: must be in 0.0..1.0, got 1.5"),
        ({"temperature": -0.1}, "temperature: must be in"),
        ({"temperature": float("inf")}, "temperature: must be in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: must be in"),
        ({"presence_penalty": float("inf")}, "presence_penalty: must be in"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty: must be in"),
        ({"exit_threshold": -0.5}, "exit_threshold: must be in"),
        ({"top_logprobs": 21}, "top_logprobs: must be in 0..20, got 21"),
        ({"stop_token_ids": range(17)}, "stop_token_ids: count: must be in 0..16, got 17"),
        ({"stop_token_ids": [3, -1]}, r"stop_token_ids\[1\]: must be in"),
        ({"logit_bias": dict.fromkeys(range(65), 1.0)}, "logit_bias: count: must be in 0..64, got 65"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: token -1: must be in"),
        ({"logit_bias": {7: float("-inf")}}, r"logit_bias\[7\]: must be in"),
    ],
)
def test_parameters_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        encode_params(**changes)


def test_parameters_need_no_torch() -> None:
    code = "import sys, wavegraph.model.sampling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


# --- against the reference ---------------------------------------------------------------------------------

wanted_settings = st.builds(
    Settings,
    prompt_len=st.integers(1, LENGTH - 1),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0, 1.0, 4.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-3, 0.05, 0.5, 0.99]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.1, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -0.5]),
    min_tokens=st.integers(0, LENGTH),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=MAX_STOP_IDS),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32), max_size=MAX_LOGIT_BIAS),
)


def random_case(seed: int, rows: int) -> tuple[Tensor, list[list[int]]]:
    """Logits of several kinds, some with many ties, and histories."""
    noise = np.random.default_rng(seed)
    logits = noise.normal(size=(rows, VOCAB)) * noise.choice([0.1, 1.0, 4.0, 20.0], size=(rows, 1))
    tied = noise.random(rows) < 0.4
    logits[tied] = np.round(logits[tied])
    histories = [noise.integers(0, VOCAB, size=noise.integers(1, LENGTH)).tolist() for _ in range(rows)]
    return torch.from_numpy(logits).float(), histories


def test_draws_equal_the_reference(bench: Bench) -> None:
    """Except where its decision margin is below 1e-5: of those there are few."""
    near: Counter[bool] = Counter()

    @settings(max_examples=120)
    @given(wanted=st.lists(wanted_settings, min_size=1, max_size=24), seed=st.integers(0, 10**6))
    def check(wanted: list[Settings], seed: int) -> None:
        logits, histories = random_case(seed, len(wanted))
        wanted = [
            replace(row, prompt_len=min(row.prompt_len, len(h))) for row, h in zip(wanted, histories, strict=True)
        ]
        tokens = bench.draw(logits, histories, wanted, garbage=seed % 200 - 20)
        for token, row, history, one in zip(tokens, logits.double().numpy(), histories, wanted, strict=True):
            expected = draw(row, history, one)
            near[expected.margin < MARGIN] += 1
            assert token == expected.token or expected.margin < MARGIN

    check()
    assert near[False] > 300
    assert near[True] < 0.05 * near[False]


def test_many_plain_draws_equal_the_reference(bench: Bench) -> None:
    """Settings that people use, 1,320 rows."""
    noise = random.Random(2)
    near = 0
    for batch in range(40):
        logits, histories = random_case(batch, 33)
        wanted = [
            Settings(
                prompt_len=noise.randint(0, len(history)),
                seed=noise.getrandbits(64),
                temperature=noise.choice([0.2, 0.7, 1.0]),
                top_k=noise.choice([0, 20, 50]),
                top_p=noise.choice([1.0, 0.93, 0.81]),
                min_p=noise.choice([0.0, 0.05]),
                repetition_penalty=noise.choice([1.0, 1.05]),
            )
            for history in histories
        ]
        tokens = bench.draw(logits, histories, wanted)
        for token, row, history, one in zip(tokens, logits.double().numpy(), histories, wanted, strict=True):
            expected = draw(row, history, one)
            near += expected.margin < MARGIN
            assert token == expected.token or expected.margin < MARGIN
    assert near < 13


@pytest.mark.parametrize(
    "wanted",
    [
        Settings(temperature=1.0),
        Settings(temperature=0.6, top_k=12),
        Settings(temperature=1.3, top_p=0.8),
        Settings(temperature=1.0, min_p=0.02),
        Settings(temperature=0.9, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.3, logit_bias={5: 2.0}),
    ],
)
def test_frequencies_are_the_probabilities(wanted: Settings, bench: Bench) -> None:
    """Chi-square over 6,336 seeds and positions; only tokens that the reference keeps are ever drawn."""
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=VOCAB) * 1.5).float()
    counts = np.zeros(VOCAB)
    for batch in range(192):
        history = [5, *[3] * (1 + batch % 20)]
        rows = [replace(wanted, seed=1000 * batch + row) for row in range(33)]
        counts += np.bincount(bench.draw(logits.expand(33, -1), [history] * 33, rows), minlength=VOCAB)
    expected = draw(logits.double().numpy(), [5, 3], wanted)
    assert counts[expected.kept].sum() == 192 * 33
    means = expected.probability * counts.sum()
    large = means >= 5
    observed = np.append(counts[expected.kept][large], counts[expected.kept][~large].sum())
    means = np.append(means[large], means[~large].sum())
    used = means > 0
    statistic = float((((observed - means)[used]) ** 2 / means[used]).sum())
    freedom = int(used.sum()) - 1
    assert freedom >= 5
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # seeds are fixed: this cannot flicker


def test_uniform_numbers_are_even_and_each_position_has_its_own() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(64) for position in range(64)])
    assert len(set(numbers.tolist())) > 4090
    counts = np.histogram(numbers, bins=16, range=(0, 1))[0]
    assert float(((counts - 256.0) ** 2 / 256).sum()) < 15 + 4 * 30**0.5


# --- each stage, by hand -----------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equal_logits(bench: Bench) -> None:
    assert one(bench, [1.0, 3.0, 2.0, 3.0]) == 1
    assert one(bench, [-0.0, 0.0, -1.0]) == 0
    assert one(bench, [-2.0, 0.0, -0.0]) == 1


def test_ties_are_drawn_in_order_of_id(bench: Bench) -> None:
    """Four equal tokens: the draw is a quarter of the uniform number."""
    for seed in range(40):
        expected = int(uniform(seed, 1) * 4)
        assert one(bench, [2.0, 2.0, 2.0, 2.0], temperature=0.5, seed=seed) == expected
        assert one(bench, [2.0, 2.0, 2.0, 2.0], temperature=0.5, seed=seed, top_k=2) == int(uniform(seed, 1) * 2)


def test_the_seed_has_64_bits(bench: Bench) -> None:
    tokens = {one(bench, [0.0] * VOCAB, temperature=1.0, seed=seed) for seed in (1, 1 + 2**32, 1 + 2**63, 1 + 2**31)}
    assert len(tokens) == 4


def test_repetition_counts_prompt_and_output(bench: Bench) -> None:
    logits = [4.0, 3.0, -1.0]
    assert one(bench, logits, [0, 5], prompt_len=1, repetition_penalty=1.5) == 1
    assert one(bench, logits, [5, 0], prompt_len=1, repetition_penalty=1.5) == 1
    assert one(bench, logits, [5, 5], prompt_len=1, repetition_penalty=1.5) == 0
    # Negative logits go down too.
    assert one(bench, [-1.0, -1.2], [0], prompt_len=1, repetition_penalty=1.5) == 1


def test_presence_and_frequency_count_output_alone(bench: Bench) -> None:
    logits = [4.0, 3.0]
    for penalty in ("presence_penalty", "frequency_penalty"):
        assert one(bench, logits, [0, 0, 0], prompt_len=3, **{penalty: 1.5}) == 0
        assert one(bench, logits, [0, 0, 0], prompt_len=2, **{penalty: 1.5}) == 1
    assert one(bench, logits, [7, 0, 0, 0], prompt_len=1, presence_penalty=0.9) == 0
    assert one(bench, logits, [7, 0, 0], prompt_len=1, frequency_penalty=0.4) == 0
    assert one(bench, logits, [7, 0, 0, 0], prompt_len=1, frequency_penalty=0.4) == 1


@pytest.mark.parametrize("garbage", [0, 1, -1, VOCAB, VOCAB + 1, 2**31 - 1, -(2**31)])
def test_what_lies_beyond_the_position_does_not_count(garbage: int, bench: Bench) -> None:
    row = torch.full((1, VOCAB), 0.0)
    row[0, 0], row[0, 1] = 2.0, 1.9
    wanted = Settings(prompt_len=1, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0)
    assert bench.draw(row, [[7, 7]], [wanted], garbage=garbage) == [0]


def test_bias_is_added_to_as_many_tokens_as_are_allowed(bench: Bench) -> None:
    assert one(bench, [1.0], logit_bias={VOCAB - 1: 100.0}) == VOCAB - 1
    assert one(bench, [1.0, 0.9], logit_bias={0: -0.2}) == 1
    assert one(bench, [0.0] * VOCAB, logit_bias={token: 1.0 + token for token in range(MAX_LOGIT_BIAS)}) == 63


def test_unused_entries_change_nothing(bench: Bench) -> None:
    """Ids and values beyond the counts are not looked at."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 1.0
    bench.set_rows(logits, [[0]], [Settings(min_tokens=9)])
    bench.io.params[0, Column.STOP_IDS : Column.BIAS_IDS] = 3
    bench.io.params[0, Column.BIAS_IDS :] = 2**31 - 1
    bench.driver.model.ops.draw(bench.io, 1)
    assert bench.io.coda_token[0] == 3


def test_stop_ids_are_banned_until_there_are_enough_outputs(bench: Bench) -> None:
    logits = [5.0, 4.0, 3.0]
    for generated in range(5):
        history = [9] * (3 + generated)
        expected = 2 if generated < 3 else 0
        wanted: dict[str, Any] = {"prompt_len": 3, "min_tokens": 3, "stop_token_ids": [0, 1]}
        assert one(bench, logits, history, **wanted) == expected
        assert one(bench, logits, history, **wanted, logit_bias={0: 100.0}) == expected
        if generated < 3:
            assert one(bench, logits, history, **wanted, temperature=100.0, seed=generated) not in (0, 1)
    assert one(bench, logits, [9] * 3, prompt_len=3, stop_token_ids=[0, 1]) == 0
    many = list(range(MAX_STOP_IDS))
    assert one(bench, [9.0 - token for token in many] + [-5.0], min_tokens=4, stop_token_ids=many) == MAX_STOP_IDS


def test_a_tiny_temperature_is_nearly_greedy(bench: Bench) -> None:
    assert all(one(bench, [3.0, 3.001, 2.0], temperature=1e-30, seed=seed) == 1 for seed in range(20))


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0, 1]),  # 0.4 is not enough
        ({"top_p": 0.39}, [0]),
        ({"top_p": 1e-30}, [0]),
        ({"top_p": 0.75}, [0, 1, 2]),
        ({"min_p": 0.6}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 2, "top_p": 0.56}, [0]),  # of what top-k left, the first has 4/7
        ({"top_k": 3, "min_p": 0.3}, [0, 1, 2]),
    ],
)
def test_what_is_kept(changes: dict[str, Any], kept: list[int], bench: Bench) -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1, over 330 seeds."""
    row = torch.full((33, VOCAB), -200.0)
    row[:, :4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    drawn: Counter[int] = Counter()
    for batch in range(10):
        wanted = [Settings(temperature=1.0, seed=33 * batch + index, **changes) for index in range(33)]
        drawn.update(bench.draw(row, [[0]] * 33, wanted))
    assert sorted(drawn) == kept


def test_a_row_that_stays_draws_nothing(bench: Bench) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    bench.set_rows(logits, [[1, 2], [3], [4, 5, 6]], [Settings(temperature=1.0)] * 3)
    bench.io.coda_left[1] = 0
    before = bench.io.token_table.clone()
    bench.driver.model.ops.draw(bench.io, 3)
    assert bench.io.coda_token[1] == -1
    changed = (bench.io.token_table != before)[:-1].nonzero().tolist()
    assert changed == [[0, 2], [2, 3]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_still_give_a_token(value: float, bench: Bench) -> None:
    logits = torch.full((2, VOCAB), value)
    tokens = bench.draw(logits, [[1], [2]], [Settings(temperature=1.0), Settings()])
    assert all(0 <= token < VOCAB for token in tokens)


def test_actions_are_what_the_scheduler_calls_them() -> None:
    assert {action.name: action.value for action in Action} == {action.name: action.value for action in CodaAction}
