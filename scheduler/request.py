"""A request's state: frontier vector, pages, tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

from wavegraph.scheduler.pages import PrefixKey
from wavegraph.scheduler.plan import ExitRule, RequestSpec


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A request in mid-life, apart from the content of its pages: what another engine needs to go on with it.

    ``frontier`` and ``limits`` are the lanes' ``next`` and ``limit`` by depth; ``pages`` are the pages of the
    exporting engine, whose content travels with the snapshot, in order of position.
    """

    spec: RequestSpec
    tokens: list[int]
    exits: list[int]
    frontier: list[int]
    limits: list[int]
    completed: list[int]
    known: int
    prefill_end: int
    held_depth: int
    scored: int
    cached_tokens: int
    pages: list[int]


class Lane:
    """One request at one depth: the rows ``next <= p < limit`` are ready (RFC "Dependency graph").

    ``next`` is the submitted frontier of this depth. ``limit`` is the frontier of the depth before it (for
    depth 0 the number of known tokens) as of the last step boundary: rows whose hidden state a submitted step
    leaves. It moves only between steps, so no position can run at two depths in one step. ``turn`` is what a
    step cut off this lane's last turn, 0 if nothing. ``arrival`` is its place in the queue, if ``queued``. ``stale``
    marks a queue entry that outlives its request's stay on the device.
    """

    __slots__ = ("arrival", "depth", "limit", "next", "queued", "request", "stale", "turn")

    def __init__(self, request: "Request", depth: int, start: int, limit: int) -> None:
        self.request = request
        self.depth = depth
        self.next = start
        self.limit = limit
        self.turn = 0
        self.arrival = 0
        self.queued = False
        self.stale = False


class Request:
    """A live request, waiting or running. Two frontiers are kept: submitted (lanes) and completed.

    ``known`` counts the tokens that exist on the device once all submitted steps have run: the prompt and one
    per sampled row; the host's ``tokens`` lag behind it by what is in flight. ``total_limit`` bounds both.
    Tokens before ``prefill_end`` are prompt work: the prompt, and after a recomputation what it had put out.
    Tokens before ``host_end`` come from the host; later ones CODA puts into the device's table itself.
    ``generation`` is unique in the scheduler's life; in-flight results of an older one are void. ``arrival`` counts the
    requests that were queued up to this one.
    ``in_flight`` counts tasks planned and not applied. ``exits[i]`` is the depth at which output token ``i`` left.
    ``started`` is how many positions were done when it (re)started: behind its frontier once it has run a row.
    ``cached_tokens`` is how much of the prompt the prefix cache had when the request first came to the device.
    ``held_depth`` is the depth at which the newest position waits for its coda row or the gate's decision, -1 if
    it does not wait. ``scored`` is the next prompt position that CODA has to score.
    """

    __slots__ = (
        "_early_spans",
        "_early_tokens",
        "arrival",
        "cached_tokens",
        "completed",
        "exits",
        "generation",
        "held_depth",
        "host_end",
        "in_flight",
        "known",
        "lanes",
        "num_prompt_tokens",
        "pages",
        "pages_needed",
        "passed_over",
        "prefill_end",
        "published",
        "published_key",
        "reserved",
        "rule",
        "scored",
        "slot",
        "spec",
        "started",
        "swapped",
        "swapped_pages",
        "tokens",
        "total_limit",
    )

    def __init__(self, spec: RequestSpec, depths: int, total_limit: int, pages_needed: int) -> None:
        self.spec = spec
        self.generation = 0
        self.arrival = 0
        self.slot = -1
        self.rule = spec.exit_rule or ExitRule(depths - 1)
        self.tokens = list(spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.total_limit = total_limit
        self.pages: list[int] = []
        self.pages_needed = pages_needed
        self.reserved = 0
        self.passed_over = 0
        self.swapped = False
        self.swapped_pages = 0
        self.cached_tokens = 0
        self.exits: list[int] = []
        self.in_flight = 0
        self.restart(depths, 0)

    def restart(self, depths: int, cached: int) -> None:
        """Stand at the start of (re)computation, with ``cached`` positions done at every depth.

        Under ``copy`` the output so far is fed back one token at a time, as it was decoded: each left at a
        depth of its own.
        """
        copied = self.rule.copy and len(self.tokens) > self.num_prompt_tokens
        self.prefill_end = self.num_prompt_tokens if copied else len(self.tokens)
        self.known = self.prefill_end
        self.lanes = [Lane(self, depth, cached, cached) for depth in range(depths)]
        self.lanes[0].limit = self.known
        self.completed = [cached] * depths
        self.started = cached
        self.held_depth = -1
        self.host_end = len(self.tokens)
        unscored = self.spec.score_prompt and len(self.tokens) == self.num_prompt_tokens
        self.scored = 0 if unscored else self.num_prompt_tokens - 1
        self.published = 0
        self.published_key: PrefixKey = b""
        self._early_spans: dict[tuple[int, int], int] = {}
        self._early_tokens: dict[int, tuple[int, int, int, int]] = {}

    @property
    def num_prefilled_tokens(self) -> int:
        """Largest contiguous prompt prefix completed at all depths (RFC "Task representation")."""
        return min(self.completed[-1], self.num_prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled and seen by the host so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def replaying(self) -> bool:
        """Whether the next token is one that the host knows already (recomputation under ``copy``)."""
        return self.known < len(self.tokens)

    @property
    def to_score(self) -> bool:
        """Whether prompt positions are still to be scored."""
        return self.scored < self.num_prompt_tokens - 1

    def copies_from(self, depth: int) -> bool:
        """Whether a position that leaves at ``depth`` has its KV copied into the deeper planes, and skips them."""
        return self.rule.copy and depth + 1 < len(self.lanes)

    def exit_window(self) -> tuple[int, int]:
        """First and last depth at which the newest known position may leave."""
        depths, rule = len(self.lanes), self.rule
        if self.replaying:
            exit_depth = self.exits[self.known - self.num_prompt_tokens]
            return exit_depth, exit_depth
        if rule.copy and self.known == self.num_prompt_tokens:
            return depths - 1, depths - 1
        return (rule.min_depth if rule.gated else rule.max_depth), rule.max_depth

    def snapshot(self, pages: list[int]) -> "RequestSnapshot":
        """The whole state of a request with nothing in flight. ``pages`` hold its KV and hidden rows."""
        return RequestSnapshot(
            spec=self.spec,
            tokens=list(self.tokens),
            exits=list(self.exits),
            frontier=[lane.next for lane in self.lanes],
            limits=[lane.limit for lane in self.lanes],
            completed=list(self.completed),
            known=self.known,
            prefill_end=self.prefill_end,
            held_depth=self.held_depth,
            scored=self.scored,
            cached_tokens=self.cached_tokens,
            pages=pages,
        )

    def restore(self, snapshot: "RequestSnapshot") -> None:
        """Stand where a snapshot was taken, as a request that was swapped out."""
        self.tokens = list(snapshot.tokens)
        self.exits = list(snapshot.exits)
        if not snapshot.pages:
            self.restart(len(self.lanes), 0)
            return
        self.lanes = [
            Lane(self, depth, start, limit)
            for depth, (start, limit) in enumerate(zip(snapshot.frontier, snapshot.limits, strict=True))
        ]
        self.completed = list(snapshot.completed)
        self.known = snapshot.known
        self.prefill_end = snapshot.prefill_end
        self.held_depth = snapshot.held_depth
        self.scored = snapshot.scored
        self.cached_tokens = snapshot.cached_tokens
        self.swapped = True
        self.swapped_pages = len(snapshot.pages)

    def resume_where_it_stands(self) -> None:
        """Fresh lanes at the same frontier, for the next stay on the device."""
        self.lanes = [Lane(self, lane.depth, lane.next, lane.limit) for lane in self.lanes]

    def retire(self) -> None:
        """Turn all queue entries of this stay on the device stale."""
        for lane in self.lanes:
            lane.stale = True

    def complete_span(self, depth: int, start: int, end: int) -> None:
        """Positions ``start .. end - 1`` are done at ``depth``; results may come in any order.

        The frontier advances over what is contiguous; the rest is kept until the gap closes.
        """
        completed = self.completed
        if start != completed[depth]:
            self._early_spans[depth, start] = end
            return
        early = self._early_spans
        while early and (depth, end) in early:
            end = early.pop((depth, end))
        completed[depth] = end

    def accept_token(
        self, position: int, token: int, exit_depth: int, step_id: int, row: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """Record the token sampled for ``position``; yield (token, exit depth, step, row) of what is now contiguous."""
        early = self._early_tokens
        early[position] = (token, exit_depth, step_id, row)
        while (following := len(self.tokens)) in early:
            accepted = early.pop(following)
            self.tokens.append(accepted[0])
            self.exits.append(accepted[1])
            yield accepted
