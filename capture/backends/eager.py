"""The `eager` backend: keeps the program and runs it each time. The reference for all others."""

from wavegraph.capture.backends.base import Backend, Program, Recording
from wavegraph.capture.static import StaticSet


class EagerBackend(Backend):
    """Runs programs as they are, at the bucket's shape; one run at capture shows that they do run."""

    name = "eager"

    def _record(self, program: Program, static: StaticSet, name: str) -> Recording:
        program()
        return Recording(program)
