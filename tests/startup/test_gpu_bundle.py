"""Bundles for a GPU, made without one: a cubin for every kernel that a step launches, and no compiler to run them."""

import ctypes
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.capture.driver import Driver
from wavegraph.capture.backends.eager import EagerBackend
from wavegraph.capture.bundle import Bundle, read_bundle
from wavegraph.capture.executor import Executor
from wavegraph.capture.fingerprint import fingerprint_here, machine_differences
from wavegraph.cli import main
from wavegraph.config import EngineConfig
from wavegraph.errors import BundleError, ConfigError
from wavegraph.model.config import OuroConfig
from wavegraph.model.loading import load_model
from wavegraph.model.ops.triton import cubin
from wavegraph.model.ops.triton.cubin import CubinLauncher
from wavegraph.model.ops.triton.ops import TritonOps
from wavegraph.model.sampling import FEATURE_SAMPLER, encode_params
from wavegraph.startup import backend_choice
from wavegraph.startup.backend_choice import choose_backend
from wavegraph.startup.precompile import precompile, with_bundle
from wavegraph.startup.sizing import derive

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

TINY = Path(__file__).parents[1] / "goldens" / "tiny"
CONFIG = EngineConfig(buckets=(1, 8), max_num_seqs=4, max_model_len=2048, num_pages=64)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    told: list[tuple[int, int]] = []
    made = precompile(
        TINY,
        tmp_path_factory.mktemp("bundles") / "tiny",
        target="sm_90",
        ladder=[1, 8],
        dtype="bfloat16",
        on_build=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, len(made.kernels)) for done in range(len(made.kernels) + 1)]
    return made


class FakeKernel:
    """Takes what a launch gives, and checks it against what the manifest says of the kernel."""

    launched: dict[str, int]
    manifest: dict[str, dict[str, Any]]

    def __init__(self, cubin: bytes, name: str, *, shared: int, warps: int) -> None:
        assert cubin.startswith(b"\x7fELF")
        self.facts = self.manifest[name]
        assert (shared, warps) == (self.facts["shared"], self.facts["warps"])

    def launch(self, grid: Sequence[int], stream: int, arguments: Sequence[tuple[int | float, type[Any]]]) -> None:
        assert stream == 99
        assert all(size >= 1 for size in grid)
        kinds = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}
        wanted = [kinds.get(kind, ctypes.c_void_p) for _, kind in self.facts["arguments"]]
        assert [kind for _, kind in arguments] == [*wanted, ctypes.c_void_p, ctypes.c_void_p]
        assert [value for value, _ in arguments[-2:]] == [0, 0]
        self.launched[self.facts["kernel"]] = self.launched.get(self.facts["kernel"], 0) + 1


@pytest.fixture
def launched(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each kernel was launched since, by a driver that does nothing."""
    monkeypatch.setattr(FakeKernel, "launched", {}, raising=False)
    monkeypatch.setattr(FakeKernel, "manifest", {kernel["entry"]: kernel for kernel in bundle.kernels}, raising=False)
    monkeypatch.setattr(cubin, "Kernel", FakeKernel)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 99}))
    return FakeKernel.launched


def executor_over(bundle: Bundle, config: EngineConfig = CONFIG) -> Executor:
    ops = TritonOps(CubinLauncher(bundle.cubins()))
    sizes = derive(config, OuroConfig.from_file(TINY), torch.bfloat16, dense_attention=False)
    model = load_model(TINY, ops=ops, dtype="bfloat16", max_model_len=config.max_model_len)
    return Executor(model, sizes.limits, sizes.ladder, sizes.coda_ladder, EagerBackend())


def test_a_bundle_holds_every_kernel_that_a_step_needs(bundle: Bundle, launched: dict[str, int]) -> None:
    """All programs at all buckets, then steps with updates, spans, greedy and sampled coda rows, over the cubins."""
    executor = executor_over(bundle)
    executor.capture()
    launched.clear()
    driver = Driver(executor)
    driver.features = FEATURE_SAMPLER
    driver.add(0, [1, 2, 3, 4, 5], encode_params(prompt_len=5, temperature=1.0, seed=3))
    driver.run(driver.make_step([(0, 0, 5, 0)]))
    driver.run(driver.make_step([(0, 0, 5, 1)], [(0, 4)]))
    driver.features = 0
    driver.run(driver.make_step([], [(0, 4)]))
    layers = executor.pools.k.shape[2]
    assert launched["attention"] == launched["rope_write"] == 2 * layers
    assert launched["draw_greedy"] == 1
    assert set(launched) <= {kernel["kernel"] for kernel in bundle.kernels}


def test_a_bundle_holds_nothing_else(bundle: Bundle, launched: dict[str, int]) -> None:
    executor_over(bundle).capture()
    assert set(launched) == {kernel["kernel"] for kernel in bundle.kernels}
    assert set(bundle.files) == {kernel["file"] for kernel in bundle.kernels}


def test_a_kernel_that_is_missing_is_named(bundle: Bundle, launched: dict[str, int]) -> None:
    """While programs are warmed up: before anything is served."""
    kernels = tuple(kernel for kernel in bundle.kernels if kernel["kernel"] != "merge_splits")
    executor = executor_over(replace(bundle, kernels=kernels))
    with pytest.raises(BundleError, match=r"kernel merge_splits \(HEADS=4, .*is not in the bundle; precompile it anew"):
        executor.capture()


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_num_seqs": 40}, {"max_model_len": 100}, {"num_pages": 9}]
)
def test_a_bundle_serves_engines_of_any_limits(
    bundle: Bundle, launched: dict[str, int], options: dict[str, int]
) -> None:
    executor_over(bundle, replace(CONFIG, **options)).capture()  # type: ignore[arg-type]


def test_the_manifest_says_what_each_kernel_takes(bundle: Bundle) -> None:
    for kernel in bundle.kernels:
        assert kernel["registers"] > 0
        if kernel["kernel"] in ("attention", "norm", "residual_norm"):
            assert (kernel["stack"], kernel["local"]) == (0, 0)
        assert kernel["file"] == f"{kernel['name']}.cubin"
        assert kernel["name"].startswith(kernel["kernel"] + "-")
    text = CliRunner().invoke(main, ["bundle", "inspect", str(bundle.folder)]).output
    attention = next(kernel for kernel in bundle.kernels if kernel["kernel"] == "attention")
    words = [attention["name"], attention["registers"], 0, attention["shared"]]
    assert [str(word) for word in words] in [line.split() for line in text.splitlines()]
    assert "target: sm_90 in the bundle, no GPU here" in text
    facts = json.loads(CliRunner().invoke(main, ["bundle", "inspect", str(bundle.folder), "--json", "-"]).output)
    assert facts["kernels"] == list(bundle.kernels)


def test_another_gpu_or_option_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from wavegraph.capture import fingerprint

    shape = OuroConfig.from_file(TINY)
    monkeypatch.setattr(fingerprint, "_architecture", lambda: "sm_90")
    assert machine_differences(bundle) == []
    assert with_bundle(CONFIG, bundle, shape, torch.bfloat16) == CONFIG
    here = fingerprint_here(bundle, shape, torch.float32, 16, [1, 8], deterministic=True)
    assert bundle.differences(here) == [
        "deterministic: False in the bundle, True here",
        "dtype: bfloat16 in the bundle, float32 here",
    ]
    monkeypatch.setattr(fingerprint, "_architecture", lambda: "sm_100")
    with pytest.raises(BundleError, match="target: sm_90 in the bundle, sm_100 here"):
        with_bundle(CONFIG, bundle, shape, torch.bfloat16)


def test_without_a_gpu_it_is_not_run(bundle: Bundle) -> None:
    with pytest.raises(ConfigError, match="backend: 'cuda' cannot run here, since torch sees no GPU"):
        choose_backend("auto", torch.bfloat16, bundle)
    with pytest.raises(ConfigError, match="backend: 'compiled' runs no bundle for sm_90; use 'cuda', or no bundle"):
        choose_backend("compiled", torch.bfloat16, bundle)


def test_it_is_read_and_launched_without_triton(bundle: Bundle) -> None:
    script = f"""
import sys
sys.modules["triton"] = None
from wavegraph.capture.bundle import read_bundle
from wavegraph.model.ops.triton.cubin import CubinLauncher
from wavegraph.model.ops.triton.ops import TritonOps
from wavegraph.startup.backend_choice import make_runner
TritonOps(CubinLauncher(read_bundle({str(bundle.folder)!r}).cubins()))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_running_one_needs_no_triton(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend_choice, "find_spec", lambda name: None)
    assert choose_backend("auto", torch.bfloat16, bundle) == ("cuda", "")
    with pytest.raises(ConfigError, match="since Triton is not installed"):
        choose_backend("cuda", torch.bfloat16)


def test_making_one_needs_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from wavegraph.startup import precompile as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="target: 'sm_80' needs Triton, which is not installed"):
        precompile(TINY, tmp_path / "bundle", target="sm_80")


def test_the_command_line_makes_one(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    arguments = ["--target", "sm_90", "--ladder", "1,8", "--dtype", "bfloat16", "--deterministic"]
    result = CliRunner().invoke(main, ["precompile", str(TINY), "--out", str(folder), *arguments])
    assert result.exit_code == 0, result.output
    made = read_bundle(folder)
    assert made.fingerprint["deterministic"] is True
    assert "gemm" in {kernel["kernel"] for kernel in made.kernels}
    assert f"sm_90 ({len(made.kernels)} kernels), bfloat16" in result.output
