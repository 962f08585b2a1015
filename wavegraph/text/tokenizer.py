"""Text to token ids and back, by the checkpoint's own ``tokenizer.json``."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from wavegraph.errors import CheckpointError, RequestError
from wavegraph.text.chat import ChatTemplate, Message
from wavegraph.text.decoders import BYTE_OF, flat
from wavegraph.text.detokenizer import Detokenizer, TextStream

TOKENIZER_FILE = "tokenizer.json"


TURN_END = "<|im_end|>"
"""What ends a turn in ChatML. The model's own end-of-sequence id need not be it."""


class Tokenizer:
    """A checkpoint's tokenizer, with its chat template. `load` gives None for a checkpoint that has none.

    ``fast`` neither truncates nor pads from here on, whatever its file says: that is left from training.
    """

    def __init__(self, fast: FastTokenizer, chat: ChatTemplate | None = None) -> None:
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._detokenizer = Detokenizer(fast)
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

        Raises `RequestError` that names ``field`` for text that is not valid Unicode (a lone surrogate), or that the
        vocabulary has no tokens for.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"{field}: not valid Unicode at character {error.start}: {error.reason}") from error
        # A batch of one: `encode` itself would keep all other Python threads from running.
        try:
            (encoding,) = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)
        except Exception as error:  # a bare one, such as of a vocabulary that has no token for the unknown
            raise RequestError(f"{field}: the model's tokenizer does not take it: {error}") from error
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
        return self._detokenizer.decode(ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token says in the midst of a text, which need not be whole characters; nothing without a token."""
        return self._detokenizer.said(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of a text unless it is asked for."""
        return self._detokenizer.is_special(token_id)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one of byte fallback, which stands beside the vocabulary's own for the same text."""
        return self._detokenizer.is_byte(token_id)

    @cached_property
    def chat_stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: of ``<|im_end|>`` and of the end-of-sequence token that the tokenizer names, if any."""
        ids = (self._fast.token_to_id(token) for token in (TURN_END, self.chat.specials.get("eos_token", "")))
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary writes it: at least as many as it covers. 0: no limit."""
        stripping = any(token.lstrip or token.rstrip for token in self._fast.get_added_tokens_decoder().values())
        if stripping or self._fast.normalizer is not None or not self._covers_all_bytes:
            return 0  # a token may stand for any number of characters, or none for some
        return max(map(len, self._fast.get_vocab()))

    @property
    def _covers_all_bytes(self) -> bool:
        """Whether each byte of a text is surely part of a token: others may be unknown together, or dropped."""
        splits = self._fast.pre_tokenizer
        if splits is None or not isinstance(self._fast.model, BPE):
            return False
        kinds = list(flat(json.loads(splits.__getstate__()), "pretokenizers"))
        keeping = all(
            each["type"] in ("ByteLevel", "Digits") or (each["type"] == "Split" and each["behavior"] != "Removed")
            for each in kinds
        )
        byte_level = any(each["type"] == "ByteLevel" for each in kinds)
        return keeping and byte_level and BYTE_OF.keys() <= self._fast.get_vocab().keys()

    def stream(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> TextStream:
        """A decoder for one output, token by token, that follows ``prompt``."""
        return TextStream(self._detokenizer, skip_special_tokens, prompt)
