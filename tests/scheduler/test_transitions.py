"""Each event moves one request's lanes, and offers what it made ready: by itself, without queues."""

from typing import Any

import pytest

from wavegraph.scheduler.lanes import Taken
from wavegraph.scheduler.plan import ExitRule, RequestSpec
from wavegraph.scheduler.request import Lane, Request
from wavegraph.scheduler.transitions import Transitions

DEPTHS = 3


class Offers:
    """An order that notes lanes with ready rows as they are offered: depth, ``next`` and ``limit`` at that moment."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, int]] = set()

    def ready(self, lane: Lane) -> None:
        if lane.next < lane.limit:
            self.seen.add((lane.depth, lane.next, lane.limit))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a transition asks an order for {name}")


def request_of(prompt: int, rule: ExitRule | None = None) -> Request:
    return Request(RequestSpec("a", [1] * prompt, 9, exit_rule=rule), DEPTHS, prompt + 9, 9)


def run(request: Request, *spans: tuple[int, int]) -> tuple[Offers, list[Request]]:
    """A step of (depth, rows) spans; what it offered, and who is due for a coda row."""
    offers = Offers()
    lanes: Taken = [(request.lanes[depth], count) for depth, count in spans]
    return offers, Transitions(offers).run(lanes)


def ran_to_the_gate(rule: ExitRule) -> Request:
    """A prompt of four tokens through all depths and its first token through depth 0, where the second may leave."""
    request = request_of(4, rule)
    for depth in range(DEPTHS):
        run(request, (depth, 4))
    Transitions(Offers()).leave(request, DEPTHS - 1)
    _, due = run(request, (0, 1))
    assert due == [request]
    assert request.held_depth == 0
    return request


@pytest.mark.parametrize("spans", [[(0, 3), (1, 4)], [(1, 4), (0, 3)]])
def test_a_lane_is_offered_only_once_all_lanes_of_its_step_have_moved(spans: list[tuple[int, int]]) -> None:
    """Else a queue would hold lanes that have no row ready."""
    request = request_of(9)
    run(request, (0, 4))
    offers, due = run(request, *spans)
    assert offers.seen == {(0, 7, 9), (1, 4, 7), (2, 0, 4)}
    assert not due


def test_the_newest_position_is_held_where_it_may_leave_and_nowhere_else() -> None:
    request = request_of(4)
    for depth in range(DEPTHS - 1):
        _, due = run(request, (depth, 4))
        assert not due
        assert request.lanes[depth + 1].limit == 4
    _, due = run(request, (DEPTHS - 1, 4))
    assert due == [request]
    assert request.held_depth == DEPTHS - 1


def test_a_position_that_leaves_starts_the_next_one_and_goes_on_by_itself() -> None:
    request, offers = ran_to_the_gate(ExitRule(2, 0, gated=True)), Offers()
    Transitions(offers).leave(request, 0)
    assert (request.known, request.held_depth) == (6, -1)
    assert offers.seen == {(0, 5, 6), (1, 4, 5)}


def test_a_position_that_leaves_by_copying_takes_the_deeper_lanes_along() -> None:
    request, offers = ran_to_the_gate(ExitRule(2, 0, gated=True, copy=True)), Offers()
    Transitions(offers).leave(request, 0)
    assert (request.known, request.held_depth) == (6, -1)
    assert offers.seen == {(0, 5, 6)}
    assert [(lane.next, lane.limit) for lane in request.lanes[1:]] == [(5, 5), (5, 5)]


def test_a_position_that_stays_goes_one_depth_deeper_and_no_token_is_known() -> None:
    request, offers = ran_to_the_gate(ExitRule(2, 0, gated=True)), Offers()
    assert request.lanes[1].limit == 4
    Transitions(offers).stay(request)
    assert (request.known, request.held_depth) == (5, -1)
    assert offers.seen == {(1, 4, 5)}
