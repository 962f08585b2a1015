"""What the README and the pages beside it say is so."""

import ast
import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import click
import pytest

from wavegraph.cli import main
from wavegraph.config import EngineConfig
from wavegraph.engine.stats import EngineStats
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HOUSE = [ROOT / "CONTRIBUTING.md", ROOT / "docs/architecture.md"]
"""The pages about files."""

MADE = (".venv/", "build/", "benchmarks/results/gpu/")
"""What is made here, and need not be there."""

NOT_OURS = {"model.py"}  # of a user

FILE = r"[\w-]+\.(py|toml|md|h|cpp|json|txt|html|safetensors)"


def commands() -> dict[str, click.Command]:
    context = click.Context(main)
    found = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def leaves(command: click.Command) -> list[click.Command]:
    """A command, or all commands of a group."""
    return (
        [leaf for each in command.commands.values() for leaf in leaves(each)]
        if isinstance(command, click.Group)
        else [command]
    )


def options(command: click.Command) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def links(page: str) -> list[str]:
    """Where a page's links and pictures lead, without what names a place within a page."""
    found = re.findall(r"\]\(([^)#]+)[^)]*\)", page)
    for tag in re.findall(r"<(?:a|img|source)\s[^>]*>", page):
        for name, value in re.findall(r"\b(href|src|srcset)=[\"']([^\"'#]+)", tag):
            candidates = value.split(",") if name == "srcset" else [value]
            found += [candidate.split()[0] for candidate in candidates]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_links_of_every_kind_are_found() -> None:
    page = """[a](a.md#there) ![b](b.svg) <source media="(x)" srcset="c.svg, d.svg 2x"> <img
      src="e.svg" alt="src of f"> <a href='g.md#x'>"""
    assert links(page) == ["a.md", "b.svg", "c.svg", "d.svg", "e.svg", "g.md"]


def quoted(page: Path) -> list[str]:
    """Words in backquotes, outside of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([\w./-]+)`", text)


@pytest.mark.parametrize("page", HOUSE, ids=lambda page: page.name)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    """Paths stand from the repository's root; a file's name alone, for one that the context tells where to look for."""
    paths = [word for word in quoted(page) if "/" in word and not word.startswith(("/", *MADE))]
    files = [word for word in quoted(page) if "/" not in word and re.fullmatch(FILE, word)]
    tests = [word for word in quoted(page) if re.fullmatch(r"test_\w+", word)]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []
    ours = [folder for folder in ROOT.iterdir() if not folder.name.startswith((".", "build"))]
    names = {path.name for folder in ours for path in (folder, *folder.rglob("*"))}
    assert [file for file in files if file not in names | NOT_OURS] == []
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [test for test in tests if f"def {test}(" not in sources] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    for line in re.findall(r"^ {4}wavegraph (.*)$", page.read_text(), re.MULTILINE):
        name, *words = line.split()
        if name == "COMMAND":
            continue
        used = {word.strip("[]") for word in words if word.strip("[]").startswith("--")}
        command = commands()[name]
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        assert used <= options(command), line


def test_every_command_is_described() -> None:
    headings = re.findall(r"^## ([\w-]+)$", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    assert set(headings) == set(commands())


def test_every_option_is_named() -> None:
    pages = "".join((ROOT / page).read_text() for page in ("docs/cli.md", "docs/serving.md"))
    named = set(re.findall(r"--[a-z][a-z-]*", pages))
    for command in (leaf for each in commands().values() for leaf in leaves(each)):
        assert {option for option in options(command) if option.startswith("--")} <= named


@pytest.mark.parametrize("described", [EngineConfig, SamplingParams, RequestOutput, EngineStats])
def test_every_field_is_described(described: Any) -> None:
    text = (ROOT / "docs/library.md").read_text()
    for field in dataclasses.fields(described):
        assert re.search(rf"`{field.name}[`=]", text), field.name


def test_modules_that_are_named_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"\bfrom (wavegraph[\w.]*) import", page.read_text()):
            assert importlib.util.find_spec(name) is not None, f"{page.name}: {name}"


def defined(path: Path) -> set[str]:
    """Classes and functions of a module, methods as ``Class.method``."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names |= {node.name} | {
                f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)
            }
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def test_the_stops_of_the_tour_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    stops = re.findall(r"^\| \d+ \| `([\w/.]+)` \| `([\w.]+)` \|", page, re.MULTILINE)
    assert len(stops) == 10
    assert [(path, name) for path, name in stops if name not in defined(ROOT / path)] == []


def test_the_words_stand_where_the_glossary_says() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    places = re.findall(r"((?:`\w+`(?:, | and )?)+) in `([\w/]+\.py)`", page[: page.index("## Rooms")])
    assert len(places) >= 18
    missing = [
        (path, name)
        for names, path in places
        for name in re.findall(r"\w+", names.replace(" and ", " "))
        if name not in defined(ROOT / path)
    ]
    assert missing == []


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2
