"""Plans and results: the plain data that passes between scheduler and executor. Frozen by convention.

Once handed out, a plan is never changed except for the ``state`` of its tasks, which the scheduler keeps.
"""

from dataclasses import dataclass, field
from enum import IntEnum


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
    """Life of a task. Tasks are made ready, so there is no pending state outside the frontier vector."""

    SUBMITTED = 0
    COMPLETED = 1
    CANCELLED = 2


class ExitPolicy(IntEnum):
    """How deep a task's tokens go (RFC): prompts always through all depths."""

    FULL_DEPTH = 0
    DECODE_DEPTH = 1


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
    count that runs it, ``bucket - rows`` its padding; ``coda_bucket`` is 0 when no coda row is due.
    """

    step_id: int
    tasks: list[ExecutionTask] = field(default_factory=list)
    coda_tasks: list[ExecutionTask] = field(default_factory=list)
    rows: int = 0
    bucket: int = 0
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


@dataclass(slots=True, frozen=True)
class StepResult:
    """What the host must see of a finished step: one sampled token per coda row, in plan order."""

    step_id: int
    tokens: list[int]


@dataclass(slots=True, frozen=True)
class RequestSpec:
    """A request as the scheduler needs it.

    ``stop_token_ids`` end it when sampled (the token is kept in the output); ``max_tokens`` >= 1 bounds the
    output. Text never reaches the scheduler.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(slots=True, frozen=True)
class RequestUpdate:
    """News of one request from `Scheduler.apply`: the token it got, and why it ended, if it did.

    ``finish_reason`` is ``None``, ``"stop"`` or ``"length"``.
    """

    request_id: str
    token_id: int
    finish_reason: str | None
