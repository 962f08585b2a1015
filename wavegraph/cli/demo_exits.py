"""What early exit saves: the last line of ``wavegraph demo``."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavegraph.errors import EngineError
from wavegraph.outputs import RequestOutput, require_whole
from wavegraph.sampling import SamplingParams

if TYPE_CHECKING:
    from wavegraph.llm import LLM

THRESHOLD = 0.3

REFERENCE_BYTES = 64 << 20
"""The largest checkpoint that the float64 reference, which is slow, is asked about."""


@dataclass
class Way:
    """Decoding one request at a time, with the parameters given; its last outputs, and what its runs showed."""

    params: SamplingParams
    outputs: list[RequestOutput] = field(default_factory=list)
    runs: list[dict[str, float]] = field(default_factory=list)

    def run(self, llm: "LLM", prompts: Sequence[str]) -> None:
        """Generate from each prompt alone, once for its first token only, so that prompts can be told from decoding."""
        first = replace(self.params, max_tokens=1)
        begun = _core_steps(llm)
        for prompt in prompts:
            llm.generate(prompt, first)
        prompt_steps = _core_steps(llm) - begun
        begun = _core_steps(llm)
        self.outputs = [llm.generate(prompt, self.params)[0] for prompt in prompts]
        require_whole(self.outputs)
        steps = _core_steps(llm) - begun - prompt_steps
        decoded = sum(len(output.token_ids) - 1 for output in self.outputs)
        self.runs.append({"steps_per_token": steps / decoded, "tokens_per_s": decoded / _decode_seconds(self.outputs)})

    def facts(self) -> dict[str, float]:
        """Medians over the runs."""
        return {name: statistics.median(run[name] for run in self.runs) for name in self.runs[0]}


def _core_steps(llm: "LLM") -> int:
    return llm.engine.stats().scheduler.core_steps


def _decode_seconds(outputs: Sequence[RequestOutput]) -> float:
    """From each request's first token to its last."""
    times = [(output.metrics.first_token, output.metrics.finished) for output in outputs]
    return sum(last - first for first, last in times if first is not None and last is not None)


def measure_exits(llm: "LLM", prompts: Sequence[str], params: SamplingParams, repeats: int) -> tuple[Way, Way]:
    """Full depth and exits at `THRESHOLD` with exact KV, ``repeats`` interleaved runs of each after a warm-up."""
    ways = Way(params), Way(replace(params, exit_threshold=THRESHOLD))
    for _ in range(repeats + 1):
        for way in ways:
            way.run(llm, prompts)
    for way in ways:
        del way.runs[0]
    return ways


def check_exits(llm: "LLM", folder: Path, outputs: Sequence[RequestOutput]) -> bool:
    """Whether the reference was asked; raises `EngineError` if it says other tokens or other exits.

    It is asked where its answer must be the same: in float32, and for checkpoints up to `REFERENCE_BYTES`.
    """
    import torch

    from wavegraph.model.reference import ReferenceModel

    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if llm.engine.model.dtype != torch.float32 or size > REFERENCE_BYTES:
        return False
    reference = ReferenceModel.from_folder(folder)
    for output in outputs:
        wanted = reference.generate(output.prompt_token_ids, len(output.token_ids), threshold=THRESHOLD)
        if wanted.tokens != list(output.token_ids) or wanted.exit_steps != list(output.exit_depths):
            raise EngineError(
                f"early exit at {THRESHOLD} generated other tokens than the float64 reference, so one of them is wrong"
            )
    return True


def describe(full: Way, early: Way, checked: bool) -> dict[str, Any]:
    """The figures of both ways, and how their tokens compare."""
    pairs = [
        one == other
        for a, b in zip(full.outputs, early.outputs, strict=True)
        for one, other in zip(a.token_ids, b.token_ids, strict=True)
    ]
    return {
        "threshold": THRESHOLD,
        "full_depth": full.facts(),
        "early": early.facts(),
        "tokens": len(pairs),
        "tokens_as_at_full_depth": sum(pairs),
        "equal_to_reference": True if checked else None,
    }


def sentence(facts: dict[str, Any]) -> str:
    """The last line."""
    full, early = facts["full_depth"], facts["early"]
    judged = (
        f"all {facts['tokens']} tokens and exits equal the float64 reference's"
        if facts["equal_to_reference"]
        else f"not compared with the reference (done in float32, up to {REFERENCE_BYTES >> 20} MiB)"
    )
    return (
        f"Early exit (exact) at threshold {facts['threshold']}, one request at a time: "
        f"{early['steps_per_token']:.2f} steps a token instead of {full['steps_per_token']:.2f}, "
        f"{early['tokens_per_s']:,.0f} tokens a second instead of {full['tokens_per_s']:,.0f}; {judged}; "
        f"{facts['tokens_as_at_full_depth']} of {facts['tokens']} are as at full depth."
    )
