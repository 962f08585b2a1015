"""CODA around the draw: who leaves, scores, copies of exits; bits that depend on the row alone, and recordings."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.capture.verify import bits, verify_program
from wavegraph.model.config import OuroConfig
from wavegraph.model.core import coda, coda_full, copy_exits, core, tables
from wavegraph.model.loading import load_model
from wavegraph.model.ops import aten_sampling
from wavegraph.model.ops.base import Ops
from wavegraph.model.sampling import MAX_TOP_LOGPROBS, NEVER, Action, Column, encode_params
from wavegraph.model.weights import Model, model_from_tensors, random_weights

SAMPLE, GATE, SCORE, REPLAY = Action.SAMPLE, Action.GATE, Action.SCORE, Action.REPLAY
GOLDEN_NAMES = ("tiny", "tiny_gqa", "tiny_hd32")

Golden = Callable[[str], dict[str, np.ndarray[Any, Any]]]
MakeDriver = Callable[..., Any]
MakeConfig = Callable[..., OuroConfig]


@pytest.fixture(scope="module")
def model(small_config: MakeConfig, ops: Ops) -> Model:
    return make_model(small_config(), ops)


def make_model(config: OuroConfig, ops: Ops) -> Model:
    return model_from_tensors(config, dict(random_weights(config, 1)), ops=ops, dtype=torch.float32)


def set_params(driver: Any, slot: int, **changes: Any) -> None:
    driver.io.params[slot] = torch.tensor(encode_params(**changes), dtype=torch.int32)


def own_pages(driver: Any, slots: Sequence[int], length: int) -> None:
    """Give every position of some requests a page, and hidden rows and KV at all depths."""
    depths = driver.model.config.total_ut_steps
    for slot in slots:
        tokens = [(slot, pos, (7 * pos + slot) % 50) for pos in range(length)]
        for depth in range(depths):
            driver.step([(slot, 0, length, depth)], tokens=tokens if depth == 0 else ())


# --- who leaves --------------------------------------------------------------------------------------------


def leaving(driver: Any, rows: Sequence[tuple[int, ...]]) -> list[int]:
    driver.fill_inputs([], coda_rows=rows)
    driver.io.coda_left.fill_(-1)
    driver.model.ops.leave(driver.io, driver.pools, len(rows) + 1)
    assert driver.io.coda_left[len(rows)] == 0  # padding
    left: list[int] = driver.io.coda_left[: len(rows)].tolist()
    return left


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_exit_steps_equal_the_public_model(
    name: str, ops: Ops, goldens: Path, golden: Golden, make_driver: MakeDriver
) -> None:
    """All thresholds, from the gate logits of the public model; gates of deeper depths are NaN at each decision."""
    want = golden(name)
    driver = make_driver(load_model(goldens / name, ops=ops, max_model_len=64), coda_rows=25)
    driver.step([(1, 0, 24, 0)])
    steps = np.full((len(want["thresholds"]), 24), -1)
    for depth in range(4):
        for pos in range(24):
            gates = driver.pools.gate[driver.page(1, pos), pos % driver.page_size]
            gates[: depth + 1] = torch.from_numpy(want["gate_logit"][: depth + 1, pos])
            gates[depth + 1 :] = torch.nan
        for row, threshold in enumerate(want["thresholds"]):
            set_params(driver, 1, exit_threshold=float(threshold))
            left = np.array(leaving(driver, [(1, pos, depth, GATE) for pos in range(24)]))
            steps[row] = np.where((steps[row] < 0) & (left == 1), depth, steps[row])
    np.testing.assert_array_equal(steps, want["exit_steps"])


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_gates_of_core_give_the_exit_steps(
    name: str, ops: Ops, goldens: Path, golden: Golden, make_driver: MakeDriver
) -> None:
    """CORE's own gate logits; goldens nearer than 1e-4 to a threshold are left out."""
    want = golden(name)
    driver = make_driver(load_model(goldens / name, ops=ops, max_model_len=64), coda_rows=25)
    tokens = [(1, pos, token) for pos, token in enumerate(want["token_ids"].tolist())]
    steps = np.full((len(want["thresholds"]), 24), -1)
    for depth in range(4):
        driver.step([(1, 0, 24, depth)], tokens=tokens if depth == 0 else ())
        for row, threshold in enumerate(want["thresholds"]):
            set_params(driver, 1, exit_threshold=float(threshold))
            left = np.array(leaving(driver, [(1, pos, depth, GATE) for pos in range(24)]))
            steps[row] = np.where((steps[row] < 0) & (left == 1), depth, steps[row])
    clear = (np.abs(want["cdf"][None] - want["thresholds"][:, None, None]) > 1e-4).all(axis=1)
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(steps[clear], want["exit_steps"][clear])


def test_the_action_decides_first(model: Model, make_driver: MakeDriver) -> None:
    driver = make_driver(model)
    own_pages(driver, [0, 1], 3)
    set_params(driver, 0, exit_threshold=0.0)
    set_params(driver, 1, exit_threshold=NEVER)
    for slot, gate in ((0, 1), (1, 0)):
        for depth in (0, 1):
            assert leaving(driver, [(slot, 1, depth, action) for action in Action]) == [1, gate, 0, 0]
        assert leaving(driver, [(slot, 1, 2, action) for action in Action]) == [1, 1, 0, 0]  # the last depth


def test_the_threshold_is_reached_not_passed(model: Model, make_driver: MakeDriver) -> None:
    """Gate logits of zero leave 1/2, 1/4 and 1/8 of the mass."""
    driver = make_driver(model)
    own_pages(driver, [0], 3)
    driver.pools.gate[driver.page(0, 2), 2 % driver.page_size] = torch.tensor([0.0, 0.0, torch.nan])
    for threshold, left in ((0.5, [1, 1]), (0.500001, [0, 1]), (0.75, [0, 1]), (0.750001, [0, 0])):
        set_params(driver, 0, exit_threshold=threshold)
        assert leaving(driver, [(0, 2, 0, GATE), (0, 2, 1, GATE)]) == left


def test_a_row_that_stays_stores_nothing(model: Model, make_driver: MakeDriver) -> None:
    driver = make_driver(model)
    own_pages(driver, [0, 1, 2], 6)
    set_params(driver, 1, exit_threshold=0.0)
    rows = [(0, 5, 1, GATE), (1, 5, 1, GATE), (2, 2, 2, SCORE), (2, 5, 1, REPLAY), (2, 4, 2, SAMPLE)]
    for full in (False, True):
        before = driver.io.token_table.clone()
        tokens = driver.step([(0, 0, 1, 0)], coda_rows=rows, coda_bucket=8, full=full)
        best = driver.io.logits[:5].argmax(dim=1).tolist()
        assert tokens == [-1, best[1], -1, -1, best[4]]
        before[1, 6], before[2, 5] = best[1], best[4]
        assert torch.equal(driver.io.token_table[:-1], before[:-1])


def test_greedy_rows_agree_in_both_programs(model: Model, make_driver: MakeDriver) -> None:
    driver = make_driver(model)
    own_pages(driver, [0, 1, 2], 20)
    set_params(driver, 2, temperature=1.0, seed=4)
    rows = [(slot, pos) for slot in range(3) for pos in (4, 19)]
    greedy, full = (driver.step([(0, 0, 1, 0)], coda_rows=rows, full=full) for full in (False, True))
    assert greedy[:4] == full[:4]


# --- scores ------------------------------------------------------------------------------------------------


def test_scores_of_drawn_and_of_known_tokens(model: Model, make_driver: MakeDriver) -> None:
    """Log-softmax, rank and top list against NumPy: raw logits, whatever penalties and bias did to the draw."""
    driver = make_driver(model)
    own_pages(driver, [0, 1, 2], 20)
    set_params(driver, 0, logit_bias={13: 100.0})
    set_params(driver, 1, temperature=1.0, seed=11)
    rows = [(0, 19), (1, 19), (2, 4, 2, SCORE), (2, 18, 1, SCORE)]
    tokens = driver.step([(0, 0, 1, 0)], coda_rows=rows, coda_bucket=6, full=True)
    assert tokens[0] == 13
    assert tokens[2:] == [-1, -1]
    scored = [*tokens[:2], (7 * 5 + 2) % 50, (7 * 19 + 2) % 50]
    logits = driver.io.logits[:4].double().numpy()
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for row, token in enumerate(scored):
        assert driver.io.coda_logprob[row].item() == pytest.approx(logprobs[row, token], abs=1e-5)
        assert driver.io.coda_rank[row] == (logits[row] > logits[row, token]).sum()
    best = np.argsort(-logits, axis=1, kind="stable")[:, :MAX_TOP_LOGPROBS]
    np.testing.assert_array_equal(driver.io.top_ids[:4], best)
    np.testing.assert_allclose(driver.io.top_logprobs[:4], np.take_along_axis(logprobs, best, axis=1), atol=1e-5)


def test_equal_logits_are_listed_by_id(model: Model, ops: Ops, make_driver: MakeDriver) -> None:
    driver = make_driver(model)
    driver.fill_inputs([], coda_rows=[(0, 3)])
    driver.io.logits[:2] = 0.0
    driver.io.logits[0, 50] = 1.0
    driver.io.logits[0, 2] = -0.0
    driver.io.coda_token[0] = 60
    driver.model.ops.score(driver.io, 1)
    assert driver.io.top_ids[0].tolist() == [50, *range(19)]
    assert driver.io.coda_rank[0] == 1


def test_a_small_vocabulary_has_a_short_list(ops: Ops, small_config: MakeConfig, make_driver: MakeDriver) -> None:
    driver = make_driver(make_model(small_config(vocab_size=7), ops))
    driver.step([(0, 0, 2, 0)], tokens=[(0, 0, 3)])
    tokens = driver.step([(0, 0, 2, 1)], coda_rows=[(0, 1)], full=True)
    assert driver.io.top_ids[0, 0] == tokens[0]
    assert sorted(driver.io.top_ids[0].tolist()) == list(range(7))
    assert driver.io.top_logprobs[0].exp().sum().item() == pytest.approx(1.0, abs=1e-5)


# --- copies of exits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_exits_are_copied_and_nothing_else_is_touched(
    seed: int, ops: Ops, small_config: MakeConfig, make_driver: MakeDriver
) -> None:
    draw = random.Random(seed)
    driver = make_driver(make_model(small_config(total_ut_steps=4), ops), page_size=1 + seed, coda_rows=16)
    own_pages(driver, [0, 1, 2], 12)
    for slot in range(3):
        set_params(driver, slot, exit_copy=slot != 1)
    places = draw.sample([(slot, pos) for slot in range(3) for pos in range(12)], 12)
    rows = [(slot, pos, draw.randrange(4), draw.choice(list(Action))) for slot, pos in places]
    driver.fill_inputs([], coda_rows=rows)
    left = [draw.randrange(2) if action is GATE else int(action is SAMPLE) for *_, action in rows]
    driver.io.coda_left[:12] = torch.tensor(left)
    driver.io.coda_left[12:] = 1  # of padding, which owns nothing
    pools = driver.pools.k, driver.pools.v, driver.pools.hidden, driver.pools.gate
    expected = [pool.clone() for pool in pools]
    copied = 0
    for (slot, pos, depth, action), leaves in zip(rows, left, strict=True):
        if slot != 1 and (leaves or action is REPLAY):
            copied += depth < 3
            page, offset = driver.page(slot, pos), pos % driver.page_size
            for pool in expected[:2]:
                pool[page, depth + 1 :, :, offset] = pool[page, depth, :, offset]
    assert copied >= 1
    driver.model.ops.copy_exits(driver.io, driver.pools, 16)
    for pool, want in zip(pools, expected, strict=True):
        assert torch.equal(bits(pool[:-1]), bits(want[:-1]))  # the last page is scratch


def test_one_depth_has_nothing_to_copy(ops: Ops, small_config: MakeConfig, make_driver: MakeDriver) -> None:
    driver = make_driver(make_model(small_config(total_ut_steps=1), ops))
    own_pages(driver, [0], 4)
    set_params(driver, 0, exit_copy=True)
    driver.step([(0, 0, 1, 0)], coda_rows=[(0, 3)])
    before = bits(driver.pools.k[:-1])
    driver.model.ops.copy_exits(driver.io, driver.pools, 2)
    assert torch.equal(bits(driver.pools.k[:-1]), before)


# --- a row's bits depend on the row alone ------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 5, "exit_threshold": 0.6},
    {"temperature": 1.5, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.2, "exit_threshold": 0.3},
    {"temperature": 1.0, "seed": 2**40, "top_k": 20, "min_p": 0.01, "logit_bias": {3: 2.0}, "min_tokens": 30},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "prompt_len": 2, "exit_threshold": 0.8},
]


class Batch:
    """Coda rows of a few requests, run in any selection, and what comes out of each."""

    def __init__(self, driver: Any, vocab: int) -> None:
        self.driver = driver
        noise = torch.Generator().manual_seed(1)
        slots = range(len(SETTINGS))
        for slot in slots:
            driver.fill_inputs([(slot, 0, 12, 0)])  # pages
            driver.model.ops.update_tables(driver.io)
            set_params(driver, slot, **SETTINGS[slot])
        driver.pools.gate.copy_(torch.randn(driver.pools.gate.shape, generator=noise))
        driver.io.token_table[:-1] = torch.randint(vocab, driver.io.token_table[:-1].shape, generator=noise).int()
        self.rows = [(slot, pos, pos % 3, Action(pos % 3)) for slot in slots for pos in range(12)]
        self.logits = torch.randn(len(self.rows), vocab, generator=noise) * 3
        self.tokens = driver.io.token_table.clone()

    def run(self, chosen: Sequence[int], padding: int) -> list[Tensor]:
        io, ops, count = self.driver.io, self.driver.model.ops, len(chosen)
        io.token_table.copy_(self.tokens)
        self.driver.fill_inputs([], coda_rows=[self.rows[index] for index in chosen])
        io.logits.fill_(torch.nan)
        io.logits[:count] = self.logits[list(chosen)]
        ops.leave(io, self.driver.pools, count + padding)
        ops.draw(io, count + padding)
        ops.score(io, count + padding)
        outputs = io.coda_left, io.coda_token, io.coda_logprob, io.coda_rank, io.top_ids, io.top_logprobs
        return [bits(output[:count]).view(count, -1) for output in outputs]


@pytest.mark.parametrize(("vocab", "trials"), [(97, 30), (1000, 20), (49152, 4)])
def test_neighbours_place_and_number_change_no_bit(
    vocab: int,
    trials: int,
    ops: Ops,
    small_config: MakeConfig,
    make_driver: MakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside NaN neighbours, in blocks of any size, on one thread and on two."""
    driver = make_driver(
        make_model(small_config(vocab_size=vocab), ops), slots=5, max_len=24, coda_rows=64, page_size=5
    )
    batch = Batch(driver, vocab)
    whole = range(0, 60, 1 if vocab < 2000 else 7)
    alone = {index: batch.run([index], 0) for index in whole}
    draw = random.Random(vocab)
    for trial in range(trials):
        monkeypatch.setattr(aten_sampling, "_BLOCK_LIMIT", vocab * draw.choice((1, 3, 100)))
        torch.set_num_threads(1 + trial % 2)
        chosen = draw.sample(whole, draw.randint(1, len(whole)))
        for name, output, expected in zip(
            ("left", "token", "logprob", "rank", "top_ids", "top_logprobs"),
            batch.run(chosen, draw.randint(0, 4)),
            zip(*(alone[index] for index in chosen), strict=True),
            strict=True,
        ):
            assert torch.equal(output, torch.cat(expected)), f"{name}, trial {trial}"


@pytest.mark.parametrize("garbage", [-1, 7, 2**31 - 1])
def test_garbage_in_scratch_changes_nothing(garbage: int, model: Model, ops: Ops, make_driver: MakeDriver) -> None:
    results = []
    for dirty in (False, True):
        driver = make_driver(model)
        own_pages(driver, [0, 1], 8)
        set_params(driver, 0, temperature=1.0, seed=3, exit_threshold=0.5, exit_copy=True)
        if dirty:
            driver.io.token_table[driver.slots] = garbage
            driver.io.params[driver.slots] = garbage
            for pool in (driver.pools.k, driver.pools.v, driver.pools.hidden, driver.pools.gate):
                pool[driver.scratch_page] = torch.nan
        rows = [(0, 7, 1, GATE), (1, 7), (0, 3, 2, SCORE)]
        tokens = driver.step([(0, 0, 1, 0)], coda_rows=rows, coda_bucket=7, full=True)
        driver.model.ops.copy_exits(driver.io, driver.pools, 7)
        kept = driver.io.coda_logprob[:3], driver.io.top_ids[:3], driver.io.token_table[:-1], driver.pools.k[:-1]
        results.append((tokens, [bits(tensor) for tensor in kept]))
    assert results[0][0] == results[1][0]
    for clean, dirty_bits in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(clean, dirty_bits)


# --- recordings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["core", "coda", "coda_full", "copy_exits", "tables"])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
def test_recordings_equal_plain_runs(
    name: str, rows: int, dtype: torch.dtype, ops: Ops, small_config: MakeConfig, make_driver: MakeDriver
) -> None:
    config = small_config()
    model = model_from_tensors(config, dict(random_weights(config, 1, dtype)), ops=ops, dtype=dtype)
    driver = make_driver(model)
    own_pages(driver, [0, 1, 2], 9)
    io, pools, work = driver.io, driver.pools, driver.work
    programs: dict[str, Callable[[], None]] = {
        "core": lambda: core(model, io, pools, work, rows),
        "coda": lambda: coda(model, io, pools, work, rows),
        "coda_full": lambda: coda_full(model, io, pools, work, rows),
        "copy_exits": lambda: copy_exits(model, io, pools, rows),
        "tables": lambda: tables(model, io),
    }

    def change(number: int) -> None:
        draw = random.Random(number)
        live = draw.randint(1, rows)
        chosen = [
            (draw.randrange(3), draw.randrange(9), draw.randrange(3), Action(draw.randrange(4))) for _ in range(live)
        ]
        params = [(slot, encode_params(**draw.choice(SETTINGS), exit_copy=True)) for slot in range(draw.randrange(4))]
        tokens = [(slot, number + 1, draw.randrange(97)) for slot in range(3)]
        driver.fill_inputs([(0, 0, live, number % 3)], tokens=tokens, coda_rows=chosen, params=params)
        io.coda_left.copy_(torch.tensor([draw.randrange(2) for _ in range(8)]))

    static = {"model.embedding": model.weights.embedding, "model.norm": model.weights.norm}
    static |= {
        f"gate{index}": tensor for index, tensor in enumerate((model.weights.gate_weight, model.weights.gate_bias))
    }
    static |= {"lm_head": model.weights.lm_head, "cos": model.rope.cos, "sin": model.rope.sin}
    for index, layer in enumerate(model.weights.layers):
        static |= {f"{index}.{field}": getattr(layer, field) for field in layer.__slots__}
    for part in (io, pools, work):
        static |= {f"{type(part).__name__}.{field}": getattr(part, field) for field in part.__slots__}
    change(0)
    verify_program(programs[name], static, change)


def test_parameters_reach_their_slot_alone(model: Model, make_driver: MakeDriver) -> None:
    driver = make_driver(model)
    row = encode_params(temperature=0.5, seed=77, exit_copy=True)
    before = driver.io.params.clone()
    driver.fill_inputs([], params=[(1, row)])
    tables(model, driver.io)
    assert driver.io.params[1].tolist() == list(row)
    assert torch.equal(driver.io.params[[0, 2]], before[[0, 2]])
    assert driver.io.params[1, Column.EXIT_COPY] == 1
