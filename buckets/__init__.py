"""Which shapes: the ladder of recorded row counts. Imports no torch."""

from wavegraph.buckets.ladder import Ladder

__all__ = ["Ladder"]
