"""Which backend is chosen, and what is said when it is not the fast one."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.capture.fake_cuda import TOTAL, FakeCuda, FakeDevice, fake_cuda
from wavegraph.cli import main
from wavegraph.config import EngineConfig
from wavegraph.errors import ConfigError
from wavegraph.llm import LLM
from wavegraph.model import cuda_driver
from wavegraph.model.ops import build
from wavegraph.model.ops.aten import AtenOps
from wavegraph.model.ops.triton.ops import TritonOps
from wavegraph.sampling import SamplingParams
from wavegraph.startup import backend_choice

__all__ = ["fake_cuda"]

TINY = Path(__file__).parents[1] / "goldens" / "tiny"
SMALL = EngineConfig(max_num_batched_tokens=8, max_num_seqs=2, max_model_len=32)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is loaded, and none can be built."""
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setenv("CXX", "no-such-compiler")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == backend_choice.__name__]


@pytest.mark.parametrize(
    ("name", "dtype", "backend", "ops"),
    [
        ("auto", torch.float32, "compiled", "cpu"),
        ("auto", torch.bfloat16, "compiled", "cpu"),
        ("auto", torch.float16, "recorded", "aten"),
        ("compiled", torch.float32, "compiled", "cpu"),
        ("recorded", torch.float32, "recorded", "aten"),
        ("eager", torch.bfloat16, "eager", "aten"),
    ],
)
def test_operators_go_with_the_backend(name: str, dtype: torch.dtype, backend: str, ops: str) -> None:
    chosen = backend_choice.make_runner(name, dtype)
    assert (chosen.backend.name, chosen.ops.name) == (backend, ops)
    assert backend_choice.choose_backend(name, dtype)[0] == backend


def test_compiled_is_the_default_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(TINY, SMALL) as llm:
        assert llm.engine.model.ops.name == "cpu"
        assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=3))[0].token_ids) == 3
    assert not warnings_of(caplog)


def test_without_a_compiler_recorded_runs_and_it_is_said_once(
    without_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(TINY, SMALL) as llm:
        assert llm.engine.model.ops.name == "aten"
        llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=3))
    (message,) = warnings_of(caplog)
    assert message.startswith("backend: 'recorded', which is slower than 'compiled', since no C++ compiler")
    assert caplog.records[0].levelno == logging.WARNING
    info = CliRunner().invoke(main, ["info", str(TINY)]).stdout
    assert "default backend            recorded (no C++ compiler: there is no program 'no-such-compiler'" in info
    assert "backend                    recorded (no C++ compiler" in info.split("\nengine\n")[1]


def test_float16_is_recorded_and_said(caplog: pytest.LogCaptureFixture) -> None:
    LLM(TINY, SMALL, dtype="float16").close()
    (message,) = warnings_of(caplog)
    assert "since the C++ operators compute in float32 or bfloat16, not float16" in message


def test_compiled_by_name_is_an_error_where_it_cannot_be(without_compiler: None) -> None:
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler: there is no program 'no-such-compiler'"):
        LLM(TINY, SMALL, backend="compiled")
    with pytest.raises(ConfigError, match="float32 or bfloat16, not float16; use backend 'recorded', or another dtype"):
        LLM(TINY, SMALL, backend="compiled", dtype="float16")
    with pytest.raises(ConfigError, match="backend: 'fast' is unknown; use one of cuda, compiled, recorded, eager"):
        LLM(TINY, SMALL, backend="fast")


def test_a_compiler_that_fails_is_no_end_of_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setenv("WAVEGRAPH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    assert backend_choice.make_runner("auto", torch.float32).ops.name == "aten"
    assert "failed; the compiler said" in warnings_of(caplog)[0]
    with pytest.raises(build.BuildError, match="failed; the compiler said"):
        backend_choice.make_runner("compiled", torch.float32)


def test_length_is_cut_only_where_attention_is_dense() -> None:
    with LLM(TINY, EngineConfig(max_num_batched_tokens=8, max_num_seqs=1)) as llm:
        limit = llm.engine.model.config.max_position_embeddings
        assert llm.engine.sizes.limits.max_model_len == limit


# -- a GPU -------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A machine with a GPU, as far as choosing goes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend_choice, "CudaDevice", FakeDevice)
    return fake_cuda


def test_a_gpu_is_the_default(gpu: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert backend_choice.choose_backend("auto", dtype) == ("cuda", "")
    chosen = backend_choice.make_runner("auto", torch.float16, deterministic=True)
    assert (chosen.backend.name, chosen.ops.name) == ("cuda", "triton")
    assert isinstance(chosen.ops, TritonOps)
    assert chosen.ops.deterministic
    assert chosen.ops._programs == 2 * 132
    assert backend_choice.make_runner("compiled", torch.float32).ops.name == "cpu"
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    ("missing", "words"),
    [("triton", "since Triton is not installed; install wavegraph"), ("cuda", "since cuda-python cannot be imported")],
)
def test_a_gpu_that_cannot_be_used_is_told(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str, words: str
) -> None:
    def no_bindings() -> object:
        raise ImportError("no module")

    if missing == "triton":
        monkeypatch.setattr(backend_choice, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(cuda_driver, "_bindings", no_bindings)
    assert backend_choice.make_runner("auto", torch.float32).backend.name == "compiled"
    (message,) = warnings_of(caplog)
    assert message.startswith("backend: 'compiled', which is slower than 'cuda', " + words)
    with pytest.raises(ConfigError, match="backend: 'cuda' cannot run here, " + words):
        backend_choice.make_runner("cuda", torch.float32)


def test_cuda_by_name_is_an_error_where_there_is_no_gpu() -> None:
    with pytest.raises(ConfigError, match="backend: 'cuda' cannot run here, since torch sees no GPU"):
        LLM(TINY, SMALL, backend="cuda")
    info = CliRunner().invoke(main, ["info"]).stdout
    assert "cuda backend               torch sees no GPU" in info


@pytest.mark.parametrize("name", ["recorded", "eager"])
def test_atens_products_are_not_deterministic(name: str) -> None:
    config = replace(SMALL, deterministic=True)
    with pytest.raises(ConfigError, match=f"deterministic=True: products of backend '{name}' depend on the batch; use"):
        LLM(TINY, config, backend=name)
    LLM(TINY, config, backend="compiled").close()


def test_deterministic_does_not_fall_back(without_compiler: None, tmp_path: Path) -> None:
    config = replace(SMALL, deterministic=True)
    with pytest.raises(ConfigError, match=r"'recorded' \(taken since no C\+\+ compiler: .*\) depend on the batch"):
        LLM(TINY, config)


def test_an_engine_on_a_gpu_is_fitted_to_it(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way from options to tokens, over ATen operators and the fake's graphs."""
    monkeypatch.setattr(backend_choice, "TritonOps", lambda launcher, **options: AtenOps())
    with LLM(TINY, replace(SMALL, async_scheduling=True, run_ahead=3)) as llm:
        assert llm.engine.executor._backend.name == "cuda"
        tokens = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=5, ignore_eos=True))
        pages = llm.engine.sizes.limits.num_pages
    assert gpu.free == TOTAL
    assert pages == 2 * 32 // 16
    with LLM(TINY, SMALL, backend="recorded") as llm:
        expected = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert [output.token_ids for output in tokens] == [output.token_ids for output in expected]
