"""An engine whose every value is looked at: hidden rows, gate, KV and logits are read after each step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wavegraph.config import EngineConfig
from wavegraph.model.reference import Forward, ReferenceModel
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.plan import StepPlan
from wavegraph.startup.build import build_engine

GOLDENS = Path(__file__).parents[1] / "goldens"
CHECKPOINTS = ("tiny", "tiny_gqa", "tiny_hd32", "tiny_sharded")
TOLERANCE = 1e-4

Array = NDArray[np.float32]


@cache
def golden(checkpoint: str) -> Mapping[str, Array]:
    """What the public model computed; the sharded checkpoint holds the weights of ``tiny``."""
    name = "tiny" if checkpoint == "tiny_sharded" else checkpoint
    with np.load(GOLDENS / f"{name}_fp32.npz") as arrays:
        return dict(arrays)


@cache
def reference(checkpoint: str) -> ReferenceModel:
    return ReferenceModel.from_folder(GOLDENS / checkpoint)


@cache
def expected(checkpoint: str, ids: tuple[int, ...]) -> Forward:
    """Float64 values of a whole sequence."""
    return reference(checkpoint).forward(ids)


@dataclass(frozen=True)
class Seen:
    """All values of one request of ``T`` positions, ``S`` depths, ``L`` layers, ``n`` sampled tokens.

    ``hidden [S, T, H]``, ``gate [S, T]``, ``k, v [S, L, T, kv_heads, d]``, ``logits [n, V]``.
    """

    ids: tuple[int, ...]
    output: RequestOutput
    hidden: Array
    gate: Array
    k: Array
    v: Array
    logits: Array


class Recorder:
    """Runs requests on a fresh engine and keeps what every row and coda row left behind."""

    def __init__(
        self, checkpoint: str, config: EngineConfig, backend: str, *, poisoned: bool = False, dtype: str = "float32"
    ) -> None:
        self.engine = build_engine(GOLDENS / checkpoint, config, dtype=dtype, backend=backend)
        if poisoned:  # every page, the scratch page too; what a request has not written must not matter
            for pool in (self.engine.executor.pools.k, self.engine.executor.pools.v, self.engine.executor.pools.hidden):
                pool.fill_(float("nan"))
        self._plan: StepPlan | None = None
        self._rows: dict[tuple[str, int, int], tuple[Array, float, Array, Array]] = {}
        self._logits: dict[str, list[Array]] = {}
        submit = self.engine.executor.submit

        def remember(plan: StepPlan) -> Any:
            self._plan = plan
            return submit(plan)

        self.engine.executor.submit = remember  # type: ignore[method-assign,assignment]

    def run(self, prompts: Mapping[str, Sequence[int]], max_tokens: Mapping[str, int]) -> dict[str, Seen]:
        """All values of all requests, which arrive together and run to ``max_tokens``."""
        for name, ids in prompts.items():
            params = SamplingParams(max_tokens=max_tokens[name], ignore_eos=True)
            self.engine.add_request(name, list(ids), params)
        outputs: dict[str, RequestOutput] = {}
        while self.engine.has_unfinished:
            for output in self.engine.step():
                outputs[output.request_id] = output
            self._look()
        return {name: self._collect(name, outputs[name]) for name in prompts}

    def _look(self) -> None:
        plan = self._plan
        assert plan is not None
        io, pools = self.engine.executor.io, self.engine.executor.pools
        size = pools.page_size
        for task in plan.tasks:
            for position in range(task.token_start, task.token_end):
                page = task.pages[position // size - task.token_start // size]
                offset = position % size
                key = (task.request_id, task.depth, position)
                assert key not in self._rows, f"{key} ran twice"
                self._rows[key] = (
                    _copy(pools.hidden[page, offset]),
                    float(pools.gate[page, offset, task.depth]),
                    _copy(pools.k[page, task.depth, :, offset]),
                    _copy(pools.v[page, task.depth, :, offset]),
                )
        for index, task in enumerate(plan.coda_tasks):
            self._logits.setdefault(task.request_id, []).append(_copy(io.logits[index]))

    def _collect(self, name: str, output: RequestOutput) -> Seen:
        ids = (*output.prompt_token_ids, *output.token_ids[:-1])
        depths = self.engine.model.config.total_ut_steps
        rows = [[self._rows[name, depth, position] for position in range(len(ids))] for depth in range(depths)]

        def field(index: int) -> Array:
            return np.array([[row[index] for row in plane] for plane in rows], dtype=np.float32)

        k, v = field(2).swapaxes(1, 2), field(3).swapaxes(1, 2)
        return Seen(ids, output, field(0), field(1), k, v, np.array(self._logits[name]))


def _copy(tensor: torch.Tensor) -> Array:
    values: Array = tensor.detach().to(torch.float32).numpy().copy()
    return values


def assert_close(what: str, got: Array, want: NDArray[Any]) -> None:
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    worst = float(np.abs(got - want).max())
    assert worst <= TOLERANCE, f"{what}: differs by {worst:.2e} (NaN if a NaN reached it)"


def check_against_reference(checkpoint: str, seen: Seen) -> None:
    """Hidden rows, gate and KV of every position and depth, and logits of every sampled token, in float64."""
    want = expected(checkpoint, seen.ids)
    depths, layers, length = seen.k.shape[:3]
    assert_close("hidden", seen.hidden, want.hidden)
    assert_close("gate", seen.gate, want.gate_logits)
    for what, got, slots in (("k", seen.k, want.k), ("v", seen.v, want.v)):
        planes = slots.reshape(depths, layers, *slots.shape[1:])[:, :, :, :length]
        assert_close(what, got, planes.swapaxes(2, 3))
    first = len(seen.output.prompt_token_ids) - 1
    assert_close("logits", seen.logits, want.logits[-1, first:])
    assert seen.output.token_ids == tuple(seen.logits.argmax(axis=1).tolist())


def near_ties(checkpoint: str, prompt: Sequence[int], got: Sequence[int], want: Sequence[int]) -> int:
    """0 if the tokens are equal, 1 if they part where the two best logits are a rounding apart; fails else."""
    if list(got) == list(want):
        return 0
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    best = np.sort(expected(checkpoint, (*prompt, *got[:at])).logits[-1, -1])
    margin = best[-1] - best[-2]
    assert len(got) == len(want), f"{len(got)} tokens, expected {len(want)}"
    assert margin < TOLERANCE, f"token {at} is {got[at]}, expected {want[at]}, with a margin of {margin:.2e}"
    return 1
