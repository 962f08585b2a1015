"""Which room may import which, read from the sources, and what an import may bring in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALLOWED = {
    "model": {"errors", "model"},
    "buckets": {"errors", "buckets"},
    "scheduler": {"errors", "scheduler", "buckets"},
    "capture": {"errors", "capture", "model", "buckets"},
}


def imported(path: Path) -> set[str]:
    """Full names of all modules that a source file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names |= {f"wavegraph.{alias.name}" for alias in node.names} if module == "wavegraph" else {module}
    return names


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_import_only_what_they_may(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        ours = {name.split(".")[1] for name in imported(path) if name.startswith("wavegraph.")}
        assert ours <= ALLOWED[room], f"{path.relative_to(ROOT)} imports {sorted(ours - ALLOWED[room])}"


@pytest.mark.parametrize("room", ["buckets", "scheduler"])
def test_rooms_without_torch_never_name_it(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        assert not {name for name in imported(path) if name.split(".")[0] == "torch"}, path


@pytest.mark.parametrize(
    "module",
    ["wavegraph", "wavegraph.scheduler", "wavegraph.buckets", "wavegraph.builtin", "wavegraph.errors"],
)
def test_light_modules_bring_in_no_torch(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
