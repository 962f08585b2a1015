"""The recorded programs of an executor: which there are, over which ladder, and in what order they are captured."""

from contextlib import ExitStack

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.backends.base import Backend
from wavegraph.capture.ladder import CapturedLadder, Progress
from wavegraph.capture.static import StaticSet
from wavegraph.model.core import coda, coda_full, copy_exits, core, tables
from wavegraph.model.io import Pools, StepIO, Workspace
from wavegraph.model.weights import Model


class Programs:
    """CORE; CODA greedy and in full, and its KV copy; and the table updates alone, at a single bucket of 1."""

    def __init__(
        self, model: Model, io: StepIO, pools: Pools, work: Workspace, ladder: Ladder, coda_ladder: Ladder
    ) -> None:
        self.core = CapturedLadder("core", ladder, lambda rows: core(model, io, pools, work, rows))
        self.coda = CapturedLadder("coda", coda_ladder, lambda rows: coda(model, io, pools, work, rows))
        self.coda_full = CapturedLadder("coda_full", coda_ladder, lambda rows: coda_full(model, io, pools, work, rows))
        self.copy_exits = CapturedLadder("copy_exits", coda_ladder, lambda rows: copy_exits(model, io, pools, rows))
        self.tables = CapturedLadder("tables", Ladder([1]), lambda rows: tables(model, io))
        self.all = (self.core, self.coda, self.coda_full, self.copy_exits, self.tables)

    def capture(self, backend: Backend, static: StaticSet, progress: Progress | None) -> None:
        """Record every program at every bucket, the largest first. Raises `CaptureError`; nothing is kept then."""
        total = sum(len(program.ladder.sizes) for program in self.all)
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, total)

        with ExitStack() as on_failure:
            on_failure.callback(backend.release)
            on_failure.callback(self.release)
            with backend.session():
                for program in self.all:
                    program.capture(backend, static, advance)
            on_failure.pop_all()

    def release(self) -> None:
        """Let go of all recordings."""
        for program in self.all:
            program.release()
