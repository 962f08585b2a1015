"""Launching cubins, seen by a driver that only notes its calls."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wavegraph.errors import BundleError
from wavegraph.model import cuda_driver
from wavegraph.model.cuda_driver import DriverError
from wavegraph.model.ops.triton.cubin import Cubin, CubinLauncher
from wavegraph.model.ops.triton.launch import Launch, describe


class FakeDriver:
    """Answers as ``cuda.bindings.driver`` does: a tuple of a result, then values. ``fails`` is refused."""

    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            if name == self.fails:
                return (700,)
            return {
                "cuModuleLoadData": (0, "module"),
                "cuModuleGetFunction": (0, "function"),
                "cuGetErrorString": (0, b"an illegal thing"),
            }.get(name, (0,))

        return call

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_bindings", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    return fake


def launch(warps: int = 4) -> Launch:
    arguments = {"x_ptr": torch.zeros(4), "ids_tab": torch.zeros(4, dtype=torch.int32), "rows": 3, "eps": 0.5}
    return describe("norm", (3, 2), arguments, {"BLOCK": 16}, num_warps=warps)


def launcher_of(folder: Path, *launches: Launch, shared: int = 0) -> CubinLauncher:
    path = folder / "norm.cubin"
    path.write_bytes(b"cubin")
    return CubinLauncher({one.spec.name: Cubin(path, "norm", shared) for one in launches})


def test_values_go_in_their_order_and_two_null_pointers_last(driver: FakeDriver, tmp_path: Path) -> None:
    one = launch()
    launcher = launcher_of(tmp_path, one, shared=1000)
    assert driver.calls == []
    launcher(one)
    assert driver.calls[:2] == [("cuModuleLoadData", b"cubin"), ("cuModuleGetFunction", "module", b"norm")]
    x, ids = one.values[:2]
    assert isinstance(x, torch.Tensor)
    assert isinstance(ids, torch.Tensor)
    values = (x.data_ptr(), ids.data_ptr(), 3, 0.5, 0, 0)
    pointer = ctypes.c_void_p
    types = (pointer, pointer, ctypes.c_int32, ctypes.c_float, pointer, pointer)
    assert driver.calls[2] == ("cuLaunchKernel", "function", 3, 2, 1, 128, 1, 1, 1000, 77, (values, types), 0)
    launcher(one)
    assert driver.names[3:] == ["cuLaunchKernel"], "it is loaded once"


@pytest.mark.parametrize(("shared", "asked"), [(49152, 0), (49153, 1)])
def test_much_shared_memory_is_asked_for(driver: FakeDriver, tmp_path: Path, shared: int, asked: int) -> None:
    one = launch(8)
    launcher_of(tmp_path, one, shared=shared)(one)
    found = [call for call in driver.calls if call[0] == "cuFuncSetAttribute"]
    assert found == [("cuFuncSetAttribute", "function", 8, shared)] * asked


def test_a_kernel_that_was_not_precompiled_is_refused(driver: FakeDriver, tmp_path: Path) -> None:
    launcher = launcher_of(tmp_path, launch())
    with pytest.raises(BundleError, match=r"kernel norm \(BLOCK=16\) is not in the bundle; precompile it anew"):
        launcher(launch(warps=8))
    assert driver.calls == []


@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_what_was_loaded_before_a_failure_is_unloaded(driver: FakeDriver, tmp_path: Path, name: str) -> None:
    driver.fails = name
    one = launch()
    with pytest.raises(DriverError, match=f"{name}: an illegal thing"):
        launcher_of(tmp_path, one, shared=60000)(one)
    assert driver.names.count("cuModuleUnload") == (name != "cuModuleLoadData")


def test_a_launch_that_the_driver_refuses_is_an_error(driver: FakeDriver, tmp_path: Path) -> None:
    driver.fails = "cuLaunchKernel"
    one = launch()
    with pytest.raises(DriverError, match="cuLaunchKernel: an illegal thing"):
        launcher_of(tmp_path, one)(one)
