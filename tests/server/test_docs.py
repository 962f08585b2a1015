"""docs/serving.md names every endpoint, field, option and error; the core stands without the server."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import Served
from tests.server.test_metrics import COUNTERS, GAUGES, HISTOGRAMS
from wavegraph.cli.serve import serve_command
from wavegraph.server.requests import _UNSUPPORTED, ChatCompletionRequest, CompletionRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/serving.md").read_text()


def example(language: str, server: Served) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    found = str(text)
    assert "http://127.0.0.1:8000" in found
    return found.replace("http://127.0.0.1:8000", server.url)


def test_the_python_example_runs(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example("python", server), "docs/serving.md", "exec"), {})
    _, loops, streamed = re.split(r" (\d\.\d+)\n", capsys.readouterr().out)
    assert 1 <= float(loops) <= 4
    assert streamed


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_examples_run(server: Served) -> None:
    script = "set -e\n" + example("sh", server).replace('"stream": true', '"stream": true, "max_tokens": 4')
    done = subprocess.run(["sh"], input=script, capture_output=True, text=True, timeout=60)
    assert '"text_completion"' in done.stdout, done.stderr
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_every_endpoint_is_described(server: Served) -> None:

    document = json.loads(server.request("GET", "/openapi.json")[2])
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"`{method.upper()} {path}`" in PAGE


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
def test_every_field_is_described(kind: type[CompletionRequest]) -> None:
    for name in (*kind.model_fields, *_UNSUPPORTED):
        assert re.search(rf"`{name}`", PAGE), name


def test_every_option_of_its_own_is_described() -> None:
    from wavegraph.cli.generate import generate_command

    shared = {option.name for option in generate_command.params}
    for option in serve_command.params:
        if option.name not in shared:
            assert f"`{max(option.opts, key=len)}`" in PAGE or option.name == "model", option.name


def test_every_error_is_described() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "wavegraph/server").glob("*.py"))
    for code in re.findall(r'\bcode="(\w+)"', sources):
        assert f"`{code}`" in PAGE, code
    table = PAGE.partition("## Errors")[2].partition("## Operation")[0]
    for status in re.findall(r"ApiError\(\s*(\d{3})", sources):
        assert status in table, status


def test_the_core_needs_none_of_it() -> None:
    script = (
        "import sys, wavegraph.llm, wavegraph.cli\n"
        "found = {'fastapi', 'starlette', 'pydantic', 'msgspec', 'prometheus_client', 'uvicorn'} & set(sys.modules)\n"
        "sys.exit(', '.join(found) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_document_is_whole(server: Served) -> None:
    """Every reference leads somewhere."""
    text = server.request("GET", "/openapi.json")[2].decode()
    for name in set(re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', text)):
        assert f'"{name}":{{' in text.partition('"schemas":')[2], name


def test_every_metric_is_described() -> None:
    for name in (*GAUGES, *HISTOGRAMS, *(f"{name}_total" for name in COUNTERS)):
        assert f"`wavegraph:{name}`" in PAGE, name
