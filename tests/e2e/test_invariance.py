"""The schedule does not show: any configuration gives the tokens of a plain one, sampled ones too."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from tests.e2e.drive import build, check_drained
from tests.e2e.harness import reference
from wavegraph.engine.engine import Engine
from wavegraph.model.reference_sampling import Settings, draw
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams
from wavegraph.text.tokenizer import Tokenizer

COUNT = 50
MAX_LEN = 48
PLAIN: dict[str, Any] = {
    "wavefront": False,
    "async_scheduling": False,
    "prefix_cache": False,
    "admission": "worst_case",
    "prefill_chunk_size": 32,
    "max_num_seqs": 8,
    "num_pages": 200,
}


@dataclass(frozen=True)
class Case:
    """A request, and after how many of its tokens its caller leaves, if at all."""

    prompt: tuple[int, ...]
    params: SamplingParams
    leaves_after: int | None
    priority: int


def make_cases(seed: int) -> list[Case]:
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(30)]
    cases: list[Case] = []
    for _ in range(COUNT):
        kind = rng.random()
        if kind < 0.3 and cases:
            prompt = rng.choice(cases).prompt
        elif kind < 0.6:
            prompt = (*shared[: rng.randint(1, 30)], *(rng.randrange(256) for _ in range(rng.randint(0, 3))))
        else:
            prompt = tuple(rng.randrange(256) for _ in range(rng.choice([1, 2, 5, 9, 17, 34])))
        tokens = rng.randint(1, 14)
        leaves = rng.randint(1, tokens) if rng.random() < 0.15 else None
        cases.append(Case(prompt, _params(rng, tokens), leaves, rng.randint(0, 2)))
    return cases


def _params(rng: random.Random, tokens: int) -> SamplingParams:
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice([0.5, 1.0, 1.5]), "seed": rng.randrange(1000)}
        options |= rng.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}])
    if rng.random() < 0.3:
        options |= rng.choice(
            [
                {"repetition_penalty": 1.3},
                {"presence_penalty": 0.7, "frequency_penalty": 0.3},
                {"repetition_penalty": 0.8},
            ]
        )
    if rng.random() < 0.2:
        options |= {"logit_bias": {rng.randrange(256): rng.choice([-5.0, 3.0]) for _ in range(3)}}
    if rng.random() < 0.4:
        options |= {"min_tokens": rng.randint(0, tokens), "stop_token_ids": tuple(rng.sample(range(1, 256), 15))}
    if rng.random() < 0.3:
        options |= {
            "stop": rng.choice([("7",), ("3>", "<1"), ("><2",)]),
            "include_stop_str_in_output": rng.random() < 0.5,
        }
    if rng.random() < 0.2:
        options |= {"logprobs": 2}
    if rng.random() < 0.1:
        return SamplingParams(**options, prompt_logprobs=1)
    options |= rng.choice(
        [{}, {}, *({"exit_threshold": t} for t in (0.3, 0.5, 0.8)), {"exit_at_step": 1}, {"max_loops": 3}]
    )
    return SamplingParams(**options, exit_kv=rng.choice(["exact", "copy"]))


def make_options(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    budget = rng.choice([1, 3, 8, 17, 32]) if seed % 4 else 32
    page_size = rng.choice([1, 3, 4, 16])
    ladder = sorted({budget, *(rng.randint(1, budget) for _ in range(rng.randint(0, 3)))})
    pressure = rng.random() < 0.6
    return {
        "max_num_batched_tokens": budget,
        "buckets": tuple(ladder),
        "prefill_chunk_size": rng.choice([1, 2, 5, 16, 64, "auto", "auto"]),
        "packing": rng.choice(["fill", "fill", "fifo"]),
        "target_itl_ms": rng.choice([None, None, 1.0, 60.0]),
        "max_num_seqs": rng.choice([1, 2, 5, 12]),
        "page_size": page_size,
        "num_pages": -(-MAX_LEN // page_size) * (rng.choice([1, 2]) if pressure else 12) + 1,
        "swap_bytes": rng.choice([0, 200_000, 1 << 28]),
        "wavefront": rng.random() < 0.8,
        "step_mix": rng.choice(["fused", "separate"]),
        "stage_policy": rng.choice(["decode_first", "refill", "fifo"]),
        "admission": rng.choice(["incremental", "incremental", "worst_case"]),
        "admission_order": rng.choice(["fcfs", "priority"]),
        "refill": rng.random() < 0.8,
        "max_bypass": rng.choice([0, 8]),
        "prefix_cache": rng.random() < 0.7,
        "async_scheduling": rng.random() < 0.7,
        "run_ahead": rng.randint(1, 4),
        "backend": rng.choice(["eager", "recorded"]),
    }


def make_tokenizer() -> Tokenizer:
    """Token 17 reads ``<17>``."""
    fast = FastTokenizer(models.WordLevel({f"<{token}>": token for token in range(256)}, unk_token="<0>"))
    fast.decoder = decoders.Fuse()
    return Tokenizer(fast)


def play(engine: Engine, cases: list[Case], rng: random.Random, preemptions: int = 40) -> list[RequestOutput]:
    """Requests arrive a few at a time, some are thrown out, some callers leave; returns their last outputs."""
    engine.tokenizer = make_tokenizer()
    waiting = list(range(len(cases)))[::-1]
    last: dict[int, RequestOutput] = {}
    while waiting or engine.has_unfinished:
        while waiting and rng.random() < 0.3:
            index = waiting.pop()
            engine.add_request(str(index), cases[index].prompt, cases[index].params, priority=cases[index].priority)
        running = list(engine.scheduler.residency.running)
        if running and preemptions and rng.random() < 0.05:
            preemptions -= engine.preempt(rng.choice(running))
        for output in engine.step():
            last[int(output.request_id)] = output
            assert output.error is None
            if len(output.token_ids) == cases[int(output.request_id)].leaves_after:
                engine.abort(output.request_id)
    check_drained(engine)
    return [last[index] for index in range(len(cases))]


@cache
def plain(seed: int) -> list[RequestOutput]:
    engine = build(max_model_len=MAX_LEN, **PLAIN)
    outputs = play(engine, make_cases(seed), random.Random(0), preemptions=0)
    engine.close()
    return outputs


def margin(case: Case, output: RequestOutput, at: int) -> float:
    """The smallest lead, in float64, of a decision up to token ``at``: gate, argmax or sampling boundary."""
    params, prompt = case.params, list(case.prompt)
    assert params.exit_kv == "exact", "a copied exit parted: its margin needs a reference of its own"
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (0,))}
    settings = Settings(
        prompt_len=len(prompt),
        seed=params.seed or 0,
        stop_token_ids=sorted(stops),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        min_tokens=params.min_tokens,
        logit_bias=params.logit_bias,
    )
    known = [*prompt, *output.token_ids[:at]]
    state = reference("tiny").forward(known)
    leads = [draw(state.logits[depth, -1], known, settings).margin for depth in range(4)]
    if params.exit_threshold is not None:
        leads += np.abs(state.cdf[:, -1] - params.exit_threshold).tolist()
    return min(leads)


def check_same(seed: int, options: dict[str, Any]) -> int:
    """Run all cases under ``options``; returns how many parted at a near tie."""
    cases, ties = make_cases(seed), 0
    engine = build(max_model_len=MAX_LEN, **options)
    outputs = play(engine, cases, random.Random(seed))
    engine.close()
    for index, (case, want, got) in enumerate(zip(cases, plain(seed), outputs, strict=True)):
        if got.token_ids == want.token_ids:
            assert (got.text, got.exit_depths) == (want.text, want.exit_depths), (index, case)
            if case.leaves_after is None:
                assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
            continue
        pairs = zip(got.token_ids, want.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got.token_ids), len(want.token_ids)))
        lead = margin(case, want, at)
        assert lead < 1e-4, f"request {index} parts at token {at}, margin {lead:.1e}: {case} under {options}"
        ties += 1
    return ties


@pytest.mark.parametrize(
    "number", [*range(4), *(pytest.param(number, marks=pytest.mark.slow) for number in range(4, 44))]
)
def test_any_schedule_gives_the_plain_tokens(number: int, count_near_ties: Callable[[int], None]) -> None:
    ties = check_same(number // 8, make_options(number))
    print(f"{ties} of {COUNT} requests parted at a near tie")
    count_near_ties(ties)


def test_the_cases_hold_what_they_should() -> None:
    """Every kind of end, exit and sampling is among those compared."""
    cases, outputs = make_cases(0), plain(0)
    assert {output.finish_reason for output in outputs} == {"stop", "length", None}
    assert {type(output.stop_reason) for output in outputs} == {str, int, type(None)}
    assert len({case.prompt for case in cases}) < COUNT
    assert {depth for output in outputs for depth in output.exit_depths} == {0, 1, 2, 3}
    for name in ("temperature", "presence_penalty", "logit_bias", "min_tokens", "stop", "exit_threshold"):
        assert len({str(getattr(case.params, name)) for case in cases}) > 1, name
    assert {case.params.exit_kv for case in cases} == {"exact", "copy"}
