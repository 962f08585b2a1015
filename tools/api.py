"""The public interface as text, one line a name: ``python -m tools.api`` writes it where a test compares it.

Public is what `wavegraph` exports, and what docs/library.md names beyond that. A line holds a signature, so a field, a
default or a type that changes is seen. The texts of types are our own: Python's differ between its versions.
"""

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import wavegraph

SNAPSHOT = Path(__file__).parents[1] / "tests" / "wavegraph" / "api.txt"

BEYOND = (
    "wavegraph.buckets.cost.CostModel",
    "wavegraph.buckets.cost.ProgramCost",
    "wavegraph.builtin.builtin_path",
    "wavegraph.engine.handover.RequestState",
    "wavegraph.engine.stats.EngineStats",
    "wavegraph.llm.OutputStream",
    "wavegraph.outputs.TokenLogprob",
    "wavegraph.study.workload.Arrival",
    "wavegraph.study.workload.Workload",
    "wavegraph.study.workload.read_workload",
)
"""What docs/library.md names and `wavegraph` does not export."""

_PROTOCOLS = ("__enter__", "__exit__", "__iter__", "__next__", "__len__")


def describe() -> str:
    """The whole interface."""
    lines = [line for name in wavegraph.__all__ for line in entry(f"wavegraph.{name}", getattr(wavegraph, name))]
    for name in BEYOND:
        module, _, last = name.rpartition(".")
        lines += entry(name, getattr(import_module(module), last))
    return "\n".join(lines) + "\n"


def entry(name: str, thing: Any) -> Iterator[str]:
    """Lines of a class with its public members, of a function or of a constant. A ``*`` is before keywords only."""
    if not isinstance(thing, type):
        yield f"{name}{_signature(thing)}" if callable(thing) else f"{name}: {type_text(type(thing))}"
        return
    bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
    frozen = "frozen " if is_dataclass(thing) and vars(thing)["__dataclass_params__"].frozen else ""
    yield f"{frozen}class {name}({bases})" if bases else f"{frozen}class {name}"
    for line in _members(thing):
        yield f"    {line}"


def _members(cls: type) -> Iterator[str]:
    if is_dataclass(cls):
        for keywords, group in groupby(fields(cls), key=lambda each: each.kw_only):
            yield from ["*"] * keywords
            yield from map(_field, group)
    elif "__init__" in vars(cls):
        yield f"__init__{_signature(vars(cls)['__init__'], method=True)}"
        yield from _attributes(cls)
    taken = {each.name for each in fields(cls)} if is_dataclass(cls) else set()
    for name in sorted(vars(cls)):
        if name not in taken and (not name.startswith("_") or name in _PROTOCOLS):
            yield _member(name, vars(cls)[name])


def _field(field: "Field[Any]") -> str:
    text = f"{field.name}: {type_text(field.type)}"
    if field.default is not MISSING:
        return f"{text} = {field.default!r}"
    return text if field.default_factory is MISSING else f"{text} = {type_text(field.default_factory)}()"


def _attributes(cls: type) -> Iterator[str]:
    """Public names that ``__init__`` sets."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(vars(cls)["__init__"])))
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    for name in sorted({node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}):
        if not name.startswith("_"):
            yield f"attribute {name}"


def _member(name: str, thing: Any) -> str:
    if isinstance(thing, property):
        assert thing.fget is not None
        return f"property {name}: {type_text(inspect.signature(thing.fget).return_annotation)}"
    if isinstance(thing, classmethod | staticmethod):
        return f"{type(thing).__name__} {name}{_signature(thing.__func__, method=isinstance(thing, classmethod))}"
    return f"{name}{_signature(thing, method=True)}" if callable(thing) else f"{name} = {thing!r}"


def _signature(function: Callable[..., Any], method: bool = False) -> str:
    signature = inspect.signature(function)
    parts, last = [], None
    for each in list(signature.parameters.values())[method:]:
        if last is each.POSITIONAL_ONLY and each.kind is not last:
            parts.append("/")
        if each.kind is each.KEYWORD_ONLY and last not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            parts.append("*")
        last = each.kind
        stars = "*" * (each.kind is each.VAR_POSITIONAL) + "**" * (each.kind is each.VAR_KEYWORD)
        text = f"{stars}{each.name}: {type_text(each.annotation)}"
        parts.append(text if each.default is each.empty else f"{text} = {each.default!r}")
    return f"({', '.join(parts)}) -> {type_text(signature.return_annotation)}"


def type_text(annotation: Any) -> str:
    """An annotation without names of modules, which move, and alike in every version of Python."""
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is ...:
        return "..."
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, list):  # parameters of a Callable
        return f"[{', '.join(map(type_text, annotation))}]"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(type_text, arguments))
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(type_text, arguments))}]"
    return str(getattr(annotation, "__name__", annotation))


if __name__ == "__main__":
    SNAPSHOT.write_text(describe(), encoding="utf-8")
