"""What a bucket is worth, for when memory is too short for all of them."""

from wavegraph.buckets.cost import ProgramCost
from wavegraph.buckets.ladder import Ladder


def extra_seconds(ladder: Ladder, cost: ProgramCost) -> dict[int, float]:
    """Mean extra seconds of a step without each bucket: its row counts would run at the next larger one.

    All row counts are taken to be equally likely. The largest bucket is left out: it cannot be given up.
    """
    sizes = (0, *ladder.sizes)
    return {
        size: (size - smaller) * (cost.replay(larger) - cost.replay(size)) / ladder.max
        for smaller, size, larger in zip(sizes, sizes[1:], sizes[2:], strict=False)
    }


def without(ladder: Ladder, bucket: int) -> Ladder:
    """The ladder without a bucket, which is not its largest one."""
    return Ladder(size for size in ladder.sizes if size != bucket)
