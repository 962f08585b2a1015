"""Text to token ids and back, by the checkpoint's own ``tokenizer.json``."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from wavegraph.errors import CheckpointError, RequestError

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """A checkpoint's tokenizer. `load` gives None for a checkpoint that has none."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """Read ``folder/tokenizer.json``; None if there is no such file.

        Raises `CheckpointError` if the file cannot be read as a tokenizer.
        """
        path = folder / TOKENIZER_FILE
        try:
            content = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        try:
            return cls(FastTokenizer.from_str(content))
        except Exception as error:
            raise CheckpointError(f"{path}: not a tokenizer of the `tokenizers` library: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with whatever special tokens the tokenizer itself puts around a text.

        Raises `RequestError` for text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: not valid Unicode at character {error.start}: {error.reason}") from error
        ids: list[int] = self._fast.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens; bytes that form no character become U+FFFD."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self, skip_special_tokens: bool = True) -> "TextStream":
        """A decoder for one output, token by token."""
        return TextStream(self._fast, skip_special_tokens)


class TextStream:
    """Text of one output as its tokens arrive, never splitting a character that spans tokens.

    ``text`` is what is certain so far. `finish` replaces it by the text of all ids at once, which differs only
    by bytes that were held back for a character that never came.
    """

    def __init__(self, fast: FastTokenizer, skip_special_tokens: bool) -> None:
        self._fast = fast
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self.text = ""

    def append(self, token_id: int) -> None:
        """Take the next token."""
        self._ids.append(token_id)
        self.text += self._stream.step(self._fast, token_id) or ""

    def finish(self) -> None:
        """The output is complete: let go of what was held back."""
        self.text = self._fast.decode(self._ids, skip_special_tokens=self._skip)
