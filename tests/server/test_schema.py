"""Requests made up from the server's own document: no answer breaks it, and none is a fault of the server's."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.server.harness import SETTINGS, serving
from wavegraph.config import EngineConfig

SCHEMATHESIS = shutil.which("schemathesis", path=str(Path(sys.executable).parent))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(SCHEMATHESIS is None, reason="needs schemathesis, of the extra 'check'"),
]

CONFIG = EngineConfig(max_num_batched_tokens=128, max_model_len=64, num_pages=200)
EXAMPLES = 1000


def test_a_thousand_requests_keep_to_the_document(tmp_path: Path) -> None:
    with serving(config=CONFIG) as server:
        server.do(server.engine.ready())
        with urlopen(f"{server.url}/openapi.json") as answer:
            document = json.load(answer)
        # A name that is not the model's is a 404 and looks no further.
        for name in ("CompletionRequest", "ChatCompletionRequest"):
            document["components"]["schemas"][name]["properties"]["model"]["enum"] = [SETTINGS.model_name]
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        options = [
            "--phases",
            "coverage,fuzzing",
            "--max-examples",
            "60",
            "--seed",
            "1",
            "--no-shrink",
            "--continue-on-failure",
        ]
        options += ["--request-timeout", "100"]
        # That a token id is below the size of the vocabulary, or one field wants another, no schema can say.
        checks = ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
        done = subprocess.run(
            [str(SCHEMATHESIS), "run", "openapi.json", "--url", server.url, *options, *checks],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert server.engine.is_ready
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None
    assert int(generated[1]) >= EXAMPLES
