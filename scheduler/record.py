"""What the checker knows of one live request: its tokens, its place, and how deep each position is."""

import numpy as np

from wavegraph.scheduler.config import SchedulerConfig
from wavegraph.scheduler.plan import ExecutionTask, ExitRule, RequestSpec
from wavegraph.scheduler.request import RequestSnapshot


class Record:
    """One request, as far as plans, results and tokens have told.

    By position, as arrays of ``total_limit`` entries: ``reached`` is the deepest depth submitted and ``completed`` the
    deepest that has run (-1: none), ``copied`` whether it left by a copy of its KV, ``uploaded`` whether the slot's
    table has its token, ``scored`` whether it was scored. ``known`` counts the tokens that the device has or will have,
    ``host_end`` those that come from the host, ``prefill_end`` those that are prompt work. ``gate`` is the position and
    depth whose gate has not decided. ``slot`` is None off the device, and ``swapped`` how many pages are on the host,
    None if the request is not there.
    """

    def __init__(self, spec: RequestSpec, config: SchedulerConfig) -> None:
        self.spec = spec
        self.depths = config.depths
        self.rule = spec.exit_rule or ExitRule(config.depths - 1)
        self.prompt_len = len(spec.prompt_token_ids)
        self.tokens = list(spec.prompt_token_ids)
        self.exits: list[int] = []
        self.total_limit = min(self.prompt_len + spec.max_tokens, config.max_model_len)
        self.generation = 0
        self.slot: int | None = None
        self.swapped: int | None = None
        self.pages: list[int] = []
        self.restart()

    def restart(self) -> None:
        """Nothing of it is on the device."""
        size = self.total_limit
        copied = self.rule.copy and len(self.tokens) > self.prompt_len
        self.prefill_end = self.prompt_len if copied else len(self.tokens)
        self.host_end = len(self.tokens)
        self.known = self.prefill_end
        self.reached = np.full(size, -1, dtype=np.int16)
        self.completed = np.full(size, -1, dtype=np.int16)
        self.copied = np.zeros(size, dtype=bool)
        self.uploaded = np.zeros(size, dtype=bool)
        self.scored = np.zeros(size, dtype=bool)
        self.gate: tuple[int, int] | None = None
        self.pages = []

    def resume(self, snapshot: RequestSnapshot, generation: int) -> None:
        """It was imported in mid-life; its pages, if any, are on the host."""
        self.tokens, self.exits = list(snapshot.tokens), list(snapshot.exits)
        self.restart()
        if not snapshot.pages:
            return
        self.generation, self.swapped = generation, len(snapshot.pages)
        self.known, self.prefill_end = snapshot.known, snapshot.prefill_end
        for depth, (submitted, done) in enumerate(zip(snapshot.frontier, snapshot.completed, strict=True)):
            self.reached[:submitted] = depth
            self.completed[:done] = depth
        self.copied[self.prompt_len :] = self.rule.copy
        self.scored[: snapshot.scored] = True

    def leave(self, task: ExecutionTask) -> None:
        """The position of a coda task leaves at its depth: the token after it is known."""
        if self.known < self.total_limit and self.slot == task.slot and self.known >= len(self.tokens):
            self.uploaded[self.known] = True  # CODA has put the token into the slot's table
        self.known += 1
        if self.rule.copy and task.depth < self.depths - 1:
            self.reached[task.token_start] = self.depths - 1
            self.copied[task.token_start] = True

    def prefix(self, pages: int, page_size: int) -> tuple[int, ...]:
        """Tokens of the first ``pages`` pages."""
        return tuple(self.tokens[: pages * page_size])

    def finished_pages(self, page_size: int) -> int:
        """Pages complete at every depth, of accepted tokens, with no copied exit among them."""
        end = min(self.total_limit, len(self.tokens))
        good = (self.completed[:end] == self.depths - 1) & ~self.copied[:end]
        return (end if good.all() else int(np.argmin(good))) // page_size
