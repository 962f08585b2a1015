"""Whole steps through interpreted kernels: equal to the ATen operators and the float64 reference; the same tokens."""

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from numpy.testing import assert_allclose

from tests.capture.driver import Driver, make_executor
from tests.model.cpu_step import same_bits
from tests.model.interpreted.launcher import make_launcher
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.base import Ops
from wavegraph.model.ops.triton.ops import TritonOps
from wavegraph.model.reference import ReferenceModel
from wavegraph.model.sampling import FEATURE_SAMPLER, Action, encode_params
from wavegraph.model.weights import model_from_tensors, random_weights

MakeDriver = Callable[..., Any]
MakeConfig = Callable[..., OuroConfig]

PROMPTS = [random.Random(seed).choices(range(97), k=length) for seed, length in enumerate((19, 4))]

# (spans, coda rows) of each step: a wavefront of two requests, whose chunks follow each other through two depths. The
# sampling program takes the last one.
SCHEDULE: list[tuple[list[tuple[int, int, int, int]], list[tuple[int, ...]]]] = [
    ([(0, 0, 17, 0), (1, 0, 1, 0)], []),
    ([(0, 0, 17, 1), (1, 0, 1, 1), (0, 17, 2, 0), (1, 1, 3, 0)], []),
    ([(1, 1, 3, 1), (0, 17, 2, 1)], [(0, 18), (1, 3, 1, Action.GATE)]),
    ([(0, 19, 1, 0)], [(0, 18, 1, Action.SCORE)]),
]


def run(
    ops: Ops, config: OuroConfig, dtype: torch.dtype, make_driver: MakeDriver, padding: int
) -> tuple[Any, list[int]]:
    """The driver after all steps, and the first tokens of the requests."""
    tensors = dict(random_weights(config, 3, dtype))
    driver = make_driver(model_from_tensors(config, tensors, ops=ops, dtype=dtype), page_size=16, max_len=32)
    tokens = {}
    for number, (spans, coda_rows) in enumerate(SCHEDULE):
        updates = [
            (slot, pos, PROMPTS[slot][pos])
            for slot, start, count, depth in spans
            for pos in range(start, min(start + count, len(PROMPTS[slot])))
            if depth == 0
        ]
        live = sum(span[2] for span in spans)
        params = [(slot, encode_params(exit_threshold=0.5, exit_copy=True)) for slot in range(2)] if number == 0 else []
        drawn = driver.step(
            spans,
            tokens=updates,
            bucket=live + padding,
            coda_rows=coda_rows,
            coda_bucket=len(coda_rows) + padding,
            params=params,
            full=number == 3,
        )
        tokens |= {row[0]: token for row, token in zip(coda_rows, drawn, strict=True) if token >= 0}
        if coda_rows:
            driver.model.ops.copy_exits(driver.io, driver.pools, len(coda_rows) + padding)
    return driver, [tokens[slot] for slot in sorted(tokens)]


@pytest.mark.parametrize(
    ("dtype", "bound", "deterministic"),
    [(torch.float32, 1e-5, True), (torch.bfloat16, 0.12, False)],
    ids=("fp32", "bf16"),
)
def test_steps_equal_eager(
    dtype: torch.dtype, bound: float, deterministic: bool, small_config: MakeConfig, make_driver: MakeDriver
) -> None:
    """Hidden rows, KV and logits over one schedule; in bfloat16 as near as both are to float64."""
    config = small_config(head_dim=16, total_ut_steps=2)
    ops = TritonOps(make_launcher(), deterministic=deterministic, programs=4)
    (got, tokens), (want, expected) = (run(each, config, dtype, make_driver, padding=3) for each in (ops, AtenOps()))
    assert tokens == expected
    assert len(tokens) == 2
    arrays = {name: tensor.double().numpy() for name, tensor in random_weights(config, 3, dtype)}
    reference = ReferenceModel(asdict(config), arrays)
    for slot, prompt in enumerate(PROMPTS):
        length = len(prompt)
        exact = reference.forward(prompt)
        for hidden in (want.hidden(slot, 0, length), exact.hidden[-1]):
            assert_allclose(got.hidden(slot, 0, length), hidden, rtol=0, atol=bound)
        for planes in (want.kv(slot, length), (exact.k, exact.v)):
            for mine, theirs in zip(got.kv(slot, length), planes, strict=True):
                assert_allclose(mine, theirs, rtol=0, atol=bound)
        assert_allclose(got.gates(slot, 0, length), want.gates(slot, 0, length), rtol=0, atol=bound)
    assert_allclose(got.io.logits[:1].double(), want.io.logits[:1].double(), rtol=0, atol=bound)
    assert torch.equal(got.io.token_table[:-1], want.io.token_table[:-1])


def test_deterministic_steps_have_the_same_bits_at_every_bucket(
    small_config: MakeConfig, make_driver: MakeDriver
) -> None:
    config = small_config(head_dim=16, num_hidden_layers=1, total_ut_steps=2)
    ops = TritonOps(make_launcher(), deterministic=True, programs=4)
    model = model_from_tensors(config, dict(random_weights(config, 3, torch.bfloat16)), ops=ops, dtype=torch.bfloat16)
    results = []
    for chunk, padding in ((4, 0), (3, 3)):
        driver = make_driver(model, page_size=16, max_len=32)
        driver.prefill(1, PROMPTS[1], chunk, padding=padding)
        page = driver.page(1, 0)
        pools = driver.pools
        results.append([pool[page, ..., :4, :].clone() for pool in (pools.k.transpose(3, 4), pools.hidden)])
        results[-1].append(driver.io.logits[0].clone())
    for one, other in zip(*results, strict=True):
        assert same_bits(one, other)


def test_an_executor_over_interpreted_kernels(small_config: MakeConfig) -> None:
    """The tokens of the ATen operators: packed inputs start anywhere, padding is whatever earlier steps left."""
    config = small_config(head_dim=16, num_hidden_layers=1, total_ut_steps=2)
    tensors = dict(random_weights(config, 3))
    results = []
    for ops in (TritonOps(make_launcher(), programs=4), AtenOps()):
        model = model_from_tensors(config, tensors, ops=ops, dtype=torch.float32)
        driver = Driver(make_executor(model, "eager", ladder=(2, 8), coda_ladder=(2,), page_size=16, num_pages=6))
        driver.features = FEATURE_SAMPLER
        driver.add(0, [5, 3, 9, 9, 2])
        driver.add(1, PROMPTS[1], encode_params(prompt_len=4, seed=5, temperature=0.8, top_k=20))
        results.append(driver.generate(2, chunk=3, budget=8))
    assert results[0] == results[1]
