"""Which backend is chosen, and what is said when it is not the fast one."""

import logging
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from wavegraph import runner
from wavegraph.cli import main
from wavegraph.config import EngineConfig
from wavegraph.errors import ConfigError
from wavegraph.llm import LLM
from wavegraph.model.ops import build
from wavegraph.sampling import SamplingParams

TINY = Path(__file__).parents[1] / "goldens" / "tiny"
SMALL = EngineConfig(max_num_batched_tokens=8, max_num_seqs=2, max_model_len=32)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library is loaded, and none can be built."""
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setenv("CXX", "no-such-compiler")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == runner.__name__]


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
    chosen = runner.make_runner(name, dtype)
    assert (chosen.backend.name, chosen.ops.name) == (backend, ops)
    assert runner.choose_backend(name, dtype)[0] == backend


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
    with pytest.raises(ConfigError, match="backend: 'fast' is unknown; use one of compiled, recorded, eager"):
        LLM(TINY, SMALL, backend="fast")


def test_a_compiler_that_fails_is_no_end_of_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setenv("WAVEGRAPH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    assert runner.make_runner("auto", torch.float32).ops.name == "aten"
    assert "failed; the compiler said" in warnings_of(caplog)[0]
    with pytest.raises(build.BuildError, match="failed; the compiler said"):
        runner.make_runner("compiled", torch.float32)


def test_length_is_cut_only_where_attention_is_dense() -> None:
    with LLM(TINY, EngineConfig(max_num_batched_tokens=8, max_num_seqs=1)) as llm:
        limit = llm.engine.model.config.max_position_embeddings
        assert llm.engine.sizes.limits.max_model_len == limit
