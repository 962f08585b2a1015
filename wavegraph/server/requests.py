"""Requests as clients write them. Unknown fields are accepted; a known one with a wrong type or value is refused.

Ranges are those of `wavegraph.sampling.SamplingParams`, stated here once more so that they stand in the OpenAPI
document; what a field means is said there.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from wavegraph.errors import RequestError
from wavegraph.model.sampling import MAX_LOGIT_BIAS, MAX_STOP_IDS, MAX_TOP_LOGPROBS
from wavegraph.sampling import MAX_N, MAX_STOP_STRINGS, SamplingParams
from wavegraph.server.errors import ApiError
from wavegraph.text.chat import check_messages

Body = TypeVar("Body", bound=BaseModel)

INT32 = 2**31 - 1
_SHOWN = 60


def _check_prompt(value: Any) -> list[str | list[int]]:
    """A prompt, or a list of them, as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be text, a list of texts, token ids, or a list of lists of token ids")
    if not value:
        raise ValueError("is empty; give at least one prompt, or one token")
    if type(value[0]) is int:
        _check_ids(value, "")
        return [value]
    for index, prompt in enumerate(value):
        if type(prompt) is not type(value[0]) or not isinstance(prompt, str | list):
            raise ValueError(f"[{index}] must be text, or a list of token ids, like all the others")
        if isinstance(prompt, list):
            _check_ids(prompt, f"[{index}]")
    return value


def _check_ids(ids: list[Any], where: str) -> None:
    for index, token in enumerate(ids):
        if type(token) is not int:
            raise ValueError(f"{where}[{index}] must be a token id, an integer")


def _check_stop(value: Any) -> list[str] | None:
    """A stop string, or a list of them, as a list."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a non-empty string, or a list of them")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(stops)} strings, but at most {MAX_STOP_STRINGS} are allowed")
    if any("\ud800" <= char <= "\udfff" for stop in stops for char in stop):
        raise ValueError("must be valid Unicode")
    return stops


def _check_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("must be an object that maps token ids to numbers")
    bias = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError("must map token ids, written in digits, to numbers")
        if type(number) not in (int, float) or not -100 <= number <= 100:
            raise ValueError(f"[{key}] must be a number between -100 and 100")
        bias[int(key)] = float(number)
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(bias)} entries, but at most {MAX_LOGIT_BIAS} fit")
    return bias


def _check_chat(value: Any) -> list[dict[str, Any]]:
    return check_messages(value)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_TEXT, _PART]}}, {"type": "null"}]},
    },
    "required": ["role"],  # an assistant's turn may have no content
}

Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "minLength": 1}, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}
    ),
]
Stops = Annotated[
    list[str] | None,
    PlainValidator(_check_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_STRINGS},
                {"type": "null"},
            ]
        }
    ),
]
Bias = Annotated[
    dict[int, float] | None,
    PlainValidator(_check_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": MAX_LOGIT_BIAS,
                },
                {"type": "null"},
            ]
        }
    ),
]
Messages = Annotated[
    list[dict[str, Any]],
    PlainValidator(_check_chat),
    WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1}),
]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Penalty = Annotated[float, Field(ge=-100, le=100)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(_Request):
    """How to stream."""

    include_usage: bool | None = None


class GenerationRequest(_Request):
    """What completions and chat completions have in common. A field that is null is as if it were not there."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: Stops = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Bias = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-INT32, le=INT32)] | None = None
    return_token_ids: bool | None = None
    max_loops: Annotated[int, Field(ge=1, le=INT32)] | None = None
    min_loops: Annotated[int, Field(ge=1, le=INT32)] | None = None
    exit_threshold: Annotated[float, Field(ge=0)] | None = None
    exit_at_step: Annotated[int, Field(ge=0, le=INT32)] | None = None
    exit_kv: Literal["exact", "copy"] | None = None
    return_exit_depths: bool | None = None

    def sampling(self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """The engine's parameters. Raises `RequestError` for values that do not go together."""
        given = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **given,
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_together(self) -> None:
        """Raise `ApiError` for fields that cannot be honoured together, or not at all."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options: has no meaning without stream=true; leave it out", param="stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs: cannot be streamed; leave out stream", param="prompt_logprobs")
        for name, neutral in _UNSUPPORTED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in neutral:
                raise ApiError(400, f"{name}: is not supported by this server; leave it out", param=name)


# Fields that `SamplingParams` has under the same name, with the same default.
_SAME = (
    "min_tokens",
    "top_p",
    "min_p",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "max_loops",
    "min_loops",
    "exit_threshold",
    "exit_at_step",
    "exit_kv",
)

# Known to OpenAI's clients, not to us, and not to be ignored: an answer would not be what was asked for.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
    "chat_template": (),
}


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class ChatCompletionRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class TokenizeRequest(_Request):
    """``POST /tokenize``: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(_Request):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None


def parse(kind: type[Body], body: bytes) -> Body:
    """The request in ``body``. Raises `ApiError` that names the field at fault."""
    try:
        content = json.loads(body)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: is not UTF-8 text (byte {error.start})", param="body") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"body: is not JSON that can be read: {_reason(error)}", param="body") from error
    if not isinstance(content, dict):
        raise ApiError(400, f"body: must be a JSON object, got {_kind_of(content)}", param="body")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = _path(first["loc"])
        message = f"{field}: {_sentence(first['msg'])}"
        if first["type"] not in ("value_error", "missing"):
            message += f", got {_show(first['input'])}"
        raise ApiError(400, message, param=field) from error
    except RequestError as error:
        raise from_request_error(error) from error


def from_request_error(error: RequestError) -> ApiError:
    """A refusal by the core, whose sentence begins with the field's name."""
    message = str(error)
    end = next((at for at, char in enumerate(message) if not (char.isalnum() or char in "_[].")), len(message))
    return ApiError(400, message, param=message[:end] or None)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def _path(loc: tuple[int | str, ...]) -> str:
    """``messages[0].content`` from ``("messages", 0, "content")``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return text.lstrip(".").encode("ascii", "backslashreplace").decode()[:_SHOWN] or "body"


def _sentence(text: str) -> str:
    text = text.removeprefix("Value error, ").removeprefix("Input ")
    return text[:1].lower() + text[1:]


def _show(value: Any) -> str:
    if isinstance(value, str | bool | int | float) or value is None:
        text = repr(value) if not isinstance(value, int) or abs(value) < 10**_SHOWN else "a huge number"
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return _kind_of(value)


def _kind_of(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
