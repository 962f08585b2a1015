"""The row counts that other engines record by default, written out, to compare an optimised ladder with.

Each rule is given as its engine has it, for batches of up to ``max_rows`` rows. Where an engine runs larger batches
without a graph (vLLM above 512 rows; all of them above their own largest size), its list is carried on in its last
stride, and ``max_rows`` itself is always added: a ladder of ours is closed, and the comparison is about padding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.buckets.optimise import (
    Histogram,
    ladder_bytes,
    ladder_capture_seconds,
    padding,
    predicted_seconds,
)


def vllm(max_rows: int) -> Ladder:
    """vLLM, commit 09f030e (2026), ``vllm/config/vllm.py``, ``VllmConfig._set_cudagraph_sizes``.

    1, 2, 4, multiples of 8 below 256, then of 16. There the largest is the lesser of 512 and twice ``max_num_seqs``.
    """
    return _closed([1, 2, 4, *range(8, 256, 8), *range(256, max_rows + 1, 16)], max_rows)


def sglang(max_rows: int) -> Ladder:
    """SGLang 0.5.23, ``sglang/srt/arg_groups/cuda_graph_hook.py``, ``generate_decode_cuda_graph_batch_sizes``.

    1, 2, 4, 8, 12, multiples of 8 from 16 to 256, of 16 below 512, then of 32: with padding, not speculative.
    """
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_rows + 1, 32)]
    return _closed(sizes, max_rows)


def tensorrt_llm(max_rows: int) -> Ladder:
    """TensorRT-LLM 1.0, ``tensorrt_llm/llmapi/llm_args.py``, ``CudaGraphConfig`` with ``enable_padding``.

    1, 2, 4, multiples of 8 to 128, then powers of two.
    """
    return _closed([1, 2, 4, *range(8, 129, 8), *_powers(256, max_rows)], max_rows)


def powers_of_two(max_rows: int) -> Ladder:
    """Powers of two."""
    return _closed(_powers(1, max_rows), max_rows)


RULES: Mapping[str, Callable[[int], Ladder]] = {
    "vLLM": vllm,
    "SGLang": sglang,
    "TensorRT-LLM": tensorrt_llm,
    "powers of two": powers_of_two,
    "Wavegraph default": Ladder.default,
}
"""Ladders of up to a number of rows, by the name of who records them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One ladder on a histogram. Seconds, bytes and padding are predicted; rows are of all steps together.

    ``saving`` is the share of this ladder's seconds that the optimised one saves.
    """

    name: str
    ladder: Ladder
    seconds: float
    padding_rows: float
    rows: float
    capture_seconds: float
    capture_bytes: int
    saving: float

    @property
    def padding_share(self) -> float:
        """Padding among the rows that are run."""
        return self.padding_rows / (self.padding_rows + self.rows)


def compare(histogram: Histogram, cost: CostModel, optimised: Ladder) -> list[Comparison]:
    """``optimised`` first, then every rule of `RULES` up to its top bucket."""
    ladders = {"optimised": optimised} | {name: rule(optimised.max) for name, rule in RULES.items()}
    least = predicted_seconds(histogram, optimised, cost)
    rows = sum(wanted * steps for wanted, steps in histogram.items())
    table = []
    for name, ladder in ladders.items():
        seconds = predicted_seconds(histogram, ladder, cost)
        table.append(
            Comparison(
                name,
                ladder,
                seconds,
                padding(histogram, ladder),
                rows,
                ladder_capture_seconds(ladder, cost),
                ladder_bytes(ladder, cost),
                1 - least / seconds if seconds else 0.0,
            )
        )
    return table


def _powers(first: int, limit: int) -> list[int]:
    powers = []
    while first <= limit:
        powers.append(first)
        first *= 2
    return powers


def _closed(sizes: list[int], max_rows: int) -> Ladder:
    return Ladder([*(size for size in sizes if size <= max_rows), max_rows])
