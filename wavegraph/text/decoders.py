"""The decoders of a ``tokenizer.json``, each fed piece by piece.

`tokenizers` decodes a whole list of tokens at once. Its incremental decoder guesses from the texts of parts, and raises
where the guess was wrong: a run of byte tokens that turns out to be no UTF-8 makes U+FFFD of what was a character. Here
each decoder of the chain gives out a piece once nothing that may follow can change it, and keeps the rest. What a
decoder does to a piece is asked of the library itself, apart from bytes, ends and joins.
"""

import codecs
import copy
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from tokenizers import decoders

logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable Latin-1 for itself, the rest from
    U+0100 on, as in GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = count(0x100)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


BYTE_OF = _byte_alphabet()
"""The byte of each character of a byte-level vocabulary."""


class Stage:
    """One decoder of the chain. Pieces are tokens, or, behind one that joins them, parts of one long token.

    ``settled``: whether all that came before the first piece it saw would make no difference to what it does from here.
    """

    settled = True

    def push(self, piece: str) -> Iterable[str]:
        """What is certain once ``piece`` has come."""
        raise NotImplementedError

    def end(self) -> Iterable[str]:
        """The rest: nothing follows."""
        return ()

    def copy(self) -> "Stage":
        """Another one in the same state."""
        return copy.copy(self)


class _Each(Stage):
    """A decoder that looks at each token, or character, by itself."""

    def __init__(self, decoder: decoders.Decoder) -> None:
        self._decoder = decoder

    def push(self, piece: str) -> Iterable[str]:
        return (self._decoder.decode([piece]),)


class _First(Stage):
    """A decoder that treats the first token otherwise than the rest (Metaspace, WordPiece)."""

    def __init__(self, decoder: decoders.Decoder) -> None:
        self._decoder = decoder
        self.settled = False

    def push(self, piece: str) -> Iterable[str]:
        before = [""] if self.settled else []
        self.settled = True
        return (self._decoder.decode([*before, piece]),)


class _Last(Stage):
    """A decoder that treats the last token otherwise than the rest (BPEDecoder)."""

    def __init__(self, decoder: decoders.Decoder) -> None:
        self._decoder = decoder
        self._held: str | None = None

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return self._held is not None

    def push(self, piece: str) -> Iterable[str]:
        held, self._held = self._held, piece
        return (self._decoder.decode([held, ""]),) if held is not None else ()

    def end(self) -> Iterable[str]:
        return (self._decoder.decode([self._held]),) if self._held is not None else ()


class _Distinct(Stage):
    """A decoder that takes equal neighbours for one, and leaves out those without text (CTC)."""

    def __init__(self, decoder: decoders.Decoder) -> None:
        self._decoder = decoder
        self._before: str | None = None

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return self._before is not None

    def push(self, piece: str) -> Iterable[str]:
        if piece == self._before:
            return ()
        self._before = piece
        text = self._decoder.decode([piece])
        return (text,) if text else ()


class _Spaced(Stage):
    """No decoder: tokens with spaces between."""

    settled = False

    def push(self, piece: str) -> Iterable[str]:
        text = f" {piece}" if self.settled else piece
        self.settled = True
        return (text,)


class _ByteTokens(Stage):
    """ByteFallback: a run of byte tokens is UTF-8 as a whole, or U+FFFD for each byte. So it is kept to its end."""

    settled = False

    def __init__(self) -> None:
        self._run = b""

    def push(self, piece: str) -> Iterable[str]:
        byte = _byte_of(piece)
        if byte is not None:
            self._run += byte
            return ()
        self.settled = True
        return (*self.end(), piece)

    def end(self) -> Iterable[str]:
        run, self._run = self._run, b""
        try:
            return (run.decode(),) if run else ()
        except UnicodeDecodeError:
            return (REPLACEMENT,) * len(run)


class _ByteLevel(Stage):
    """ByteLevel: all tokens are one UTF-8 text, in which U+FFFD stands for what is none."""

    def __init__(self) -> None:
        self._pending = b""
        self._seen = 0

    @property
    def settled(self) -> bool:  # type: ignore[override]
        # A character has at most three bytes after its first.
        return self._seen >= 3

    def push(self, piece: str) -> Iterable[str]:
        said = _byte_level(piece)
        self._seen += len(said)
        data = self._pending + said
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return (text,)

    def end(self) -> Iterable[str]:
        return (self._pending.decode("utf-8", "replace"),)


class _StripEach(Stage):
    """Strip, of each token. Not the library's, which panics at a token that is shorter than what is to be stripped."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self.stop = stop

    def push(self, piece: str) -> Iterable[str]:
        strip = _StripText(self._content, self._start, self.stop)
        return ("".join(strip.push(piece)),)


class _StripText(Stage):
    """Strip, of all text: up to ``start`` times ``content`` at its beginning, up to ``stop`` times at its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self.stop = stop
        self._tail = ""
        self._cut = not stop

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return not self._start and self._cut

    def push(self, piece: str) -> Iterable[str]:
        at = 0
        while self._start and at < len(piece):
            if piece[at] != self._content:
                self._start = 0
                break
            self._start -= 1
            at += 1
        text = self._tail + piece[at:]
        end = len(text)
        while end and len(text) - end < self.stop and text[end - 1] == self._content:
            end -= 1
        self._cut |= end > 0
        self._tail = text[end:]
        return (text[:end],)


class _ReplaceText(Stage):
    """Replace of a string, in all text: what may be its beginning is kept."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._tail = ""
        self.settled = len(pattern) == 1

    def push(self, piece: str) -> Iterable[str]:
        *replaced, rest = (self._tail + piece).split(self._pattern)
        held = held_length(rest, [self._pattern])
        self._tail = rest[len(rest) - held :]
        return (self._content.join([*replaced, rest[: len(rest) - held]]),)

    def end(self) -> Iterable[str]:
        return (self._tail,)


class _All(Stage):
    """A decoder of which nothing is known before the end."""

    settled = False

    def __init__(self, decoder: decoders.Decoder, joined: bool) -> None:
        self._decoder = decoder
        self._joined = joined
        self._pieces: list[str] = []
        logger.warning("tokenizer.json: its decoder can say no text before an output is complete: %s", decoder)

    def push(self, piece: str) -> Iterable[str]:
        self._pieces.append(piece)
        return ()

    def end(self) -> Iterable[str]:
        return (self._decoder.decode(["".join(self._pieces)] if self._joined else self._pieces),)

    def copy(self) -> Stage:
        other = copy.copy(self)
        other._pieces = list(self._pieces)
        return other


def held_length(text: str, wanted: Sequence[str]) -> int:
    """Length of the longest end of ``text`` with which one of ``wanted`` begins, and does not end."""
    longest = 0
    for each in wanted:
        for length in range(min(len(each) - 1, len(text)), longest, -1):
            if text.endswith(each[:length]):
                longest = length
                break
    return longest


def _byte_of(piece: str) -> bytes | None:
    """The byte that a token such as ``<0xE2>`` stands for; None for any other token."""
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match is not None else None


def _byte_level(piece: str) -> bytes:
    """The bytes of a token as a byte-level vocabulary writes them; of any other token, its text's."""
    try:
        return bytes([BYTE_OF[char] for char in piece])
    except KeyError:
        return piece.encode()


def flat(config: dict[str, Any], parts: str) -> Iterator[dict[str, Any]]:
    """A part of a ``tokenizer.json``, or, if it is a sequence, the ``parts`` of that, in order."""
    if config["type"] == "Sequence":
        for each in config[parts]:
            yield from flat(each, parts)
    else:
        yield config


def _decoder(config: dict[str, Any]) -> decoders.Decoder:
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(config).encode())
    return decoder


_EACH = {"Replace": _Each, "Metaspace": _First, "WordPiece": _First, "BPEDecoder": _Last, "CTC": _Distinct}
"""Decoders of single tokens, by their name in ``tokenizer.json``."""


def stages_of(decoder: decoders.Decoder | None) -> list[Stage]:
    """The chain that ``decoder`` is; without one, tokens are joined by spaces."""
    if decoder is None:
        return [_Spaced()]
    stages: list[Stage] = []
    joined = False
    for config in flat(json.loads(decoder.__getstate__()), "decoders"):
        stage = _stage(config, joined)
        joined |= config["type"] in ("Fuse", "ByteLevel")
        if stage is not None:
            stages.append(stage)
        elif config["type"] != "Fuse":  # of a kind that came up after this was written
            return [_All(decoder, joined=False)]
    return stages


def _stage(config: dict[str, Any], joined: bool) -> Stage | None:
    kind = config["type"]
    if kind == "Strip":
        return (_StripText if joined else _StripEach)(config["content"], config["start"], config["stop"])
    if not joined:
        if kind in ("ByteFallback", "ByteLevel"):
            return _ByteTokens() if kind == "ByteFallback" else _ByteLevel()
        return _EACH[kind](_decoder(config)) if kind in _EACH else None
    if kind == "Metaspace":
        return _Each(_decoder(config))
    pattern = config["pattern"].get("String") if kind == "Replace" else None
    if pattern:
        return _ReplaceText(pattern, config["content"])
    return _All(_decoder(config), joined=True) if kind in _EACH or kind in ("ByteFallback", "ByteLevel") else None


def raw_bytes(stages: Sequence[Stage], piece: str) -> bytes | None:
    """The bytes that a token stands for where the chain makes text of bytes; None where the token is text."""
    for stage in stages:
        if isinstance(stage, _ByteLevel):
            return _byte_level(piece)
        if isinstance(stage, _ByteTokens) and (byte := _byte_of(piece)) is not None:
            return byte
    return None


def is_byte_token(stages: Sequence[Stage], piece: str) -> bool:
    """Whether a token such as ``<0x41>`` stands for a byte in this chain, beside whatever token says the same."""
    return any(isinstance(stage, _ByteTokens) for stage in stages) and _byte_of(piece) is not None


def makes_library_panic(stages: Sequence[Stage]) -> bool:
    """Whether the chain is one with which the library panics at some tokens."""
    return any(isinstance(stage, _StripEach | _StripText) and stage.stop for stage in stages)


def push(stages: Sequence[Stage], pieces: Iterable[str]) -> str:
    """Text that is certain once ``pieces`` have gone into the chain."""
    for stage in stages:
        pieces = [out for piece in pieces for out in stage.push(piece)]
    return "".join(pieces)


def end(stages: Sequence[Stage]) -> str:
    """The rest of the text: nothing follows."""
    pieces: list[str] = []
    for stage in stages:
        pieces = [*(out for piece in pieces for out in stage.push(piece)), *stage.end()]
    return "".join(pieces)
