"""``wavegraph generate``: prompts in, text or token ids out."""

from pathlib import Path
from typing import Any

import click

from wavegraph.cli.common import complete_model, emit, examples, integers, json_output, to_json, write_json
from wavegraph.cli.engine import Bars, engine_options, load, take_options
from wavegraph.cli.sampling import sampling_options, take_sampling
from wavegraph.errors import InputError
from wavegraph.outputs import RequestOutput, require_whole


@click.command(
    "generate",
    epilog=examples(
        "generate builtin --prompt 'Waves follow' --max-tokens 32",
        "generate ./checkpoint --prompts-file prompts.txt --temperature 0.8 --seed 1 --json out.json",
    ),
)
@click.argument("model", shell_complete=complete_model)
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt. Can be given several times.")
@click.option(
    "--prompt-ids",
    "ids",
    multiple=True,
    type=integers,
    metavar="1,2,3",
    help="A prompt as token ids. Can be given several times.",
)
@click.option("--prompts-file", type=Path, metavar="FILE", help="A prompt per line; empty lines are left out.")
@sampling_options()
@engine_options()
@json_output
def generate_command(
    model: str,
    texts: tuple[str, ...],
    ids: tuple[list[int], ...],
    prompts_file: Path | None,
    json_path: Path | None,
    **given: Any,
) -> None:
    """Generate from MODEL: a checkpoint folder, a Hugging Face Hub id, or 'builtin'.

    Prompts run together, in this order: --prompt, --prompt-ids, --prompts-file. Prints each output's text, or
    its token ids if the checkpoint has no tokenizer.
    """
    prompts: list[str | list[int]] = [*texts, *ids]
    if prompts_file is not None:
        prompts += _read_prompts(prompts_file)
    if not prompts:
        raise click.UsageError("No prompt: give --prompt, --prompt-ids or --prompts-file.")
    params = take_sampling(given)
    options = take_options(given)
    bars = Bars()
    with load(model, options, bars) as llm:
        with bars.show("Generating") as on_progress:
            outputs = llm.generate(prompts, params, on_progress=on_progress)
        stats = llm.engine.stats()
    if json_path is None:
        _print(outputs)
    else:
        result = {"outputs": [output.to_dict() for output in outputs], "stats": stats.to_dict()}
        write_json(json_path, to_json(result))
    require_whole(outputs)


def _read_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts-file {path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise InputError(f"--prompts-file {path}: cannot be read ({error.strerror})") from error
    return [line for line in lines if line.strip()]


def _print(outputs: list[RequestOutput]) -> None:
    for index, output in enumerate(outputs):
        if len(outputs) > 1:
            emit(f"[{index}] {output.prompt if output.prompt is not None else list(output.prompt_token_ids)}")
        emit(output.text if output.text is not None else ",".join(map(str, output.token_ids)))
