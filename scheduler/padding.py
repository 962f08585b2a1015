"""Which bucket runs a step's rows, and why it is larger than they are, if it is."""

from wavegraph.buckets.assembly import Assembly
from wavegraph.buckets.ladder import Ladder
from wavegraph.scheduler.lanes import Taken, ready_rows
from wavegraph.scheduler.order import Order
from wavegraph.scheduler.packing import Packer
from wavegraph.scheduler.plan import PaddingReason, StepPlan


class BucketChoice:
    """Gives plans their bucket, and a padded one its `PaddingReason`.

    ``ladder`` has the buckets; None: a step's bucket is its row count. With an ``assembly`` the cheapest that holds the
    rows is chosen, without one the smallest. ``packer`` and ``order`` say what they did to the last step.
    """

    def __init__(self, ladder: Ladder | None, assembly: Assembly | None, packer: Packer, order: Order) -> None:
        self._ladder = ladder
        self._assembly = assembly
        self._packer = packer
        self._order = order
        self._last = PaddingReason.NONE, 0  # of the last step that was chosen freely: why, and its rows

    def choose(self, plan: StepPlan, lanes: Taken, short_of_pages: bool) -> None:
        """Set ``rows``, ``bucket`` and ``padding_reason`` of the plan that is to run ``lanes``, before these move on.

        ``short_of_pages``: the pool had no room for rows that were ready.
        """
        plan.rows = rows = sum(count for _, count in lanes)
        if self._ladder is None:
            plan.bucket = rows
            return
        plan.bucket = self._assembly.bucket(rows) if self._assembly is not None else self._ladder.bucket(rows)
        if plan.bucket > rows:
            plan.padding_reason = self._why(lanes, rows, self._ladder.sizes[0], short_of_pages)

    def _why(self, lanes: Taken, rows: int, smallest: int, short_of_pages: bool) -> PaddingReason:
        """The depths of a cohort have the reason of its first."""
        if not self._order.chose:
            reason, before = self._last
            return reason if rows == before else PaddingReason.COHORT
        reason = self._reason(lanes, rows, smallest, short_of_pages)
        self._last = reason, rows
        return reason

    def _reason(self, lanes: Taken, rows: int, smallest: int, short_of_pages: bool) -> PaddingReason:
        if self._packer.paced:
            return PaddingReason.TARGET
        if short_of_pages:
            return PaddingReason.PAGES
        if rows == self._packer.budget:
            return PaddingReason.BUDGET
        if self._order.others_ready:
            return PaddingReason.KIND
        if any(count < ready_rows(lane) for lane, count in lanes):
            return PaddingReason.CHUNK
        if rows < smallest:
            return PaddingReason.SMALLEST
        if self._assembly is None:
            return PaddingReason.FIFO
        return PaddingReason.DRAIN if self._packer.drains(lanes, rows) else PaddingReason.RATE
