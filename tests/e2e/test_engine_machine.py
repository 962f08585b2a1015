"""Anything a caller may do to engines, in any order, over an executor that is late and may refuse a step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import wavegraph.engine.engine
from tests.e2e.drive import COST, GOLDENS, check_drained
from tests.e2e.fake_executor import VOCAB, FakeExecutor, expected, mix, score_of
from wavegraph.config import EngineConfig
from wavegraph.engine.engine import Engine
from wavegraph.engine.handover import RequestState
from wavegraph.errors import EngineError, RequestError
from wavegraph.model.config import OuroConfig
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.plan import RequestSpec
from wavegraph.startup.sizing import derive

MODEL = OuroConfig.from_file(GOLDENS / "tiny")
MAX_LEN = 24
REASONS = {"stop", "length", "error"}
COUNTS = {"rules": 0, "ended": 0, "moved": 0, "refused": 0}

EXITS = st.sampled_from(
    [
        {},
        {"exit_threshold": 0.5},
        {"exit_threshold": 0.5, "min_loops": 2, "max_loops": 3},
        {"exit_at_step": 1},
        {"exit_at_step": 0, "exit_kv": "copy"},
        {"exit_threshold": 0.5, "exit_kv": "copy"},
        {"prompt_logprobs": 0},
    ]
)


class Life:
    """One request from its arrival on: its latest output, and whether it has ended."""

    def __init__(self, spec: RequestSpec, owner: int, salt: int) -> None:
        self.spec = spec
        self.owner = owner
        self.tokens, self.exits = expected(spec, salt, MAX_LEN)
        self.scores = [None, *_scores(spec, salt)] if spec.score_prompt else None
        self.seen = 0

    def take(self, output: RequestOutput) -> None:
        got = list(output.token_ids)
        assert got == self.tokens[: len(got)]
        assert list(output.exit_depths) == self.exits[: len(got)]
        if output.finish_reason == "error":
            assert len(got) == self.seen
        else:
            assert len(got) == self.seen + 1, "a token was doubled or lost"
            done = len(got) == len(self.tokens)
            stopped = done and got[-1] in self.spec.stop_token_ids
            assert output.finish_reason == ("stop" if stopped else "length" if done else None)
            if self.scores is not None:
                assert output.prompt_logprobs is not None
                assert [entry and entry.logprob for entry in output.prompt_logprobs] == self.scores
        self.seen = len(got)


def _scores(spec: RequestSpec, salt: int) -> list[float]:
    cells, planes = [], [salt] * 4
    for position, token in enumerate(spec.prompt_token_ids):
        below = token
        for depth in range(4):
            planes[depth] = below = mix(below, planes[depth], depth, position)
        cells.append(below)
    return [score_of(cell, token) for cell, token in zip(cells, spec.prompt_token_ids[1:], strict=False)]


class EngineMachine(RuleBasedStateMachine):
    """Two engines that requests may move between; tiny budgets, a pool that two requests can fill, ids that return."""

    @initialize(
        sides=st.lists(
            st.fixed_dictionaries(
                {
                    "prefill_chunk_size": st.just("auto") | st.integers(1, 5),
                    "packing": st.sampled_from(["fill", "fill", "fifo"]),
                    "target_itl_ms": st.none() | st.floats(0.5, 80.0),
                    "max_num_batched_tokens": st.integers(1, 9),
                    "max_num_seqs": st.integers(1, 3),
                    "num_pages": st.integers(8, 12),
                    "wavefront": st.booleans(),
                    "step_mix": st.sampled_from(["fused", "separate"]),
                    "stage_policy": st.sampled_from(["decode_first", "refill", "fifo"]),
                    "admission_order": st.sampled_from(["fcfs", "priority"]),
                    "refill": st.booleans(),
                    "admission": st.sampled_from(["incremental", "worst_case"]),
                    "swap_bytes": st.sampled_from([0, 50_000, 1 << 28]),
                    "prefix_cache": st.booleans(),
                    "run_ahead": st.integers(1, 4),
                }
            ),
            min_size=2,
            max_size=2,
        )
    )
    def start(self, sides: list[dict[str, Any]]) -> None:
        FakeExecutor.salt = 0
        self.engines = []
        for options in sides:
            config = EngineConfig(page_size=3, max_model_len=MAX_LEN, max_bypass=2, check=True, **options)
            engine = Engine(
                SimpleNamespace(config=MODEL),  # type: ignore[arg-type]
                derive(config, MODEL, torch.float32),
                backend=None,  # type: ignore[arg-type]
                check=True,
                run_ahead=config.run_ahead,
                cost=COST,
            )
            self.engines.append(engine)
        self.live: dict[str, Life] = {}
        self.away: list[bytes] = []  # exported and not imported yet

    @rule(
        side=st.integers(0, 1),
        name=st.sampled_from("abcdef"),
        clash=st.booleans(),
        prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 6),
        stop=st.integers(0, VOCAB - 1),
        options=EXITS,
        penalty=st.sampled_from([0.0, 0.0, 1.0]),
        priority=st.integers(0, 2),
        seed=st.integers(0, 3),
    )
    def add(
        self,
        side: int,
        name: str,
        clash: bool,
        prompt: int,
        max_tokens: int,
        stop: int,
        options: dict[str, Any],
        penalty: float,
        priority: int,
        seed: int,
    ) -> None:
        COUNTS["rules"] += 1
        name = name if clash or name not in self.live else next((n for n in "abcdef" if n not in self.live), name)
        engine = self.engines[side]
        params = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=(stop, stop // 2, 2), seed=seed, presence_penalty=penalty, **options
        )
        ids = [seed // 2] + [5] * (prompt - 1)  # prompts that begin alike
        if name in self.live:
            if name in engine._records:
                with pytest.raises(RequestError, match="already in use"):
                    engine.add_request(name, ids, params)
            return
        engine.add_request(name, ids, params, priority=priority)
        self.live[name] = Life(engine._records[name].spec, side, FakeExecutor.salt)

    @precondition(lambda self: self._here())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        COUNTS["rules"] += 1
        name = data.draw(st.sampled_from(self._here()))
        assert self.engines[self.live.pop(name).owner].abort(name)

    @precondition(lambda self: self._here())
    @rule(data=st.data())
    def abort_and_use_the_id_again(self, data: st.DataObject) -> None:
        COUNTS["rules"] += 1
        name = data.draw(st.sampled_from(self._here()))
        side = self.live.pop(name).owner
        assert self.engines[side].abort(name)
        self.engines[side].add_request(name, [3, 4], SamplingParams(max_tokens=2, prompt_logprobs=0, seed=0))
        self.live[name] = Life(self.engines[side]._records[name].spec, side, FakeExecutor.salt)

    @rule(side=st.integers(0, 1), data=st.data())
    def preempt(self, side: int, data: st.DataObject) -> None:
        COUNTS["rules"] += 1
        running = list(self.engines[side].scheduler.residency.running)
        if running:
            assert self.engines[side].preempt(data.draw(st.sampled_from(running)))

    @rule(side=st.integers(0, 1), times=st.integers(1, 9))
    def step(self, side: int, times: int) -> None:
        COUNTS["rules"] += 1
        for _ in range(times):
            self._step(side)

    @rule(side=st.integers(0, 1))
    def step_that_cannot_be_launched(self, side: int) -> None:
        COUNTS["rules"] += 1
        engine = self.engines[side]
        engine.executor.refuse_next = True  # type: ignore[attr-defined]
        self._step(side)
        COUNTS["refused"] += not engine.executor.refuse_next  # type: ignore[attr-defined]
        engine.executor.refuse_next = False  # type: ignore[attr-defined]

    @precondition(lambda self: self._here())
    @rule(data=st.data(), to=st.sampled_from([None, 0, 1]))
    def export(self, data: st.DataObject, to: int | None) -> None:
        COUNTS["rules"] += 1
        name = data.draw(st.sampled_from(self._here()))
        engine = self.engines[self.live[name].owner]
        try:
            state = engine.export_request(name)
        except RequestError:  # it ended while the steps in flight were waited for
            assert any(output.request_id == name and output.finished for output in engine._undelivered)
            return
        self.live[name].owner = -1
        self.live[name].seen = len(state.snapshot.exits)
        self.away.append(state.to_bytes())
        if to is not None:
            self.take_in(to)

    @precondition(lambda self: self.away)
    @rule(side=st.integers(0, 1))
    def take_in(self, side: int) -> None:
        COUNTS["rules"] += 1
        COUNTS["moved"] += 1
        state = RequestState.from_bytes(self.away.pop())
        self.engines[side].import_request(state)
        self.live[state.snapshot.spec.request_id].owner = side

    @precondition(lambda self: not self.away)
    @rule(salt=st.integers(0, 5), how=st.sampled_from(["refuse", "finish", "abort"]))
    def update_weights(self, salt: int, how: Any) -> None:
        COUNTS["rules"] += 1
        busy = [engine for engine in self.engines if engine.scheduler.has_unfinished]
        if how == "refuse" and busy:
            with pytest.raises(EngineError, match="are not finished"):
                busy[0].update_weights({"salt": torch.tensor(salt)})
            return
        tensors = {"salt": torch.tensor(FakeExecutor.salt)}
        for engine in self.engines:  # all are idle before the first gets new weights
            engine.update_weights(tensors, live=how)
            news = {output.request_id for output in engine._undelivered if output.finished}
            if how == "abort":
                for name in [n for n, life in self.live.items() if life.owner == self.engines.index(engine)]:
                    if name not in news:
                        del self.live[name]
        for engine in self.engines:
            engine.update_weights({"salt": torch.tensor(salt)})
            if engine.has_unfinished:
                self._take(engine.step())
        assert not self.live

    @invariant()
    def the_engines_agree_with_the_callers(self) -> None:
        for side, engine in enumerate(getattr(self, "engines", [])):
            news = {output.request_id for output in engine._undelivered if output.finished}
            assert set(engine._records) | news == {n for n, life in self.live.items() if life.owner == side}

    def teardown(self) -> None:
        if not hasattr(self, "engines") or any(engine._broken for engine in self.engines):
            return  # not begun, or a rule has failed
        while self.away:
            self.take_in(0)
        for side, engine in enumerate(self.engines):
            for _ in range(3000):
                if not engine.has_unfinished:
                    break
                self._step(side)
            check_drained(engine)
            assert set(engine.executor.host) <= set(engine.scheduler._draft.swap_drop)  # type: ignore[attr-defined]
        assert not self.live

    def _here(self) -> list[str]:
        """Those that have not ended, as the engines know them."""
        return sorted(n for n, life in self.live.items() if life.owner >= 0 and n in self.engines[life.owner]._records)

    def _step(self, side: int) -> None:
        self._take(self.engines[side].step())

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            life = self.live[output.request_id]
            life.take(output)
            if output.finished:
                assert output.finish_reason in REASONS
                assert (output.error is not None) == (output.finish_reason == "error")
                COUNTS["ended"] += 1
                del self.live[output.request_id]


def run_machine(examples: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wavegraph.engine.engine, "Executor", FakeExecutor)
    monkeypatch.setattr(wavegraph.engine.engine, "check_new_weights", lambda *_: None)  # its weights are a number
    profile = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    before = dict(COUNTS)
    run_state_machine_as_test(EngineMachine, settings=profile)
    done = {name: COUNTS[name] - before[name] for name in COUNTS}
    print(done)
    assert done["rules"] >= 15 * examples
    assert done["ended"] >= examples
    assert done["moved"] >= examples // 4
    assert done["refused"] >= examples // 4


def test_engine_state_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    run_machine(150, 40, monkeypatch)


@pytest.mark.slow
def test_engine_state_machine_at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    run_machine(300, 60, monkeypatch)
