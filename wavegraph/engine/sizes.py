"""What an engine is built to. `wavegraph.startup.sizing` derives it from options and a model."""

from dataclasses import dataclass

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.buffers import Limits
from wavegraph.scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one engine is built to.

    ``compatibility`` is a digest of what an engine must share with another to take over its requests.
    """

    ladder: Ladder
    coda_ladder: Ladder
    limits: Limits
    scheduler: SchedulerConfig
    compatibility: str
