"""Steps that fail on purpose, in any executor that has been built."""

from collections.abc import Collection

from wavegraph.capture.executor import Executor
from wavegraph.capture.metadata import StepInputs
from wavegraph.capture.ring import HostSlot
from wavegraph.errors import CaptureError


def inject(executor: Executor, *, before: Collection[int] = (), after: Collection[int] = ()) -> None:
    """Make submissions fail, counted from 0 as they come from now on.

    Those in ``before`` are refused with `CaptureError`, with nothing launched; those in ``after`` run, and then the
    device reports an error.
    """
    prepare, launch = executor._prepare, executor._launch
    submitted = iter(range(1 << 62))
    doomed: list[StepInputs] = []

    def failing_prepare(step: StepInputs, slot: HostSlot) -> int:
        number = next(submitted)
        if number in before:
            raise CaptureError(f"submission {number}: injected refusal")
        if number in after:
            doomed.append(step)
        return prepare(step, slot)

    def failing_launch(step: StepInputs, slot: HostSlot, parts: int) -> None:
        launch(step, slot, parts)
        if any(step is other for other in doomed):
            raise RuntimeError("injected device error")

    executor._prepare = failing_prepare  # type: ignore[method-assign]
    executor._launch = failing_launch  # type: ignore[method-assign]
