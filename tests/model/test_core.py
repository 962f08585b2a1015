"""CORE and CODA over each set of operators, driven by hand, against the goldens and the float64 reference.

The driver fills everything that was never written with NaN, and hands out pages in a shuffled order.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch.utils._python_dispatch import TorchDispatchMode

from wavegraph.model.config import OuroConfig
from wavegraph.model.core import coda, coda_full, copy_exits, core, tables
from wavegraph.model.loading import load_model
from wavegraph.model.ops import aten
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.base import Ops
from wavegraph.model.reference import Forward, ReferenceModel
from wavegraph.model.weights import Model, RopeTables, model_from_tensors, random_weights

Golden = Callable[[str], dict[str, np.ndarray[Any, Any]]]
MakeDriver = Callable[..., Any]
MakeConfig = Callable[..., OuroConfig]

TOLERANCE = 1e-4
CHECKPOINTS = ("tiny", "tiny_gqa", "tiny_hd32", "tiny_sharded")


def make_models(
    config: OuroConfig, ops: Ops, seed: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Model, ReferenceModel]:
    """A random model and its float64 reference, of equal (rounded) weights."""
    tensors = dict(random_weights(config, seed, dtype))
    arrays = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    return model_from_tensors(config, tensors, ops=ops, dtype=dtype), ReferenceModel(asdict(config), arrays)


def prompt_of(length: int, vocab: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


def assert_request(driver: Any, slot: int, want: Forward, tolerance: float = TOLERANCE) -> None:
    """A request that went through all depths left the reference's hidden rows and KV behind."""
    length = want.hidden.shape[1]
    k, v = driver.kv(slot, length)
    assert_allclose(driver.hidden(slot, 0, length), want.hidden[-1], rtol=0, atol=tolerance)
    assert_allclose(k, want.k, rtol=0, atol=tolerance)
    assert_allclose(v, want.v, rtol=0, atol=tolerance)


# --- goldens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_step_equals_the_public_model(
    name: str, ops: Ops, goldens: Path, golden: Golden, make_driver: MakeDriver
) -> None:
    want = golden(name.removesuffix("_sharded"))
    tokens = want["token_ids"].tolist()
    driver = make_driver(load_model(goldens / name, ops=ops, max_model_len=64), coda_rows=24)
    for depth in range(4):
        updates = [(1, pos, token) for pos, token in enumerate(tokens)] if depth == 0 else []
        coda_rows = [(1, pos) for pos in range(24)]
        sampled = driver.step([(1, 0, 24, depth)], tokens=updates, bucket=29, coda_rows=coda_rows)
        assert_allclose(driver.hidden(1, 0, 24), want["hidden"][depth], rtol=0, atol=TOLERANCE)
        assert_allclose(driver.gates(1, 0, 24)[:, depth], want["gate_logit"][depth], rtol=0, atol=TOLERANCE)
        assert_allclose(driver.io.logits, want["step_logits"][depth], rtol=0, atol=TOLERANCE)
        assert sampled == want["step_logits"][depth].argmax(axis=1).tolist()
    k, v = driver.kv(1, 8)
    assert_allclose(k, want["kv8_k"], rtol=0, atol=TOLERANCE)
    assert_allclose(v, want["kv8_v"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_greedy_tokens_equal_the_public_model(
    name: str, chunk: int, ops: Ops, goldens: Path, golden: Golden, make_driver: MakeDriver
) -> None:
    want = golden(name.removesuffix("_sharded"))
    driver = make_driver(load_model(goldens / name, ops=ops, max_model_len=64))
    prompt = want["gen_prompt"].tolist()
    tokens = [driver.prefill(2, prompt, chunk, padding=1)]
    while len(tokens) < 24:
        pos = len(prompt) + len(tokens) - 1
        for depth in range(4):  # the sampled token is on the device already
            sampled = driver.step([(2, pos, 1, depth)], coda_rows=[(2, pos)] if depth == 3 else [])
        tokens += sampled
    assert tokens == want["gen_tokens"].tolist()


# --- any schedule of any shape -----------------------------------------------------------------------------

shapes = st.sampled_from(
    [
        {},
        {"num_key_value_heads": 4, "head_dim": 6},
        {"num_key_value_heads": 1, "head_dim": 10},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "num_hidden_layers": 1},
        {"total_ut_steps": 1, "rms_norm_eps": 0.1},
        {"total_ut_steps": 4, "rope_theta": 10.0, "tie_word_embeddings": True},
    ]
)


def wavefront(driver: Any, prompts: Sequence[list[int]], draw: random.Random) -> dict[int, int]:
    """Run prompts by random legal steps of mixed requests, depths and chunks. Returns the first tokens."""
    depths = driver.model.config.total_ut_steps
    frontier = [[len(prompt)] + [0] * depths for prompt in prompts]
    first: dict[int, int] = {}
    while len(first) < len(prompts):
        spans, tokens, due = [], [], []
        before = [list(row) for row in frontier]
        for slot, prompt in enumerate(prompts):
            for depth in range(depths):
                ready = before[slot][depth] - before[slot][depth + 1]
                count = draw.randint(0, min(ready, 7))
                if count == 0:
                    continue
                start = before[slot][depth + 1]
                spans.append((slot, start, count, depth))
                frontier[slot][depth + 1] += count
                if depth == 0:
                    tokens += [(slot, pos, prompt[pos]) for pos in range(start, start + count)]
            if frontier[slot][-1] == len(prompt) and slot not in first and slot not in due:
                due.append(slot)
        draw.shuffle(spans)
        live = sum(span[2] for span in spans)
        if spans:
            coda_rows = [(slot, len(prompts[slot]) - 1) for slot in due]
            bucket, coda_bucket = live + draw.randint(0, 3), len(due) + draw.randint(0, 2)
            sampled = driver.step(spans, tokens=tokens, bucket=bucket, coda_rows=coda_rows, coda_bucket=coda_bucket)
            first |= dict(zip(due, sampled, strict=True))
    return first


@settings(max_examples=40)
@given(changes=shapes, seed=st.integers(0, 10**6), page_size=st.integers(1, 6))
def test_any_schedule_equals_the_reference(
    changes: dict[str, Any], seed: int, page_size: int, ops: Ops, small_config: MakeConfig, make_driver: MakeDriver
) -> None:
    draw = random.Random(seed)
    config = small_config(**changes)
    model, reference = make_models(config, ops)
    driver = make_driver(model, slots=3, max_len=24, page_size=page_size, seed=seed)
    prompts = [prompt_of(draw.randint(1, 20), config.vocab_size, seed + slot) for slot in range(3)]
    first = wavefront(driver, prompts, draw)
    for slot, prompt in enumerate(prompts):
        want = reference.forward(prompt)
        assert_request(driver, slot, want)
        assert first[slot] == int(want.logits[-1, -1].argmax())


def test_gate_of_every_row_of_a_mixed_step(ops: Ops, small_config: MakeConfig, make_driver: MakeDriver) -> None:
    config = small_config()
    model, reference = make_models(config, ops)
    driver = make_driver(model)
    prompts = {0: prompt_of(9, 97, 0), 1: prompt_of(5, 97, 1)}
    want = {slot: reference.forward(prompt).gate_logits for slot, prompt in prompts.items()}
    tokens = [(slot, pos, token) for slot, prompt in prompts.items() for pos, token in enumerate(prompt)]
    driver.step([(0, 0, 6, 0), (1, 0, 5, 0)], tokens=tokens)
    driver.step([(0, 0, 4, 1)])
    spans = [(1, 0, 3, 1), (0, 6, 3, 0), (0, 0, 2, 2), (0, 4, 2, 1)]
    driver.step(spans, bucket=12)
    for slot, start, n, depth in spans:
        expected = want[slot][depth, start : start + n]
        assert_allclose(driver.gates(slot, start, start + n)[:, depth], expected, rtol=0, atol=TOLERANCE)
    assert driver.gates(1, 0, 5)[3:, 1:].isnan().all()  # gates of depths that did not run


# --- padding, scratch and poison ---------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [-1, 5, 2**31 - 1])
def test_scratch_garbage_changes_no_bit(
    garbage: int, ops: Ops, small_config: MakeConfig, make_driver: MakeDriver
) -> None:
    model, _ = make_models(small_config(), ops)
    results = []
    for dirty in (False, True):
        driver = make_driver(model)
        if dirty:
            driver.io.token_table[driver.slots] = garbage
            driver.io.params[driver.slots] = garbage
        first = [driver.prefill(slot, prompt_of(7, 97, slot), chunk=3, padding=4) for slot in range(3)]
        driver.step([(0, 7, 1, 0)], bucket=8, coda_rows=[(1, 6)], coda_bucket=4)
        results.append((first, driver.hidden(1, 0, 7), *driver.kv(2, 7), driver.io.coda_token[0].item()))
    for clean, dirty in zip(*results, strict=True):
        np.testing.assert_array_equal(clean, dirty)


def test_a_step_writes_only_its_rows_and_scratch(ops: Ops, small_config: MakeConfig, make_driver: MakeDriver) -> None:
    model, _ = make_models(small_config(), ops)
    driver = make_driver(model)
    driver.prefill(0, prompt_of(8, 97, 0), chunk=8)
    driver.step([(1, 0, 5, 0)], tokens=[(1, pos, 3) for pos in range(5)])
    stored = driver.io.token_table, driver.io.page_table, driver.io.params
    pools = driver.pools.k, driver.pools.v, driver.pools.hidden, driver.pools.gate
    before = [tensor.clone() for tensor in (*pools, *stored)]
    driver.step([(1, 0, 2, 1)], bucket=9, coda_rows=[(0, 7)], coda_bucket=3)
    k, v, hidden, gate = (pool.clone() for pool in pools)
    token_table, page_table, params = (table.clone() for table in stored)
    for pos in (0, 1):
        page, offset = driver.page(1, pos), pos % driver.page_size
        assert not k[page, 1, :, offset].isnan().any()
        k[page, 1, :, offset], v[page, 1, :, offset] = before[0][page, 1, :, offset], before[1][page, 1, :, offset]
        hidden[page, offset] = before[2][page, offset]
        assert not gate[page, offset, 1].isnan()
        gate[page, offset, 1] = before[3][page, offset, 1]
    token_table[0, 8] = before[4][0, 8]
    for after, earlier in zip((k, v, hidden, gate, token_table, page_table, params), before, strict=True):
        assert torch.equal(after[:-1].nan_to_num(9e9), earlier[:-1].nan_to_num(9e9))  # the last is scratch


def test_recycled_slot_and_pages_need_no_cleaning(ops: Ops, small_config: MakeConfig, make_driver: MakeDriver) -> None:
    config = small_config()
    model, reference = make_models(config, ops)
    driver = make_driver(model, slots=2, max_len=24)
    driver.prefill(0, prompt_of(21, 97, 0), chunk=8)
    driver.release(0)
    driver.prefill(1, prompt_of(20, 97, 1), chunk=8)  # takes some of the pages slot 0's stale entries name
    prompt = prompt_of(6, 97, 2)
    first = driver.prefill(0, prompt, chunk=4)
    want = reference.forward(prompt)
    assert_request(driver, 0, want)
    assert first == int(want.logits[-1, -1].argmax())


# --- prepare and draw -------------------------------------------------------------------------------------


def rows_of(driver: Any, rows: int) -> list[tuple[int, ...]]:
    fields = [getattr(driver.io, f"row_{name}")[:rows].tolist() for name in ("slot", "pos", "depth")]
    return list(zip(*fields, strict=True))


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(0, 0, 1, 0)],
        [(2, 3, 4, 1), (0, 9, 1, 2), (1, 0, 3, 0)],
        [(0, 0, 2, 0), (1, 7, 0, 1), (2, 1, 0, 2), (1, 2, 2, 1)],
        [(index % 3, index, 1, 2) for index in range(16)],
    ],
)
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_spans_expand_to_rows(
    spans: list[tuple[int, int, int, int]], padding: int, ops: Ops, small_config: MakeConfig, make_driver: MakeDriver
) -> None:
    driver = make_driver(make_models(small_config(), ops)[0])
    driver.step([(slot, 0, 20, 0) for slot in range(3)])  # every position has a page
    driver.fill_inputs(spans)
    expected = [(slot, start + index, depth) for slot, start, n, depth in spans for index in range(n)]
    live = len(expected)
    rows = max(1, live + padding)
    expected += [(driver.slots, 0, 0)] * (rows - live)
    driver.model.ops.prepare(driver.io, driver.pools, rows)
    assert rows_of(driver, rows) == expected
    pages = [driver.page(slot, pos) for slot, pos, _ in expected[:live]] + [driver.scratch_page] * (rows - live)
    assert driver.io.row_page[:rows].tolist() == pages
    assert driver.io.row_offset[:rows].tolist() == [pos % driver.page_size for _, pos, _ in expected]


def test_greedy_takes_the_first_of_equals(ops: Ops, small_config: MakeConfig, make_driver: MakeDriver) -> None:
    driver = make_driver(make_models(small_config(), ops)[0])
    driver.fill_inputs([], coda_rows=[(1, 4), (0, 0)])
    driver.io.coda_left[:3] = torch.tensor([1, 1, 0])
    driver.io.logits[:3] = 0
    driver.io.logits[0, [11, 60, 96]] = 2.0
    driver.model.ops.draw_greedy(driver.io, 3)
    assert driver.io.coda_token[:3].tolist() == [11, 0, -1]
    assert driver.io.token_table[1, 5] == 11
    assert driver.io.token_table[:-1].sum() == 11


# --- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.12), (torch.float16, 0.015)])
def test_half_precision_is_near_the_reference(
    dtype: torch.dtype, bound: float, ops: Ops, small_config: MakeConfig, make_driver: MakeDriver
) -> None:
    if dtype == torch.float16 and ops.name == "cpu":
        pytest.skip("the C++ operators have no float16")
    model, reference = make_models(small_config(), ops, dtype=dtype)
    driver = make_driver(model)
    prompt = prompt_of(20, 97, 0)
    driver.prefill(0, prompt, chunk=6, padding=2)
    want = reference.forward(prompt)
    assert_request(driver, 0, want, tolerance=bound)
    error = driver.hidden(0, 0, 20) - want.hidden[-1]
    assert np.sqrt((error**2).mean()) < bound / 4
    assert driver.io.logits.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_rounds_before_the_weight(ops: Ops, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and ops.name == "cpu":
        pytest.skip("the C++ operators have no float16")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 24, generator=generator).mul(3).to(dtype)
    weight = torch.randn(24, generator=generator).to(dtype)
    out = torch.full_like(x, float("nan"))
    ops.norm(out, x, weight, 1e-6, 4)
    wide = x.double()
    exact = wide / (wide.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(out[:4], (weight * exact.to(dtype))[:4])
    assert out[4].isnan().all()


def test_rotary_tables_are_float32_angles(small_config: MakeConfig) -> None:
    config = small_config(max_position_embeddings=65536, rope_theta=1e6)
    tables = RopeTables.build(config, 65536, torch.float32)
    angles = np.arange(65536)[:, None] * 1e6 ** -(np.arange(0, 8, 2) / 8)
    for table, exact in ((tables.cos, np.cos(angles)), (tables.sin, np.sin(angles))):
        error = np.abs(table.numpy() - np.tile(exact, 2))
        assert (error <= 1e-6 + 3e-7 * np.tile(angles, 2)).all()  # float32 rounds frequency and angle
    assert RopeTables.build(config, 4, torch.bfloat16).cos.dtype == torch.bfloat16


def test_attention_in_blocks_equals_attention_at_once(
    small_config: MakeConfig, make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = make_models(small_config(), AtenOps())
    prompt = prompt_of(20, 97, 3)
    for limit in (1, 4000):
        monkeypatch.setattr(aten, "_GATHER_LIMIT", limit)
        driver = make_driver(model)
        driver.prefill(0, prompt, chunk=11, padding=2)
        assert_request(driver, 0, reference.forward(prompt))


# --- the contract of a recorded program --------------------------------------------------------------------


class Tape(TorchDispatchMode):
    """Notes each operator with the shapes and storages it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, tuple | list) else [] if out is None else [out]
        shapes = [tuple(tensor.shape) for tensor in outputs]
        scalars = [arg for arg in args if isinstance(arg, int | float)]
        self.calls.append(f"{func} {scalars} -> {shapes}")
        return out


def test_the_operators_depend_on_rows_alone(ops: Ops, small_config: MakeConfig, make_driver: MakeDriver) -> None:
    driver = make_driver(make_models(small_config(), ops)[0])
    tapes = []
    for spans in ([(0, 0, 6, 0)], [(1, 0, 1, 0), (0, 6, 2, 0), (0, 0, 3, 1)], []):
        driver.fill_inputs(spans, tokens=[(slot, start, 1) for slot, start, _, _ in spans])
        with Tape() as tape:
            core(driver.model, driver.io, driver.pools, driver.work, 7)
            tables(driver.model, driver.io)
            coda_full(driver.model, driver.io, driver.pools, driver.work, 2)
            coda(driver.model, driver.io, driver.pools, driver.work, 2)
            copy_exits(driver.model, driver.io, driver.pools, 2)
        tapes.append(tape.calls)
    assert tapes[0] == tapes[1] == tapes[2]
    banned = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "rand")
    assert not [call for call in tapes[0] if any(name in call for name in banned)]
