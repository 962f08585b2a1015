"""Imports, read from the sources, are those that tools/rooms.py allows; what an import may bring in."""

import ast
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tools.rooms import ROOMS, Room, arrows, fill

PACKAGED = ("buckets", "capture", "model", "scheduler", "wavegraph")


def files_of(room: Room) -> list[Path]:
    places = [ROOT / place for place in room.places]
    return sorted(path for place in places for path in (place.rglob("*.py") if place.is_dir() else [place]))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "wavegraph" else ("wavegraph", *parts))


ROOM_OF = {module_name(path): room.name for room in ROOMS for path in files_of(room)}


def imported(path: Path) -> set[str]:
    """Full names of all modules that a source file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            inner = {f"{module}.{alias.name}" for alias in node.names} & ROOM_OF.keys()
            names |= inner or {module}
    return names


def ours(path: Path) -> set[str]:
    return {name for name in imported(path) if name.split(".")[0] == "wavegraph"}


def test_every_source_file_has_one_room() -> None:
    found = [path for place in PACKAGED for path in (ROOT / place).rglob("*.py")]
    listed = [path for room in ROOMS for path in files_of(room)]
    assert sorted(found) == sorted(listed)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_rooms_import_what_they_may_and_nothing_else(room: Room) -> None:
    used: dict[str, str] = defaultdict(str)
    for path in files_of(room):
        for name in ours(path):
            used[ROOM_OF[name]] = f"{path.relative_to(ROOT)} imports {name}"
    assert {name: why for name, why in used.items() if name not in {room.name, "errors", *room.imports}} == {}
    assert room.imports - used.keys() == set(), "may be imported by the data, but is not: take it out"


def test_rooms_are_listed_from_the_ground_up() -> None:
    below: set[str] = set()
    for room in ROOMS:
        assert room.imports <= below, room.name
        below.add(room.name)


def test_no_module_is_part_of_an_import_circle() -> None:
    graph = {module_name(path): ours(path) - {"wavegraph"} for room in ROOMS for path in files_of(room)}
    graph.pop("wavegraph")  # its names are imported at first use
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_arrows_leave_out_what_follows() -> None:
    a, b, c = Room("a", (), ""), Room("b", (), "", frozenset("a")), Room("c", (), "", frozenset("ab"))
    assert arrows([a, b, c]) == [("b", "a"), ("c", "b")]


def test_the_page_draws_the_rooms() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert fill(page) == page, "python -m tools.rooms docs/architecture.md"


@pytest.mark.parametrize("room", [room for room in ROOMS if not room.torch], ids=lambda room: room.name)
def test_rooms_without_torch_never_name_it(room: Room) -> None:
    for path in files_of(room):
        assert not {name for name in imported(path) if name.split(".")[0] == "torch"}, path


@pytest.mark.parametrize(
    "module",
    ["wavegraph", "wavegraph.scheduler", "wavegraph.buckets", "wavegraph.builtin", "wavegraph.errors"],
)
def test_light_modules_bring_in_no_torch(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
