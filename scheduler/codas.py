"""Coda rows that are due: tokens to draw, gates to ask, prompt positions to score."""

from collections.abc import Iterable

from wavegraph.scheduler.plan import COPY_KV, CodaAction, StepPlan
from wavegraph.scheduler.request import Request
from wavegraph.scheduler.tasks import TaskWriter
from wavegraph.scheduler.transitions import Transitions

SAMPLE, GATE, SCORE, REPLAY = CodaAction.SAMPLE, CodaAction.GATE, CodaAction.SCORE, CodaAction.REPLAY


class CodaQueue:
    """Requests that wait for coda rows, first come, first served; at most ``limit`` rows a step.

    An entry names the request's generation, and that of a held position its depth, so that one which outlived what
    it asked for is dropped.
    """

    def __init__(self, limit: int, writer: TaskWriter, transitions: Transitions) -> None:
        self._limit = limit
        self._writer = writer
        self._transitions = transitions
        self._due: list[tuple[Request, int, int]] = []
        self._scoring: list[tuple[Request, int]] = []

    @property
    def waiting(self) -> int:
        """How many rows of the next step may be taken already: all while prompts are scored."""
        return self._limit if self._scoring else len(self._due)

    def resume(self, request: Request) -> None:
        """A request came to the device, new or in mid-life."""
        if request.to_score:
            self._scoring.append((request, request.generation))
        if request.held_depth >= 0:
            self._due.append((request, request.generation, request.held_depth))

    def ask(self, requests: Iterable[Request]) -> None:
        """The newest positions of these are held for a coda row."""
        self._due.extend([(request, request.generation, request.held_depth) for request in requests])

    def add_to(self, plan: StepPlan) -> None:
        """Plan the rows that are due: tokens first, then prompt positions to score with the room that is left."""
        room = self._limit
        due, self._due = self._due, []
        for entry in due:
            request, generation, depth = entry
            if request.generation != generation or request.slot < 0 or request.held_depth != depth:
                continue
            if request.to_score or not room:
                self._due.append(entry)
                continue
            self._draw(plan, request, depth)
            room -= 1
        scoring, self._scoring = self._scoring, []
        for request, generation in scoring:
            if request.generation == generation and request.slot >= 0:
                room = self._score(plan, request, room)
                if request.to_score:
                    self._scoring.append((request, generation))

    def _score(self, plan: StepPlan, request: Request, room: int) -> int:
        """Score prompt positions that are through all depths and whose next token the device has."""
        first, last = request.lanes[0], request.lanes[-1]
        end = min(last.next, first.next - 1, request.num_prompt_tokens - 1, request.scored + room)
        for position in range(request.scored, end):
            self._writer.add_coda(plan, request, position, last.depth, SCORE)
            request.scored += 1
            room -= 1
        return room

    def _draw(self, plan: StepPlan, request: Request, depth: int) -> None:
        """The newest position may leave at ``depth``: draw its next token, or let the gate decide."""
        action = REPLAY if request.replaying else SAMPLE
        if action is SAMPLE and depth < request.exit_window()[1]:
            action = GATE
        self._writer.add_coda(plan, request, request.known - 1, depth, action)
        if request.copies_from(depth):
            plan.coda_features |= COPY_KV
        if action is not GATE:
            self._transitions.leave(request, depth)
