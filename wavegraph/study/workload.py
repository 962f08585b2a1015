"""Workloads: when requests arrive, and how many tokens each brings and gets. Imports no torch.

A workload comes from a file (`read_workload`: JSON lines, or the trace of an engine) or has a name (`NAMED`).
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite, log
from pathlib import Path
from random import Random
from typing import Any

from wavegraph.engine.trace import REQUEST_EVENT
from wavegraph.errors import ConfigError, OutputError

FIELDS = ("arrival", "prompt_tokens", "output_tokens")
"""Keys of a line: seconds since the first arrival, and two counts of tokens."""


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """One request: it comes at ``arrival`` seconds with ``prompt_tokens`` and gets ``output_tokens``, both >= 1."""

    arrival: float
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if type(self.arrival) not in (int, float) or not isfinite(self.arrival) or self.arrival < 0:
            raise ConfigError(f"arrival must be a finite number of seconds from 0 on, got {self.arrival!r}")
        for name in FIELDS[1:]:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by time of arrival, at least one. ``name`` is that of the file or of the synthetic workload."""

    name: str
    requests: tuple[Arrival, ...]

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError(f"workload {self.name}: has no request; give at least one")
        object.__setattr__(self, "requests", tuple(sorted(self.requests, key=lambda each: each.arrival)))

    @classmethod
    def at_once(cls, name: str, prompts: Iterable[int], output_tokens: int = 1) -> "Workload":
        """Prompts of the given lengths that arrive together."""
        return cls(name, tuple(Arrival(0.0, prompt, output_tokens) for prompt in prompts))

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(each.prompt_tokens for each in self.requests)

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(each.output_tokens for each in self.requests)

    @property
    def longest(self) -> int:
        """Most tokens, prompt and output, of a request: the ``max_model_len`` that it needs."""
        return max(each.prompt_tokens + each.output_tokens for each in self.requests)

    def scaled(self, factor: float) -> "Workload":
        """All prompts and outputs ``factor`` times as long, at least one token; arrivals stay."""
        return Workload(
            self.name,
            tuple(
                Arrival(r.arrival, max(1, round(r.prompt_tokens * factor)), max(1, round(r.output_tokens * factor)))
                for r in self.requests
            ),
        )

    def limited(self, max_model_len: int) -> "Workload":
        """Requests cut to ``max_model_len`` (>= 2) tokens: the prompt first to all but one, then the output."""

        def cut(request: Arrival) -> Arrival:
            prompt = min(request.prompt_tokens, max_model_len - 1)
            return Arrival(request.arrival, prompt, min(request.output_tokens, max_model_len - prompt))

        return Workload(self.name, tuple(map(cut, self.requests)))

    def write(self, path: str | Path) -> None:
        """One line of JSON a request, which `read_workload` reads. Raises `OutputError`."""
        lines = [json.dumps({name: getattr(each, name) for name in FIELDS}) for each in self.requests]
        try:
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"workload: {path} cannot be written ({error.strerror}); name another file") from error


def find_workload(text: str) -> Workload:
    """The workload of that name, or that of the file at that path.

    Names are those of `NAMED`; ``4x512``, four prompts of 512 tokens at once; ``chat@2.5``, with 2.5 arrivals a second.

    Raises `ConfigError` if it is neither, or the file is no workload.
    """
    name, _, rate = text.partition("@")
    if name == "chat" and rate:
        try:
            return chat(float(rate))
        except ValueError:
            raise ConfigError(f"workload: {rate!r} in {text!r} is no rate; write requests a second: chat@2.5") from None
    if text in NAMED:
        return NAMED[text]()
    if uniform := re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,7})", text):
        return Workload.at_once(text, [int(uniform[2])] * int(uniform[1]))
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"workload: {text!r} is neither a file nor one of {', '.join(NAMED)}, 4x512 (any numbers)")
    return read_workload(path)


def read_workload(path: str | Path) -> Workload:
    """A workload from JSON lines (`FIELDS`), or from the trace of an engine (``--trace``).

    In a trace every request that got a token counts, also one that was aborted. Arrivals count from the first.
    Raises `ConfigError` that names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload: {path} cannot be read ({error})") from error
    requests = _from_trace(path, text) if text.lstrip().startswith("[") else _from_lines(path, text)
    if not requests:
        raise ConfigError(f"workload: {path} holds no request; each line is an object with {', '.join(FIELDS)}")
    first = min(each.arrival for each in requests)
    return Workload(
        Path(path).name, tuple(Arrival(r.arrival - first, r.prompt_tokens, r.output_tokens) for r in requests)
    )


def _from_lines(path: str | Path, text: str) -> list[Arrival]:
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            requests.append(_arrival(json.loads(line)))
        except (json.JSONDecodeError, ConfigError) as error:
            raise ConfigError(f"workload: {path}, line {number}: {error}") from error
    return requests


def _arrival(data: Any) -> Arrival:
    if not isinstance(data, dict):
        raise ConfigError(f"must be an object with {', '.join(FIELDS)}, got {data!r}")
    if data.keys() != set(FIELDS):
        raise ConfigError(f"must have the keys {', '.join(FIELDS)}, got {', '.join(map(str, data)) or 'none'}")
    return Arrival(*(data[name] for name in FIELDS))


def _from_trace(path: str | Path, text: str) -> list[Arrival]:
    """A trace has an event on each line. That of an engine that was not closed may break off in the last one."""
    lines = text.rstrip().splitlines()
    requests = []
    for number, raw in enumerate(lines, 1):
        line = raw.strip().removesuffix(",")
        if line in ("[", "]"):
            continue
        try:
            event = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ConfigError(f"workload: {path}, line {number}: is no event of a trace ({error})") from error
        if isinstance(event, dict) and event.get("cat") == REQUEST_EVENT and event.get("ph") == "b":
            try:
                args = event["args"]
                if args["output_tokens"]:
                    requests.append(Arrival(event["ts"] / 1e6, args["prompt_tokens"], args["output_tokens"]))
            except (KeyError, TypeError) as error:
                raise ConfigError(f"workload: {path}, line {number}: the request lacks {error}") from error
    return requests


def rfc() -> Workload:
    """The RFC's first table: four prompts of 8,064 tokens at once, one token each."""
    return Workload.at_once("rfc", [8064] * 4)


def mixed(requests: int, unit: int) -> Workload:
    """Prompts of mixed lengths at once, one token each: ``unit`` x (1, 2, 4, 8, 3, 6, 1, 5) tokens, and so on again.

    The RFC gives the numbers of requests of its mixed sets (32 and 128), but not their lengths: these are ours. With
    four running at once and steps planned one at a time, 32 prompts of unit 128 fill ordinary steps as the RFC's do:
    60.00 rows at chunk 16, 480.00 at chunk 128.
    """
    shares = (1, 2, 4, 8, 3, 6, 1, 5)
    return Workload.at_once(f"mixed-{requests}", [unit * shares[index % len(shares)] for index in range(requests)])


def chat(rate: float = 1.0, requests: int = 128) -> Workload:
    """Poisson arrivals, ``rate`` a second, of lognormal lengths: prompts about 256 tokens, outputs about 96 (seed 0).

    Prompts are cut to 16..2048 tokens, outputs to 4..512. Raises `ConfigError` for a rate that is not above 0.
    """
    if not 0 < rate < float("inf"):
        raise ConfigError(f"workload chat: the rate must be a number of requests a second above 0, got {rate}")
    draw = Random(0)

    def length(median: int, sigma: float, low: int, high: int) -> int:
        return min(high, max(low, round(draw.lognormvariate(log(median), sigma))))

    arrivals, now = [], 0.0
    for _ in range(requests):
        arrivals.append(Arrival(now, length(256, 0.9, 16, 2048), length(96, 0.7, 4, 512)))
        now += draw.expovariate(1.0) / rate
    return Workload("chat", tuple(arrivals))


NAMED: dict[str, Callable[[], Workload]] = {
    "rfc": rfc,
    "mixed-32": lambda: mixed(32, 128),
    "mixed-128": lambda: mixed(128, 32),
    "chat": chat,
    "decode": lambda: Workload.at_once("decode", [16] * 32, 128),
}
"""Workloads that need no file."""
