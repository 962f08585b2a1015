"""Log-probabilities of prompt and output through the engine, and several outputs of one prompt."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.e2e.drive import build, generate, run
from tests.e2e.harness import TOLERANCE, golden, reference
from wavegraph.outputs import RequestOutput, TokenLogprob
from wavegraph.sampling import SamplingParams

MODES: dict[str, dict[str, Any]] = {
    "plain": {"async_scheduling": False, "wavefront": False, "prefill_chunk_size": 64, "max_num_batched_tokens": 64},
    "chunked": {"prefill_chunk_size": 3},
    "one coda row": {"max_num_seqs": 1, "max_num_batched_tokens": 1, "prefill_chunk_size": 1},
    "narrow": {"max_num_seqs": 3, "max_num_batched_tokens": 5, "prefill_chunk_size": 4, "step_mix": "separate"},
}


@cache
def _log_softmax(ids: tuple[int, ...]) -> NDArray[np.float64]:
    """Log-probabilities ``[depths, T, V]`` of what follows each position, in float64."""
    logits = reference("tiny").forward(ids).logits
    shifted = logits - logits.max(axis=-1, keepdims=True)
    values: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return values


def check_entry(entry: TokenLogprob | None, token: int, want: NDArray[np.float64], top: int) -> None:
    assert entry is not None
    assert entry.token_id == token
    assert abs(entry.logprob - want[token]) < TOLERANCE
    below, above = (want > want[token] + TOLERANCE).sum(), (want > want[token] - TOLERANCE).sum()
    assert below <= entry.rank <= above
    best = np.sort(want)[::-1][:top]
    assert len(entry.top) == top
    np.testing.assert_allclose(list(entry.top.values()), best, atol=TOLERANCE)
    np.testing.assert_allclose([want[token] for token in entry.top], best, atol=TOLERANCE)


def check_logprobs(output: RequestOutput, params: SamplingParams) -> None:
    prompt, tokens = output.prompt_token_ids, output.token_ids
    want = _log_softmax((*prompt, *tokens))
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position, entry in enumerate(output.prompt_logprobs[1:], 1):
            check_entry(entry, prompt[position], want[-1, position - 1], params.prompt_logprobs)
    if params.logprobs is None:
        assert output.logprobs is None
    else:
        assert output.logprobs is not None
        for index, (entry, token) in enumerate(zip(output.logprobs, tokens, strict=True)):
            check_entry(entry, token, want[output.exit_depths[index], len(prompt) - 1 + index], params.logprobs)


def requests() -> list[tuple[list[int], SamplingParams]]:
    ids = golden("tiny")["token_ids"].tolist()

    def params(tokens: int, **options: Any) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, ignore_eos=True, **options)

    return [
        (ids, params(5, logprobs=3, prompt_logprobs=2)),
        (ids[:1], params(6, logprobs=0, prompt_logprobs=0)),
        (ids[5:17], params(4, temperature=0.9, seed=5, logprobs=20, prompt_logprobs=20)),
        (ids, params(1, prompt_logprobs=1)),
        (ids[3:12], params(8, logprobs=2, exit_threshold=0.5, presence_penalty=0.5)),
        (ids, params(7)),
    ]


QUICK = {("plain", None), ("chunked", "swap"), ("one coda row", "recompute"), ("narrow", "swap")}


@pytest.mark.parametrize(
    ("mode", "preempted"),
    [
        pytest.param(mode, how, marks=[] if (mode, how) in QUICK else pytest.mark.slow)
        for mode in MODES
        for how in (None, "swap", "recompute")
    ],
)
def test_logprobs_are_those_of_the_reference(mode: str, preempted: str | None) -> None:
    engine = build(swap_bytes=0 if preempted == "recompute" else 1 << 28, **MODES[mode])
    outputs = generate(engine, requests(), random.Random(1) if preempted else None)
    for output, (_, params) in zip(outputs, requests(), strict=True):
        check_logprobs(output, params)
        assert params.prompt_logprobs is None or output.num_cached_tokens == 0
    assert preempted is None or engine.stats().preemptions > 3
    engine.close()


@pytest.mark.parametrize("at", range(1, 14, 6))
@pytest.mark.parametrize("swap_bytes", [0, 1 << 28])
def test_a_prompt_thrown_out_while_it_is_scored(swap_bytes: int, at: int) -> None:
    """It comes back to another slot, whose token table holds somebody else's tokens."""
    engine = build(
        max_num_seqs=2, max_num_batched_tokens=12, prefill_chunk_size=6, swap_bytes=swap_bytes, async_scheduling=False
    )
    scored = requests()[0]
    engine.add_request("a", *scored)
    engine.add_request("b", [7] * 20, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(at):
        engine.step()
    slot = engine.scheduler.residency.running["a"].slot
    engine.preempt("a")
    engine.preempt("b")  # whose slot is the next to be taken
    engine.step()
    assert engine.scheduler.residency.running["a"].slot != slot
    check_logprobs(run(engine)["a"], scored[1])
    engine.close()


def test_an_id_that_is_used_again_gets_no_scores_of_its_last_owner() -> None:
    engine = build(max_num_batched_tokens=64, run_ahead=4)
    (long, params), (short, few) = requests()[0], requests()[1]
    for steps in range(1, 7):
        engine.add_request("a", long, params)
        for _ in range(steps):
            engine.step()
        assert engine.abort("a")
        engine.add_request("a", short, few)
        check_logprobs(run(engine)["a"], few)
    engine.close()


@pytest.mark.parametrize("seed", [11, None])
def test_n_outputs_are_n_requests_with_seeds_that_follow(seed: int | None) -> None:
    engine = build(prefill_chunk_size=5)
    prompt = golden("tiny")["gen_prompt"].tolist()
    params: dict[str, Any] = {"max_tokens": 10, "temperature": 1.0, "ignore_eos": True}
    names = engine.add_request("a", prompt, SamplingParams(n=4, seed=seed, **params))
    assert names == ["a#0", "a#1", "a#2", "a#3"]
    outputs = run(engine)
    assert [outputs[name].index for name in names] == [0, 1, 2, 3]
    together = [outputs[name].token_ids for name in names]
    assert len(set(together)) == 4
    if seed is not None:
        alone = [generate(engine, [(prompt, SamplingParams(seed=seed + i, **params))])[0].token_ids for i in range(4)]
        assert together == alone
    engine.close()
