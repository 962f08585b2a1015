"""Clients that people use, run as they are: OpenAI's for JavaScript, and lm-eval."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.harness import SETTINGS, Served, serving
from wavegraph.builtin import builtin_path
from wavegraph.config import EngineConfig
from wavegraph.model.reference import ReferenceModel
from wavegraph.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NPM, NODE = shutil.which("npm"), shutil.which("node")
HERE = Path(__file__).parent
CONFIG = EngineConfig(max_num_batched_tokens=128, max_model_len=512, num_pages=400)


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with serving(config=CONFIG) as served:
        served.do(served.engine.ready())
        yield served
        served.wait_idle()
        assert served.free_pages() == 400


@pytest.mark.skipif(NPM is None or NODE is None, reason="needs node and npm")
def test_the_javascript_client(running: Served, tmp_path: Path) -> None:
    install = [str(NPM), "install", "--no-audit", "--no-fund", "openai@6"]
    got = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if got.returncode:
        pytest.skip(f"npm has no openai: {got.stderr.strip()[-200:]}")
    shutil.copy(HERE / "client.mjs", tmp_path)
    command = [str(NODE), "client.mjs", f"{running.url}/v1", SETTINGS.model_name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    expected = running.offline("The cat", max_tokens=12)
    assert said["text"] == expected.text
    assert said["usage"]["completion_tokens"] == len(expected.token_ids)
    assert said["reply"]


QUESTIONS = [
    ("The server answers", [" at once", " with an error", " never"]),
    ("import os\nimport", [" sys", " the cat"]),
    ("def main(", ["):", ") -> None:", "banana"]),
    ("Licensed under the Apache", [" License, Version 2.0", " tree"]),
    ("ünïcode — „quotes“", [" and ß", "…", " 🙂"]),
]

TASK = """
task: wavegraph_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""


def lm_eval(server: Served, folder: Path) -> list[tuple[str, str, float, bool]]:
    """Log-likelihood of each choice, as lm-eval has it from the server. Nothing is asked of any hub."""
    tasks, tokenizer = folder / "tasks", folder / "tokenizer"
    tasks.mkdir()
    tokenizer.mkdir()
    lines = [json.dumps({"question": question, "choices": choices}) for question, choices in QUESTIONS]
    (folder / "data.jsonl").write_text("\n".join(lines))
    (tasks / "local.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
    shutil.copy(builtin_path() / "tokenizer.json", tokenizer)
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    arguments = [f"{server.url}/v1/completions", SETTINGS.model_name, tokenizer, tasks]
    done = subprocess.run(
        [sys.executable, HERE / "lm_eval_task.py", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [tuple(entry) for entry in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval, of the extra 'check'")
def test_lm_eval_finds_the_log_likelihoods_of_the_reference(running: Served, tmp_path: Path) -> None:
    found = lm_eval(running, tmp_path)
    assert [(context, choice) for context, choice, *_ in found] == [
        (question, choice) for question, choices in QUESTIONS for choice in choices
    ]
    reference, tokenizer = ReferenceModel.from_folder(builtin_path()), Tokenizer.load(builtin_path())
    assert tokenizer is not None
    for context, choice, likelihood, greedy in found:
        before = tokenizer.encode(context)  # lm-eval sends these ids, also where a token would span both parts
        ids = before + tokenizer.encode(context + choice)[len(before) :]
        expected, best = score(reference, ids, len(before))
        assert likelihood == pytest.approx(expected, abs=1e-3), (context, choice)
        assert greedy == best, (context, choice)
    assert len({round(entry[2], 2) for entry in found}) > len(QUESTIONS)


def score(reference: ReferenceModel, ids: list[int], start: int) -> tuple[float, bool]:
    """Log-likelihood of ``ids[start:]`` after the others, and whether each of them is the likeliest."""
    logits: Any = reference.forward(ids).logits[-1, start - 1 : -1]
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    targets = ids[start:]
    best = logits.argmax(axis=-1).tolist() == targets
    return float(logprobs[np.arange(len(targets)), targets].sum()), best
