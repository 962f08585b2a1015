"""A request's state: frontier vector, pages, tokens."""

from wavegraph.scheduler.plan import RequestSpec


class Lane:
    """One request at one depth: the rows ``next <= p < limit`` are ready (RFC "Dependency graph").

    ``next`` is the submitted frontier of this depth. ``limit`` is the frontier of the depth before it (for
    depth 0 the number of known tokens) as of the last step boundary: rows whose hidden state a submitted step
    leaves. It moves only between steps, so no position can run at two depths in one step. ``turn`` is what a step's
    budget cut off this lane's last turn, 0 if nothing.
    """

    __slots__ = ("depth", "limit", "next", "queued", "request", "turn")

    def __init__(self, request: "Request", depth: int) -> None:
        self.request = request
        self.depth = depth
        self.next = 0
        self.limit = 0
        self.turn = 0
        self.queued = False


class Request:
    """An admitted or waiting request. Two frontiers are kept: submitted (lanes) and completed.

    ``known`` counts the tokens that exist on the device once all submitted steps have run: the prompt and one
    per submitted coda row; the host's ``tokens`` lag behind it by what is in flight. ``total_limit`` bounds
    both. ``generation`` is unique in the scheduler's life, so that a reused id is never mistaken; ``ended`` marks
    queue entries that outlive their request.
    """

    __slots__ = (
        "_early_spans",
        "_early_tokens",
        "completed",
        "ended",
        "generation",
        "known",
        "lanes",
        "num_prompt_tokens",
        "pages",
        "pages_needed",
        "slot",
        "spec",
        "tokens",
        "total_limit",
    )

    def __init__(self, spec: RequestSpec, generation: int, depths: int, total_limit: int, pages_needed: int) -> None:
        self.spec = spec
        self.generation = generation
        self.ended = False
        self.slot = -1
        self.tokens = list(spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.known = self.num_prompt_tokens
        self.total_limit = total_limit
        self.pages: list[int] = []
        self.pages_needed = pages_needed
        self.lanes = [Lane(self, depth) for depth in range(depths)]
        self.lanes[0].limit = self.known
        self.completed = [0] * depths
        self._early_spans: dict[tuple[int, int], int] = {}
        self._early_tokens: dict[int, int] = {}

    @property
    def num_prefilled_tokens(self) -> int:
        """Largest contiguous prompt prefix completed at all depths (RFC "Task representation")."""
        return min(self.completed[-1], self.num_prompt_tokens)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens sampled and seen by the host so far."""
        return self.tokens[self.num_prompt_tokens :]

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

    def accept_token(self, position: int, token: int) -> list[int]:
        """Record the token sampled for ``position``; return the tokens that are now contiguous, in order."""
        self._early_tokens[position] = token
        accepted = []
        while (position := len(self.tokens)) in self._early_tokens:
            token = self._early_tokens.pop(position)
            self.tokens.append(token)
            accepted.append(token)
        return accepted
