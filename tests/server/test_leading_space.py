"""An output's first space is part of it, although a text's first space is not: prompt and output are one text."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.server.harness import CONFIG, Served, Stream, serving
from tests.text.sentencepiece import BOS, HELLO, PIECES, WORLD, byte, fast_tokenizer, sentencepiece_folder
from wavegraph.llm import LLM, build_engine
from wavegraph.sampling import SamplingParams
from wavegraph.server.logprobs import TokenNames
from wavegraph.text.tokenizer import Tokenizer

ASK: dict[str, Any] = {
    "model": "builtin",
    "prompt": [HELLO],
    "max_tokens": 2,
    "temperature": 0,
    "ignore_eos": True,
    "logit_bias": {str(WORLD): 100},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return sentencepiece_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def words(folder: Any) -> Iterator[Served]:
    with serving(build=partial(build_engine, folder, CONFIG)) as served:
        served.do(served.engine.ready())
        yield served


@pytest.fixture(scope="module")
def llm(folder: Any) -> Iterator[LLM]:
    with LLM(folder, CONFIG) as llm:
        yield llm


def params(token: int = WORLD, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 2, "ignore_eos": True, "logit_bias": {token: 1000}, **options})


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([HELLO], " world world"),
        ([BOS, HELLO], " world world"),
        ("Hello", " world world"),
        ([BOS], "world world"),  # there it begins the text
    ],
)
def test_an_output_is_what_it_adds_to_its_prompt(llm: LLM, prompt: Any, text: str) -> None:
    (output,) = llm.generate(prompt, params()) if isinstance(prompt, str) else llm.generate([prompt], params())
    assert output.text == text
    assert llm.engine.tokenizer is not None
    whole = llm.engine.tokenizer.decode([*output.prompt_token_ids, *output.token_ids])
    assert whole == llm.engine.tokenizer.decode(output.prompt_token_ids) + text
    assert [each.text for each in llm.stream(prompt, params())] == [text[: len(text) - 6], text]


@pytest.mark.parametrize(
    ("stop", "text"), [(" world", ""), ("d w", " worl"), ("world", " "), ("Hello world", " world world")]
)
def test_stop_strings_see_the_space(llm: LLM, stop: str, text: str) -> None:
    (output,) = llm.generate([[HELLO]], params(stop=(stop,)))
    assert output.text == text


def test_min_tokens_hold_back_stop_strings_too(llm: LLM) -> None:
    for prompt, min_tokens, count in (([HELLO], 0, 1), ([HELLO], 3, 4), ([HELLO], 5, 5)):
        (output,) = llm.generate([prompt], params(stop=("world",), max_tokens=5, min_tokens=min_tokens))
        assert len(output.token_ids) == count
        assert output.text == " world" * min(min_tokens, count) + (" " if count == min_tokens + 1 else "")
        assert output.finish_reason == ("stop" if count < 5 else "length")


def test_an_invalid_run_of_bytes_is_text_like_any_other(llm: LLM) -> None:
    """Such an output ended the server."""
    output, good = llm.generate([[HELLO], [HELLO]], [params(byte(0xFF), max_tokens=4), params()])
    assert (output.text, output.finish_reason) == ("\ufffd" * 4, "length")
    assert good.text == " world world"
    (output,) = llm.generate([[HELLO, byte(0xE2)]], params(byte(0x82), max_tokens=1))
    assert (output.text, output.finish_reason) == ("\ufffd", "length")


def test_answers_and_streams_have_the_space(words: Served) -> None:
    assert words.post("/v1/completions", ASK)[1]["choices"][0]["text"] == " world world"
    assert words.post("/v1/completions", {**ASK, "prompt": "Hello"})[1]["choices"][0]["text"] == " world world"
    pieces = [event["choices"][0]["text"] for event in Stream(words.port, ASK).finish()[:-1]]
    assert "".join(pieces) == " world world"
    chat = {**ASK, "messages": [{"role": "user", "content": "Hello"}]}
    assert words.post("/v1/chat/completions", chat)[1]["choices"][0]["message"]["content"] == " world world"


@pytest.mark.parametrize("prompt", [[HELLO], [BOS, HELLO], "Hello", "<s>Hello"])
def test_echo_and_offsets(words: Served, prompt: Any) -> None:
    (choice,) = words.post("/v1/completions", {**ASK, "prompt": prompt, "echo": True, "logprobs": 2})[1]["choices"]
    echo = prompt if isinstance(prompt, str) else "Hello"
    assert choice["text"] == f"{echo} world world"
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert tokens[-3:] == [" Hello", " world", " world"]
    start = len(echo)
    assert offsets[-3:] == [start - len("Hello"), start, start + 6]
    for token, offset in zip(tokens[-2:], offsets[-2:], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_offsets_without_echo_and_of_a_stream(words: Served) -> None:
    asked = {**ASK, "logprobs": 3}
    (choice,) = words.post("/v1/completions", asked)[1]["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 6]
    assert choice["logprobs"]["tokens"] == [" world", " world"]
    assert all(len(top) >= 3 for top in choice["logprobs"]["top_logprobs"])  # "world" and " world" have other names
    chunks = [event["choices"][0]["logprobs"] for event in Stream(words.port, asked).finish()[:-1]]
    assert [offset for chunk in chunks if chunk for offset in chunk["text_offset"]] == [0, 6]


def test_no_two_tokens_have_one_name() -> None:
    names = TokenNames(Tokenizer(fast_tokenizer()))
    assert len({names.name(token) for token in range(len(PIECES) + 2)}) == len(PIECES) + 2
    assert [names.name(token) for token in (WORLD, WORLD + 1, byte(0x20), byte(0xE2))] == [
        *(" world", "world", "bytes:\\x20", "bytes:\\xe2")
    ]


def test_offsets_of_bytes(words: Served) -> None:
    asked = {**ASK, "logprobs": 1, "max_tokens": 3, "logit_bias": {str(byte(0xFF)): 100}}
    (choice,) = words.post("/v1/completions", asked)[1]["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("\ufffd\ufffd\ufffd", [0, 0, 0])
    assert choice["logprobs"]["tokens"] == ["bytes:\\xff"] * 3


def test_moved_requests_go_on_from_their_prompt(llm: LLM) -> None:
    engine = llm.engine
    engine.add_request("moved", [HELLO], params(max_tokens=4))
    while not any(output.token_ids for output in engine.step()):
        pass
    engine.import_request(engine.export_request("moved"))
    text = ""
    while engine.has_unfinished:
        for output in engine.step():
            text = output.text or ""
    assert text == " world" * 4
