"""Runs prompts through an executor by hand-made steps: no scheduler, and every step can be looked at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.buffers import Limits
from wavegraph.capture.executor import Executor
from wavegraph.model.config import OuroConfig
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.weights import Model, model_from_tensors, random_weights

GOLDENS = Path(__file__).parents[1] / "goldens"

Span = tuple[int, int, int, int]
"""Slot, start, count, depth."""


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


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> Model:
    config = tiny_config(**changes)
    return model_from_tensors(config, dict(random_weights(config, seed, dtype)), ops=AtenOps(), dtype=dtype)


def make_executor(
    model: Model,
    backend: str = "recorded",
    *,
    ladder: Sequence[int] = (1, 2, 4, 8),
    coda_ladder: Sequence[int] = (1, 2, 3),
    num_pages: int = 24,
    page_size: int = 4,
    max_in_flight: int = 4,
    max_model_len: int = 32,
) -> Executor:
    """A captured executor for three requests."""
    limits = Limits(
        max_num_seqs=3,
        max_spans=max(ladder),
        max_rows=max(ladder),
        max_coda_rows=max(coda_ladder),
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
    )
    executor = Executor(model, limits, Ladder(ladder), Ladder(coda_ladder), backend, max_in_flight=max_in_flight)
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
    coda_slot: list[int] = field(default_factory=list)
    coda_pos: list[int] = field(default_factory=list)
    coda_bucket: int = 0

    @property
    def spans(self) -> list[Span]:
        return list(zip(self.span_slot, self.span_start, self.span_count, self.span_depth, strict=True))


@dataclass
class Request:
    """A slot's tokens (prompt and generated), pages, and positions done at each depth."""

    tokens: list[int]
    frontier: list[int]
    prompt_len: int
    pages: list[int] = field(default_factory=list)


class Driver:
    """Requests by slot, pages by free list, and what came out of each step.

    ``gates`` is keyed by (slot, position, depth), ``logits`` by (slot, position).
    """

    def __init__(self, executor: Executor, free_pages: Sequence[int] | None = None) -> None:
        self.executor = executor
        self.depths = executor.pools.k.shape[1]
        self.free = list(range(executor.limits.num_pages)) if free_pages is None else list(free_pages)
        self.requests: dict[int, Request] = {}
        self.gates: dict[tuple[int, int, int], Tensor] = {}
        self.logits: dict[tuple[int, int], Tensor] = {}
        self.before_submit: Callable[[Step], None] = lambda step: None

    def add(self, slot: int, prompt: Sequence[int]) -> None:
        self.requests[slot] = Request(list(prompt), [0] * self.depths, len(prompt))

    def make_step(self, spans: Sequence[Span], coda: Sequence[tuple[int, int]] = (), bucket: int | None = None) -> Step:
        """A step of ``spans`` and coda rows, with the table updates that these need. Frontiers stay as they are."""
        step = Step(rows=sum(count for _, _, count, _ in spans))
        for slot, start, count, depth in spans:
            step.span_slot.append(slot)
            step.span_start.append(start)
            step.span_count.append(count)
            step.span_depth.append(depth)
            if depth == 0:
                self._prepare(step, slot, start, start + count)
        for slot, pos in coda:
            step.coda_slot.append(slot)
            step.coda_pos.append(pos)
        if step.rows:
            step.bucket = self.executor.core.bucket(step.rows) if bucket is None else bucket
        if coda:
            step.coda_bucket = self.executor.coda.bucket(len(coda))
        return step

    def run(self, step: Step) -> list[int]:
        """Submit, poll, note outputs, advance frontiers, and append tokens sampled at a request's end."""
        self.before_submit(step)
        tokens = self.executor.poll(self.executor.submit(step)).tokens
        row = 0
        for slot, start, count, depth in step.spans:
            for pos in range(start, start + count):
                self.gates[slot, pos, depth] = self.executor.io.gate_logits[row].clone()
                row += 1
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
        """NaN wherever no live value is: scratch page, free pages, tails of live pages, all intermediates."""
        kv, hidden = self.written()
        pools = self.executor.pools
        for pool in (pools.k, pools.v):
            pool.permute(0, 1, 3, 2, 4, 5)[~kv] = torch.nan
        pools.hidden[~hidden] = torch.nan
        work = self.executor.work
        for tensor in (work.x, work.normed, work.branch, work.qkv, work.attn, work.mlp, work.coda_x):
            tensor.fill_(torch.nan)
        self.executor.io.gate_logits.fill_(torch.nan)
        self.executor.io.logits.fill_(torch.nan)

    def _prepare(self, step: Step, slot: int, start: int, end: int) -> None:
        """Token and page updates for positions that run for the first time."""
        request = self.requests[slot]
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
