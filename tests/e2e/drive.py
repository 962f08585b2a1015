"""Whole engines for tests: build one, run it dry, and see that nothing is left in it."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wavegraph.buckets.cost import CostModel, ProgramCost
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine
from wavegraph.model.reference import ReferenceModel
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams
from wavegraph.startup.build import build_engine

GOLDENS = Path(__file__).parents[1] / "goldens"

DEFAULTS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 10,
    "page_size": 4,
    "buckets": (4, 32),
    "check": True,
}


COST = CostModel(
    ProgramCost((1, 32), (5e-3, 36e-3), (0.0, 0.0), (0, 0)),
    ProgramCost((1, 10), (1e-3, 10e-3), (0.0, 0.0), (0, 0)),
    seconds_per_position=1e-5,
    source="made up",
)
"""Fixed seconds of steps, so that schedules repeat."""


def build(checkpoint: str | Path = "tiny", backend: str = "eager", trace: Path | None = None, **options: Any) -> Engine:
    """An engine in float32 that checks every plan."""
    given = DEFAULTS | options
    if given["max_num_batched_tokens"] != DEFAULTS["max_num_batched_tokens"] and "buckets" not in options:
        given["buckets"] = None
    config = EngineConfig(**given)
    return build_engine(GOLDENS / checkpoint, config, dtype="float32", backend=backend, trace=trace, cost=COST)


def run(engine: Engine, preempt: random.Random | None = None) -> dict[str, RequestOutput]:
    """Run the engine dry; returns the last output of each request. ``preempt`` says when to throw someone out.

    At most 30 times: a long prompt that is recomputed a row at a time would never end.
    """
    last: dict[str, RequestOutput] = {}
    thrown = 0
    while engine.has_unfinished:
        if preempt is not None and thrown < 30 and preempt.random() < 0.2:
            running = list(engine.scheduler.residency.running)
            if running:
                assert engine.preempt(preempt.choice(running))
                thrown += 1
        for output in engine.step():
            before = last.get(output.request_id)
            assert before is None or (not before.finished and len(output.token_ids) == len(before.token_ids) + 1)
            last[output.request_id] = output
    return last


def generate(
    engine: Engine,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    preempt: random.Random | None = None,
) -> list[RequestOutput]:
    """Run requests that arrive together to their ends; returns their outputs in order."""
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), list(prompt), params)
    outputs = run(engine, preempt)
    check_drained(engine)
    return [outputs[str(index)] for index in range(len(requests))]


def check_drained(engine: Engine) -> None:
    """Every page, slot, id and record is back."""
    residency = engine.scheduler.residency
    assert not engine.has_unfinished
    assert not residency.live
    assert not residency.running
    assert not len(residency.waiting)
    assert not engine._records
    assert engine._checker is None or not engine._checker.live
    assert residency.pages.num_free == residency.pages.available == residency.pages.num_pages
    assert sorted(residency.free_slots) == list(range(len(residency.free_slots)))
    assert len(residency.free_slots) == engine.sizes.scheduler.max_num_seqs
    assert residency.swapped_pages == 0


class CopyReference:
    """``exit_kv="copy"`` in float64, one token at a time: a token that left early lends its KV to the deeper planes."""

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model

    def generate(
        self, prompt: Sequence[int], count: int, *, threshold: float = np.inf, first: int = 0, last: int = 3
    ) -> tuple[list[int], list[int], float]:
        """Greedy tokens, their exit depths, and the smallest margin of any decision.

        Tokens but the first leave at the first depth from ``first`` on whose exit mass reaches ``threshold``, at
        ``last`` at the latest.
        """
        model = self._model
        state = model.forward(prompt)
        planes = list(zip(state.k, state.v, strict=True))
        tokens, exits, logits, margin = [], [model.steps - 1], state.logits[-1, -1], np.inf
        while True:
            second, best = np.sort(logits)[-2:]
            margin = min(margin, float(best - second))
            tokens.append(int(np.argmax(logits)))
            if len(tokens) == count:
                return tokens, exits, margin
            depth, logits, gap = self._decode(tokens[-1], planes, threshold, first, last)
            margin = min(margin, gap)
            exits.append(depth)

    def _decode(
        self, token: int, planes: list[tuple[Any, Any]], threshold: float, first: int, last: int
    ) -> tuple[int, Any, float]:
        model, layers = self._model, self._model.layers
        tensors = model._tensors
        x = tensors["model.embed_tokens.weight"][[token]]
        stayed, margin = 1.0, np.inf
        for depth in range(last + 1):
            for layer in range(layers):
                x, *planes[depth * layers + layer] = model._layer(layer, x, planes[depth * layers + layer])
            x = model._norm(x, "model.norm.weight")
            gate = x[0] @ tensors["model.early_exit_gate.weight"][0] + tensors["model.early_exit_gate.bias"][0]
            stayed *= 1 - 1 / (1 + np.exp(-gate))
            if first <= depth < last:
                margin = min(margin, abs(1 - stayed - threshold))
                if 1 - stayed >= threshold:
                    break
        for slot in range((depth + 1) * layers, model.steps * layers):
            source = planes[depth * layers + slot % layers]
            planes[slot] = tuple(  # type: ignore[assignment]
                np.concatenate([old, new[:, -1:]], axis=1) for old, new in zip(planes[slot], source, strict=True)
            )
        return depth, tensors["lm_head.weight"] @ x[0], margin
