"""What is the same for all commands: help with examples, completion."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from wavegraph.cli import main


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands that do something."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        yield from leaves(child, (*path, name))


COMMANDS = dict(leaves(main))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_has_examples_that_can_be_parsed(path: tuple[str, ...]) -> None:
    text = CliRunner().invoke(main, [*path, "--help"]).stdout
    shown = re.findall(r"^    wavegraph (.*)$", text.partition("Examples:")[2], re.MULTILINE)
    assert shown
    for line in shown:
        words = shlex.split(line.split(" < ")[0].split(" > ")[0].split(" >> ")[0])
        assert tuple(words[: len(path)]) == path
        command = COMMANDS[path]
        command.make_parser(click.Context(command)).parse_args(words[len(path) :])  # raises for what is no option


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_says_what_it_is(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            names = max(parameter.opts, key=len)
            assert re.fullmatch(r"--[a-z]+(-[a-z]+)*", names), names


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_WAVEGRAPH_COMPLETE={shell}_complete" in result.stdout
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=result.stdout, text=True, check=True, timeout=10)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("wavegraph ge", "plain,generate"),
        ("wavegraph bundle ins", "plain,inspect"),
        ("wavegraph serve --drain", "plain,--drain-seconds"),
        ("wavegraph info bu", "plain,builtin"),
        ("wavegraph generate ./check", "dir,./check"),
        ("wavegraph serve builtin --log-format js", "plain,json"),
    ],
)
def test_what_a_shell_is_offered(words: str, offered: str) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_WAVEGRAPH_COMPLETE": "bash_complete"}
    script = "import sys; sys.argv[0] = 'wavegraph'; from wavegraph.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | asked, capture_output=True, timeout=60)
    assert offered in done.stdout.decode().split("\n")
