"""Random weights that behave like a trained model where it matters, judged by the float64 reference."""

import json

import numpy as np
import pytest

from wavegraph.builtin import PackagedModel
from wavegraph.builtin.weights import make_weights
from wavegraph.model.reference import Forward, ReferenceModel, exit_steps

TOKENS = 192


@pytest.fixture(scope="module")
def forward() -> Forward:
    config = PackagedModel.load().config
    ids = np.random.default_rng(1).integers(0, PackagedModel.load().vocab_size, TOKENS)
    return ReferenceModel(json.loads(config), make_weights(config)).forward(ids.tolist())


def test_hidden_states_neither_explode_nor_collapse(forward: Forward) -> None:
    size = np.sqrt((forward.hidden**2).mean(axis=(1, 2)))
    assert np.all((size > 0.5) & (size < 2))
    unit = forward.hidden / np.linalg.norm(forward.hidden, axis=2, keepdims=True)
    for step, states in enumerate(unit):
        alike = (np.sum(states @ states.T) - TOKENS) / (TOKENS * (TOKENS - 1))
        assert alike < 0.5, f"step {step}: positions have become alike"
    assert np.all(np.sum(unit[1:] * unit[:-1], axis=2).mean(axis=1) < 0.97), "a loop changes next to nothing"


def test_greedy_choice_is_seldom_close(forward: Forward) -> None:
    best = np.sort(forward.logits[-1], axis=1)
    lead = best[:, -1] - best[:, -2]
    assert np.median(lead) > 0.3
    assert lead.min() > 1e-3
    assert len(set(forward.logits[-1].argmax(axis=1))) > TOKENS // 4


def test_gate_leaves_at_every_depth(forward: Forward) -> None:
    counts = np.bincount(exit_steps(forward.cdf, 0.5), minlength=len(forward.hidden))
    assert counts.min() >= TOKENS // 20
