"""Text to token ids and back, by the checkpoint's own ``tokenizer.json``."""

from collections.abc import Sequence
from functools import cached_property
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from wavegraph.errors import CheckpointError, RequestError
from wavegraph.text.chat import ChatTemplate, Message

TOKENIZER_FILE = "tokenizer.json"


TURN_END = "<|im_end|>"
"""What ends a turn in ChatML. The model's own end-of-sequence id need not be it."""


class Tokenizer:
    """A checkpoint's tokenizer, with its chat template. `load` gives None for a checkpoint that has none."""

    def __init__(self, fast: FastTokenizer, chat: ChatTemplate | None = None) -> None:
        self._fast = fast
        self.chat = chat if chat is not None else ChatTemplate()

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """Read ``folder/tokenizer.json`` and the chat template; None if there is no such file.

        Raises `CheckpointError` if a file cannot be read as what it is.
        """
        path = folder / TOKENIZER_FILE
        try:
            content = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        try:
            fast = FastTokenizer.from_str(content)
        except Exception as error:
            raise CheckpointError(f"{path}: not a tokenizer of the `tokenizers` library: {error}") from error
        return cls(fast, ChatTemplate.load(folder))

    def encode(self, text: str, *, field: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with whatever special tokens the tokenizer itself puts around a text.

        Raises `RequestError` that names ``field`` for text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"{field}: not valid Unicode at character {error.start}: {error.reason}") from error
        # A batch of one: `encode` itself would keep all other Python threads from running.
        (encoding,) = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """How many tokens ``text`` has at least, told by its length alone; 0 where that cannot be told."""
        return -(-len(text) // self._longest_token) if self._longest_token else 0

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids that ask for the next turn. Raises `RequestError` for messages that the template does not take."""
        return self.encode(self.chat.render(messages), field="messages", add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that form no character become U+FFFD."""
        texts: list[str] = self._fast.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def token_bytes(self, token_id: int) -> bytes:
        """What one token says, which need not be whole characters. Empty for an id without a token."""
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return str(token).encode()
        if isinstance(self._fast.decoder, ByteLevel) and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        return self.decode([token_id]).encode()

    @cached_property
    def chat_stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: of ``<|im_end|>`` and of the end-of-sequence token that the tokenizer names, if any."""
        ids = (self._fast.token_to_id(token) for token in (TURN_END, self.chat.specials.get("eos_token", "")))
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary writes it: at least as many as it covers. 0: no limit."""
        stripping = any(token.lstrip or token.rstrip for token in self._fast.get_added_tokens_decoder().values())
        if stripping or self._fast.normalizer is not None:  # a token may stand for any number of characters
            return 0
        return max(map(len, self._fast.get_vocab()))

    @cached_property
    def _added(self) -> frozenset[int]:
        """Ids of tokens that stand for their text as it is."""
        return frozenset(self._fast.get_added_tokens_decoder())

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


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable Latin-1 for itself, the rest from
    U+0100 on, as in GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = count(0x100)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


_BYTE_OF = _byte_alphabet()
