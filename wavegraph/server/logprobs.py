"""Log-probabilities in the forms that OpenAI's two endpoints, and vLLM, give them."""

import codecs
from collections.abc import Sequence

from wavegraph.outputs import TokenLogprob
from wavegraph.server.responses import (
    ChatLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from wavegraph.text.tokenizer import Tokenizer


class TokenNames:
    """Names for single tokens: their text; ``bytes:\\xe2\\x82`` where that is not whole characters, as OpenAI does, so
    that two tokens never have one name; ``token_id:7`` where there is no tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes(self, token_id: int) -> bytes:
        """What the token says."""
        return self._tokenizer.token_bytes(token_id) if self._tokenizer is not None else b""

    def name(self, token_id: int) -> str:
        """The token's name."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        said = self._tokenizer.token_bytes(token_id)
        try:
            return said.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in said)


class Offsets:
    """Where each token begins in the text that its choice has so far, in characters."""

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, said: bytes) -> int:
        """Offset of the next token; a character counts once its last byte is there."""
        at = self._at
        self._at += len(self._decoder.decode(said))
        return at


def completion_logprobs(
    names: TokenNames, offsets: Offsets, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> CompletionLogprobs:
    """Of completions; None is the prompt's first token, which nothing comes before."""
    result = CompletionLogprobs([], [], [], [])
    for token_id, entry in zip(ids, logprobs, strict=True):
        result.tokens.append(names.name(token_id))
        result.token_logprobs.append(entry.logprob if entry is not None else None)
        result.top_logprobs.append({names.name(each): value for each, value in _candidates(entry)} if entry else None)
        result.text_offset.append(offsets.next(names.bytes(token_id)))
    return result


def chat_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprob]) -> list[ChatLogprob]:
    """Of chat completions."""
    return [
        ChatLogprob(
            names.name(entry.token_id),
            entry.logprob,
            list(names.bytes(entry.token_id)),
            [TopLogprob(names.name(each), value, list(names.bytes(each))) for each, value in entry.top.items()],
        )
        for entry in logprobs
    ]


def prompt_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """Of the prompt, as vLLM gives them."""
    return [
        None
        if entry is None
        else {
            str(token_id): PromptLogprob(
                value, entry.rank + 1 if token_id == entry.token_id else place, names.name(token_id)
            )
            for place, (token_id, value) in enumerate(_candidates(entry), 1)
        }
        for entry in logprobs
    ]


def _candidates(entry: TokenLogprob) -> list[tuple[int, float]]:
    """The most likely tokens, and the token itself if it is not among them."""
    own = {} if entry.token_id in entry.top else {entry.token_id: entry.logprob}
    return [*entry.top.items(), *own.items()]
