"""How many rows a step runs: buckets filled exactly, spans that grow, and a target for the seconds of a step."""

import sys
from collections.abc import Sequence

from wavegraph.buckets.assembly import Assembly, Outlook
from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import ConfigError
from wavegraph.scheduler.lanes import Allow, Taken, ready_rows
from wavegraph.scheduler.request import Lane

AUTO_TURN = 16
"""Rows that each ready lane gets in its turn before any lane's span grows, if no chunk size is given."""

PATIENCE = 8
"""So many steps in a row may keep prompts out for the sake of the target; the next one runs a turn of theirs."""


ENDLESS = Outlook(sys.maxsize, None, lambda left: 0)
"""More is ready than a step can hold."""


class Packer:
    """Sizes steps for an order, from what it took of its queues.

    ``budget`` is the most rows of a step, ``chunk`` the most of one lane; None: a turn is `AUTO_TURN` rows, and spans
    grow into what is left of the step. With an ``assembly`` a step runs as many rows as predicted seconds ask for,
    without one all that are ready. ``atomic`` says that deeper rows do not queue but follow their cohort. ``paced``:
    the target kept rows out of the last step.
    """

    def __init__(
        self,
        budget: int,
        chunk: int | None,
        assembly: Assembly | None,
        pace: "Pace | None" = None,
        *,
        atomic: bool,
    ) -> None:
        self.budget = budget
        self.turn = min(chunk or AUTO_TURN, budget)
        self.longest_span = chunk or budget
        self.grows = chunk is None
        self.pace = pace
        self.paced = False
        self._cut_before: set[Lane] = set()
        self._outlook: Outlook | None = None  # of the last step, if it mattered
        self._assembly = assembly
        self._atomic = atomic

    def fit(self, taken: Taken, rows: int, more: bool, due: bool, allow: Allow) -> Taken:
        """Let spans grow, or cut them; returns which lanes gave rows up, and how many.

        ``rows`` are taken. ``more``: others are ready, but were not taken. ``due``: prompts have waited long enough for
        the target.
        """
        wanted = self._wanted(taken, rows, more, due)
        back: Taken = []
        if wanted > rows:
            self._grow(taken, wanted - rows, allow)
        elif wanted < rows:
            back = self._cut(taken, rows - wanted)
        self._cut_before = {lane for lane, _ in back}
        return back

    def _wanted(self, taken: Taken, rows: int, more: bool, due: bool) -> int:
        """How many rows to run, of those taken and those by which spans may grow."""
        self.paced, self._outlook = False, None
        ready = rows
        if self.grows and rows < self.budget:
            ready = min(self.budget, sum(_growing(lane, count) for lane, count in taken))
        floor = 0
        if self.pace is not None and self.pace.active:
            limit, floor = self._limits(self.pace, taken, due)
            self.paced = limit < ready
            ready = min(ready, limit)
        if self._assembly is None:
            return ready
        chosen = self._assembly.rows(ready, lambda: ENDLESS if more or self.paced else self._look_out(taken))
        return chosen if chosen > floor else ready

    def drains(self, taken: Taken, rows: int) -> bool:
        """Whether fewer than the ``rows`` rows of the last step become ready with it."""
        return (self._outlook or self._look_out(taken)).following < rows

    def _look_out(self, taken: Taken) -> Outlook:
        """What comes after a step that runs all that is ready, as far as it may run beside it."""
        following, remaining, path, goes_on = 0, 0, 0, False
        turn, grows, atomic = self.turn, self.grows, self._atomic
        for lane, count in taken:
            request, ready = lane.request, lane.limit - lane.next
            deeper = 0 if atomic else len(request.lanes) - lane.depth - 1
            remaining += ready * (deeper + 1)
            path = max(path, deeper)
            if ready > count:
                if grows:
                    count = ready
                else:
                    following += min(turn, ready - count)
            decodes = lane.next >= request.prefill_end
            more = request.known + 1 < request.total_limit
            if deeper:
                following += count
            elif more and lane.next + count == request.known:
                following += 1  # its next token
            goes_on |= decodes and more

        order = self._cut_order(taken)

        def steps_after(left: int) -> int:
            return max(path, self._path(taken, order, left))

        self._outlook = Outlook(following, None if goes_on else remaining, steps_after)
        return self._outlook

    def _path(self, taken: Taken, order: Sequence[int], left: int) -> int:
        """How many steps ``left`` rows need at least, if they are cut in this order."""
        longest = 0
        for index in order:
            if left <= 0:
                break
            lane, count = taken[index]
            longest = max(longest, 1 if self._atomic else len(lane.request.lanes) - lane.depth)
            left -= count
        return longest

    def _cut_order(self, taken: Taken) -> Sequence[int]:
        """Which lanes give rows up: those of the kind that is served second, and the last ones first.

        Of prompts, the deepest first: they have the fewest steps to come. A lane that gave rows up in the last step is
        spared if others can; but no decode row gives way to a target.
        """
        if _is_decode(taken[0][0]) and _is_decode(taken[-1][0]):
            return range(len(taken) - 1, -1, -1)
        prompts: list[int] = []
        decodes: list[int] = []
        spared: list[int] = []
        for index in range(len(taken) - 1, -1, -1):
            lane = taken[index][0]
            group = decodes if _is_decode(lane) else prompts
            (spared if lane in self._cut_before else group).append(index)
        prompts.sort(key=lambda index: -taken[index][0].depth)
        if self.pace is not None and self.pace.active:
            return prompts + [index for index in spared if not _is_decode(taken[index][0])]
        return (prompts + decodes if _is_decode(taken[0][0]) else decodes + prompts) + spared

    def _cut(self, taken: Taken, rows: int) -> Taken:
        """Take ``rows`` rows back from the ends of spans; returns of which lanes, and how many."""
        back: Taken = []
        for index in self._cut_order(taken):
            lane, count = taken[index]
            given = min(count, rows)
            taken[index] = lane, count - given
            back.append((lane, given))
            rows -= given
            if not rows:
                break
        taken[:] = [entry for entry in taken if entry[1]]
        return back

    def _limits(self, pace: "Pace", taken: Taken, due: bool) -> tuple[int, int]:
        """The most rows that the target allows, and the decode rows among those taken, which always run."""
        decodes = positions = codas = longest = prompts = 0
        for lane, count in taken:
            most = min(_growing(lane, count), self.budget) if self.grows else count
            codas += self._ends(lane, most)
            if lane.next < lane.request.prefill_end:
                prompts += most
                longest = max(longest, lane.next + most)
            else:
                decodes += count
                positions += attended(lane.next, count)
        fitting = pace.prompt_rows(decodes, positions, codas, longest)
        if not fitting and (due or not decodes):
            fitting = min(self.turn, prompts)
        return decodes + fitting, decodes

    def _ends(self, lane: Lane, count: int) -> bool:
        """Whether ``count`` rows of a lane reach a position whose token may be drawn."""
        request = lane.request
        if lane.next + count < request.known:
            return False
        first, last = request.exit_window()
        return self._atomic or first <= lane.depth <= last

    def _grow(self, taken: Taken, rows: int, allow: Allow) -> None:
        """Deal ``rows`` more to spans that have ready rows left: the lowest depth first, then the oldest request.

        Of unit tasks in chains, those with the most to come after them go first: that ends soonest (Hu 1961). It leaves
        later steps the most ready rows, so that they are full to the end.
        """
        order = sorted(
            (index for index, (lane, count) in enumerate(taken) if _growing(lane, count) > count),
            key=lambda index: (taken[index][0].depth, taken[index][0].request.arrival),
        )
        for index in order:
            lane, count = taken[index]
            wanted = min(count + rows, ready_rows(lane))
            if not lane.depth:
                wanted = max(count, allow(lane, wanted, taken))
            rows -= wanted - count
            taken[index] = lane, wanted
            if not rows:
                return


def _is_decode(lane: Lane) -> bool:
    return lane.next >= lane.request.prefill_end


def _growing(lane: Lane, count: int) -> int:
    """Rows that a lane's span may have at most. One that got less than its turn, for lack of pages, does not grow."""
    return count if lane.queued else ready_rows(lane)


def attended(start: int, count: int) -> int:
    """Positions that rows ``start .. start + count - 1`` attend in all: a row attends those before it, and itself."""
    return count * (2 * start + count + 1) // 2


class Pace:
    """Bounds the prompt rows of a step so that its predicted seconds stay within ``target``, if decode rows allow it.

    It is in force while ``active``, that is, while decodes are live; ``codas`` is how many coda rows a step may have
    besides those of its own spans. Raises `ConfigError` without measured seconds to go by.
    """

    def __init__(self, target: float, budget: int, ladder: Ladder | None, coda_ladder: Ladder, cost: CostModel) -> None:
        require_measured(cost)
        self.active = False
        self.codas = 0
        self._target = target
        self._coda_ladder = coda_ladder
        self._cost = cost
        self._steps: list[tuple[int, float]] = []  # rows, and seconds that no fewer rows exceed
        slowest = 0.0
        for size in ladder.sizes if ladder is not None else range(1, budget + 1):
            slowest = max(slowest, cost.core.replay(size))
            self._steps.append((min(size, budget), slowest))

    def prompt_rows(self, decodes: int, positions: int, codas: int, longest: int) -> int:
        """How many prompt rows fit beside ``decodes`` decode rows that attend ``positions``.

        ``codas`` is how many coda rows the spans may want, ``longest`` the most positions that a prompt row attends.
        """
        codas = min(codas + self.codas, self._coda_ladder.max)
        coda_bucket = self._coda_ladder.bucket(codas) if codas else 0
        room = self._target - self._cost.step_seconds(0, positions, coda_bucket)
        each = longest * self._cost.seconds_per_position
        best = 0
        for rows, seconds in reversed(self._steps):
            if rows <= decodes + best:
                break
            if seconds <= room:
                fitting = rows - decodes
                best = max(best, min(fitting, int((room - seconds) / each)) if each else fitting)
        return best


def require_measured(cost: CostModel | None) -> None:
    """Raises `ConfigError` unless there are measured costs, which a target needs."""
    if cost is None or not cost.measured:
        raise ConfigError(
            "target_itl_ms: needs measured costs of this model on this device to predict a step's seconds; give a "
            "bundle with a cost model, or `cost` with the file that `wavegraph profile-buckets` wrote, or no target"
        )
