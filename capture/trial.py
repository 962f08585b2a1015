"""What recordings and buffers take of a GPU's memory, measured before the KV pool is sized."""

import gc
from dataclasses import dataclass, replace

from wavegraph.buckets.ladder import Ladder
from wavegraph.capture.backends.cuda import CudaBackend
from wavegraph.capture.buffers import Limits
from wavegraph.capture.device import CudaDevice
from wavegraph.capture.executor import Executor
from wavegraph.capture.ladder import CapturedLadder, Progress
from wavegraph.model.weights import Model

TRIAL_PAGES = 1


@dataclass(frozen=True, slots=True)
class Trial:
    """Bytes of a GPU. ``free`` is what a pool and all else can take; ``needed`` is all else: buffers and recordings.

    Of those, ``core`` and ``coda`` are the recordings of each bucket: of CORE, and of all programs over coda rows.
    """

    free: int
    needed: int
    core: dict[int, int]
    coda: dict[int, int]


def run_trial(
    model: Model,
    limits: Limits,
    ladder: Ladder,
    coda_ladder: Ladder,
    device: CudaDevice,
    progress: Progress | None = None,
) -> Trial:
    """Capture everything once over a pool of one page, of the same strides, and give it back.

    What stays (modules, workspaces of matrix products) is there for the real capture too, and so is not counted.
    Raises `CaptureError` as a capture does.
    """
    small = replace(limits, num_pages=TRIAL_PAGES)
    executor = Executor(model, small, ladder, coda_ladder, CudaBackend(device))
    try:
        executor.capture(progress)
        device.settle()
        within = device.memory().free
        programs = executor.programs
        core = _bytes(programs.core)
        coda: dict[int, int] = dict.fromkeys(coda_ladder.sizes, 0)
        for program in (programs.coda, programs.coda_full, programs.copy_exits):
            for bucket, count in _bytes(program).items():
                coda[bucket] += count
        pool = executor.pool_bytes
    finally:
        executor.close()
    del executor, programs, program
    gc.collect()  # buffers and recordings refer to each other
    device.settle()
    free = device.memory().free
    return Trial(free, free - within - pool, core, coda)


def _bytes(program: CapturedLadder) -> dict[int, int]:
    return {bucket: facts.bytes for bucket, facts in program.facts.items()}
