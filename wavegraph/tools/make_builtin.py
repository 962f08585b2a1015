"""Make the built-in model from nothing: ``python -m wavegraph.tools.make_builtin --out DIR``.

Trains the tokenizer on text that ships with every Python, and draws the weights. The result depends on the
Python that runs it only through that text, so ``tokenizer.json`` as made by one Python is kept in the package
(to renew it, copy it from DIR), and weights, which depend on nothing, are drawn at first use.
"""

import os
from pathlib import Path
from pydoc_data.topics import topics

import click
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from wavegraph.builtin import PackagedModel, write_model

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# Code; the prose is the language reference that `help()` shows, about 0.7 MB.
CORPUS = (
    "argparse.py",
    "ast.py",
    "collections/__init__.py",
    "dataclasses.py",
    "datetime.py",
    "difflib.py",
    "email/message.py",
    "functools.py",
    "inspect.py",
    "json/decoder.py",
    "logging/__init__.py",
    "pickle.py",
    "random.py",
    "statistics.py",
    "subprocess.py",
    "textwrap.py",
    "threading.py",
    "typing.py",
    "unittest/case.py",
)


def read_corpus() -> list[str]:
    """Prose and code that ship with the running Python, line by line."""
    library = Path(os.__file__).parent
    texts = list(topics.values()) + [(library / name).read_text(encoding="utf-8") for name in CORPUS]
    return [line for text in texts for line in text.splitlines(keepends=True)]


def train_tokenizer(lines: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly ``vocab_size`` tokens; digits are split singly.

    All 256 bytes are tokens, so every text can be encoded and decoded without loss.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to make.")
def main(out: Path) -> None:
    """Write config.json, tokenizer.json and model.safetensors of the built-in model to a new folder."""
    if out.exists():
        raise click.BadParameter(f"{out} exists already: name a new folder", param_hint="--out")
    packaged = PackagedModel.load()
    tokenizer = train_tokenizer(read_corpus(), packaged.vocab_size).to_str(pretty=True)
    try:
        write_model(PackagedModel(packaged.config, tokenizer.encode()), out)
    except OSError as error:
        reason = f"{out} cannot be written ({error.strerror}): name a folder that can be"
        raise click.BadParameter(reason, param_hint="--out") from error
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
