"""Options of the commands that generate: one for each field of `SamplingParams`."""

from collections.abc import Callable
from typing import Any

import click

from wavegraph.cli.common import Command, integers
from wavegraph.sampling import SamplingParams

_OPTIONS = {
    "min_tokens": click.option("--min-tokens", type=int, metavar="N", help="No end before so many tokens."),
    "stop": click.option(
        "--stop", multiple=True, metavar="TEXT", help="A string that ends the output. Several can be given."
    ),
    "stop_token_ids": click.option(
        "--stop-token-ids", type=integers, metavar="1,2,3", help="Further ids that end the output."
    ),
    "ignore_eos": click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the end-of-sequence id."),
    "n": click.option("--n", type=int, metavar="N", help="Outputs of each prompt."),
    "temperature": click.option("--temperature", type=float, metavar="T", help="0 is greedy.  [default: 0]"),
    "top_k": click.option("--top-k", type=int, metavar="K", help="Draw from the K most likely tokens."),
    "top_p": click.option("--top-p", type=float, metavar="P", help="Draw from the most likely tokens that reach P."),
    "min_p": click.option(
        "--min-p", type=float, metavar="P", help="Draw from tokens at least P times as likely as the first."
    ),
    "seed": click.option("--seed", type=int, metavar="N", help="Make the draws repeatable."),
    "repetition_penalty": click.option("--repetition-penalty", type=float, metavar="X", help="1 is off."),
    "presence_penalty": click.option("--presence-penalty", type=float, metavar="X", help="0 is off."),
    "frequency_penalty": click.option("--frequency-penalty", type=float, metavar="X", help="0 is off."),
    "logprobs": click.option(
        "--logprobs", type=int, metavar="N", help="Report each token's log-probability and N others (--json)."
    ),
    "prompt_logprobs": click.option(
        "--prompt-logprobs", type=int, metavar="N", help="The same for the prompt (--json)."
    ),
    "max_loops": click.option("--max-loops", type=int, metavar="N", help="Most loops of a decoded token."),
    "min_loops": click.option("--min-loops", type=int, metavar="N", help="Fewest loops of a decoded token."),
    "exit_threshold": click.option(
        "--exit-threshold", type=float, metavar="P", help="Leave the loop once the gate's sum reaches P."
    ),
    "exit_at_step": click.option(
        "--exit-at-step", type=int, metavar="D", help="Leave the loop always after this one, from 0."
    ),
    "exit_kv": click.option(
        "--exit-kv", type=click.Choice(["exact", "copy"]), help="Fill all KV planes, or copy the exit's."
    ),
}


def sampling_options(*, max_tokens: int = 16, without: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Add the options; the command gets them as keyword arguments, for `take_sampling`.

    ``max_tokens`` is its default; ``without`` names parameters that the command has no use for.
    """
    limit = click.option(
        "--max-tokens", type=int, default=max_tokens, show_default=True, metavar="N", help="Most tokens to generate."
    )

    def add(command: Command) -> Command:
        for name, option in reversed(_OPTIONS.items()):
            if name not in without:
                command = option(command)
        return limit(command)

    return add


def take_sampling(given: dict[str, Any]) -> SamplingParams:
    """Take the options out of ``given``. Raises `RequestError` for a bad value."""
    names = [parameter for parameter in SamplingParams.__dataclass_fields__ if parameter in given]
    values = {name: given.pop(name) for name in names}
    return SamplingParams(**{name: value for name, value in values.items() if value not in (None, ())})
