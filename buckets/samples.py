"""Measured samples in a file of JSON lines: what was measured stays, whatever ends the process, and is not repeated.

::

    {"fingerprint": {...}}                                                          the first line
    {"program": "core", "rows": 16, "capture_seconds": ..., "bytes": ..., "nodes": ...}
    {"program": "core", "rows": 16, "context": 256, "round": 0, "positions": ..., "seconds": [...]}
    {"host_seconds": [...]}
    {"rates": {...}}
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wavegraph.buckets.fit import BucketMeasure, ReplayTime
from wavegraph.errors import ConfigError, OutputError

PROGRAMS = ("core", "coda")


class Point(NamedTuple):
    """What is timed: replays of ``program`` at bucket ``rows``, each row at the end of ``context`` positions."""

    program: str
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Captured:
    """One recorded bucket: seconds to record it, bytes that it keeps, nodes of a replay (0 if there are none)."""

    program: str
    rows: int
    seconds: float
    bytes: int
    nodes: int


class Samples:
    """The samples of one fingerprint, in the file ``path``, which is made, or gone on with.

    ``fingerprint`` (JSON types) is all that samples depend on. ``fresh`` drops what is there. Raises `ConfigError`
    naming the differing fields if the file holds samples of another fingerprint, or is none of ours, and `OutputError`
    if it cannot be written.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.path = path
        self.fingerprint: dict[str, Any] = json.loads(json.dumps(fingerprint))
        self.host_seconds: list[float] = []
        self.rates: dict[str, float] = {}
        self._captured: dict[tuple[str, int], Captured] = {}
        self._timed: dict[Point, dict[int, tuple[int, list[float]]]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = b"" if fresh or not path.exists() else path.read_bytes()
            # A process that was killed may have left half a line.
            content = content[: content.rfind(b"\n") + 1]
            self._load(content)
            path.write_bytes(content)
        except OSError as error:
            raise self._unwritable(error) from error
        if not content:
            self._append({"fingerprint": self.fingerprint})

    def has(self, point: Point, number: int) -> bool:
        """Whether round ``number`` of a point was measured."""
        return number in self._timed.get(point, {})

    def add(self, point: Point, number: int, positions: int, seconds: list[float]) -> None:
        """Keep the replays of a round at a point, where all rows together attend ``positions``."""
        self._append({**point._asdict(), "round": number, "positions": positions, "seconds": seconds})
        self._timed.setdefault(point, {})[number] = positions, seconds

    def add_captured(self, captured: Captured) -> None:
        """Keep what a recording took; the first one of a bucket counts."""
        key = captured.program, captured.rows
        if key not in self._captured:
            numbers = {"capture_seconds": captured.seconds, "bytes": captured.bytes, "nodes": captured.nodes}
            self._append({"program": captured.program, "rows": captured.rows, **numbers})
            self._captured[key] = captured

    def add_host(self, seconds: list[float]) -> None:
        """Keep the host's seconds of some steps."""
        self._append({"host_seconds": seconds})
        self.host_seconds += seconds

    def add_rates(self, rates: dict[str, float]) -> None:
        """Keep what the machine can do, by name."""
        self._append({"rates": rates})
        self.rates |= rates

    def measures(self, program: str) -> list[BucketMeasure]:
        """All that is known of a program's buckets, by ascending rows; those without a replay are left out."""
        return list(self._measures(program))

    def _measures(self, program: str) -> Iterator[BucketMeasure]:
        for (name, rows), captured in sorted(self._captured.items()):
            timed = {point.context: rounds for point, rounds in self._timed.items() if point[:2] == (name, rows)}
            if name == program and timed:
                replays = []
                for context, rounds in sorted(timed.items()):
                    positions = next(iter(rounds.values()))[0]
                    replays.append(ReplayTime.of(context, positions, [s for _, each in rounds.values() for s in each]))
                yield BucketMeasure(rows, captured.seconds, captured.bytes, captured.nodes, tuple(replays))

    def _load(self, content: bytes) -> None:
        lines = content.splitlines()
        try:
            for line in lines:
                self._take(json.loads(line))
            if lines and "fingerprint" not in json.loads(lines[0]):
                raise KeyError("fingerprint")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.path}: holds something that is no samples ({error!r}); name another folder"
            ) from error

    def _take(self, entry: dict[str, Any]) -> None:
        if "fingerprint" in entry:
            self._check(entry["fingerprint"])
        elif "host_seconds" in entry:
            self.host_seconds += entry["host_seconds"]
        elif "rates" in entry:
            self.rates |= entry["rates"]
        elif "context" in entry:
            point = Point(entry["program"], entry["rows"], entry["context"])
            self._timed.setdefault(point, {})[entry["round"]] = entry["positions"], entry["seconds"]
        else:
            numbers = entry["capture_seconds"], entry["bytes"], entry["nodes"]
            self._captured[entry["program"], entry["rows"]] = Captured(entry["program"], entry["rows"], *numbers)

    def _check(self, there: dict[str, Any]) -> None:
        here = self.fingerprint
        differing = [
            f"{name}: {there.get(name)} there, {here.get(name)} now"
            for name in sorted({*there, *here})
            if there.get(name) != here.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{self.path}: was measured under other conditions ({'; '.join(differing)}); name another folder, or "
                "measure afresh"
            )

    def _append(self, entry: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(f"{self.path}: cannot be written ({error.strerror}); name another folder")
