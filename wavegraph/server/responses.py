"""Answers as clients read them. A field that is `msgspec.UNSET` is not in the JSON."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

Logprob = float


class PromptDetails(Struct):
    """Of the prompt tokens, how many the prefix cache had."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of a request over all its choices. ``mean_loops``: after how many loops its tokens left, on average."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    mean_loops: float | None


class PromptLogprob(Struct):
    """One candidate for a token of the prompt; ``rank`` 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt but the first, candidates by token id, its own among them."""


class CompletionLogprobs(Struct):
    """Tokens of a choice. ``text_offset``: where each begins in the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One output, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    exit_depths: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct):
    """The answer of ``/v1/completions``; with ``stream``, each of its chunks."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct):
    """An alternative to a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    """One token of a choice."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Tokens of a choice."""

    content: list[ChatLogprob]


class ChatMessage(Struct):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str


class ChatDelta(Struct):
    """What a chunk adds to the assistant's turn."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct):
    """One output."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    exit_depths: list[int] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """What a chunk adds to one output."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    exit_depths: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunk(Struct):
    """A chunk of ``/v1/chat/completions`` with ``stream``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct):
    """A model that can be asked for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(Struct):
    """The answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Struct):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(Struct):
    """The answer of ``/detokenize``."""

    prompt: str


class Version(Struct):
    """The answer of ``/version``."""

    version: str


class Load(Struct):
    """The answer of ``/load``: sequences that wait or run."""

    server_load: int
