"""How launches are described, without Triton and without a GPU."""

import subprocess
import sys

import pytest
import torch

from wavegraph.errors import CaptureError
from wavegraph.model.ops.triton.launch import Recorder, Value, describe
from wavegraph.model.ops.triton.scratch import Splits, most_tiles


def test_a_spec_holds_what_a_binary_is_compiled_for() -> None:
    arguments = {
        "x_ptr": torch.zeros(4, dtype=torch.bfloat16),
        "ids_tab": torch.zeros(4, dtype=torch.int32),
        "rows": 3,
        "eps": 1e-6,
    }
    launch = describe("norm", (3, 1), arguments, {"BLOCK": 16}, num_warps=4)
    assert launch.spec.arguments == (("x_ptr", "*bf16"), ("ids_tab", "*i32"), ("rows", "i32"), ("eps", "fp32"))
    assert launch.spec.constants == (("BLOCK", 16),)
    assert launch.spec.aligned == (0,)
    assert launch.values == tuple(arguments.values())
    other = describe("norm", (7, 1), arguments | {"rows": 7, "eps": 1e-5}, {"BLOCK": 16}, num_warps=4)
    assert other.spec == launch.spec
    specs = {launch.spec}
    for changes in ({"num_warps": 8}, {"num_stages": 2}, {"fp_fusion": False}):
        specs.add(describe("norm", (3, 1), arguments, {"BLOCK": 16}, **({"num_warps": 4} | changes)).spec)
    specs.add(describe("norm", (3, 1), arguments, {"BLOCK": 32}, num_warps=4).spec)
    specs.add(describe("norm", (3, 1), arguments | {"x_ptr": torch.zeros(4)}, {"BLOCK": 16}, num_warps=4).spec)
    assert len({spec.name for spec in specs}) == 6


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x_ptr", torch.zeros(4, dtype=torch.float64), "norm: x_ptr is torch.float64; the kernels take"),
        ("x_ptr", torch.zeros(4, 4).t(), r"norm: x_ptr of shape \[4, 4\] is not contiguous"),
        ("x_ptr", torch.zeros(4)[1:], "norm: x_ptr must start at a multiple of 16 bytes"),
        ("rows", 2**31, "norm: rows is 2147483648, beyond 32 bits"),
    ],
)
def test_what_no_kernel_takes_is_refused(name: str, value: Value, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        describe("norm", (1, 1), {name: value}, {}, num_warps=4)


def test_tables_may_start_anywhere() -> None:
    describe("norm", (1, 1), {"ids_tab": torch.zeros(4, dtype=torch.int32)[1:]}, {}, num_warps=4)


def test_nothing_needs_triton_until_it_is_launched() -> None:
    script = (
        "import sys\n"
        "import wavegraph.capture.needed_kernels, wavegraph.model.ops.triton.cubin\n"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_a_recorder_counts() -> None:
    recorder = Recorder()
    for blocks in (16, 16, 32):
        recorder(describe("norm", (1, 1), {"rows": 1}, {"BLOCK": blocks}, num_warps=4))
    assert list(recorder.launches.values()) == [2, 1]


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(1, (512, 1)), (512, (512, 1)), (513, (512, 2)), (8192, (512, 16)), (8193, (576, 15)), (65536, (4096, 16))],
)
def test_prefixes_are_cut_into_a_bounded_number_of_splits(capacity: int, expected: tuple[int, int]) -> None:
    splits = Splits.of(capacity, 512, 16, 64)
    assert (splits.length, splits.count) == expected
    assert splits.length * splits.count >= capacity


def test_the_most_tiles_is_reached_and_never_passed() -> None:
    for rows in range(1, 70):
        for spans in range(1, 9):
            # One row each, and the last span takes the rest: or all spans as even as they can be.
            lengths = [1] * min(spans, rows)
            lengths[-1] += rows - len(lengths)
            even = [rows // spans + (index < rows % spans) for index in range(spans)]
            for cut in (lengths, even):
                assert sum(-(-count // 16) for count in cut) <= most_tiles(rows, spans, 16)
    assert most_tiles(64, 64, 16) == 64
    assert most_tiles(1024, 4, 16) == 68
