"""The ladder: the sorted list of row counts that are recorded, closed at the largest batch."""

from collections.abc import Iterable

from wavegraph.errors import ConfigError


class Ladder:
    """Sorted, distinct bucket sizes (rows) with constant-time lookup.

    The ladder is *closed*: every batch of ``1 <= rows <= ladder.max`` has a bucket, and callers derive
    their limits from ``max``, so no batch can miss. Raises `ConfigError` for an empty ladder or a size
    below one.
    """

    __slots__ = ("_bucket_of", "sizes")

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes: tuple[int, ...] = tuple(sorted(set(sizes)))
        if not self.sizes:
            raise ConfigError("ladder: at least one bucket size is needed, got none")
        if self.sizes[0] < 1:
            raise ConfigError(f"ladder: bucket sizes are row counts of at least 1, got {self.sizes[0]}")
        table = [0]
        for size in self.sizes:
            table.extend([size] * (size - len(table) + 1))
        self._bucket_of = table

    @classmethod
    def default(cls, max_rows: int) -> "Ladder":
        """Powers of two and their midpoints up to ``max_rows``, which is always the top bucket.

        Two buckets an octave bound padding by a third of the rows. A measured ladder is better; this is the
        one used before anything was measured.
        """
        if max_rows < 1:
            raise ConfigError(f"ladder: the largest batch must hold at least 1 row, got {max_rows}")
        sizes = {max_rows}
        size = 1
        while size < max_rows:
            sizes.add(size)
            midpoint = size + size // 2
            if size >= 8 and midpoint < max_rows:
                sizes.add(midpoint)
            size *= 2
        return cls(sizes)

    @property
    def max(self) -> int:
        """The largest bucket: the most rows a step may hold."""
        return self.sizes[-1]

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds ``rows`` rows (``1 <= rows <= max``)."""
        if not 1 <= rows <= self.max:
            raise ConfigError(f"ladder: {rows} rows do not fit buckets 1..{self.max}")
        return self._bucket_of[rows]

    def __repr__(self) -> str:
        return f"Ladder({list(self.sizes)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ladder) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)
