"""Token ids to text as they arrive: never more than is certain, and in the end what decoding all ids at once gives."""

from collections.abc import Sequence

from tokenizers import Tokenizer as FastTokenizer

from wavegraph.text.decoders import Stage, end, is_byte_token, makes_library_panic, push, raw_bytes, stages_of

CONTEXT = 8
"""So many of a prompt's last tokens are decoded, at least, to know how an output goes on from it."""

_ANCHOR = "\ue000"
"""Stands for text before and behind a token."""


class Detokenizer:
    """Text of token ids by the decoder of ``fast``, whatever that is. May be shared by threads."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._stages = stages_of(fast.decoder)
        self._panics = makes_library_panic(self._stages)
        added = fast.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._pieces: dict[int, str | None] = {}
        self._said: dict[int, bytes] = {}

    def piece(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The token as the vocabulary writes it; None for an id without one, and for a special token to be skipped."""
        try:
            piece = self._pieces[token_id]
        except KeyError:
            piece = self._pieces[token_id] = self._fast.id_to_token(token_id)
        return None if skip_special_tokens and piece in self._special else piece

    def is_special(self, token_id: int) -> bool:
        """Whether ``skip_special_tokens`` skips the token."""
        return self.piece(token_id, skip_special_tokens=False) in self._special

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one of byte fallback."""
        piece = self.piece(token_id, skip_special_tokens=False)
        return piece is not None and is_byte_token(self._stages, piece)

    def stages(self) -> list[Stage]:
        """The chain at its beginning."""
        return [stage.copy() for stage in self._stages]

    def stages_after(self, prompt: Sequence[int], skip_special_tokens: bool) -> list[Stage]:
        """The chain behind a prompt, of which no more is decoded than makes a difference."""
        wanted = CONTEXT
        pieces: list[str] = []  # from the prompt's end
        rest = reversed(prompt)
        while True:
            for token_id in rest:
                piece = self.piece(token_id, skip_special_tokens)
                if piece is not None:
                    pieces.append(piece)
                    if len(pieces) == wanted:
                        break
            stages = self.stages()
            push(stages, reversed(pieces))
            if len(pieces) < wanted or all(stage.settled for stage in stages):
                return stages
            wanted *= 4

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ``ids``; bytes that form no character become U+FFFD."""
        if not self._panics:
            texts: list[str] = self._fast.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
            return texts[0]
        pieces = (self.piece(token_id, skip_special_tokens) for token_id in ids)
        return self._text([piece for piece in pieces if piece is not None])

    def said(self, token_id: int) -> bytes:
        """What one token says in the midst of a text, which need not be whole characters; nothing without a token."""
        if token_id not in self._said:
            self._said[token_id] = self._say(token_id)
        return self._said[token_id]

    def _say(self, token_id: int) -> bytes:
        piece = self.piece(token_id, skip_special_tokens=False)
        if piece is None:
            return b""
        if token_id in self._added:  # stands for its text as it is
            return piece.encode()
        raw = raw_bytes(self._stages, piece)
        if raw is not None:
            return raw
        whole, around = (self._text(pieces) for pieces in ((_ANCHOR, piece, _ANCHOR), (_ANCHOR, _ANCHOR + _ANCHOR)))
        after = len(around) - 2 * len(_ANCHOR)
        return whole[len(_ANCHOR) : len(whole) - after].encode()

    def _text(self, pieces: Sequence[str]) -> str:
        stages = self.stages()
        return push(stages, pieces) + end(stages)


class TextStream:
    """Text of one output as its tokens arrive.

    ``text`` is what is certain so far: a beginning of what it will be, which never shrinks. Once `finish` was called it
    is the text of prompt and output together, without that of the prompt. Where an output changes the prompt's own text
    (it completes a character), it begins where the two part.
    """

    def __init__(self, detokenizer: Detokenizer, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> None:
        self._detokenizer = detokenizer
        self._skip = skip_special_tokens
        self._stages = detokenizer.stages_after(prompt, skip_special_tokens) if prompt else detokenizer.stages()
        self._known = self._rest() if prompt else ""  # of the prompt's text, what is still to come
        self.text = ""

    def append(self, token_id: int) -> None:
        """Take the next token."""
        piece = self._detokenizer.piece(token_id, self._skip)
        if piece is not None:
            self._add(push(self._stages, (piece,)))

    def place(self, token_id: int) -> int:
        """Take the next token; returns where it begins in ``text``, in characters. Tokens that make characters together
        all begin where the first of them does.
        """
        held, at = self.held(), len(self.text)
        self.append(token_id)
        return at + _common(held, self.text[at:])

    def held(self) -> str:
        """What `finish` would add to ``text`` now."""
        rest = self._rest()
        return rest[_common(self._known, rest) :]

    def finish(self) -> None:
        """The output is complete: let go of what was held back."""
        self._add(end(self._stages))
        self._stages = []

    def _rest(self) -> str:
        return end([stage.copy() for stage in self._stages])

    def _add(self, new: str) -> None:
        if self._known:
            same = _common(self._known, new)
            self._known = self._known[same:] if same == len(new) else ""
            new = new[same:]
        self.text += new


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
