"""Plans and results: the plain data that passes between scheduler and executor. Frozen by convention.

Once handed out, a plan is never changed except for the ``state`` of its tasks, which the scheduler keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Kind(IntEnum):
    """What a task's tokens are (RFC, "Discard PREFILL Plan")."""

    PROMPT = 0
    DECODE = 1


class Phase(IntEnum):
    """Which part of the model a task runs (RFC, "Task representation").

    ``COMPOSITE_DEPTH0`` is PRELUDE fused with depth 0, as CORE records it; ``RECURRENT`` a later depth.
    """

    COMPOSITE_DEPTH0 = 0
    RECURRENT = 1
    CODA = 2


class TaskState(IntEnum):
    """Life of a task. A task is made when its rows are ready; what is pending lives in the frontier vector."""

    SUBMITTED = 0
    COMPLETED = 1
    CANCELLED = 2


class ExitPolicy(IntEnum):
    """How deep a task's tokens go (RFC): prompts through all depths, decoded tokens as far as their exit rule."""

    FULL_DEPTH = 0
    DECODE_DEPTH = 1


class PaddingReason(StrEnum):
    """Why a step's bucket was larger than its rows. The first that holds, in this order."""

    NONE = ""
    COHORT = "cohort"
    """Members left an atomic plan before its last depth."""
    TARGET = "latency target"
    """Rows were ready, but the target for a step's seconds kept them out."""
    PAGES = "page room"
    """Rows were ready, but the pool had no page for them."""
    BUDGET = "row budget"
    """The step is full: ``max_num_batched_tokens`` is less than the bucket."""
    KIND = "other kind"
    """Rows were ready of a kind, prompt or decode, that the step could not hold."""
    CHUNK = "chunk size"
    """Rows were ready beyond ``prefill_chunk_size``."""
    SMALLEST = "smallest bucket"
    """All that was ready was less than the smallest bucket."""
    FIFO = "fifo"
    """Packing is ``fifo``: it runs all that is ready, whatever the bucket."""
    DRAIN = "drain"
    """All that was ready ran, since little follows: the least seconds for the rest."""
    RATE = "rate"
    """All that was ready ran, with more live rows a second than in a filled bucket."""


COPY_KV = 1 << 30
"""Bit of ``StepPlan.coda_features``: some row leaves early and wants its KV copied into the deeper planes."""


class CodaAction(IntEnum):
    """What CODA does for one row.

    ``SAMPLE`` draws the next token. ``GATE`` draws it only if the gate lets the row leave at this depth.
    ``SCORE`` reports the prompt log-probability of the token after the row. ``REPLAY`` draws nothing: it repeats
    the KV copy of an exit that was taken before a recomputation.
    """

    SAMPLE = 0
    GATE = 1
    SCORE = 2
    REPLAY = 3


@dataclass(slots=True, frozen=True)
class ExitRule:
    """Where decoded tokens leave the loop. Depths are zero-based.

    Without ``gated`` every token leaves at ``max_depth``. With it, the gate decides at each depth from
    ``min_depth`` on, and ``max_depth`` is the last. ``copy`` selects the KV semantics: False fills every plane
    (the reference), True copies the exit depth's KV into the deeper planes and skips the work, with prompts and
    the first token at full depth (RFC).
    """

    max_depth: int
    min_depth: int = 0
    gated: bool = False
    copy: bool = False


@dataclass(slots=True, eq=False)
class ExecutionTask:
    """A span with an identity and a life: positions ``token_start .. +token_count`` of a request at one depth.

    ``generation`` tells two lives of one request id apart. ``pages`` are the pages that hold the span's hidden
    rows (and its KV): its hidden-state handle. Completion is ``state``; the step that runs it is ``step_id``.
    """

    task_id: int
    step_id: int
    request_id: str
    generation: int
    slot: int
    kind: Kind
    phase: Phase
    depth: int
    token_start: int
    token_count: int
    exit_policy: ExitPolicy
    pages: list[int]
    state: TaskState = TaskState.SUBMITTED

    @property
    def token_end(self) -> int:
        """One past the last position."""
        return self.token_start + self.token_count

    @property
    def position(self) -> int:
        """First position (the RFC's ``position`` of a decode task)."""
        return self.token_start


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step: rows for one core replay, and the coda rows due after it.

    ``tasks`` are the core spans in row order; ``coda_tasks`` one task per coda row. The parallel integer lists
    are the same step as the device sees it (`capture.metadata.StepInputs`). ``bucket`` is the recorded row
    count that runs it, ``bucket - rows`` its padding, and ``padding_reason`` says why there is some; ``coda_bucket``
    is 0 when no coda row is due. Either part may be empty, not both.

    ``swap_out`` and ``swap_in`` move whole requests between pool and host before the step's updates, in this
    order: (key, pages); ``swap_drop`` names keys whose copy on the host is no longer wanted. A key is a
    request's generation. ``param_slot``, ``param_row`` and ``param_owner`` name the requests that come to the
    device: slot, opaque device parameters, (id, generation). ``restarts`` names generations that left it to be
    recomputed.
    ``coda_features`` joins the features that the coda rows ask of CODA (opaque bits of `RequestSpec`).
    """

    step_id: int
    tasks: list[ExecutionTask] = field(default_factory=list)
    coda_tasks: list[ExecutionTask] = field(default_factory=list)
    rows: int = 0
    bucket: int = 0
    padding_reason: PaddingReason = PaddingReason.NONE
    coda_bucket: int = 0
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
    coda_depth: list[int] = field(default_factory=list)
    coda_action: list[int] = field(default_factory=list)
    coda_features: int = 0
    param_slot: list[int] = field(default_factory=list)
    param_row: list[Sequence[int]] = field(default_factory=list)
    param_owner: list[tuple[str, int]] = field(default_factory=list)
    swap_out: list[tuple[int, list[int]]] = field(default_factory=list)
    swap_in: list[tuple[int, list[int]]] = field(default_factory=list)
    swap_drop: list[int] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class StepResult:
    """What the host must see of a finished step: one token per coda row, in plan order.

    -1 where no token was drawn: a gated row that did not leave, a scored or replayed row.
    """

    step_id: int
    tokens: list[int]


@dataclass(slots=True, frozen=True)
class RequestSpec:
    """A request as the scheduler needs it.

    ``stop_token_ids`` end it when sampled (the token is kept in the output); ``max_tokens`` >= 1 bounds the
    output. A lower ``priority`` is served earlier. ``exit_rule`` None means full depth. ``score_prompt`` asks for
    a coda row at every prompt position. ``needs_history`` says that CODA reads all earlier tokens of the request
    from the device's table. ``coda_features`` and ``device_params`` are passed through unread. Text never
    reaches the scheduler.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    exit_rule: ExitRule | None = None
    score_prompt: bool = False
    needs_history: bool = False
    coda_features: int = 0
    device_params: Sequence[int] = ()


@dataclass(slots=True, frozen=True)
class RequestUpdate:
    """News of one request from `Scheduler.apply`: the token it got, its exit depth, and why it ended, if it did.

    ``coda_row`` is the row of the step's results that the token came from, in the plan of ``step_id``; tokens
    whose results came early name an earlier step. ``cached_tokens`` is how much of the prompt the prefix cache had.
    ``finish_reason`` is ``None``, ``"stop"`` or ``"length"``.
    """

    request_id: str
    token_id: int
    finish_reason: str | None
    exit_depth: int
    step_id: int
    coda_row: int
    cached_tokens: int
