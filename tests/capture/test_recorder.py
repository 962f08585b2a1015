"""What no recording can hold is refused, naming the operator and the line."""

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.capture.verify import assert_same_bits
from wavegraph.capture.backends.base import Backend
from wavegraph.capture.backends.eager import EagerBackend
from wavegraph.capture.backends.recorded import RecordedBackend
from wavegraph.capture.backends.registry import create_backend
from wavegraph.capture.static import StaticSet
from wavegraph.errors import CaptureError, ConfigError


@dataclass
class State:
    """Static tensors of the programs below, and one tensor that is not declared."""

    x: Tensor = field(default_factory=lambda: torch.arange(12, dtype=torch.float32).view(3, 4))
    index: Tensor = field(default_factory=lambda: torch.tensor([2, 0, 1]))
    mask: Tensor = field(default_factory=lambda: torch.tensor([True, False, True]))
    out: Tensor = field(default_factory=lambda: torch.zeros(3, 4))
    kept: list[Tensor] = field(default_factory=list)

    @property
    def static(self) -> StaticSet:
        return StaticSet({"x": self.x, "index": self.index, "mask": self.mask, "out": self.out})


foreign = torch.ones(3, 4)

# Each program goes wrong on its first line. The operator or call that must be named stands beside it.
REFUSED: list[tuple[str, str, Callable[[State], object]]] = [
    ("item", "item", lambda s: s.x[0, 0].item()),
    ("bool", "__bool__", lambda s: bool(s.mask[0])),
    ("if", "__bool__", lambda s: 1 if s.mask[0] else 2),
    ("int", "__int__", lambda s: int(s.index[0])),
    ("float", "__float__", lambda s: float(s.x[0, 0])),
    ("cpu", "cpu", lambda s: s.x.cpu()),
    ("tolist", "tolist", lambda s: s.index.tolist()),
    ("numpy", "numpy", lambda s: s.x.numpy()),
    ("asarray", "__array__", lambda s: np.asarray(s.x)),
    ("data_ptr", "data_ptr", lambda s: s.x.data_ptr()),
    ("print", "__repr__", lambda s: print(s.x)),
    ("format", "__format__", lambda s: f"{s.x}"),
    ("contains", "__contains__", lambda s: 1.0 in s.x),
    ("slice by a tensor", "aten._local_scalar_dense", lambda s: s.x[: s.index[0]]),
    ("select by a tensor", "aten._local_scalar_dense", lambda s: s.x[s.index[0]]),
    ("size from a tensor", "aten._local_scalar_dense", lambda s: torch.full((2,), s.index[0])),
    ("equal", "aten.equal", lambda s: torch.equal(s.x, s.out)),
    ("allclose", "aten.allclose", lambda s: torch.allclose(s.x, s.out)),
    ("nonzero", "aten.nonzero", lambda s: torch.nonzero(s.mask)),
    ("where with one argument", "aten.nonzero", lambda s: torch.where(s.mask)),
    ("masked_select", "aten.masked_select", lambda s: torch.masked_select(s.x, s.x > 3)),
    ("unique", "aten._unique2", lambda s: torch.unique(s.index)),
    ("unique_consecutive", "aten.unique_consecutive", lambda s: torch.unique_consecutive(s.index)),
    ("bincount", "aten.bincount", lambda s: torch.bincount(s.index)),
    ("repeat_interleave", "aten.repeat_interleave", lambda s: torch.repeat_interleave(s.index)),
    ("boolean index", "aten.index.Tensor", lambda s: s.x[s.mask]),
    ("boolean index_put", "aten.index_put_", lambda s: s.x.index_put_((s.mask,), s.out[0])),
    ("host list", "aten.lift_fresh", lambda s: torch.tensor([1, 2])),
    ("host scalar by assignment", "aten.lift_fresh", lambda s: s.x.__setitem__(s.index, 0.0)),
    ("host array", "aten.lift_fresh", lambda s: torch.from_numpy(np.zeros(3))),
    ("new_tensor", "aten.lift_fresh", lambda s: s.x.new_tensor([1.0])),
    ("foreign input", "aten.add.Tensor", lambda s: s.x + foreign),
    ("foreign output", "aten.add.out", lambda s: torch.add(s.x, s.x, out=foreign)),
    ("foreign index", "aten.lift_fresh", lambda s: s.x[s.index, [0, 1, 2]]),
    ("randn", "aten.randn", lambda s: torch.randn(3)),
    ("rand_like", "aten.rand_like", lambda s: torch.rand_like(s.x)),
    ("dropout", "aten.native_dropout", lambda s: torch.native_dropout(s.x, 0.5, True)),
    ("bernoulli_", "aten.bernoulli_", lambda s: s.out.bernoulli_(0.5)),
    ("multinomial", "aten.multinomial", lambda s: torch.multinomial(s.x, 1)),
    ("resize_", "aten.resize_", lambda s: s.out.resize_(100)),
    ("set_", "aten.set_", lambda s: s.out.set_(s.x)),
    ("out that grows", "aten.add.out", lambda s: torch.add(s.x, 1, out=torch.empty(0))),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "program"), [pytest.param(op, f, id=name) for name, op, f in REFUSED])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_refusal_names_operator_and_line(operator: str, program: Callable[[State], object]) -> None:
    state = State()
    with pytest.raises(CaptureError) as caught:
        RecordedBackend().capture(lambda: program(state), state.static, "core[8]")
    message = str(caught.value)
    assert message.startswith("core[8]: ")
    assert operator in message
    assert f"{__file__}:{program.__code__.co_firstlineno} " in message


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("integer index", lambda s: s.out.copy_(s.x[s.index])),
        ("where", lambda s: s.out.copy_(torch.where(s.mask.unsqueeze(1), s.x, 0.0))),
        (
            "repeat_interleave of a known size",
            lambda s: s.out.copy_(s.x[torch.repeat_interleave(s.index, output_size=3)]),
        ),
        ("shape", lambda s: s.out.fill_(len(s.x) * s.x.shape[1])),
        ("iteration", lambda s: [row.mul_(2) for row in s.out]),
        ("format of a shape", lambda s: s.out.fill_(len(f"{s.x.shape}"))),
        ("metadata in place", lambda s: s.out.copy_(s.x.clone().t_().t())),
    ],
)  # fmt: skip
def test_static_shapes_are_recorded(name: str, program: Callable[[State], object]) -> None:
    state, reference = State(), State()
    recorded = RecordedBackend().capture(lambda: program(state), state.static, name)
    state.x.add_(1)
    reference.x.add_(1)
    program(reference)
    program(reference)
    recorded.replay()
    assert_same_bits(state.out, reference.out, name)


def test_error_that_the_program_swallows_still_fails_the_capture() -> None:
    state = State()

    def program() -> None:
        try:
            state.x[0, 0].item()
        except CaptureError:
            state.out.fill_(1)

    with pytest.raises(CaptureError, match="item"):
        RecordedBackend().capture(program, state.static, "p")


def test_errors_of_the_program_pass_through() -> None:
    state = State()
    with pytest.raises(RuntimeError, match="size"):
        RecordedBackend().capture(lambda: state.out.add_(torch.ones(5)), state.static, "p")


def test_tensor_that_outlives_the_recording_is_refused() -> None:
    state = State()
    with pytest.raises(CaptureError, match=r"aten\.mul\.Tensor at .*test_recorder\.py:\d+ outlives"):
        RecordedBackend().capture(lambda: state.kept.append(state.x * 2), state.static, "p")


def test_cycle_that_holds_a_dead_tensor_is_not_taken_for_an_escape() -> None:
    state = State()

    def program() -> None:
        cycle: list[object] = [state.x * 2]
        cycle.append(cycle)

    RecordedBackend().capture(program, state.static, "p")


@pytest.mark.parametrize("backend", [EagerBackend(), RecordedBackend()], ids=lambda b: b.name)
def test_no_capture_after_freeze(backend: Backend) -> None:
    state = State()
    backend.freeze()
    with pytest.raises(CaptureError, match=r"core\[3\]: capture is forbidden"):
        backend.capture(lambda: None, state.static, "core[3]")


@pytest.mark.parametrize("backend", ["eager", "recorded"])
def test_static_tensor_that_moved_is_named(backend: str) -> None:
    state = State()
    recorded = create_backend(backend).capture(lambda: state.out.copy_(state.x), state.static, "p")
    recorded.replay()
    state.out.fill_(-1)
    state.x.set_(torch.ones(3, 4))
    with pytest.raises(CaptureError, match=r"^x: moved from address 0x"):
        recorded.replay()
    assert torch.equal(state.out, torch.full((3, 4), -1.0)), "nothing may run"


def test_static_storage_that_changed_size_is_named() -> None:
    state = State()
    recorded = RecordedBackend().capture(lambda: None, state.static, "p")
    state.out.untyped_storage().resize_(1 << 20)
    with pytest.raises(CaptureError, match=r"^out: its storage changed from 48 to 1048576 bytes"):
        recorded.replay()


def test_capture_over_a_moved_tensor_is_refused() -> None:
    state = State()
    static = state.static
    state.x.set_(torch.ones(3, 4))
    with pytest.raises(CaptureError, match=r"^x: moved"):
        RecordedBackend().capture(lambda: None, static, "p")


def test_kept_output_is_overwritten_by_the_next_replay() -> None:
    state = State()
    recorded = RecordedBackend().capture(lambda: torch.mul(state.x, 2, out=state.out), state.static, "p")
    recorded.replay()
    kept, first = state.out, state.out.clone()
    state.x.add_(1)
    recorded.replay()
    assert torch.equal(kept, first + 2)


def test_sparse_tensor_cannot_be_static() -> None:
    with pytest.raises(CaptureError, match=r"^s: layout torch\.sparse_coo"):
        StaticSet({"s": torch.ones(2, 2).to_sparse()})


def test_static_set_finds_tensors_in_nested_containers() -> None:
    state = State()
    static = StaticSet.of(root={"a": [state.x, (state.index, 3)]}, state=state)
    assert list(static.storages) == ["root['a'][0]", "root['a'][1][0]", "state.mask", "state.out"]


def test_other_threads_are_neither_recorded_nor_disturbed() -> None:
    state = State()
    started, stop = threading.Event(), threading.Event()
    seen: list[float] = []

    def other() -> None:
        while not stop.is_set():
            seen.append(torch.ones(2).sum().item())
            started.set()

    thread = threading.Thread(target=other)
    thread.start()

    def program() -> None:
        started.wait(10)
        torch.add(state.x, 1, out=state.out)

    try:
        recorded = RecordedBackend().capture(program, state.static, "p")
    finally:
        stop.set()
        thread.join()
    assert recorded.facts.nodes == 1
    assert set(seen) == {2.0}


def test_recording_imports_no_compiler() -> None:
    """Importing it would take seconds of every start."""
    script = """
import sys, torch
from wavegraph.capture.backends.recorded import RecordedBackend
from wavegraph.capture.static import StaticSet
out = torch.zeros(3)
RecordedBackend().capture(lambda: out.add_(1), StaticSet({"out": out}), "p").replay()
assert out.tolist() == [2, 2, 2]
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ConfigError, match="backend: 'metal' is unknown; use one of cuda, compiled, recorded, eager"):
        create_backend("metal")
