"""Requests that move between engines in mid-life: same tokens, in another process too; nothing else gets in."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.drive import build, check_drained, generate, run
from tests.e2e.harness import golden
from wavegraph.engine.engine import Engine
from wavegraph.engine.handover import RequestState
from wavegraph.errors import RequestError
from wavegraph.sampling import SamplingParams

PROMPT: list[int] = golden("tiny")["token_ids"].tolist()
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=14,
    ignore_eos=True,
    temperature=0.9,
    seed=7,
    logprobs=2,
    presence_penalty=0.4,
    logit_bias={3: 1.5},
    exit_threshold=0.5,
)
COPY = SamplingParams(max_tokens=14, ignore_eos=True, exit_threshold=0.4, exit_kv="copy")
SCORED = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=2)
OPTIONS: dict[str, Any] = {"prefill_chunk_size": 3, "max_num_batched_tokens": 8, "num_pages": 30}

CHILD = """
import json, sys
from pathlib import Path
from tests.e2e.drive import build, check_drained, run
from wavegraph.engine.handover import RequestState
engine = build(prefill_chunk_size=5, max_num_batched_tokens=16, num_pages=50, max_num_seqs=3)
for path in sys.argv[1:]:
    engine.import_request(RequestState.from_bytes(Path(path).read_bytes()))
outputs = run(engine)
check_drained(engine)
print(json.dumps({name: output.to_dict() for name, output in outputs.items()}))
"""


def alone(params: SamplingParams) -> Any:
    engine = build(**OPTIONS)
    (output,) = generate(engine, [(PROMPT, params)])
    engine.close()
    return output


def after_steps(engine: Engine, name: str, params: SamplingParams, steps: int) -> None:
    engine.add_request(name, PROMPT, params)
    for _ in range(steps):
        engine.step()


def test_to_another_process(tmp_path: Path) -> None:
    """A prompt half way through its wavefront, and a request that decodes, sampled, with log-probabilities."""
    engine = build(prefix_cache=False, **OPTIONS)
    after_steps(engine, "decoding", SAMPLED, 26)
    assert 3 <= len(engine._records["decoding"].token_ids) < 14
    after_steps(engine, "copying", COPY, 12)
    after_steps(engine, "prompt", GREEDY, 5)
    for name in ("prompt", "decoding", "copying"):
        state = engine.export_request(name)
        if name == "prompt":
            assert len(set(state.snapshot.frontier)) > 2, "is not in the middle of its wavefront"
        (tmp_path / name).write_bytes(state.to_bytes())
    check_drained(engine)
    engine.close()
    paths = [str(tmp_path / name) for name in ("prompt", "decoding", "copying")]
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, *paths],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    outputs = json.loads(child.stdout)
    for name, params in (("prompt", GREEDY), ("decoding", SAMPLED), ("copying", COPY)):
        want = alone(params)
        assert outputs[name]["token_ids"] == list(want.token_ids)
        assert outputs[name]["exit_depths"] == list(want.exit_depths)
        assert outputs[name]["finish_reason"] == "length"
        if want.logprobs is not None:
            got = outputs[name]["logprobs"]
            assert [entry["token_id"] for entry in got] == list(want.token_ids)
            assert [entry["logprob"] for entry in got] == pytest.approx([e.logprob for e in want.logprobs], abs=1e-4)


@pytest.mark.parametrize(
    "moments", [(4, 30), pytest.param(range(0, 60, 5), marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("swap_bytes", [0, 1 << 28])
@pytest.mark.parametrize("params", [SAMPLED, COPY, SCORED], ids=["sampled", "copy", "scored"])
def test_at_every_moment_of_its_life(params: SamplingParams, swap_bytes: int, moments: Sequence[int]) -> None:
    """Running, its swap pending, on the host, and about to come back; the importer goes on from each."""
    want = alone(params)
    ours, theirs = build(swap_bytes=swap_bytes, **OPTIONS), build(run_ahead=1, **OPTIONS)
    for steps in moments:
        for preempted, later in ((False, 0), (True, 0), (True, 1)):
            after_steps(ours, "a", params, steps)
            ours.add_request("other", PROMPT[:9], GREEDY)
            if preempted:
                ours.preempt("a")
            for _ in range(later):
                ours.step()
            try:
                state = RequestState.from_bytes(ours.export_request("a").to_bytes())
            except RequestError:  # it ended on the last of its steps
                run(ours)
                continue
            theirs.import_request(state)
            output = run(theirs)["a"]
            assert (output.token_ids, output.exit_depths) == (want.token_ids, want.exit_depths)
            if params is SCORED:
                got = [entry and entry.logprob for entry in output.prompt_logprobs or ()]
                assert got[1:] == pytest.approx([e.logprob for e in want.prompt_logprobs[1:]], abs=1e-4)
            check_drained(theirs)
            run(ours)
            check_drained(ours)
    ours.close()
    theirs.close()


def test_a_request_that_never_ran_moves_too() -> None:
    ours, theirs = build(**OPTIONS), build(**OPTIONS)
    ours.add_request("a", PROMPT, GREEDY)
    state = ours.export_request("a")
    assert state.snapshot.pages == []
    theirs.import_request(RequestState.from_bytes(state.to_bytes()))
    assert run(theirs)["a"].token_ids == alone(GREEDY).token_ids
    check_drained(ours)
    ours.close()
    theirs.close()


def test_what_does_not_fit_is_refused_and_can_go_elsewhere() -> None:
    ours = build(**OPTIONS)
    after_steps(ours, "a", GREEDY, 20)
    state = ours.export_request("a")
    with pytest.raises(RequestError, match="not live"):
        ours.export_request("a")
    for other, message in (
        (build("tiny_gqa", **OPTIONS), "another model, dtype, page size or KV layout"),
        (build(**OPTIONS | {"page_size": 8}), "another model, dtype, page size or KV layout"),
        (build(**OPTIONS | {"num_pages": 4, "max_model_len": 16}), "max_model_len=16"),
        (build(**OPTIONS | {"num_pages": 7}), "need 9 KV pages of 4 tokens, but the pool has 7"),
    ):
        with pytest.raises(RequestError, match=message):
            other.import_request(state)
        check_drained(other)
        other.close()
    broken = replace(state, pages={name: tensor[1:] for name, tensor in state.pages.items()})
    with pytest.raises(RequestError):
        ours.import_request(broken)
    with pytest.raises(RequestError):
        ours.import_request(replace(state, pages={}))
    check_drained(ours)
    ours.import_request(state)
    with pytest.raises(RequestError, match="already in use"):
        ours.import_request(state)
    assert run(ours)["a"].token_ids == alone(GREEDY).token_ids
    check_drained(ours)
    ours.close()


def some_bytes() -> bytes:
    engine = build(**OPTIONS)
    after_steps(engine, "a", SAMPLED, 30)
    data = engine.export_request("a").to_bytes()
    engine.close()
    return data


GOOD = some_bytes()
HEAD = 8 + int.from_bytes(GOOD[:8], "little")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\0" * 100,
        b"\xff" * 100,
        GOOD[:HEAD],
        GOOD[:-1],
        GOOD + b"x",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"null",
        (20).to_bytes(8, "little") + b'{"__metadata__": {}}',
    ],
    ids=lambda data: repr(data[:12]),
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(RequestError, match="request state: "):
        RequestState.from_bytes(data)


@settings(max_examples=80)
@given(at=st.integers(0, HEAD - 1), value=st.integers(0, 255))
def test_a_damaged_head_is_refused(at: int, value: int) -> None:
    data = bytearray(GOOD)
    data[at] = value
    try:
        state = RequestState.from_bytes(bytes(data))
    except RequestError:
        return
    good = RequestState.from_bytes(GOOD)
    assert replace(state, pages={}) == replace(good, pages={})
    assert {name: list(tensor.shape) for name, tensor in state.pages.items()} == {
        name: list(tensor.shape) for name, tensor in good.pages.items()
    } or data[at] != GOOD[at]


def test_bytes_survive_a_round_trip() -> None:
    state = RequestState.from_bytes(GOOD)
    again = RequestState.from_bytes(state.to_bytes())
    assert replace(again, pages={}) == replace(state, pages={})
    assert again.pages.keys() == state.pages.keys()
    for name, tensor in state.pages.items():
        assert torch.equal(again.pages[name].view(torch.uint8), tensor.view(torch.uint8))
