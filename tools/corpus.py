"""Text that every Python installation ships, as training data: read, split, tokenized. Needs no network.

Prose is the language reference behind `help()`, the licence and the documentation strings of the standard library;
code is the library's sources. Left out: what some distributions package apart (tests, IDLE, tkinter, ...), tables
(encodings), and everything that is not of the standard library. The order is fixed, and which module is held out
depends on its name alone, so that another Python splits alike; the text itself is that of the running Python.
"""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2, as in Ouro's tokenizer. The first one ends a document."""

HELD_OUT_SHARE = 1 / 16

_LEFT_OUT = frozenset(
    {"test", "tests", "idle_test", "encodings", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils"}
    | {"ensurepip", "pydoc_data", "__phello__"}
)
_SHORTEST_DOCSTRING = 80  # characters; shorter ones say little without their code


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it comes from: a module's path, after ``doc/`` for its documentation strings."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents to train on and documents of modules that are held out."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all names and texts, in their order."""
        sha = hashlib.sha256()
        for part in (self.train, self.held_out):
            for document in part:
                sha.update(f"{document.name}\0{document.text}\0".encode())
            sha.update(b"\0")
        return sha.hexdigest()


def read_corpus() -> Corpus:
    """The corpus of the running Python: about 9 MB to train on and 0.4 MB held out, with Python 3.11."""
    library = Path(sysconfig.get_path("stdlib"))
    train = [Document(f"topic/{name}", topics[name]) for name in sorted(topics)]
    licence = library / "LICENSE.txt"
    if licence.is_file():
        train.append(Document(licence.name, licence.read_text(encoding="utf-8")))
    held_out: list[Document] = []
    for name, source in read_modules(library):
        part = held_out if is_held_out(name) else train
        prose = docstrings(source)
        if prose:
            part.append(Document(f"doc/{name}", prose))
        if source:
            part.append(Document(name, source))
    return Corpus(tuple(train), tuple(held_out))


def is_held_out(name: str) -> bool:
    """Whether the module at this path (``json/decoder.py``) is one of the sixteenth that is never trained on."""
    return hashlib.sha256(name.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def docstrings(source: str) -> str:
    """The longer documentation strings of a module's source, unindented, in the order of `ast.walk`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) > _SHORTEST_DOCSTRING:
                found.append(f"{text}\n")
    return "\n".join(found)


def read_modules(library: Path) -> Iterator[tuple[str, str]]:
    """Path and source of each module of the standard library that is taken, in order of path."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        parts = name.with_suffix("").parts
        if parts[0] in sys.stdlib_module_names and _LEFT_OUT.isdisjoint(parts):
            yield name.as_posix(), path.read_text(encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
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
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> NDArray[np.int64]:
    """Token ids ``[N]`` of all documents, each ended by ``<|endoftext|>``."""
    encodings = tokenizer.encode_batch([document.text for document in documents])
    return np.concatenate([np.array([*encoding.ids, 0], dtype=np.int64) for encoding in encodings])
