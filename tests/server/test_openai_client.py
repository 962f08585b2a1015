"""The official Python client: completions and chat, streaming and not, errors and aborts."""

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.server.harness import Served, wait_until

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Waves?"}]
GREEDY: Any = {"model": "builtin", "temperature": 0}


@pytest.fixture
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("builtin", "model")
    assert client.models.retrieve("builtin").id == "builtin"


def test_a_completion_is_what_the_engine_gives(client: OpenAI, server: Served) -> None:
    answer = client.completions.create(prompt="Waves follow", max_tokens=8, **GREEDY)
    offline = server.offline("Waves follow", max_tokens=8)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (offline.text, offline.finish_reason)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(offline.token_ids)
    assert answer.usage.prompt_tokens == len(offline.prompt_token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.mean_loops == 4  # type: ignore[attr-defined]


def test_a_streamed_completion_adds_up(client: OpenAI, server: Served) -> None:
    options: Any = {"stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt="Waves", max_tokens=12, stream=True, **GREEDY, **options))
    offline = server.offline("Waves", max_tokens=12)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == offline.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_many_prompts_and_many_outputs(client: OpenAI, server: Served) -> None:
    prompts: Any = [[5, 6, 7], [8, 9]]
    answer = client.completions.create(
        model="builtin",
        prompt=prompts,
        n=2,
        seed=3,
        temperature=0.9,
        max_tokens=5,
        extra_body={"return_token_ids": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for index, prompt in enumerate(prompts):
        offline = server.offline(prompt, n=2, seed=3, temperature=0.9, max_tokens=5)
        for choice, output in zip(answer.choices[2 * index :], offline, strict=False):
            assert choice.token_ids == list(output.token_ids)  # type: ignore[attr-defined]
            assert choice.prompt_token_ids == prompt  # type: ignore[attr-defined]


def test_chat_streaming_and_not(client: OpenAI, server: Served) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, max_completion_tokens=8, **GREEDY)
    chunks = list(client.chat.completions.create(messages=MESSAGES, max_tokens=8, stream=True, **GREEDY))
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    ids = server.engine.available().tokenizer.encode_chat(MESSAGES)  # type: ignore[union-attr]
    assert choice.message.content == server.offline(ids, max_tokens=8, stop_token_ids=(2,)).text
    parts: Any = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, MESSAGES[1]]
    again = client.chat.completions.create(messages=parts, max_tokens=8, **GREEDY)
    assert again.choices[0].message.content == choice.message.content


def test_a_chat_stops_at_the_end_of_the_turn(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, logit_bias={"2": 100}, **GREEDY)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == ""
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_a_chat_without_a_limit_may_fill_the_context(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "7" * 980}]  # a token each
    answer = client.chat.completions.create(messages=messages, logit_bias={"7": 100}, **GREEDY)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 1024
    assert answer.usage.completion_tokens < 40
    assert answer.choices[0].finish_reason == "length"


def test_logprobs_of_completions(client: OpenAI, server: Served) -> None:
    answer = client.completions.create(prompt="Wave", max_tokens=3, logprobs=2, echo=True, **GREEDY)
    offline = server.offline("Wave", max_tokens=3, logprobs=2, prompt_logprobs=2)
    (choice,) = answer.choices
    assert choice.text == "Wave" + offline.text
    logprobs = choice.logprobs
    assert logprobs is not None
    entries = [*offline.prompt_logprobs, *offline.logprobs]
    assert logprobs.token_logprobs == [entry and entry.logprob for entry in entries]
    assert logprobs.top_logprobs is not None
    assert [top and len(top) for top in logprobs.top_logprobs] == [
        entry and len({*entry.top, entry.token_id}) for entry in entries
    ]
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    plain = [token for token in logprobs.tokens or [] if not token.startswith("bytes:")]
    at = [offset for offset, token in zip(logprobs.text_offset, logprobs.tokens or [], strict=True) if token in plain]
    for offset, token in zip(at, plain, strict=True):
        assert choice.text[offset : offset + len(token)] == token


def test_logprobs_of_chats(client: OpenAI) -> None:
    options: Any = {"max_tokens": 4, "logprobs": True, "top_logprobs": 2, **GREEDY}
    (choice,) = client.chat.completions.create(messages=MESSAGES, **options).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert len(content) == 4
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob >= entry.top_logprobs[1].logprob
    said = b"".join(bytes(entry.bytes or []) for entry in content)
    assert choice.message.content == said.decode(errors="replace")
    streamed = []
    for chunk in client.chat.completions.create(messages=MESSAGES, stream=True, **options):
        streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in content]


def test_our_own_fields(client: OpenAI, server: Served) -> None:
    extra = {
        "min_loops": 1,
        "max_loops": 3,
        "exit_threshold": 0.4,
        "return_exit_depths": True,
        "top_k": 5,
        "min_p": 0.1,
    }
    answer = client.completions.create(model="builtin", prompt="Wave", seed=1, max_tokens=6, extra_body=extra)
    offline = server.offline(
        "Wave", seed=1, temperature=1.0, max_tokens=6, max_loops=3, min_loops=1, exit_threshold=0.4, top_k=5, min_p=0.1
    )
    assert answer.choices[0].exit_depths == list(offline.exit_depths)  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.mean_loops == offline.mean_loops  # type: ignore[attr-defined]


def test_cached_tokens_are_reported(client: OpenAI) -> None:
    prompt = [9] * 70
    client.completions.create(prompt=prompt, max_tokens=1, **GREEDY)
    usage = client.completions.create(prompt=prompt, max_tokens=1, **GREEDY).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None  # type: ignore[attr-defined]
    assert usage.prompt_tokens_details.cached_tokens == 64  # type: ignore[attr-defined]


def test_prompt_logprobs_as_vllm_gives_them(client: OpenAI, server: Served) -> None:
    answer = client.completions.create(prompt=[5, 6, 7], max_tokens=1, **GREEDY, extra_body={"prompt_logprobs": 1})
    offline = server.offline([5, 6, 7], max_tokens=1, prompt_logprobs=1)
    first, *others = answer.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    assert first is None
    for entry, expected in zip(others, offline.prompt_logprobs[1:], strict=True):
        assert entry[str(expected.token_id)]["logprob"] == expected.logprob
        assert entry[str(expected.token_id)]["rank"] == expected.rank + 1


def stops_of(text: str) -> list[str]:
    return [text[at : at + 4] for at in (3, 12)]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_over_token_boundaries(client: OpenAI, server: Served, include: bool) -> None:
    text = server.offline("Waves", max_tokens=24, ignore_eos=True).text
    for stop in stops_of(text):
        options: Any = {"prompt": "Waves", "stop": stop, "max_tokens": 24, **GREEDY}
        options["extra_body"] = {"include_stop_str_in_output": include, "ignore_eos": True}
        (choice,) = client.completions.create(**options).choices
        expected = text[: text.index(stop) + len(stop) * include]
        assert (choice.text, choice.finish_reason) == (expected, "stop")
        assert choice.stop_reason == stop  # type: ignore[attr-defined]
        streamed = [chunk.choices[0] for chunk in client.completions.create(stream=True, **options)]
        assert "".join(each.text for each in streamed) == expected
        assert streamed[-1].finish_reason == "stop"


def test_characters_over_token_boundaries(client: OpenAI, server: Served) -> None:
    tokenizer = server.engine.available().tokenizer
    assert tokenizer is not None
    halves = [token for token in range(1024) if tokenizer.token_bytes(token) in (b"\xc3", b"\xa9")]  # of "é"
    bias = dict.fromkeys(map(str, halves), 100)
    text = ""
    for seed in range(3):
        options: Any = {"prompt": "é", "max_tokens": 30, "logit_bias": bias, "seed": seed, "model": "builtin"}
        parts = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **options)]
        assert "".join(parts) == client.completions.create(**options).choices[0].text
        text += "".join(part for part in parts[:-1])
    assert set(text) == {"é", "\ufffd"}


def test_errors_have_the_clients_types(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(prompt="a", max_tokens=-1, **GREEDY)
    assert (bad.value.param, bad.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(messages=[{"role": "user", "content": "wave " * 2000}], **GREEDY)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_pages_back(client: OpenAI, server: Served, stream: bool) -> None:
    before = server.on_engine(lambda engine: engine.stats().finished.get("abort", 0))
    options: Any = {"prompt": [3] * 40, "max_tokens": 900, "extra_body": {"ignore_eos": True}, **GREEDY}
    if stream:
        answer = client.completions.create(stream=True, **options)
        next(iter(answer))
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).completions.create(**options)
    wait_until(lambda: server.engine.unfinished == 0, "the server noticed", 10)
    # The next command follows the abort, with no step between them or one that was under way.
    assert server.free_pages() == 640
    assert server.on_engine(lambda engine: engine.stats().finished["abort"]) == before + 1


def test_others_do_not_notice_those_who_leave(client: OpenAI, server: Served) -> None:
    alone = server.offline("Others", max_tokens=60, ignore_eos=True).text
    options: Any = {"prompt": "Others", "max_tokens": 60, "stream": True, "extra_body": {"ignore_eos": True}, **GREEDY}
    streams = [iter(client.completions.create(**options)) for _ in range(6)]
    for stream in streams[:3]:
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    time.sleep(0.05)
    for stream in streams[3:]:
        assert "".join(chunk.choices[0].text for chunk in stream) == alone
