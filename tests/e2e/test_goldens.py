"""Every value the engine computes, under every schedule, against the public model and the float64 reference."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.harness import (
    CHECKPOINTS,
    Recorder,
    assert_close,
    check_against_reference,
    golden,
    near_ties,
)
from wavegraph.config import EngineConfig

BACKENDS = ("eager", "recorded", "compiled")
CHUNKS = (1, 2, 3, 5, 8, 64)
BUDGETS = (1, 4, 7, 64)

Count = Callable[[int], None]


def make_config(wavefront: bool, chunk: int, budget: int, max_num_seqs: int = 5, page_size: int = 4) -> EngineConfig:
    return EngineConfig(
        wavefront=wavefront,
        prefill_chunk_size=chunk,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=64,
        page_size=page_size,
        num_pages=80,
        prefix_cache=False,  # every row is run and looked at
        async_scheduling=False,  # nothing runs while it is looked at
        check=True,
    )


def check_goldens(checkpoint: str, recorder: Recorder, neighbours: dict[str, list[int]], count: Count) -> None:
    """The golden sequence as a prompt and the golden generation, beside ``neighbours``, in one engine."""
    gold = golden(checkpoint)
    prompts = {"sequence": gold["token_ids"].tolist(), "generation": gold["gen_prompt"].tolist(), **neighbours}
    max_tokens = dict.fromkeys(neighbours, 3) | {"sequence": 1, "generation": len(gold["gen_tokens"])}
    seen = recorder.run(prompts, max_tokens)

    sequence = seen["sequence"]
    assert_close("hidden", sequence.hidden, gold["hidden"])
    assert_close("gate", sequence.gate, gold["gate_logit"])
    assert_close("last logits", sequence.logits[0], gold["logits"][-1])
    model = recorder.engine.model
    hidden = torch.from_numpy(sequence.hidden).flatten(0, 1)
    logits = torch.empty(len(hidden), model.config.vocab_size)
    model.ops.linear(logits, hidden, model.weights.lm_head, len(hidden))
    assert_close("step logits", logits.numpy().reshape(gold["step_logits"].shape), gold["step_logits"])
    for name, planes in (("kv8_k", sequence.k), ("kv8_v", sequence.v)):
        slots = planes[:, :, :8].swapaxes(2, 3)
        assert_close(name, slots.reshape(-1, *slots.shape[2:]), gold[name])

    generation = seen["generation"]
    want = gold["gen_tokens"].tolist()
    ties = near_ties(checkpoint, generation.output.prompt_token_ids, generation.output.token_ids, want)
    count(ties)
    if not ties:
        assert_close("generated logits", generation.logits, gold["gen_logits"])
    for one in seen.values():
        check_against_reference(checkpoint, one)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wavefront", [False, True])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_goldens_alone(checkpoint: str, wavefront: bool, backend: str, count_near_ties: Count) -> None:
    recorder = Recorder(checkpoint, make_config(wavefront, chunk=5, budget=7), backend)
    check_goldens(checkpoint, recorder, {}, count_near_ties)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    checkpoint=st.sampled_from(CHECKPOINTS),
    wavefront=st.booleans(),
    chunk=st.sampled_from(CHUNKS),
    budget=st.sampled_from(BUDGETS),
    backend=st.sampled_from(BACKENDS),
    max_num_seqs=st.integers(1, 5),
    page_size=st.sampled_from([1, 4, 16]),
    poisoned=st.booleans(),
    neighbours=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=20), max_size=3),
)
def test_goldens_under_any_schedule_and_company(
    checkpoint: str,
    wavefront: bool,
    chunk: int,
    budget: int,
    backend: str,
    max_num_seqs: int,
    page_size: int,
    poisoned: bool,
    neighbours: list[list[int]],
    count_near_ties: Count,
) -> None:
    config = make_config(wavefront, chunk, budget, max_num_seqs, page_size)
    recorder = Recorder(checkpoint, config, backend, poisoned=poisoned)
    check_goldens(checkpoint, recorder, {f"n{i}": ids for i, ids in enumerate(neighbours)}, count_near_ties)


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("wavefront", [False, True])
def test_backends_agree_bit_for_bit(wavefront: bool, poisoned: bool) -> None:
    gold = golden("tiny_gqa")
    prompts = {"a": gold["token_ids"].tolist(), "b": gold["gen_prompt"].tolist()}
    config = make_config(wavefront, chunk=3, budget=7)
    eager, recorded = (
        Recorder("tiny_gqa", config, backend, poisoned=poisoned and backend == "recorded").run(
            prompts, {"a": 4, "b": 9}
        )
        for backend in ("eager", "recorded")
    )
    for name in prompts:
        for field in ("hidden", "gate", "k", "v", "logits"):
            np.testing.assert_array_equal(getattr(eager[name], field), getattr(recorded[name], field))


def test_a_token_may_differ_only_at_a_near_tie() -> None:
    gold = golden("tiny")
    prompt, tokens = gold["gen_prompt"].tolist(), gold["gen_tokens"].tolist()
    assert near_ties("tiny", prompt, tokens, tokens) == 0
    with pytest.raises(AssertionError, match="token 3 is"):
        near_ties("tiny", prompt, [*tokens[:3], tokens[3] + 1, *tokens[4:]], tokens)
