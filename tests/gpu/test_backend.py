"""What only CUDA can show of the `cuda` backend: graphs equal eager runs, memory stays flat, failures give it back."""

import gc
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.capture.driver import Driver, make_executor
from tests.capture.test_async import scripted
from wavegraph.capture.backends.base import Backend
from wavegraph.capture.backends.cuda import CudaBackend
from wavegraph.capture.backends.eager import EagerBackend
from wavegraph.capture.device import CudaDevice
from wavegraph.capture.executor import Executor
from wavegraph.capture.static import StaticSet
from wavegraph.errors import CaptureError
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops.triton.launch import JitLauncher
from wavegraph.model.ops.triton.ops import TritonOps
from wavegraph.model.sampling import FEATURE_SAMPLER
from wavegraph.model.weights import Model, model_from_tensors, random_weights

LADDER = (1, 2, 4, 8, 16, 32)
CODA = (1, 2, 4)
POOLS = ("k", "v", "hidden", "gate")


@cache
def device() -> CudaDevice:
    return CudaDevice()


@cache
def model(dtype: torch.dtype = torch.bfloat16, *, deterministic: bool = False) -> Model:
    raw = {
        "model_type": "ouro", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "total_ut_steps": 3,
        "max_position_embeddings": 4096, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "early_exit_threshold": 1.0, "eos_token_id": 0, "hidden_act": "silu",
    }  # fmt: skip
    config = OuroConfig.from_dict(raw)
    ops = TritonOps(JitLauncher(), deterministic=deterministic)
    weights = dict(random_weights(config, 0, dtype))
    return model_from_tensors(config, weights, ops=ops, dtype=dtype, device=device().target)


def executor_of(
    backend: Backend, *, check: bool = False, deterministic: bool = False, ladder: Sequence[int] = LADDER
) -> Executor:
    return make_executor(
        model(deterministic=deterministic),
        backend,
        ladder=ladder,
        coda_ladder=CODA,
        num_pages=60,
        page_size=16,
        max_model_len=256,
        max_num_seqs=4,
        check=check,
    )


@pytest.fixture(autouse=True)
def closed() -> Iterator[list[Executor]]:
    """Executors to be closed behind a test."""
    made: list[Executor] = []
    yield made
    for executor in made:
        executor.close()


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("bucket", LADDER)
def test_graphs_equal_eager_runs_bit_for_bit(closed: list[Executor], bucket: int) -> None:
    """The same steps through both, at each bucket, with every value compared: live ones and all else."""
    executors = [executor_of(CudaBackend(device())), executor_of(EagerBackend(device()))]
    closed += executors
    for executor in executors:
        driver = Driver(executor)
        driver.features = FEATURE_SAMPLER
        prompt = list(range(5, 5 + bucket))
        driver.add(0, prompt)
        for depth in range(driver.depths):
            coda = [(0, bucket - 1)] if depth == driver.depths - 1 else []
            driver.run(driver.make_step([(0, 0, bucket, depth)], coda, bucket=bucket))
    graphs, eager = executors
    for name in POOLS:
        assert torch.equal(bits(getattr(graphs.pools, name)[:-1]), bits(getattr(eager.pools, name)[:-1])), name
    for name in ("token_table", "coda_token", "coda_logprob", "top_ids"):
        assert torch.equal(bits(getattr(graphs.io, name)[:1]), bits(getattr(eager.io, name)[:1])), name


def test_steps_in_flight_equal_steps_one_by_one(closed: list[Executor]) -> None:
    one = executor_of(CudaBackend(device()))
    closed.append(one)
    steps, expected = scripted(one)
    many = executor_of(CudaBackend(device()))
    closed.append(many)
    tickets, results = [], []
    for step in steps:
        if len(tickets) == 4:
            results.append(many.poll(tickets.pop(0)).tokens)
        tickets.append(many.submit(step))
    results += [many.poll(ticket).tokens for ticket in tickets]
    assert results == expected


def test_a_rows_bits_do_not_depend_on_its_bucket_if_deterministic(closed: list[Executor]) -> None:
    executor = executor_of(CudaBackend(device()), deterministic=True)
    closed.append(executor)
    seen = []
    for bucket in (8, 16, 32):
        driver = Driver(executor, free_pages=range(bucket, 60))
        driver.add(0, list(range(7)))
        for depth in range(driver.depths):
            driver.run(driver.make_step([(0, 0, 7, depth)], bucket=bucket))
        page = driver.requests[0].pages[0]
        seen.append([getattr(executor.pools, name)[page].clone() for name in POOLS])
    for other in seen[1:]:
        for first, second in zip(seen[0], other, strict=True):
            live = (first[:7], second[:7]) if first.dim() < 4 else (first[:, :, :7], second[:, :, :7])
            assert torch.equal(bits(live[0]), bits(live[1]))


def test_audits_find_nothing(closed: list[Executor]) -> None:
    executor = executor_of(CudaBackend(device()), check=True)
    closed.append(executor)
    scripted(executor)
    executor.synchronize()


def test_ten_thousand_replays_take_no_memory(closed: list[Executor]) -> None:
    executor = executor_of(CudaBackend(device()))
    closed.append(executor)
    driver = Driver(executor)
    driver.add(0, [1, 2, 3, 4])
    step = driver.make_step([(0, 0, 4, 0)], [(0, 3)])
    executor.poll(executor.submit(step))
    device().synchronize()
    before = device().memory().free
    tickets = []
    for _ in range(10_000):
        if len(tickets) == 4:
            executor.poll(tickets.pop(0))
        tickets.append(executor.submit(step))
    for ticket in tickets:
        executor.poll(ticket)
    assert device().memory().free == before


def test_close_gives_memory_back() -> None:
    model()
    gc.collect()
    device().settle()
    executor_of(CudaBackend(device())).close()  # what is made once, stays
    gc.collect()
    device().settle()
    before = device().memory().free
    executor = executor_of(CudaBackend(device()))
    assert device().memory().free < before
    executor.close()
    del executor
    gc.collect()
    device().settle()
    assert before - device().memory().free <= 2 << 20


def test_a_sync_fails_the_capture_and_nothing_is_lost() -> None:
    """The device goes on, its memory is back, and the next capture works."""
    backend = CudaBackend(device())
    with device().running():
        x = torch.zeros(1 << 20, device=device().target)
    static = StaticSet({"x": x})

    def program() -> None:
        y = x * 2 + 1
        x.copy_(y * int(torch.cuda.is_current_stream_capturing() and y.sum().item() > 0))

    device().settle()
    before = device().memory().free
    with pytest.raises(CaptureError, match="bad: cannot be captured as a CUDA graph"), backend.session():
        backend.capture(program, static, "bad")
    gc.collect()
    device().settle()
    assert before - device().memory().free <= 2 << 20
    with backend.session():
        recorded = backend.capture(lambda: x.add_(1), static, "good")
    with device().running():
        x.zero_()
    for _ in range(3):
        with device().running():
            recorded.replay()
    device().synchronize()
    assert float(x[0]) == 3
    backend.release()


def test_graphs_can_be_looked_into(closed: list[Executor], tmp_path: Path) -> None:
    backend = CudaBackend(device())
    executor = executor_of(backend, ladder=(4,))
    closed.append(executor)
    names = [node.kernel for node in backend.nodes("core[4]") if node.kernel is not None]
    assert executor.core.facts[4].nodes >= len(names)
    assert names.count("attention") == 3
    backend.write_dot("core[4]", tmp_path / "core.dot")
    assert "digraph" in (tmp_path / "core.dot").read_text()
