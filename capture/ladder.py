"""A program recorded at every bucket of a ladder: `fits`, `bucket`, `replay`.

(Padding a step up to its bucket is done by `capture.metadata`: unused entries point at scratch.)
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.backends.base import Backend, Facts, Recorded
from wavegraph.capture.static import StaticSet
from wavegraph.errors import CaptureError

Progress = Callable[[int, int], None]
"""Called with buckets recorded so far, and in all."""


@dataclass(slots=True)
class LadderStats:
    """Counts since start-up. ``misses`` are refused replays by reason; nothing runs outside its bucket.

    ``seconds`` is the host's time in replays: on a CPU all of their work, on a GPU their launches.
    """

    hits: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    padding_rows: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    seconds: float = field(default=0.0, compare=False)


class CapturedLadder:
    """``program(rows)`` recorded once for each bucket of ``ladder``, the largest first.

    The ladder is closed: every ``1 <= rows <= ladder.max`` has a bucket, and there is no other way to run.
    """

    def __init__(self, name: str, ladder: Ladder, program: Callable[[int], None]) -> None:
        self.name = name
        self.ladder = ladder
        self.stats = LadderStats()
        self._program = program
        self._recorded: dict[int, Recorded] = {}

    def capture(self, backend: Backend, static: StaticSet, progress: Callable[[], None]) -> None:
        """Record all buckets, calling ``progress`` after each. If one fails, none is kept."""
        recorded: dict[int, Recorded] = {}
        for size in reversed(self.ladder.sizes):
            program = partial(self._program, size)
            recorded[size] = backend.capture(program, static, f"{self.name}[{size}]")
            progress()
        self._recorded = recorded

    @property
    def facts(self) -> dict[int, Facts]:
        """Facts of each recorded bucket."""
        return {size: recorded.facts for size, recorded in self._recorded.items()}

    def fits(self, rows: int) -> bool:
        """Whether some recorded bucket holds ``rows`` rows."""
        return 1 <= rows <= self.ladder.max and self.ladder.bucket(rows) in self._recorded

    def bucket(self, rows: int) -> int:
        """The smallest bucket for ``rows`` rows. Raises `ConfigError` outside ``1..ladder.max``."""
        return self.ladder.bucket(rows)

    def check(self, bucket: int, rows: int) -> None:
        """Raise `CaptureError`, and count the miss, unless ``rows`` rows may be replayed at ``bucket``."""
        if bucket not in self._recorded:
            self.stats.misses["bucket not recorded"] += 1
            raise CaptureError(f"{self.name}: bucket {bucket} was not recorded; use one of {sorted(self._recorded)}")
        if not 1 <= rows <= bucket:
            self.stats.misses["rows do not fit"] += 1
            raise CaptureError(f"{self.name}: {rows} rows do not fit bucket {bucket}; use one that holds them")

    def replay(self, bucket: int, rows: int) -> None:
        """Replay ``bucket`` for ``rows`` live rows.

        Raises `CaptureError` as `check` does, or if a static tensor moved.
        """
        self.check(bucket, rows)
        started = perf_counter()
        self._recorded[bucket].replay()
        self.stats.seconds += perf_counter() - started
        self.stats.hits[bucket] += 1
        self.stats.rows += rows
        self.stats.padding_rows += bucket - rows

    def run(self, bucket: int) -> None:
        """Run the program itself at ``bucket``, which no count takes note of."""
        with torch.no_grad():
            self._program(bucket)

    def check_addresses(self) -> None:
        """Raise `CaptureError` naming the bucket if a recording's tensors lie elsewhere than when it was made."""
        for recorded in self._recorded.values():
            recorded.check_addresses()

    def release(self) -> None:
        """Let go of all recordings."""
        self._recorded = {}
