"""The prefix cache: what is shared, what never is, and what is evicted first."""

import pytest

from tests.scheduler.harness import Harness, make_config
from wavegraph.errors import EngineError
from wavegraph.scheduler.pages import PagePool, prefix_key
from wavegraph.scheduler.plan import ExitRule, RequestSpec


def cached(**overrides: object) -> Harness:
    return Harness(make_config(prefix_cache=True, page_size=4, **overrides))


def first_rows(harness: Harness, name: str) -> int:
    """Where the request's first span starts."""
    return next(task.token_start for plan in harness.plans for task in plan.tasks if task.request_id == name)


@pytest.mark.parametrize(
    ("length", "start"),
    [(9, 8), (8, 4), (7, 4), (5, 4), (4, 0), (12, 8), (13, 12)],
    ids=lambda value: str(value),
)
def test_a_hit_is_whole_pages_and_leaves_a_position_to_run(length: int, start: int) -> None:
    """Also where the prefix ends exactly at a page, and where all of the prompt is known."""
    harness = cached()
    harness.add("a", 13, 1, prompt_of="s")
    harness.run()
    harness.add("b", length, 2, prompt_of="s")
    harness.run()
    assert first_rows(harness, "b") == start
    harness.check_output("b")
    harness.check_drained()


def test_pages_are_shared_while_their_owner_runs() -> None:
    harness = cached()
    harness.add("a", 9, 30, prompt_of="s")
    while not harness.outputs["a"]:
        harness.plan()
        harness.complete()
    harness.add("b", 9, 2, prompt_of="s")
    harness.run()
    assert first_rows(harness, "b") == 8
    harness.check_drained()


def test_only_pages_finished_at_every_depth_are_shared() -> None:
    harness = cached(depths=3)
    harness.add("a", 13, 30, prompt_of="s")
    for _ in range(3):  # chunks of a page: the first is through, the second at depth 1, the third at depth 0
        harness.plan()
        harness.complete()
    harness.add("b", 13, 2, prompt_of="s")
    harness.run()
    assert first_rows(harness, "b") == 4


@pytest.mark.parametrize(("copy", "start"), [(False, 8), (True, 4)])
def test_output_is_shared_with_a_prompt_that_repeats_it_unless_it_was_copied(copy: bool, start: int) -> None:
    harness = cached(depths=2)
    harness.add("c", 4, 9, exit_rule=ExitRule(1, 0, gated=True, copy=copy))
    harness.run()
    assert set(harness.exits["c"]) == {0, 1}, "some tokens were to leave early, others not"
    tokens = [*harness.specs["c"].prompt_token_ids, *harness.outputs["c"]]
    harness.add_spec(RequestSpec("again", tokens[:10], 1))
    harness.run()
    assert first_rows(harness, "again") == start


def test_scored_prompts_bypass_the_cache() -> None:
    harness = cached()
    harness.add("a", 9, 1, prompt_of="s")
    harness.run()
    harness.add("b", 9, 1, prompt_of="s", score_prompt=True)
    harness.run()
    assert first_rows(harness, "b") == 0


def test_forgotten_prefixes_are_not_hit() -> None:
    harness = cached()
    harness.add("a", 9, 1, prompt_of="s")
    harness.run()
    harness.scheduler.forget_prefixes()
    harness.checker.forget_prefixes()
    harness.add("b", 9, 1, prompt_of="s")
    harness.run()
    assert first_rows(harness, "b") == 0


def test_the_least_recently_used_tail_is_evicted_first() -> None:
    harness = cached(num_pages=6, max_model_len=30)
    harness.add("a", 9, 1, prompt_of="s")  # leaves two published pages
    harness.run()
    harness.add("b", 17, 1, prompt_of="t")  # needs five of six: evicts the tail of a's
    harness.run()
    harness.add("c", 9, 1, prompt_of="s")
    harness.run()
    assert first_rows(harness, "c") == 4
    harness.check_drained()


def test_history_is_sent_for_a_hit_if_coda_looks_back() -> None:
    sent = {}
    for history in (False, True):
        harness = cached()
        harness.add("a", 9, 1, prompt_of="s")
        harness.run()
        harness.plans.clear()
        harness.add("b", 9, 1, prompt_of="s", needs_history=history)
        harness.run()
        sent[history] = [position for plan in harness.plans for position in plan.token_pos]
    assert sent == {False: [8], True: list(range(9))}


def test_keys_depend_on_the_whole_prefix() -> None:
    first, other = prefix_key(b"", [1, 2]), prefix_key(b"", [2, 1])
    assert prefix_key(first, [3, 4]) != prefix_key(other, [3, 4])
    assert prefix_key(first, [3, 4]) == prefix_key(first, (3, 4))


def test_misuse_of_pages_is_an_error() -> None:
    pool = PagePool(2)
    with pytest.raises(EngineError, match="without a reservation"):
        pool.take()
    assert pool.reserve(1)
    page = pool.take()
    pool.release([page])
    with pytest.raises(EngineError, match="does not hold it"):
        pool.release([page])
    with pytest.raises(EngineError, match="only 0 are out"):
        pool.unreserve(1)


def test_a_shared_page_outlives_its_first_owner() -> None:
    harness = cached(num_pages=6, max_model_len=30)
    harness.add("a", 9, 2, prompt_of="s")
    while not harness.outputs["a"]:
        harness.plan()
        harness.complete()
    harness.add("b", 9, 6, prompt_of="s")
    harness.plan()
    harness.cancel("a")
    harness.complete()
    harness.add("c", 9, 4)  # wants more pages than are free
    harness.run()
    for name in "bc":
        harness.check_output(name)
    harness.check_drained()
