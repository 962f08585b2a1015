"""Log-probabilities in the forms that OpenAI's two endpoints, and vLLM, give them."""

from collections.abc import Sequence
from contextlib import suppress

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
    """Names for single tokens: their text; ``bytes:\\xe2\\x82`` where that is not whole characters, as OpenAI does, and
    for a token of byte fallback, so that tokens do not share a name; ``token_id:7`` where there is no tokenizer, or
    the token says nothing.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes(self, token_id: int) -> bytes:
        """What the token says."""
        return self._tokenizer.token_bytes(token_id) if self._tokenizer is not None else b""

    def name(self, token_id: int) -> str:
        """The token's name."""
        said = self.bytes(token_id)
        if self._tokenizer is None or not said:
            return f"token_id:{token_id}"
        if not self._tokenizer.is_byte(token_id):
            with suppress(UnicodeDecodeError):
                return said.decode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in said)


class Offsets:
    """Where each token of an output begins in its choice's text, in characters. ``start``: how long the echo is."""

    def __init__(
        self, tokenizer: Tokenizer | None, skip_special_tokens: bool, prompt: Sequence[int], start: int
    ) -> None:
        self._stream = tokenizer.stream(skip_special_tokens, prompt) if tokenizer is not None else None
        self._start = start

    def next(self, token_id: int) -> int:
        """Offset of the next token."""
        return self._start + self._stream.place(token_id) if self._stream is not None else 0


def echo_offsets(tokenizer: Tokenizer | None, prompt: Sequence[int], echo: str) -> list[int]:
    """Where each token of a prompt begins in ``echo``, the prompt as it was given: special tokens may stand in it."""
    if tokenizer is None:
        return [0] * len(prompt)
    stream, specials, offsets = tokenizer.stream(), 0, []
    for token_id in prompt:
        at = min(stream.place(token_id) + specials, len(echo))
        offsets.append(at)
        if tokenizer.is_special(token_id):
            name = tokenizer.token_bytes(token_id).decode()
            specials += len(name) if echo.startswith(name, at) else 0
    return offsets


def completion_logprobs(
    names: TokenNames, offsets: Sequence[int], ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> CompletionLogprobs:
    """Of completions; None is the prompt's first token, which nothing comes before."""
    result = CompletionLogprobs([], [], [], list(offsets))
    for token_id, entry in zip(ids, logprobs, strict=True):
        result.tokens.append(names.name(token_id))
        result.token_logprobs.append(entry.logprob if entry is not None else None)
        result.top_logprobs.append({names.name(each): value for each, value in _candidates(entry)} if entry else None)
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
