"""CORE and CODA over the C++ operators: the goldens, and equal bits under any schedule."""

import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.cpu_step import ISAS, same_bits
from wavegraph.model.config import OuroConfig
from wavegraph.model.core import coda, copy_exits, core
from wavegraph.model.loading import load_model
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.cpu import CpuOps
from wavegraph.model.reference import ReferenceModel
from wavegraph.model.weights import Model, model_from_tensors, random_weights

Golden = Callable[[str], dict[str, np.ndarray[Any, Any]]]
MakeDriver = Callable[..., Any]

TOLERANCE = 1e-4


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(request.param)


@pytest.mark.parametrize("name", ["tiny_gqa", "tiny_hd32"])
def test_every_step_equals_the_public_model(
    name: str, ops: CpuOps, goldens: Path, golden: Golden, make_driver: MakeDriver
) -> None:
    """On each instruction set; `test_core` does more on the best."""
    want = golden(name)
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


class Calls(TorchDispatchMode):
    """Notes the operators called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        assert func._schema.is_mutable
        return func(*args, **(kwargs or {}))


def test_core_is_one_operator_a_call(goldens: Path, make_driver: MakeDriver) -> None:
    driver = make_driver(load_model(goldens / "tiny", ops=CpuOps(), max_model_len=64))
    driver.fill_inputs([(0, 0, 3, 0)], [(0, 0, 1), (0, 1, 2), (0, 2, 3)], [(0, 2)])
    with Calls() as calls:
        core(driver.model, driver.io, driver.pools, driver.work, 4)
        coda(driver.model, driver.io, driver.pools, driver.work, 1)
        copy_exits(driver.model, driver.io, driver.pools, 1)
    layer = [
        "linear",
        "rope_write",
        "attention",
        "linear",
        "residual_norm",
        "linear_silu_mul",
        "linear",
        "residual_norm",
    ]
    expected = ["update_tables", "prepare", "gather", "norm", *layer * 2, "scatter_gate"]
    expected += ["coda_gather", "linear", "leave", "draw_greedy", "copy_exits"]
    assert calls.names == [f"wavegraph::{name}" for name in expected]


def results(driver: Any, slot: int, length: int) -> tuple[Tensor, ...]:
    """Hidden rows and KV of a request."""
    return tuple(
        torch.from_numpy(array).float() for array in (driver.hidden(slot, 0, length), *driver.kv(slot, length))
    )


def run_wavefront(model: Model, prompts: list[list[int]], seed: int, make_driver: MakeDriver) -> list[Any]:
    """All prompts by random legal steps. Returns, for each, its hidden rows, KV and logits."""
    draw = random.Random(seed)
    driver = make_driver(model, seed=seed, page_size=1 + seed % 5, rows=80)
    depths = model.config.total_ut_steps
    done = [[len(prompt)] + [0] * depths for prompt in prompts]
    logits: dict[int, Tensor] = {}
    while len(logits) < len(prompts):
        spans, tokens = [], []
        before = [list(row) for row in done]
        for slot, depth in draw.sample(
            [(s, d) for s in range(len(prompts)) for d in range(depths)], len(prompts) * depths
        ):
            start, stop = before[slot][depth + 1], before[slot][depth]
            count = draw.randint(0, min(stop - start, draw.choice((1, 4, 20))))
            if count:
                spans.append((slot, start, count, depth))
                done[slot][depth + 1] += count
                if depth == 0:
                    tokens += [(slot, pos, prompts[slot][pos]) for pos in range(start, start + count)]
        due = [slot for slot in range(len(prompts)) if done[slot][-1] == len(prompts[slot]) and slot not in logits]
        if spans:
            torch.set_num_threads(draw.choice((1, 2)))
            live = sum(span[2] for span in spans)
            coda_rows = [(slot, len(prompts[slot]) - 1) for slot in due]
            driver.step(spans, tokens=tokens, bucket=live + draw.randint(0, 3), coda_rows=coda_rows)
            logits |= {slot: driver.io.logits[index].clone() for index, slot in enumerate(due)}
    return [(*results(driver, slot, len(prompt)), logits[slot].float()) for slot, prompt in enumerate(prompts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
def test_bits_do_not_depend_on_the_schedule(
    ops: CpuOps, dtype: torch.dtype, small_config: Callable[..., OuroConfig], make_driver: MakeDriver
) -> None:
    """KV, hidden rows and logits of ordinary prefill at several chunk sizes, and of wavefronts among other requests."""
    config = small_config(hidden_size=64, intermediate_size=176, num_attention_heads=4, head_dim=16)
    model = model_from_tensors(config, dict(random_weights(config, 1, dtype)), ops=ops, dtype=dtype)
    prompts = [random.Random(seed).choices(range(97), k=length) for seed, length in enumerate((20, 33, 7))]
    want = []
    for prompt in prompts:
        driver = make_driver(model)
        driver.prefill(0, prompt, len(prompt))
        want.append((*results(driver, 0, len(prompt)), driver.io.logits[0].float()))
    for chunk in (1, 3, 8):
        driver = make_driver(model)
        driver.prefill(2, prompts[1], chunk, padding=chunk % 2)
        for got, expected in zip((*results(driver, 2, 33), driver.io.logits[0].float()), want[1], strict=True):
            assert same_bits(got, expected)
    for seed in range(4):
        for request, expected_request in zip(run_wavefront(model, prompts, seed, make_driver), want, strict=True):
            for got, expected in zip(request, expected_request, strict=True):
                assert same_bits(got, expected)


def test_bfloat16_is_as_near_float64_as_aten(small_config: Callable[..., OuroConfig], make_driver: MakeDriver) -> None:
    """Hidden rows, keys and logits, over gentle random weights: within what the ATen operators show."""
    config = small_config(hidden_size=128, intermediate_size=352, num_hidden_layers=4, head_dim=32, total_ut_steps=4)
    errors = np.zeros((2, 3))  # of a single seed they differ by chance: each rounding goes its own way
    for seed in range(5):
        tensors = dict(random_weights(config, seed, torch.bfloat16))
        reference = ReferenceModel(asdict(config), {name: tensor.double().numpy() for name, tensor in tensors.items()})
        prompt = random.Random(seed).choices(range(97), k=48)
        want = reference.forward(prompt)
        for index, ops in enumerate((CpuOps(), AtenOps())):
            driver = make_driver(model_from_tensors(config, tensors, ops=ops, dtype=torch.bfloat16), coda_rows=48)
            driver.prefill(0, prompt, chunk=16)
            driver.step([(1, 0, 1, 0)], coda_rows=[(0, pos) for pos in range(48)])
            logits = driver.io.logits.double().numpy()
            values = (
                (driver.hidden(0, 0, 48), want.hidden[-1]),
                (driver.kv(0, 48)[0], want.k),
                (logits, want.logits[-1]),
            )
            errors[index] += [((got - exact) ** 2).mean() for got, exact in values]
    assert (errors[0] > 0).all()
    assert (errors[0] <= 1.1 * errors[1]).all()
