"""What a scheduler has planned since the start, in totals."""

from collections import Counter
from dataclasses import dataclass, field

from wavegraph.scheduler.plan import Kind, StepPlan

PROMPT = Kind.PROMPT


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start. ``rows`` counts live rows of core replays, ``padding_rows`` the rest; ``padding_reasons``
    says how many of these there were for which `PaddingReason`. ``core_steps`` held rows, ``prompt_steps`` and
    ``decode_steps`` of them rows of one kind only.
    """

    steps: int = 0
    core_steps: int = 0
    prompt_steps: int = 0
    decode_steps: int = 0
    rows: int = 0
    padding_rows: int = 0
    padding_reasons: Counter[str] = field(default_factory=Counter)
    spans: int = 0
    prompt_rows: int = 0
    coda_steps: int = 0
    coda_rows: int = 0
    coda_padding_rows: int = 0

    def count(self, plan: StepPlan) -> None:
        """Add a plan that is handed out."""
        self.steps += 1
        self.core_steps += plan.rows > 0
        self.rows += plan.rows
        if plan.bucket > plan.rows:
            self.padding_rows += plan.bucket - plan.rows
            self.padding_reasons[plan.padding_reason] += plan.bucket - plan.rows
        self.spans += len(plan.tasks)
        prompt_rows = sum(task.token_count for task in plan.tasks if task.kind is PROMPT)
        self.prompt_rows += prompt_rows
        self.prompt_steps += 0 < prompt_rows == plan.rows
        self.decode_steps += 0 == prompt_rows < plan.rows
        if plan.coda_bucket:
            self.coda_steps += 1
            self.coda_rows += len(plan.coda_slot)
            self.coda_padding_rows += plan.coda_bucket - len(plan.coda_slot)
