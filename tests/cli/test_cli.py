"""The command line: results on stdout, one sentence on stderr, an exit code that says whose fault it was."""

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from wavegraph.cli import main
from wavegraph.cli.common import CommandGroup
from wavegraph.cli.engine import Bars
from wavegraph.errors import CaptureError, ConfigError, EngineError, OutputError

GOLDENS = Path(__file__).parents[1] / "goldens"
TINY = str(GOLDENS / "tiny")
SMALL = ("--max-model-len", "64", "--max-batched-tokens", "16", "--max-num-seqs", "4", "--num-pages", "16")

with np.load(GOLDENS / "tiny_fp32.npz") as arrays:
    PROMPT = ",".join(map(str, arrays["gen_prompt"].tolist()))
    TOKENS = arrays["gen_tokens"].tolist()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def generate(model: str, *arguments: str) -> Result:
    return run("generate", model, *SMALL, *arguments)


def check_refused(result: Result, named: str, exit_code: int = 2) -> None:
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert named in result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().split("\n")[-1]
    assert last.startswith("Error: ")


@pytest.mark.parametrize("mode", [(), ("--no-wavefront",), ("--backend", "eager", "--check", "--chunk", "3")])
def test_generate_prints_the_golden_tokens(mode: tuple[str, ...]) -> None:
    result = generate(TINY, "--prompt-ids", PROMPT, "--max-tokens", "6", "--ignore-eos", *mode)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ",".join(map(str, TOKENS[:6])) + "\n"


def test_generate_writes_json_to_stdout_and_nothing_else() -> None:
    result = generate("builtin", "--prompt", "Wave", "--prompt-ids", "5,6", "--max-tokens", "3", "--json", "-")
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    text, ids = content["outputs"]
    assert (text["prompt"], ids["prompt"], ids["prompt_token_ids"]) == ("Wave", None, [5, 6])
    assert isinstance(text["text"], str)
    assert 1 <= len(ids["token_ids"]) <= 3
    assert ids["metrics"]["latency"] >= ids["metrics"]["time_to_first_token"] > 0
    assert content["stats"]["scheduler"]["steps"] >= 4


def test_prompts_keep_their_order_and_get_their_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo\u2028three\n", encoding="utf-8")
    out = tmp_path / "out.json"
    result = generate(
        "builtin", "--prompts-file", str(file), "--prompt-ids", "7", "--prompt", "zero", "--json", str(out)
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    prompts = [output["prompt"] for output in json.loads(out.read_text(encoding="utf-8"))["outputs"]]
    assert prompts == ["zero", None, "one", "two\u2028three"]


def broken(tmp_path: Path, file: str, content: bytes) -> str:
    """The tiny checkpoint with one file replaced."""
    folder = tmp_path / "broken"
    shutil.copytree(GOLDENS / "tiny", folder)
    (folder / file).write_bytes(content)
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prompt-ids", ""), "prompts[0]: prompt: is empty"),
        (("--prompt-ids", "1", "--prompt-ids", "1,256"), "prompts[1]: prompt: token id 256 at index 1"),
        (("--prompt-ids", "-1"), "token id -1"),
        (("--prompt-ids", "1,x"), "'1,x' is not a comma-separated list of integers"),
        (("--prompt-ids", ",".join(["1"] * 64)), "max_model_len=64"),
        (("--prompt-ids", "1,2,3", "--max-tokens", "61", "--num-pages", "2"), "the pool has 2"),
        (("--prompt-ids", "1", "--max-tokens", "0"), "max_tokens must be an integer of at least 1, got 0"),
        (("--prompt-ids", "1", "--max-tokens", "-4"), "got -4"),
        (("--prompt-ids", "1", "--stop-token-ids", "999"), "stop_token_ids: token id 999"),
        (("--prompt", "text"), "the checkpoint has none"),
        ((), "No prompt"),
        (("--prompts-file", "/nonexistent/prompts"), "/nonexistent/prompts: cannot be read"),
        (("--prompt-ids", "1", "--json", "/nonexistent/out.json"), "/nonexistent/out.json: cannot be written"),
        (("--prompt-ids", "1", "--json", "/"), "--json /: cannot be written"),
        (("--prompt-ids", "1", "--chunk", "0"), "prefill_chunk_size must be an integer of at least 1"),
        (("--prompt-ids", "1", "--chunk", "some"), "'some' is not a number of rows or 'auto'"),
        (("--prompt-ids", "1", "--packing", "tight"), "packing must be one of fill, fifo"),
        (("--prompt-ids", "1", "--target-itl-ms", "20"), "target_itl_ms: needs measured costs"),
        (("--prompt-ids", "1", "--cost", "/nonexistent"), "cost model: /nonexistent cannot be read"),
        (("--prompt-ids", "1", "--kv-layout", "shared"), "depends on the final-depth KV"),
        (("--prompt-ids", "1", "--backend", "fast"), "backend: 'fast' is unknown"),
        (("--prompt-ids", "1", "--dtype", "int4"), "dtype"),
        (("--prompt-ids", "1", "--buckets", "1,2"), "do not reach max_num_batched_tokens=16"),
        (("--prompt-ids", "1", "--page-size", "one"), "'one' is not a valid integer"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], named: str) -> None:
    check_refused(generate(TINY, *arguments), named)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--dtype", "foo"), "dtype: must be auto or one of"),
        (("--dtype", "float64"), "dtype: must be auto or one of"),
        (("--backend", "foo"), "backend: 'foo' is unknown"),
        (("--num-pages", str(10**9)), "the KV pool would take"),
    ],
)
def test_info_refuses_what_generate_does(arguments: tuple[str, ...], named: str) -> None:
    check_refused(run("info", TINY, *arguments), named)


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    check_refused(generate(str(tmp_path / "none"), "--prompt-ids", "1"), "no such folder")
    check_refused(generate(str(tmp_path), "--prompt-ids", "1"), "config.json: no such file")


@pytest.mark.parametrize(
    ("file", "content"),
    [("config.json", b"{"), ("model.safetensors", b"short"), ("tokenizer.json", b"{}"), ("config.json", b"{}")],
)
def test_a_broken_checkpoint(tmp_path: Path, file: str, content: bytes) -> None:
    named = "model_type" if content == b"{}" and file == "config.json" else file
    check_refused(generate(broken(tmp_path, file, content), "--prompt-ids", "1"), named)


def test_output_that_cannot_be_written_is_found_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavegraph.cli.generate.load", lambda *_: pytest.fail("the model was loaded"))
    check_refused(generate(TINY, "--prompt-ids", "1", "--json", "/nonexistent/x"), "cannot be written")


def test_a_refused_run_leaves_no_output_file_and_keeps_an_old_one(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("old")
    for file in (new, old):
        check_refused(generate(TINY, "--prompt-ids", "999", "--json", str(file)), "token id 999")
    assert not new.exists()
    assert old.read_text() == "old"


def test_the_check_of_an_output_leaves_a_link_as_it_was(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    check_refused(generate(TINY, "--prompt-ids", "999", "--json", str(link)), "token id 999")
    assert link.is_symlink()
    assert not target.exists()


SIMULATE = ["simulate", "--prompt-len", "16", "--requests", "1"]


@pytest.mark.parametrize("arguments", [SIMULATE, [*SIMULATE, "--json", "-"], ["info"]])
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
def test_stdout_that_cannot_be_written(arguments: list[str], redirection: str) -> None:
    command = f'exec "$@" {redirection}'
    done = subprocess.run(["sh", "-c", command, "sh", *COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("Error: stdout ")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_is_no_error_to_speak_of() -> None:
    command = f"{sys.executable} -m wavegraph info | true; exit $?"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("print_result", [lambda: generate(TINY, "--prompt-ids", PROMPT), lambda: run(*DEMO)])
def test_results_of_every_command_are_emitted(
    print_result: Callable[[], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("wavegraph.cli.common.click.echo", full)
    monkeypatch.setattr("wavegraph.cli.common.CommandGroup.invoke", click.Group.invoke)
    assert isinstance(print_result().exception, OutputError)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-tokens", str(10**15)),
        ("--chunk", "0"),
        ("--max-num-seqs", str(10**11)),
        ("--max-batched-tokens", str(10**11)),
        ("--requests", "60000", "--prompt-len", "60000"),
    ],
)
def test_simulate_refuses_what_no_machine_holds(arguments: tuple[str, ...]) -> None:
    result = run("simulate", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value for" in result.stderr


def test_simulate_fills_or_pads_the_buckets_it_is_given() -> None:
    """One request of 37 tokens: auto runs the fewest steps, fifo pads each of them up to 48."""
    case = [
        "simulate",
        "--requests",
        "1",
        "--prompt-len",
        "37",
        "--chunk",
        "auto",
        "--ladder",
        "default",
        "--json",
        "-",
    ]
    filled, padded = (json.loads(run(*case, "--packing", packing, "--check").stdout) for packing in ("fill", "fifo"))
    assert (padded["steps"], padded["padding_rows"], padded["bucket_hits"]) == (4, 4 * 11, {"48": 4})
    assert filled["padding_rows"] < padded["padding_rows"]
    assert filled["duration"] < padded["duration"]
    assert filled["rows"] == padded["rows"] == 4 * 37


def test_simulate_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    @contextmanager
    def show(self: Bars, label: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: seen.append((done, total))

    monkeypatch.setattr(Bars, "show", show)
    assert run("simulate", "--requests", "2", "--prompt-len", "40", "--max-tokens", "3").exit_code == 0
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (4 * 2 * 42, 4 * 2 * 42)


def test_help_shows_the_defaults_that_hold() -> None:
    engine, demo = (" ".join(run(name, "--help").stdout.split()) for name in ("generate", "demo"))
    for text in (engine, demo):
        assert "ditto" not in text
        assert "one step or not. [default: fused]" in text
    assert "depth and step, or auto. [default: auto]" in engine
    assert "depth and step, or auto. [default: 16]" in demo
    assert "prefixes. [default: on]" in engine
    assert "prefixes. [default: off]" in demo
    assert "--wavefront" not in demo.split("Options:")[1]


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(ConfigError("a"), 2), (EngineError("b"), 1), (CaptureError("c"), 1), (KeyboardInterrupt(), 130)],
)
def test_each_error_has_its_exit_code(error: BaseException, exit_code: int) -> None:
    @click.command()
    def fail() -> None:
        raise error

    result = CliRunner().invoke(CommandGroup(commands={"fail": lambda: fail}), ["fail"])
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr == (f"Error: {error}\n" if str(error) else "Interrupted.\n")


def test_info_describes_a_model_without_reading_weights(tmp_path: Path) -> None:
    folder = broken(tmp_path, "model.safetensors", b"never read")
    result = run("info", folder, *SMALL, "--json", "-")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["model"]["hidden_size"] == 64
    assert facts["model"]["pool_bytes_per_token"] == 4 * (2 * 4 * 2 * 64 + 64 + 4)
    assert facts["engine"]["num_pages"] == 16
    assert facts["engine"]["pool_bytes"] == 17 * 16 * facts["model"]["pool_bytes_per_token"]
    assert "recorded" in facts["device"]["backends"]
    shown = run("info").stdout
    assert "torch" in shown
    assert "model" not in shown


def test_demo_shows_both_modes_and_equal_tokens() -> None:
    arguments = ("demo", "--prompt", "Waves follow each other. " * 3, "--max-tokens", "8", "--repeats", "1")
    result = run(*arguments, "--max-batched-tokens", "32")
    assert result.exit_code == 0, result.stderr
    assert "tokens are equal" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert re.match(r"Early exit \(exact\) at threshold 0\.3, .* steps a token instead of 4\.00, ", last)
    assert "all 32 tokens and exits equal the float64 reference's" in last
    content = json.loads(run(*arguments, "--max-batched-tokens", "32", "--json", "-").stdout)
    off, on = content["modes"]
    assert content["tokens_equal"] is True
    exits = content["early_exit"]
    assert exits["full_depth"]["steps_per_token"] == 4.0
    assert 1.0 <= exits["early"]["steps_per_token"] < 4.0
    assert exits["equal_to_reference"] is True
    assert (off["wavefront"], on["wavefront"]) == (False, True)
    assert on["steps"] < off["steps"]
    assert on["rows_per_step"] > off["rows_per_step"]


DEMO = ("demo", "--prompt", "Waves.", "--max-tokens", "2", "--repeats", "1", "--max-batched-tokens", "8")


def test_demo_fails_if_the_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from wavegraph.cli import demo

    row = demo._Mode.run

    def lie(self: Any, *arguments: Any, **options: Any) -> None:
        row(self, *arguments, **options)
        if self.wavefront:
            self.outputs.pop()

    monkeypatch.setattr(demo._Mode, "run", lie)
    result = run(*DEMO)
    assert result.exit_code == 1
    assert "different tokens" in result.stderr


@pytest.mark.parametrize("field", ["token_ids", "exit_depths"])
def test_demo_fails_if_early_exit_differs_from_the_reference(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from wavegraph.cli import demo

    measure = demo.measure_exits

    def lie(*arguments: Any) -> Any:
        full, early = measure(*arguments)
        first, *rest = getattr(early.outputs[0], field)
        early.outputs[0] = dataclasses.replace(early.outputs[0], **{field: (first ^ 1, *rest)})
        return full, early

    monkeypatch.setattr(demo, "measure_exits", lie)
    result = run(*DEMO)
    assert result.exit_code == 1
    assert "than the float64 reference, so one of them is wrong" in result.stderr


def test_demo_asks_the_reference_only_where_the_answer_must_be_the_same() -> None:
    result = run(*DEMO, "--dtype", "bfloat16")
    assert result.exit_code == 0, result.stderr
    assert "not compared with the reference" in result.stdout.splitlines()[-1]


def test_demo_needs_a_tokenizer() -> None:
    check_refused(run("demo", TINY), "has no tokenizer.json")


COMMAND = [sys.executable, "-m", "wavegraph"]


def test_the_program_itself(tmp_path: Path) -> None:
    command = [*COMMAND, "generate", TINY, *SMALL, "--max-tokens", "2", "--ignore-eos"]
    good = subprocess.run([*command, "--prompt-ids", PROMPT], capture_output=True, text=True, timeout=120)
    assert (good.returncode, good.stdout) == (0, f"{TOKENS[0]},{TOKENS[1]}\n")
    bad = subprocess.run([*command, "--prompt-ids", "256"], capture_output=True, text=True, timeout=120)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("Error: prompts[0]: prompt: token id 256")
    assert bad.stderr.count("\n") == 1


@pytest.mark.parametrize("delay", [0.2, 1.0])  # while libraries are imported; while the model loads or runs
def test_ctrl_c_ends_the_program_with_130_and_no_traceback(tmp_path: Path, delay: float) -> None:
    prompts = tmp_path / "prompts"
    os.mkfifo(prompts)
    long_work = ["--max-tokens", "900", "--ignore-eos", "--max-batched-tokens", "1", "--backend", "eager"]
    command = [*COMMAND, "generate", "builtin", "--prompts-file", str(prompts), *long_work]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    prompts.write_text("Waves\n")  # waits until the command reads it
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, "", "Interrupted.\n")


def test_help_brings_in_no_torch() -> None:
    script = (
        "import sys; from click.testing import CliRunner; from wavegraph.cli import main\n"
        "for command in main.list_commands(None):\n"
        "    assert CliRunner().invoke(main, [command, '--help']).exit_code == 0, command\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_importing_the_package_brings_in_no_command_line() -> None:
    script = "import sys, wavegraph; sys.exit(bool({'click', 'rich', 'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
