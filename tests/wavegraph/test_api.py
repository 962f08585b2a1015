"""The public interface is the one that was written down: a change of it is seen, and made on purpose."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from tools.api import BEYOND, SNAPSHOT, describe, entry, type_text

ROOT = Path(__file__).parents[2]


def test_the_interface_is_the_one_in_the_snapshot() -> None:
    old, new = SNAPSHOT.read_text(encoding="utf-8").splitlines(), describe().splitlines()
    changes = "\n".join(unified_diff(old, new, "written down", "in the code", lineterm="", n=0))
    if changes:
        pytest.fail(
            f"the public interface has changed:\n{changes}\n\nIf that is meant, say so in CHANGELOG.md, and run\n"
            "    .venv/bin/python -m tools.api",
            pytrace=False,
        )


def names(page: str) -> set[str]:
    """Full names of what a page imports from a module below `wavegraph`, or calls by its full name."""
    found = {
        f"{module}.{name.strip()}"
        for module, each in re.findall(r"from (wavegraph\.[\w.]+) import ([\w, ]+)", page)
        for name in each.split(",")
    }
    return found | set(re.findall(r"`(wavegraph(?:\.\w+){2,})", page))


def test_what_the_page_names_is_in_the_snapshot() -> None:
    named = names((ROOT / "docs" / "library.md").read_text())
    assert "wavegraph.buckets.cost.CostModel" in named
    assert named <= set(BEYOND)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (None, "None"),
        (int | None, "int | None"),
        (Optional[int], "int | None"),  # noqa: UP045
        (Path, "Path"),
        ("Later", "Later"),
        (tuple[int, ...], "tuple[int, ...]"),
        (Mapping[str, list[Path]], "Mapping[str, list[Path]]"),
        (Callable[[int, str], None], "Callable[[int, str], None]"),
        (Literal["a", "b"] | int, "Literal['a', 'b'] | int"),
        (Any, "Any"),
    ],
)
def test_texts_of_types(annotation: Any, text: str) -> None:
    assert type_text(annotation) == text


@dataclass(frozen=True)
class Thing:
    size: int
    names: list[str] = field(default_factory=list)
    strict: bool = field(default=True, kw_only=True)

    @property
    def double(self) -> int:
        return 2 * self.size

    @classmethod
    def of(cls, *sizes: int, **options: float) -> "Thing":
        return cls(*sizes, **options)

    def run(self, path: Path, /, times: float = 1.0, *, quiet: bool = False) -> None: ...


class Plain(Exception):
    code = 2

    def __init__(self, size: int) -> None:
        self.size = size
        self._hidden = size

    @staticmethod
    def make() -> None: ...

    def __len__(self) -> int:
        return self.size


def test_lines_of_a_class() -> None:
    assert list(entry("Thing", Thing)) == [
        "frozen class Thing",
        "    size: int",
        "    names: list[str] = list()",
        "    *",
        "    strict: bool = True",
        "    property double: int",
        "    classmethod of(*sizes: int, **options: float) -> Thing",
        "    run(path: Path, /, times: float = 1.0, *, quiet: bool = False) -> None",
    ]
    assert list(entry("Plain", Plain)) == [
        "class Plain(Exception)",
        "    __init__(size: int) -> None",
        "    attribute size",
        "    __len__() -> int",
        "    code = 2",
        "    staticmethod make() -> None",
    ]
