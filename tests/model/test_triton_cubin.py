"""Launching cubins, seen by a driver that only notes its calls."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wavegraph.errors import CaptureError, EngineError
from wavegraph.model.ops.triton.compile import Binary
from wavegraph.model.ops.triton.cubin import CubinLauncher
from wavegraph.model.ops.triton.launch import Launch, describe


class FakeDriver:
    """Answers as ``cuda.bindings.driver`` does: a tuple of a result, then values. ``fails`` is refused."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            if name == self.fails:
                return (700, None)
            return {
                "cuModuleLoadData": (0, "module"),
                "cuModuleGetFunction": (0, "function"),
                "cuGetErrorString": (0, b"an illegal thing"),
            }.get(name, (0,))

        return call

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))


def launch(warps: int = 4) -> Launch:
    arguments = {"x_ptr": torch.zeros(4), "ids_tab": torch.zeros(4, dtype=torch.int32), "rows": 3, "eps": 0.5}
    return describe("norm", (3, 2), arguments, {"BLOCK": 16}, num_warps=warps)


def binary(one: Launch, shared: int = 0) -> Binary:
    return Binary(one.spec, "sm_90", "norm", shared, b"cubin")


def test_values_go_in_their_order_and_two_null_pointers_last() -> None:
    driver, one = FakeDriver(), launch()
    launcher = CubinLauncher([binary(one, shared=1000)], driver)
    assert driver.calls == [("cuModuleLoadData", b"cubin"), ("cuModuleGetFunction", "module", b"norm")]
    launcher(one)
    x, ids = one.values[:2]
    assert isinstance(x, torch.Tensor)
    assert isinstance(ids, torch.Tensor)
    values = (x.data_ptr(), ids.data_ptr(), 3, 0.5, 0, 0)
    pointer = ctypes.c_void_p
    types = (pointer, pointer, ctypes.c_int32, ctypes.c_float, pointer, pointer)
    assert driver.calls[2] == ("cuLaunchKernel", "function", 3, 2, 1, 128, 1, 1, 1000, 77, (values, types), 0)
    launcher.close()
    assert driver.names[3:] == ["cuModuleUnload"]


def test_much_shared_memory_is_asked_for() -> None:
    driver = FakeDriver()
    CubinLauncher([binary(launch(), shared=49152), binary(launch(8), shared=49153)], driver)
    assert [call for call in driver.calls if call[0] == "cuFuncSetAttribute"] == [
        ("cuFuncSetAttribute", "function", 8, 49153)
    ]


def test_a_kernel_that_was_not_precompiled_is_refused() -> None:
    launcher = CubinLauncher([binary(launch())], FakeDriver())
    with pytest.raises(CaptureError, match=r"norm-[0-9a-f]{12}: was not precompiled; make the bundle again"):
        launcher(launch(warps=8))
    launcher.close()
    with pytest.raises(CaptureError, match="was not precompiled"):
        launcher(launch())


@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_what_was_loaded_before_a_failure_is_unloaded(name: str) -> None:
    driver = FakeDriver(fails=name)
    with pytest.raises(EngineError, match=rf"norm-.*: {name} failed \(an illegal thing\)"):
        CubinLauncher([binary(launch(), shared=60000)], driver)
    assert driver.names.count("cuModuleUnload") == (name != "cuModuleLoadData")


def test_a_launch_that_the_driver_refuses_is_an_error() -> None:
    driver, one = FakeDriver(fails="cuLaunchKernel"), launch()
    with pytest.raises(EngineError, match="cuLaunchKernel failed"):
        CubinLauncher([binary(one)], driver)(one)
