"""With `compiled` no bit that a request sees depends on the schedule: compared by position, over any schedule."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.harness import Array, Recorder, golden
from wavegraph.config import EngineConfig
from wavegraph.outputs import RequestOutput
from wavegraph.sampling import SamplingParams

PARAMS = {
    "greedy": SamplingParams(max_tokens=6, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3, top_p=0.95, logprobs=2),
    "penalised": SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.8, seed=9, repetition_penalty=1.3),
    "leaving": SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=5, exit_threshold=0.5),
    "copying": SamplingParams(max_tokens=6, ignore_eos=True, exit_threshold=0.6, exit_kv="copy"),
}
LENGTHS = {"greedy": 24, "sampled": 17, "penalised": 9, "leaving": 12, "copying": 5}
LADDERS = ((1,), (7,), (1, 2, 64), (64,), (3, 5, 8, 13, 21, 34), tuple(range(1, 33)))


class Bits(Recorder):
    """A recorder of requests with parameters of their own."""

    def play(self, names: Sequence[str]) -> dict[str, RequestOutput]:
        """Run the requests of these names; their rows and logits stay behind."""
        ids = golden("tiny_gqa")["token_ids"].tolist()
        for name in names:
            self.engine.add_request(name, ids[-LENGTHS[name] :], PARAMS[name])
        outputs: dict[str, RequestOutput] = {}
        while self.engine.has_unfinished:
            outputs |= {output.request_id: output for output in self.engine.step()}
            self._look()
        return outputs

    def values(self, name: str) -> tuple[dict[tuple[int, int], bytes], list[bytes]]:
        """Bits of hidden row, gate, K and V of each depth and position, and of the logits of each coda row."""
        rows = {
            key[1:]: b"".join(np.float32(part).tobytes() for part in row)
            for key, row in self._rows.items()
            if key[0] == name
        }
        return rows, [logits.tobytes() for logits in self._logits[name]]


def run(dtype: str, config: EngineConfig, names: Sequence[str]) -> tuple[Bits, dict[str, RequestOutput]]:
    bits = Bits("tiny_gqa", config, "compiled", dtype=dtype)
    outputs = bits.play(names)
    bits.engine.close()
    return bits, outputs


def config_of(wavefront: bool, chunk: int, ladder: Sequence[int], max_num_seqs: int, page_size: int) -> EngineConfig:
    return EngineConfig(
        wavefront=wavefront,
        prefill_chunk_size=chunk,
        buckets=tuple(ladder),
        max_num_seqs=max_num_seqs,
        max_model_len=40,
        page_size=page_size,
        num_pages=200,
        prefix_cache=False,  # every row is run and looked at
        async_scheduling=False,  # nothing runs while it is looked at
        check=True,
    )


@cache
def alone(dtype: str, name: str) -> tuple[Bits, RequestOutput]:
    """A request by itself: ordinary prefill at once, one thread."""
    bits, outputs = run(dtype, config_of(False, 64, (64,), 1, 16), [name])
    return bits, outputs[name]


def assert_equal_bits(dtype: str, config: EngineConfig, names: Sequence[str]) -> None:
    bits, outputs = run(dtype, config, names)
    for name in names:
        first, output = alone(dtype, name)
        assert outputs[name].token_ids == output.token_ids
        assert outputs[name].exit_depths == output.exit_depths
        assert outputs[name].logprobs == output.logprobs
        (rows, logits), (want_rows, want_logits) = bits.values(name), first.values(name)
        assert logits == want_logits
        # A request that leaves early may end before deeper rows of its last tokens have run.
        assert PARAMS[name].exit_threshold is not None or rows.keys() == want_rows.keys()
        assert len(rows) >= LENGTHS[name] * 4
        for key in rows.keys() & want_rows.keys():
            assert rows[key] == want_rows[key], f"{name}, depth and position {key}"


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(["float32", "bfloat16"]),
    wavefront=st.booleans(),
    chunk=st.sampled_from([1, 2, 3, 5, 8, 64]),
    ladder=st.sampled_from(LADDERS),
    max_num_seqs=st.integers(1, 5),
    page_size=st.sampled_from([1, 4, 16]),
    threads=st.sampled_from([1, 2]),
    names=st.permutations(list(PARAMS)),
)
def test_no_bit_depends_on_the_schedule(
    dtype: str,
    wavefront: bool,
    chunk: int,
    ladder: tuple[int, ...],
    max_num_seqs: int,
    page_size: int,
    threads: int,
    names: list[str],
) -> None:
    torch.set_num_threads(threads)
    assert_equal_bits(dtype, config_of(wavefront, chunk, ladder, max_num_seqs, page_size), names)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wavefront", [False, True])
@pytest.mark.parametrize("chunk", range(1, 25))
def test_every_chunk_size(chunk: int, wavefront: bool, dtype: str) -> None:
    torch.set_num_threads(1 + chunk % 2)
    assert_equal_bits(dtype, config_of(wavefront, chunk, LADDERS[chunk % len(LADDERS)], 5, 4), list(PARAMS))


def test_bits_are_what_is_compared() -> None:
    """Another dtype, or another weight, shows."""
    bits, _ = alone("float32", "greedy")
    other, _ = alone("bfloat16", "greedy")
    assert bits.values("greedy")[0].keys() == other.values("greedy")[0].keys()
    assert bits.values("greedy") != other.values("greedy")
    zero: Array = np.zeros(1, np.float32)
    assert zero.tobytes() != (-zero).tobytes()
