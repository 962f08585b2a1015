"""The rooms of the house, and which may import which: data that a test holds the sources to, and that
docs/architecture.md is drawn from by ``python -m tools.rooms docs/architecture.md``.
"""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Room:
    """``places`` are folders and files under the checkout's root; ``imports`` the rooms that may be imported there.

    `errors` is imported everywhere and not listed. ``torch`` tells whether it may be named at all.
    """

    name: str
    places: tuple[str, ...]
    holds: str
    imports: frozenset[str] = frozenset()
    torch: bool = True


def _room(name: str, places: str, holds: str, imports: str = "", *, torch: bool = True) -> Room:
    return Room(name, tuple(places.split()), holds, frozenset(imports.split()), torch)


ROOMS = (
    _room("errors", "wavegraph/errors.py", "every exception that is raised on purpose", torch=False),
    _room(
        "model",
        "model/",
        "what is computed: config, checkpoints, CORE and CODA, operator sets, the float64 reference",
    ),
    _room(
        "buckets",
        "buckets/",
        "which shapes: ladders, what buckets cost, the ladder for a workload, which bucket when, the profiler",
        torch=False,
    ),
    _room(
        "scheduler",
        "scheduler/",
        "what runs when: requests, tasks, frontiers, pages, prefix cache, policies, the legality checker",
        "buckets",
        torch=False,
    ),
    _room(
        "capture",
        "capture/",
        "how it is run: static buffers, graph backends, captured ladder, executor, bundles. It knows no request",
        "model buckets",
    ),
    _room(
        "values",
        "wavegraph/config.py wavegraph/outputs.py wavegraph/sampling.py",
        "what callers hand in and get back: `EngineConfig`, `SamplingParams`, `RequestOutput`",
        "model scheduler",
        torch=False,
    ),
    _room(
        "text",
        "wavegraph/text/",
        "text and token ids: tokenizer, chat templates, the text of an output as it grows",
        torch=False,
    ),
    _room(
        "engine",
        "wavegraph/engine/",
        "one engine, one step at a time: requests in, outputs out; statistics, trace, hand-over",
        "values text scheduler capture buckets model",
    ),
    _room(
        "startup",
        "wavegraph/startup/",
        "from options and a checkpoint to an engine that runs: backend, sizes, memory, bundles",
        "engine values text scheduler capture buckets model",
    ),
    _room(
        "face",
        "wavegraph/__init__.py wavegraph/llm.py",
        "`LLM`, and the names that `import wavegraph` offers",
        "startup engine values text buckets",
    ),
    _room(
        "study",
        "wavegraph/study/",
        "what would be, and what is: workloads, the simulator, the profiler of buckets, what measuring has in common",
        "startup engine values scheduler capture buckets model",
    ),
    _room("builtin", "wavegraph/builtin/", "the built-in model: a checkpoint like any other", torch=False),
    _room("static", "wavegraph/static/", "files that pages are made of", torch=False),
    _room(
        "bench",
        "wavegraph/bench/",
        "the benchmarks: one command, one table, one JSON each",
        "study face builtin startup engine values scheduler capture buckets model",
    ),
    _room(
        "server",
        "wavegraph/server/",
        "the OpenAI-compatible server over one engine",
        "face static engine values text scheduler model",
    ),
    _room(
        "cli",
        "wavegraph/cli/ wavegraph/__main__.py",
        "the command line",
        "server bench study face builtin static startup engine values text scheduler capture buckets model",
    ),
)
"""From the ground up: a room may import only rooms above it in this list."""


def table(rooms: Iterable[Room] = ROOMS) -> str:
    """Markdown: rooms from the top of the house down, with what each holds and may import."""
    lines = ["| room | what it holds | may import |", "| --- | --- | --- |"]
    for room in reversed(list(rooms)):
        places = ", ".join(f"`{place}`" for place in room.places)
        torch = "" if room.torch else ". No torch"
        order = [each.name for each in ROOMS if each.name in room.imports]
        lines.append(f"| **{room.name}**: {places} | {room.holds}{torch} | {', '.join(reversed(order)) or 'none'} |")
    return "\n".join(lines) + "\n"


def arrows(rooms: Iterable[Room] = ROOMS) -> list[tuple[str, str]]:
    """Imports that no chain of other imports implies: what a drawing needs."""
    direct = {room.name: set(room.imports) for room in rooms}
    reached: dict[str, set[str]] = {}
    for name in TopologicalSorter(direct).static_order():
        reached[name] = set().union(*({other} | reached[other] for other in direct[name]))
    return [
        (name, other)
        for name, others in direct.items()
        for other in sorted(others)
        if not any(other in reached[between] for between in others)
    ]


def drawing(rooms: Iterable[Room] = ROOMS) -> str:
    """A Mermaid graph, which GitHub shows as a picture. `errors`, which everybody imports, is left out."""
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"  {name} --> {other}" for name, other in reversed(arrows(rooms))]
    return "\n".join([*lines, "```"]) + "\n"


def fill(page: str) -> str:
    """``page`` with drawing and table between the marks ``<!-- rooms -->`` and ``<!-- end of rooms -->``."""
    inside = f"<!-- rooms -->\n{drawing()}\n{table()}<!-- end of rooms -->"
    filled, count = re.subn(r"<!-- rooms -->\n.*?<!-- end of rooms -->", lambda _: inside, page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page has {count} places for the rooms, not one")
    return filled


def main(path: Path) -> None:
    """Bring the page at ``path`` in step."""
    path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
