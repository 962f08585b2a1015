"""``wavegraph chat``: talk with a model in the terminal."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from wavegraph.cli.common import complete_model, emit, examples
from wavegraph.cli.engine import Bars, engine_options, load, take_options
from wavegraph.cli.sampling import sampling_options, take_sampling
from wavegraph.errors import InputError, RequestError, RequestFailedError
from wavegraph.sampling import SamplingParams

if TYPE_CHECKING:
    from wavegraph.llm import LLM

CLEAR = "/clear"


@click.command(
    "chat",
    epilog=examples(
        "chat builtin",
        "chat ./checkpoint --system 'Be brief.' --temperature 1 --top-p 0.7",
        "chat builtin < questions.txt",
    ),
)
@click.argument("model", shell_complete=complete_model)
@click.option("--system", metavar="TEXT", help="What the model is told first.")
@sampling_options(max_tokens=512, without=("n", "logprobs", "prompt_logprobs"))
@engine_options()
def chat_command(model: str, system: str | None, **given: Any) -> None:
    """Talk with MODEL: a checkpoint folder, a Hugging Face Hub id, or 'builtin'.

    A line is a turn; answers appear as they are made. '/clear' begins anew, Ctrl-D ends. Without a terminal, lines
    come from stdin and answers go to stdout.
    """
    params = take_sampling(given)
    with load(model, take_options(given), Bars()) as llm:
        if llm.engine.tokenizer is None:
            raise InputError(f"{model}: has no tokenizer.json, and a chat is text; see `wavegraph generate`")
        if llm.engine.tokenizer.chat.refusal is not None:
            raise InputError(f"{llm.engine.tokenizer.chat.refusal}, so there can be no chat; see `wavegraph generate`")
        start = [{"role": "system", "content": system}] if system is not None else []
        messages = list(start)
        for line in _lines():
            if line == CLEAR:
                messages = list(start)
                continue
            asked = [*messages, {"role": "user", "content": line}]
            try:
                answer = _answer(llm, asked, params)
            except (RequestError, RequestFailedError) as error:
                click.echo(f"Error: {error}. {CLEAR} begins anew.", err=True)
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    """What the user says, line by line."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401 - gives `input` a history and editing

    while True:
        try:
            line = input("> ")
        except EOFError:
            emit("")
            return
        if line.strip():
            yield line


def _answer(llm: "LLM", messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the model's turn as it is made; returns it."""
    text = ""
    with llm.stream(llm.encode_chat(messages), llm.for_chat(params)) as stream:
        for output in stream:
            new = output.text or ""
            emit(new[len(text) :], newline=False)
            text = new
            if output.error is not None:
                raise RequestFailedError(output.error, "output")
    emit("")
    return text
