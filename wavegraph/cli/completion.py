"""``wavegraph completion``: let a shell complete commands and options."""

import click
from click.shell_completion import get_completion_class

from wavegraph.cli.common import emit, examples

SHELLS = ("bash", "zsh", "fish")


@click.command(
    "completion",
    epilog=examples("completion bash >> ~/.bashrc", "completion fish > ~/.config/fish/completions/wavegraph.fish"),
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete wavegraph's commands, options and folders."""
    kind = get_completion_class(shell)
    assert kind is not None
    program = "wavegraph"
    script = kind(context.find_root().command, {}, program, f"_{program.upper()}_COMPLETE")
    emit(script.source_template % script.source_vars())
