"""What a caller hands in, checked before anything changes."""

import operator
from collections.abc import Sequence
from typing import Any

from wavegraph.errors import RequestError
from wavegraph.text.tokenizer import Tokenizer


def encode_prompt(prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Token ids of a prompt, at least one and all in the vocabulary. Raises `RequestError`."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("prompt: text needs a tokenizer, and the checkpoint has none; give a list of token ids")
        ids: Sequence[int] = tokenizer.encode(prompt)
    elif isinstance(prompt, list | tuple):
        ids = prompt
    else:
        raise RequestError(f"prompt: must be text or a list of token ids, got {type(prompt).__name__}")
    if not ids:
        raise RequestError("prompt: is empty; give at least one token")
    return checked_ids("prompt", ids, vocab_size)


def checked_ids(field: str, ids: Sequence[Any], vocab_size: int) -> list[int]:
    """``ids`` as ints, each in ``0 .. vocab_size - 1``. Raises `RequestError` that names ``field`` and the place."""
    checked = []
    for index, token in enumerate(ids):
        try:
            value = token if type(token) is int else _index(token)
        except TypeError:
            raise RequestError(f"{field}: token ids must be integers, got {token!r} at index {index}") from None
        if not 0 <= value < vocab_size:
            raise RequestError(
                f"{field}: token id {value} at index {index} is not in the vocabulary, which ends at {vocab_size - 1}"
            )
        checked.append(value)
    return checked


def _index(token: Any) -> int:
    """An integer of another library as an int. Raises TypeError for anything else, truth values too."""
    if isinstance(token, bool):
        raise TypeError
    return operator.index(token)
