"""docs/serving.md names every endpoint, field, option and error; the core stands without the server."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import Served
from wavegraph.cli.serve import serve_command
from wavegraph.server.requests import _UNSUPPORTED, ChatCompletionRequest, CompletionRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/serving.md").read_text()


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
