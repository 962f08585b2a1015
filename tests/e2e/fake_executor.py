"""An executor without a model: every cell of KV is a number that depends on all it was computed from.

A token is a number made of its cell, so a page, slot, depth, parameter row or prefix that is mixed up shows in the
output. Steps run as late as possible: when a result is asked for.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavegraph.capture.executor import StepOutput
from wavegraph.capture.metadata import DEFAULT_PARAMS
from wavegraph.capture.ring import Logprobs
from wavegraph.errors import CaptureError
from wavegraph.model.sampling import FEATURE_SAMPLER, Column
from wavegraph.scheduler.plan import COPY_KV, CodaAction, RequestSpec, StepPlan

DEPTHS = 4
VOCAB = 97
MASK = (1 << 61) - 1
EMPTY = -1


def mix(*values: int) -> int:
    """A number made of numbers; the order counts."""
    state = 1469598103934665603
    for value in values:
        state = (state ^ (value & MASK)) * 1099511628211 % MASK
        state ^= state >> 29
    return state


def token_of(cell: int, depth: int, seed: int) -> int:
    return mix(cell, depth, seed, 7) % VOCAB


def opens(cell: int, depth: int) -> bool:
    return mix(cell, depth, 11) % 3 == 0


def score_of(cell: int, following: int) -> float:
    return float(mix(cell, following) % 1000)


def expected(spec: RequestSpec, salt: int, max_model_len: int) -> tuple[list[int], list[int]]:
    """Tokens and exit depths of a request, from nothing but itself."""
    rule, seed = spec.exit_rule, spec.device_params[0] if spec.device_params else 0
    tokens = list(spec.prompt_token_ids)
    planes = [salt] * DEPTHS
    exits: list[int] = []
    count = len(tokens)
    limit = min(count + spec.max_tokens, max_model_len)
    position = 0
    while True:
        below, leave = tokens[position], DEPTHS - 1
        for depth in range(DEPTHS):
            planes[depth] = below = mix(below, planes[depth], depth, position)
        if position >= count - 1:
            if rule is not None and not (rule.copy and position == count - 1):
                first = rule.min_depth if rule.gated else rule.max_depth
                leave = next(d for d in range(first, DEPTHS) if d == rule.max_depth or opens(planes[d], d))
            tokens.append(token_of(planes[leave], leave, seed))
            exits.append(leave)
            if rule is not None and rule.copy:
                planes[leave + 1 :] = [planes[leave]] * (DEPTHS - 1 - leave)
            if tokens[-1] in spec.stop_token_ids or len(tokens) == limit:
                return tokens[count:], exits
        position += 1


class FakeExecutor:
    """Has the methods of `Executor` that `Engine` uses. ``refuse_next`` makes one submit fail before its launch."""

    salt = 0

    def __init__(self, model: Any, limits: Any, *_: Any, **__: Any) -> None:
        self.limits = limits
        self.size: int = limits.page_size
        self.cells = self._empty(limits.num_pages)
        self.tokens: dict[int, dict[int, int]] = defaultdict(dict)
        self.table: dict[int, dict[int, int]] = defaultdict(dict)
        self.params: dict[int, Sequence[int]] = {}
        self.host: dict[int, np.ndarray[Any, Any]] = {}
        self.waiting: list[tuple[Any, StepPlan]] = []
        self.refuse_next = False
        self.stats = SimpleNamespace()

    def capture(self, progress: Any = None) -> None:
        pass

    def close(self) -> None:
        pass

    def submit(self, plan: StepPlan) -> Any:
        if self.refuse_next:
            self.refuse_next = False
            raise CaptureError("step: is not to be")
        ticket = SimpleNamespace(output=None)
        self.waiting.append((ticket, plan))
        return ticket

    def poll(self, ticket: Any) -> StepOutput:
        while ticket.output is None:
            oldest, plan = self.waiting.pop(0)
            oldest.output = self._run(plan)
        output: StepOutput = ticket.output
        return output

    def synchronize(self) -> None:
        while self.waiting:
            ticket, plan = self.waiting.pop(0)
            ticket.output = self._run(plan)

    def swap_out(self, key: int, pages: Sequence[int]) -> None:
        self.synchronize()
        assert key not in self.host
        self.host[key] = self.cells[list(pages)].copy()

    def take_swapped(self, key: int) -> dict[str, Tensor]:
        self.synchronize()
        return {"hidden": torch.from_numpy(self.host.pop(key))}

    def put_swapped(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        self.synchronize()
        assert key not in self.host
        self.host[key] = tensors["hidden"].numpy()

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        self.synchronize()
        FakeExecutor.salt = int(tensors["salt"])

    def _empty(self, pages: int) -> np.ndarray[Any, Any]:
        return np.full((pages, self.size, DEPTHS), EMPTY, dtype=np.int64)

    def _at(self, slot: int, position: int) -> np.ndarray[Any, Any]:
        view: np.ndarray[Any, Any] = self.cells[self.table[slot][position // self.size], position % self.size]
        return view

    def _run(self, plan: StepPlan) -> StepOutput:
        for key, pages in plan.swap_out:
            assert key not in self.host
            self.host[key] = self.cells[pages].copy()
        for key, pages in plan.swap_in:
            self.cells[pages] = self.host.pop(key)
        for key in plan.swap_drop:
            self.host.pop(key, None)
        for slot, row in zip(plan.param_slot, plan.param_row, strict=True):
            self.tokens[slot], self.table[slot] = {}, {}  # a new owner: nothing of the old one may be needed
            self.params[slot] = row or DEFAULT_PARAMS
        for slot, index, page in zip(plan.page_slot, plan.page_index, plan.page_id, strict=True):
            self.table[slot][index] = page
        for slot, position, token in zip(plan.token_slot, plan.token_pos, plan.token_id, strict=True):
            self.tokens[slot][position] = token
        for slot, start, count, depth in zip(
            plan.span_slot, plan.span_start, plan.span_count, plan.span_depth, strict=True
        ):
            for position in range(start, start + count):
                below = self._at(slot, position)[depth - 1] if depth else self.tokens[slot][position]
                before = self._at(slot, position - 1)[depth] if position else FakeExecutor.salt
                assert below != EMPTY
                assert before != EMPTY
                self._at(slot, position)[depth] = mix(int(below), int(before), depth, position)
        return self._coda(plan)

    def _coda(self, plan: StepPlan) -> StepOutput:
        drawn, scores = [], []
        for slot, position, depth, action in zip(
            plan.coda_slot, plan.coda_pos, plan.coda_depth, plan.coda_action, strict=True
        ):
            cells = self._at(slot, position)
            cell, token = int(cells[depth]), -1
            assert cell != EMPTY
            if action == CodaAction.SAMPLE or (action == CodaAction.GATE and opens(cell, depth)):
                token = token_of(cell, depth, self.params[slot][Column.SEED_LOW])
                self.tokens[slot][position + 1] = token
            following = self.tokens[slot][position + 1] if action == CodaAction.SCORE else token
            scores.append(score_of(cell, following))
            drawn.append(token)
            left = token >= 0 or action == CodaAction.REPLAY
            if plan.coda_features & COPY_KV and left and self.params[slot][Column.EXIT_COPY]:
                cells[depth + 1 :] = cell
        logprobs = None
        if plan.coda_features & FEATURE_SAMPLER:
            none = np.zeros((len(drawn), 20), dtype=np.int32)
            zeros = np.zeros(len(drawn), dtype=np.int32)
            logprobs = Logprobs(np.array(scores, dtype=np.float32), zeros, none, none.astype(np.float32))
        return StepOutput(drawn, logprobs)
