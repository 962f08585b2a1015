"""Chat: messages to a prompt, by the checkpoint's own Jinja template, or ChatML.

The template runs in a sandbox and its output is bounded. What messages say is data to it, never template text.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wavegraph.errors import CheckpointError, RequestError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``: content is text, or a list of parts ``{"type": "text", "text": ...}``."""

ROLES = ("system", "developer", "user", "assistant", "tool")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_PROMPT_CHARS = 16 << 20
"""The longest text that a template may make of messages."""

_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What a template's expressions raise when messages are not what its author had in mind.
_RENDER_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
# And what compiling one may raise besides: Python has limits of its own for what Jinja makes of it.
_COMPILE_ERRORS = (*_RENDER_ERRORS, SyntaxError, MemoryError)


class ChatTemplate:
    """The template of a checkpoint. ``specials`` are the variables that name its special tokens.

    ``origin`` says where it came from. ``source`` None: there are templates, but none to choose. ``refusal`` says why
    there can be no chat, if so; that is no fault of the checkpoint for anything but chat.
    """

    def __init__(
        self, source: str | None = CHATML, specials: Mapping[str, str] | None = None, origin: str = "ChatML"
    ) -> None:
        self.source = source
        self.specials = dict(specials or {})
        self.origin = origin

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """That of ``chat_template.jinja``, else of ``tokenizer_config.json``, else ChatML.

        Raises `CheckpointError` for a file that cannot be read, or does not hold what it should. A template with which
        there can be no chat is warned about.
        """
        template = cls._load(folder)
        if template.refusal is not None:
            logger.warning("%s; chat is refused, all else works", template.refusal)
        return template

    @classmethod
    def _load(cls, folder: Path) -> "ChatTemplate":
        path = folder / "tokenizer_config.json"
        text = _read(path)
        try:
            config = json.loads(text) if text is not None else {}
        except ValueError as error:
            raise CheckpointError(f"{path}: is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{path}: must hold an object, got {type(config).__name__}")
        where = f"{path}: {{}}".format
        specials = {name: _content(config[name], where(name)) for name in _SPECIALS if config.get(name) is not None}
        jinja = folder / "chat_template.jinja"
        source = _read(jinja)
        if source is not None:
            return cls(source, specials, str(jinja))
        if config.get("chat_template") is None:
            return cls(specials=specials)
        return cls(_default_template(config["chat_template"], where("chat_template")), specials, str(path))

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt that asks for the assistant's next turn. Raises `RequestError` for messages it cannot take."""
        checked = check_messages(messages)
        if self._compiled is None:
            raise RequestError(f"messages: there can be no chat, since {self.refusal}; give a prompt")
        # Templates tell what is not there by its being none, as it is in transformers.
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **self.specials}
        pieces, length = [], 0
        try:
            for piece in self._compiled.generate(messages=checked, **variables):
                length += len(piece)
                if length > MAX_PROMPT_CHARS:
                    raise RequestError(f"messages: make a prompt of more than {MAX_PROMPT_CHARS} characters; shorten")
                pieces.append(piece)
        except _RENDER_ERRORS as error:
            reason = str(error).split("\n")[0] if isinstance(error, TemplateError) else type(error).__name__
            raise RequestError(f"messages: the model's chat template does not take them: {reason}") from error
        return "".join(pieces)

    @property
    def refusal(self) -> str | None:
        """Why there can be no chat, as a sentence without its end; None where there can."""
        return self._compilation[1]

    @property
    def _compiled(self) -> Template | None:
        return self._compilation[0]

    @cached_property
    def _compilation(self) -> tuple[Template | None, str | None]:
        """The template, or why there is none."""
        if self.source is None:
            return None, f"{self.origin}: none of its chat templates is named 'default'"
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            return environment.from_string(self.source), None
        except _COMPILE_ERRORS as error:
            reason = str(error).split("\n")[0] or type(error).__name__
            return None, f"{self.origin}: its chat template cannot be compiled ({reason})"


class _Generation(Extension):
    """``{% generation %}``: marks what an assistant said, for training. For a prompt, only its content counts."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content as text, ``developer`` as ``system``; other keys as they are.

    Raises `RequestError` that names the message and field.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages: must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise RequestError("messages: is empty; give at least one")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role: must be one of {', '.join(ROLES)}, got {_shown(role)}")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""  # a turn that only called tools
    if isinstance(content, list | tuple):
        content = "\n".join(_text_of(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise RequestError(f"{where}.content: must be text or a list of text parts, got {_shown(content)}")
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"{where}: must be an object with type and text, got {_shown(part)}")
    if part.get("type") != "text":
        raise RequestError(f"{where}.type: must be 'text', the only kind there is, got {_shown(part.get('type'))}")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text: must be text, got {_shown(part.get('text'))}")
    text: str = part["text"]
    return text


def _shown(value: Any) -> str:
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__ if value is not None else "nothing"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _content(token: Any, where: str) -> str:
    """The text of a special token, which may be given as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise CheckpointError(f"{where} must be a token's text, or an object with its content, got {_shown(content)}")
    return content


def _default_template(given: Any, where: str) -> str | None:
    """The template itself, or, of several, the one named "default"; None if none is."""
    if isinstance(given, str):
        return given
    if isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
        given = {entry.get("name"): entry.get("template") for entry in given}
    named = isinstance(given, dict) and all(isinstance(text, str) for each in given.items() for text in each)
    if not named:
        raise CheckpointError(
            f"{where} must be a template, or a list of objects with name and template, got {_shown(given)}"
        )
    default: str | None = given.get("default")
    return default


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML. Parameters are those of transformers.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
