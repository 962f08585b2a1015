"""Chat templates, `LLM.chat` and ``wavegraph chat``."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from wavegraph.builtin import builtin_path
from wavegraph.cli import main
from wavegraph.config import EngineConfig
from wavegraph.errors import CheckpointError, RequestError
from wavegraph.llm import LLM
from wavegraph.sampling import SamplingParams
from wavegraph.text.chat import MAX_PROMPT_CHARS, ChatTemplate, check_messages
from wavegraph.text.tokenizer import Tokenizer

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Waves?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "How many?"},
]
SMALL = EngineConfig(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=256, num_pages=64)


def test_chatml_is_the_default() -> None:
    assert ChatTemplate().render(TALK) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWaves?<|im_end|>\n<|im_start|>assistant\nYes."
        "<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", ["{{ 7 * 7 }}", "{% if true %}x{% endif %}", "{# c #}", "<b>&amp;</b>", "\u2028\0"])
def test_messages_are_data(text: str) -> None:
    assert f"user\n{text}<|im_end|>" in ChatTemplate().render([{"role": "user", "content": text}])


def test_parts_and_developers() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert check_messages(messages) == [
        {"role": "system", "content": "one\ntwo"},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("hi", "messages: must be a list"),
        ([], "messages: is empty"),
        (["hi"], "messages[0]: must be an object"),
        ([TALK[0], {"role": "king", "content": ""}], "messages[1].role: must be one of system"),
        ([{"role": "user", "content": 3}], "messages[0].content: must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type: must be 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text: must be text"),
    ],
)
def test_bad_messages_are_named(messages: Any, named: str) -> None:
    with pytest.raises(RequestError) as error:
        ChatTemplate().render(messages)
    assert str(error.value).startswith(named)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for x in range(10 ** 9) %}x{% endfor %}", "OverflowError"),
    ],
)
def test_what_a_template_does_not_take_is_the_messages_fault(source: str, named: str) -> None:
    with pytest.raises(RequestError, match="messages: the model's chat template does not take them") as error:
        ChatTemplate(source).render(TALK)
    assert named in str(error.value)


def test_a_template_makes_no_endless_text() -> None:
    template = ChatTemplate("{% for a in range(99999) %}{{ messages[0].content }}{% endfor %}")
    with pytest.raises(RequestError, match=f"more than {MAX_PROMPT_CHARS} characters"):
        template.render([{"role": "user", "content": "a" * 1000}])


def test_what_templates_of_the_hub_use() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}\n"
        "    {% set x = m.content | trim %}\n"
        "{{ {'t': x, 'u': 'ü<'} | tojson }}{{ strftime_now('%Y')[:2] }}{% break %}{% endfor %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(TALK) == '<s>{"t": "Waves?", "u": "ü<"}20'


def folder_with(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(builtin_path(), folder)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("files", "rendered"),
    [
        ({"tokenizer_config__json": json.dumps({"chat_template": "A{{ eos_token }}", "eos_token": "E"})}, "AE"),
        ({"tokenizer_config__json": '{"chat_template": "{{ eos_token }}", "eos_token": {"content": "E"}}'}, "E"),
        ({"tokenizer_config__json": '{"chat_template": [{"name": "default", "template": "D"}]}'}, "D"),
        ({"tokenizer_config__json": '{"chat_template": {"default": "D", "rag": "R"}}'}, "D"),
        ({"tokenizer_config__json": '{"chat_template": "A"}', "chat_template__jinja": "J"}, "J"),
        (
            {"tokenizer_config__json": '{"chat_template": null, "eos_token": null, "bos_token": "B"}'},
            ChatTemplate().render(TALK),
        ),
    ],
)
def test_where_the_template_comes_from(tmp_path: Path, files: dict[str, str], rendered: str) -> None:
    tokenizer = Tokenizer.load(folder_with(tmp_path, **files))
    assert tokenizer is not None
    assert tokenizer.chat.render(TALK) == rendered


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_tokenizer_config(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.load(folder_with(tmp_path, tokenizer_config__json=content))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (5, "chat_template must be a template, or a list of objects with name and template, got int"),
        (True, "got bool"),
        (["A"], "got list"),
        ([{"name": "default"}], "got dict"),
        ([{"name": "default", "template": 5}], "got dict"),
        ({"default": None}, "got dict"),
    ],
)
def test_a_template_that_is_none_is_an_error(tmp_path: Path, given: Any, named: str) -> None:
    folder = folder_with(tmp_path, tokenizer_config__json=json.dumps({"chat_template": given}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: ") as error:
        Tokenizer.load(folder)
    assert named in str(error.value)


@pytest.mark.parametrize("token", [5, ["E"], {}, {"content": 5}])
def test_a_special_token_that_is_no_text_is_an_error(tmp_path: Path, token: Any) -> None:
    folder = folder_with(tmp_path, tokenizer_config__json=json.dumps({"eos_token": token}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: eos_token must be a token's text"):
        Tokenizer.load(folder)


NESTED = "".join(f"{{% for a{i} in messages %}}" for i in range(25)) + "{% endfor %}" * 25
BROKEN = ["{% endfor %}", "{% unknown %}", "{{ messages | no_such_filter }}", "{{ 'a", NESTED]


@pytest.mark.parametrize("source", [*BROKEN, None])
def test_a_template_that_cannot_be_used_refuses_chat_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str | None
) -> None:
    folder = folder_with(tmp_path, chat_template__jinja=source or "")
    if source is None:
        (folder / "chat_template.jinja").unlink()
        several = [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    with LLM(folder, SMALL) as llm:
        (warning,) = [record.getMessage() for record in caplog.records if record.name == "wavegraph.text.chat"]
        assert warning.endswith("chat is refused, all else works")
        assert llm.generate("Waves", SamplingParams(max_tokens=2))[0].finished
        with pytest.raises(RequestError, match="messages: there can be no chat, since ") as error:
            llm.chat(TALK)
        named = "its chat template cannot be compiled (" if source else "none of its chat templates is named 'default'"
        assert named in str(error.value)
        assert llm.generate("Waves", SamplingParams(max_tokens=2))[0].finished
    result = CliRunner().invoke(main, ["chat", str(folder), *COMMAND[2:]])
    assert (result.exit_code, "so there can be no chat" in result.stderr) == (2, True)


GENERATION = (  # in the style of SmolLM3, LFM2.5 and Phi-4
    "{{- bos_token -}}\n{%- set ns = namespace(last='') -%}\n{%- if tools is not none -%}TOOLS{%- endif -%}\n"
    "{% for message in messages %}\n{%- if message.role == 'assistant' -%}\n<|im_start|>assistant\n"
    "{% generation %}\n{%- set said = message.content -%}{{ said }}{% set ns.last = said %}{{ loop.index }}"
    "<|im_end|>\n{% endgeneration %}\n{{ said is defined }}{%- else -%}{{ message.content | tojson(indent=1) }}"
    "{%- endif -%}\n"
    "{% endfor %}{{ ns.last }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_what_an_assistant_generated_is_marked_for_training_alone() -> None:
    assert ChatTemplate("{% generation %}{{ messages[2].content }}{% endgeneration %}!").render(TALK) == "Yes.!"
    assert ChatTemplate("{%- generation -%} {{ 1 }} {%- endgeneration -%} ").render(TALK) == "1"
    rendered = ChatTemplate(GENERATION, {"bos_token": "<s>"}).render(TALK)
    assert "<|im_start|>assistant\nYes.3<|im_end|>\n" in rendered
    assert rendered.startswith('<s>"Be brief."')


@pytest.mark.parametrize(
    "source",
    [
        GENERATION,
        "{% if documents is none %}{{ tools }}{% endif %}",
        "{{ {'b': 'ü', 'a': [1, 2]} | tojson(sort_keys=true, separators=(',', ':')) }}",
        "{{ 'ü' | tojson(ensure_ascii=true) }}",
        "{% for m in messages %}\n  {% if loop.first %}\n{% continue %}\n  {% endif %}{{ m.content }}\n{% endfor %}",
    ],
)
def test_templates_render_as_in_transformers(source: str) -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    ((theirs,), _) = utilities.render_jinja_template(
        [TALK], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(TALK) == theirs


def test_both_ends_of_a_turn_are_known() -> None:
    tokenizer = Tokenizer.load(builtin_path())
    assert tokenizer is not None
    assert tokenizer.token_bytes(tokenizer.chat_stop_ids[0]) == b"<|im_end|>"


@pytest.mark.parametrize("text", ["Waves €😀 12\n", "<|im_start|>é", ""])
def test_bytes_of_tokens_are_those_of_the_text(text: str) -> None:
    tokenizer = Tokenizer.load(builtin_path())
    assert tokenizer is not None
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
    assert tokenizer.token_bytes(10**6) == b""


@pytest.mark.parametrize("text", ["", "a", "Waves follow each other.", "x" * 500, " " * 64, "€" * 40, "<|im_end|>" * 9])
def test_the_length_of_a_text_says_how_many_tokens_it_has_at_least(text: str) -> None:
    tokenizer = Tokenizer.load(builtin_path())
    assert tokenizer is not None
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.fewest_tokens("x" * 10_000) > 10


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(builtin_path(), SMALL) as llm:
        yield llm


def test_a_chat_is_its_rendered_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6)
    one, two = llm.chat([TALK, TALK[:2]], params)
    (alone,) = llm.chat(TALK, params)
    assert llm.engine.tokenizer is not None
    ids = llm.engine.tokenizer.encode(ChatTemplate().render(TALK))
    assert one.token_ids == alone.token_ids == llm.generate([ids], params)[0].token_ids
    assert two.prompt_token_ids != one.prompt_token_ids


def test_a_chat_ends_with_the_turn(llm: LLM) -> None:
    (end,) = llm.engine.tokenizer.chat_stop_ids  # type: ignore[union-attr]
    (output,) = llm.chat(TALK, SamplingParams(max_tokens=6, logit_bias={end: 1000}))
    assert (output.token_ids, output.finish_reason, output.stop_reason, output.text) == ((end,), "stop", end, "")
    (ignoring,) = llm.chat(TALK, SamplingParams(max_tokens=6, logit_bias={end: 1000}, ignore_eos=True))
    assert len(ignoring.token_ids) == 6
    both = llm.for_chat(SamplingParams(stop_token_ids=(5, end)))
    assert both.stop_token_ids == (5, end)


def test_bad_conversations_are_refused(llm: LLM) -> None:
    for messages in ("hi", [], [[]], [TALK, []], {"role": "user", "content": "a"}):
        with pytest.raises(RequestError, match="messages"):
            llm.chat(messages)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="messages: not valid Unicode"):
        llm.chat([{"role": "user", "content": "\ud800"}])


def test_chat_needs_a_tokenizer() -> None:
    with LLM(Path(__file__).parents[1] / "goldens/tiny", SMALL) as llm, pytest.raises(RequestError, match="tokenizer"):
        llm.chat(TALK)


# -- the command -------------------------------------------------------------------------------------------

COMMAND = ("chat", "builtin", "--max-model-len", "128", "--max-batched-tokens", "16", "--max-num-seqs", "2")


def test_a_conversation_in_lines(llm: LLM) -> None:
    lines = "Waves?\n\nHow many?\n/clear\nWaves?\n"
    result = CliRunner().invoke(main, [*COMMAND, "--max-tokens", "5", "--system", "Be brief."], input=lines)
    assert result.exit_code == 0, result.stderr
    params = SamplingParams(max_tokens=5)
    (first,) = llm.chat(TALK[:2], params)
    messages = [*TALK[:2], {"role": "assistant", "content": first.text}, TALK[3]]
    (second,) = llm.chat(messages, params)
    assert result.stdout == f"{first.text}\n{second.text}\n{first.text}\n"


def test_a_turn_that_is_too_long_is_no_end() -> None:
    lines = "wave " * 200 + "\nWaves?\n"
    result = CliRunner().invoke(main, [*COMMAND, "--max-tokens", "2"], input=lines)
    assert result.exit_code == 0
    assert "max_model_len" in result.stderr
    assert "/clear begins anew" in result.stderr
    assert result.stdout != ""


def test_the_command_needs_a_tokenizer() -> None:
    model = str(Path(__file__).parents[1] / "goldens/tiny")
    result = CliRunner().invoke(main, ["chat", model, *COMMAND[2:]])
    assert result.exit_code == 2
    assert "has no tokenizer.json" in result.stderr
