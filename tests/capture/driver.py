"""Runs prompts through an executor by hand-made steps: no scheduler, and every step can be looked at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.backends.base import Backend
from wavegraph.capture.buffers import Limits
from wavegraph.capture.executor import Executor, Ticket
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.cpu import CpuOps
from wavegraph.model.sampling import Action
from wavegraph.model.weights import Model, model_from_tensors, random_weights

GOLDENS = Path(__file__).parents[1] / "goldens"

Span = tuple[int, int, int, int]
"""Slot, start, count, depth."""

CodaRow = tuple[int, int] | tuple[int, int, int, Action]
"""Slot and position; depth and action too, unless they are the last depth and SAMPLE."""


def tiny_config(**changes: object) -> OuroConfig:
    fields: dict[str, object] = {
        "model_type": "ouro",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "total_ut_steps": 3,
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "early_exit_threshold": 1.0,
        "eos_token_id": 0,
        "hidden_act": "silu",
    }
    return OuroConfig.from_dict(fields | changes)


def tiny_model(
    backend: str = "recorded", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object
) -> Model:
    """A random model over the operators that ``backend`` runs."""
    config, ops = tiny_config(**changes), CpuOps() if backend == "compiled" else AtenOps()
    return model_from_tensors(config, dict(random_weights(config, seed, dtype)), ops=ops, dtype=dtype)


def make_executor(
    model: Model,
    backend: Backend | str = "recorded",
    *,
    ladder: Sequence[int] = (1, 2, 4, 8),
    coda_ladder: Sequence[int] = (1, 2, 3),
    num_pages: int = 24,
    page_size: int = 4,
    max_in_flight: int = 4,
    max_model_len: int = 32,
    max_num_seqs: int = 3,
    asynchronous: bool = False,
    check: bool = False,
) -> Executor:
    """A captured executor."""
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_spans=max(ladder),
        max_rows=max(ladder),
        max_coda_rows=max(coda_ladder),
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
    )
    executor = Executor(
        model,
        limits,
        Ladder(ladder),
        Ladder(coda_ladder),
        backend,
        max_in_flight=max_in_flight,
        asynchronous=asynchronous,
        check=check,
    )
    executor.capture()
    return executor


@dataclass
class Step:
    """One step; satisfies `StepInputs`."""

    rows: int = 0
    bucket: int = 0
    span_slot: list[int] = field(default_factory=list)
    span_start: list[int] = field(default_factory=list)
    span_count: list[int] = field(default_factory=list)
    span_depth: list[int] = field(default_factory=list)
    token_slot: list[int] = field(default_factory=list)
    token_pos: list[int] = field(default_factory=list)
    token_id: list[int] = field(default_factory=list)
    page_slot: list[int] = field(default_factory=list)
    page_index: list[int] = field(default_factory=list)
    page_id: list[int] = field(default_factory=list)
    param_slot: list[int] = field(default_factory=list)
    param_row: list[Sequence[int]] = field(default_factory=list)
    coda_slot: list[int] = field(default_factory=list)
    coda_pos: list[int] = field(default_factory=list)
    coda_depth: list[int] = field(default_factory=list)
    coda_action: list[int] = field(default_factory=list)
    coda_bucket: int = 0
    coda_features: int = 0
    swap_out: list[tuple[int, list[int]]] = field(default_factory=list)
    swap_in: list[tuple[int, list[int]]] = field(default_factory=list)
    swap_drop: list[int] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        return list(zip(self.span_slot, self.span_start, self.span_count, self.span_depth, strict=True))


@dataclass
class Request:
    """A slot's tokens (prompt and generated), pages, positions done at each depth, parameters not yet sent."""

    tokens: list[int]
    frontier: list[int]
    prompt_len: int
    params: Sequence[int] | None = None
    pages: list[int] = field(default_factory=list)


class Driver:
    """Requests by slot, pages by free list, and what came out of each step.

    ``gates`` is keyed by (slot, position, depth), ``logits`` by (slot, position). ``features`` go into each step with
    coda rows.
    """

    def __init__(self, executor: Executor, free_pages: Sequence[int] | None = None) -> None:
        self.executor = executor
        self.depths = executor.pools.k.shape[1]
        self.free = list(range(executor.limits.num_pages)) if free_pages is None else list(free_pages)
        self.requests: dict[int, Request] = {}
        self.gates: dict[tuple[int, int, int], Tensor] = {}
        self.logits: dict[tuple[int, int], Tensor] = {}
        self.before_submit: Callable[[Step], None] = lambda step: None
        self.features = 0

    def add(self, slot: int, prompt: Sequence[int], params: Sequence[int] = ()) -> None:
        self.requests[slot] = Request(list(prompt), [0] * self.depths, len(prompt), params)

    def make_step(self, spans: Sequence[Span], coda: Sequence[CodaRow] = (), bucket: int | None = None) -> Step:
        """A step of ``spans`` and coda rows, with the table updates that these need. Frontiers stay as they are."""
        step = Step(rows=sum(count for _, _, count, _ in spans))
        for slot, start, count, depth in spans:
            step.span_slot.append(slot)
            step.span_start.append(start)
            step.span_count.append(count)
            step.span_depth.append(depth)
            if depth == 0:
                self._prepare(step, slot, start, start + count)
        for row in coda:
            slot, pos, depth, action = row if len(row) == 4 else (*row, self.depths - 1, Action.SAMPLE)
            step.coda_slot.append(slot)
            step.coda_pos.append(pos)
            step.coda_depth.append(depth)
            step.coda_action.append(action)
        if step.rows:
            step.bucket = self.executor.core.bucket(step.rows) if bucket is None else bucket
        if coda:
            step.coda_features = self.features
            step.coda_bucket = self.executor.coda.bucket(len(coda))
        return step

    def run(self, step: Step) -> list[int]:
        """Submit, poll, note outputs, advance frontiers, and append tokens sampled at a request's end."""
        self.before_submit(step)
        tokens = self.executor.poll(self.executor.submit(step)).tokens
        pools = self.executor.pools
        for slot, start, count, depth in step.spans:
            for pos in range(start, start + count):
                page = self.requests[slot].pages[pos // pools.page_size]
                self.gates[slot, pos, depth] = pools.gate[page, pos % pools.page_size, depth].clone()
            self.requests[slot].frontier[depth] = start + count
        for at, (slot, pos) in enumerate(zip(step.coda_slot, step.coda_pos, strict=True)):
            self.logits[slot, pos] = self.executor.io.logits[at].clone()
            if len(self.requests[slot].tokens) == pos + 1:
                self.requests[slot].tokens.append(tokens[at])
        return tokens

    def ready(self, chunk: int, budget: int) -> list[Span]:
        """What the frontiers allow, deepest first, at most ``chunk`` rows a span and ``budget`` in all."""
        spans: list[Span] = []
        for slot, request in self.requests.items():
            for depth in reversed(range(self.depths)):
                done = request.frontier[depth]
                known = request.frontier[depth - 1] if depth else len(request.tokens)
                count = min(chunk, known - done, budget)
                if count > 0:
                    spans.append((slot, done, count, depth))
                    budget -= count
        return spans

    def generate(self, max_tokens: int, chunk: int, budget: int) -> dict[int, list[int]]:
        """All requests as one wavefront, until each has ``max_tokens`` new tokens. Coda rows ride in the step of
        their last depth."""
        generated: dict[int, list[int]] = {}
        while spans := self.ready(chunk, budget):
            coda = [
                (slot, start + count - 1)
                for slot, start, count, depth in spans
                if depth == self.depths - 1 and start + count == len(self.requests[slot].tokens)
            ]
            self.run(self.make_step(spans, coda))
            for slot, request in list(self.requests.items()):
                if len(request.tokens) - request.prompt_len == max_tokens:
                    generated[slot] = request.tokens[request.prompt_len :]
                    self.finish(slot)
        return generated

    def move_in(self, step: Step, slot: int, key: int, pages: list[int]) -> None:
        """Let ``step`` bring a slot's request back from the host under ``key``, into ``pages``."""
        request = self.requests[slot]
        request.pages = pages
        step.swap_in.append((key, pages))
        step.page_slot += [slot] * len(pages)
        step.page_index += range(len(pages))
        step.page_id += pages

    def finish(self, slot: int) -> None:
        """Give the slot and its pages back."""
        self.free.extend(self.requests.pop(slot).pages)

    def written(self) -> tuple[Tensor, Tensor]:
        """Which positions hold live KV ``[G + 1, D, page_size]``, and hidden rows ``[G + 1, page_size]``."""
        pools = self.executor.pools
        kv = torch.zeros(*pools.k.shape[:2], pools.page_size, dtype=torch.bool)
        for request in self.requests.values():
            for depth, done in enumerate(request.frontier):
                for pos in range(done):
                    kv[request.pages[pos // pools.page_size], depth, pos % pools.page_size] = True
        return kv, kv[:, 0]

    def poison(self) -> None:
        """NaN wherever no live value is: scratch page, free pages, tails of live pages, intermediates, outputs."""
        kv, hidden = self.written()
        pools = self.executor.pools
        for pool in (pools.k, pools.v):
            pool.permute(0, 1, 3, 2, 4, 5)[~kv] = torch.nan
        pools.hidden[~hidden] = torch.nan
        pools.gate.transpose(1, 2)[~kv] = torch.nan
        work, io = self.executor.work, self.executor.io
        for tensor in (*(getattr(work, entry.name) for entry in fields(work)), io.logits):
            tensor.fill_(torch.nan)
        for tensor in (io.coda_left, io.coda_token, io.coda_logprob, io.coda_rank, io.top_ids, io.top_logprobs):
            tensor.view(torch.int32).fill_(-1)

    def _prepare(self, step: Step, slot: int, start: int, end: int) -> None:
        """Updates for positions that run for the first time: tokens and pages, and first of all parameters."""
        request = self.requests[slot]
        if request.params is not None:
            step.param_slot.append(slot)
            step.param_row.append(request.params)
            request.params = None
        for pos in range(start, min(end, request.prompt_len)):
            step.token_slot.append(slot)
            step.token_pos.append(pos)
            step.token_id.append(request.tokens[pos])
        while len(request.pages) * self.executor.limits.page_size < end:
            page = self.free.pop(0)
            step.page_slot.append(slot)
            step.page_index.append(len(request.pages))
            step.page_id.append(page)
            request.pages.append(page)


def run_ahead(executor: Executor, steps: Sequence[Step], ahead: int) -> list[list[int]]:
    """Run ``steps`` with up to ``ahead`` of them in flight until all have passed; returns the tokens of each."""
    results: list[list[int]] = []
    tickets: list[Ticket] = []
    for step in steps:
        if len(tickets) == ahead:
            results.append(executor.poll(tickets.pop(0)).tokens)
        tickets.append(executor.submit(step))
    results += [executor.poll(ticket).tokens for ticket in tickets]
    executor.synchronize()
    return results
