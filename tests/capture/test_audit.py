"""``check=True``: replays against eager runs, addresses, and canaries; each must notice what is broken."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.driver import Driver, make_executor, tiny_model
from tests.capture.verify import assert_same_bits
from wavegraph.capture.audit import AUDIT_EVERY
from wavegraph.capture.backends.recorded import RecordedBackend
from wavegraph.capture.executor import Executor
from wavegraph.capture.guards import GUARD_BYTES
from wavegraph.capture.metadata import FEATURE_COPY_KV
from wavegraph.errors import EngineError
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.sampling import FEATURE_SAMPLER, Action, encode_params

BACKENDS = ["eager", "recorded", "compiled"]
PROMPT = [3, 9, 27, 11, 60, 2, 5]
SAMPLED = encode_params(temperature=1.0, seed=3, prompt_len=7)


def run_step(driver: Driver, features: int = 0) -> list[int]:
    """A prompt in one step a depth, the last of which draws."""
    driver.features = features
    if 0 not in driver.requests:
        driver.add(0, PROMPT, SAMPLED if features & FEATURE_SAMPLER else ())
    tokens: list[int] = []
    for depth in range(driver.depths):
        step = driver.make_step([(0, 0, 7, depth)], [(0, 6, 1, Action.SAMPLE)] if depth == driver.depths - 1 else [])
        tokens = driver.run(step)
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", [0, FEATURE_SAMPLER | FEATURE_COPY_KV])
@pytest.mark.parametrize("backend", BACKENDS)
def test_looking_changes_nothing(
    backend: str, features: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is sampled; tokens, pools and tables are those of an executor that does not look."""
    monkeypatch.setattr("wavegraph.capture.executor.AUDIT_EVERY", 1)
    model = tiny_model(backend, dtype)
    drivers = [Driver(make_executor(model, backend, check=check)) for check in (False, True)]
    for driver in drivers:
        driver.features = features
        for slot, prompt in {0: PROMPT, 1: [1, 2], 2: PROMPT[::-1]}.items():
            driver.add(slot, prompt, SAMPLED if features else ())
    plain, looked_at = (driver.generate(4, chunk=3, budget=8) for driver in drivers)
    assert plain == looked_at
    for part in ("pools", "io"):
        for name in ("k", "v", "hidden", "gate") if part == "pools" else ("token_table", "page_table", "params"):
            one, two = (getattr(getattr(driver.executor, part), name)[:-1] for driver in drivers)
            assert_same_bits(one, two, name)
    assert looked_at
    assert drivers[1].executor.stats.core.hits == drivers[0].executor.stats.core.hits


def test_one_step_in_several_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(tiny_model(), "eager", check=True)
    assert executor._audit is not None
    seen: list[int] = []
    monkeypatch.setattr(executor._audit, "storage", lambda: seen.append(executor.stats.steps))
    driver = Driver(executor)
    for _ in range(6):
        run_step(driver)
        driver.requests[0].frontier = [0] * driver.depths
    assert seen == [1, 1 + AUDIT_EVERY, 1 + 2 * AUDIT_EVERY]


@pytest.mark.parametrize(
    ("name", "which", "message"),
    [
        ("norm", 1, r"core\[8\]: \w+ of row 0 differs between the replay and an eager run"),
        ("scatter_gate", 0, r"core\[8\]: (hidden|gate) of row 0"),
        ("draw_greedy", None, r"coda\[1\]: logits of row 0 differs"),
        ("score", None, r"coda_full\[1\]: logits of row 0 differs"),
        ("copy_exits", None, r"copy_exits\[1\]: k of row 0 differs"),
    ],
)
def test_replay_that_differs_from_an_eager_run_is_named(
    name: str, which: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that changes after capture, as a Python value baked into the recording would."""
    monkeypatch.setattr("wavegraph.capture.executor.AUDIT_EVERY", 1)
    executor = make_executor(tiny_model(), "recorded", check=True)
    driver = Driver(executor)
    original = getattr(AtenOps, name)

    def other(self: AtenOps, *args: Any) -> None:
        if which is not None:
            args[which].add_(1)
        original(self, *args)
        if which is None:
            (executor.pools.k if name == "copy_exits" else executor.io.logits).add_(1)

    monkeypatch.setattr(AtenOps, name, other)
    features = {"score": FEATURE_SAMPLER, "copy_exits": FEATURE_COPY_KV}.get(name, 0)
    with pytest.raises(EngineError, match=message):
        run_step(driver, features)
    with pytest.raises(EngineError, match="failed after its launch"):
        run_step(driver, features)


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize(
    ("name", "pick"),
    [
        ("work.qkv", lambda executor: executor.work.qkv),
        ("pools.k", lambda executor: executor.pools.k),
        ("pools.gate", lambda executor: executor.pools.gate),
        ("io.page_table", lambda executor: executor.io.page_table),
        ("io.logits", lambda executor: executor.io.logits),
    ],
)
def test_write_beside_a_buffer_is_noticed(name: str, pick: Callable[[Executor], Tensor], side: int) -> None:
    """Right behind its last element, or right before its first."""
    executor = make_executor(tiny_model(), "recorded", check=True)
    tensor = pick(executor)
    assert tensor.data_ptr() % 64 == 0
    at = tensor.storage_offset() + (tensor.numel() if side == 1 else -1)
    tensor.as_strided((1,), (1,), at).zero_()
    with pytest.raises(EngineError, match=f"{name}: something wrote {'after' if side == 1 else 'before'} it"):
        run_step(Driver(executor))


def test_guards_are_only_there_when_asked_for() -> None:
    plain, checked = (make_executor(tiny_model(), "eager", check=check) for check in (False, True))
    for executor, extra in ((plain, 0), (checked, 2 * GUARD_BYTES)):
        for tensor in (executor.pools.k, executor.work.x, executor.io.token_table, executor.io.header):
            assert tensor.is_contiguous()
        assert executor.work.x.untyped_storage().nbytes() == executor.work.x.nbytes + extra


def test_intermediates_that_moved_are_noticed() -> None:
    """They are no static tensors: only the digest of the recording's addresses knows them."""
    backend = RecordedBackend()
    executor = make_executor(tiny_model(), backend, check=True)
    driver = Driver(executor)
    run_step(driver)
    recorded = executor.core._recorded[8]
    recorded.check_addresses()
    storage = backend.arena.untyped_storage()
    with suppress(RuntimeError):
        storage.resize_(storage.nbytes() * 64)
    for _ in range(AUDIT_EVERY - executor.stats.steps % AUDIT_EVERY):
        driver.requests[0].frontier = [0] * driver.depths
        driver.run(driver.make_step([(0, 0, 7, 0)]))
    with pytest.raises(EngineError, match=r"\[\d+\]: addresses it holds changed since its capture \(digest \w+, was "):
        driver.run(driver.make_step([(0, 0, 7, 0)]))
