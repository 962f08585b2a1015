import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from wavegraph.builtin import builtin_path
from wavegraph.errors import CheckpointError, RequestError
from wavegraph.text.tokenizer import Tokenizer

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """One token per byte (so that most characters span tokens), and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(fast)


BYTES = byte_tokenizer()


@given(st.text())
def test_text_survives_a_round_trip_and_streams_as_prefixes(text: str) -> None:
    ids = BYTES.encode(text)
    stream = BYTES.stream()
    for token in ids:
        stream.append(token)
        assert text.startswith(stream.text)
    assert stream.text == text or text.endswith("\ufffd")
    stream.finish()
    assert stream.text == text == BYTES.decode(ids)


@given(st.lists(st.integers(0, EOS), max_size=30))
def test_any_ids_stream_to_what_they_decode_to(ids: list[int]) -> None:
    stream = BYTES.stream()
    whole = BYTES.decode(ids)
    for token in ids:
        stream.append(token)
        assert whole.startswith(stream.text)
    stream.finish()
    assert stream.text == whole


def test_a_character_that_spans_tokens_is_held_back_whole() -> None:
    stream = BYTES.stream()
    seen = []
    for token in BYTES.encode("a😀b"):
        stream.append(token)
        seen.append(stream.text)
    assert seen == ["a", "a", "a", "a", "a😀", "a😀b"]


def test_a_character_that_never_came_is_let_go_at_the_end() -> None:
    stream = BYTES.stream()
    for token in BYTES.encode("a😀")[:3]:
        stream.append(token)
    assert stream.text == "a"
    stream.finish()
    assert stream.text == "a\ufffd"


def test_special_tokens_leave_no_text() -> None:
    assert BYTES.decode([*BYTES.encode("a"), EOS]) == "a"


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode at character 1"):
        BYTES.encode("a\ud800")


def test_a_folder_without_tokenizer_gives_none(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", json.dumps({"model": {"type": "X"}}).encode()])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_of_the_file_are_left_aside(tmp_path: Path) -> None:
    fast = FastTokenizer.from_file(str(builtin_path() / "tokenizer.json"))
    text = "Waves follow each other. " * 9
    wanted = fast.encode(text).ids
    fast.enable_truncation(10)
    fast.enable_padding(length=64, pad_token="<|im_end|>", pad_id=2)
    assert len(fast.encode(text).ids) == 64
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode(text) == wanted
    assert tokenizer.encode_chat([{"role": "user", "content": text}]) == tokenizer.encode(
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode("a") == fast.encode("a").ids[:1]


def word_level(pre_tokenizer: Any = None) -> FastTokenizer:
    fast = FastTokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizer if pre_tokenizer is not None else pre_tokenizers.Whitespace()
    return fast


def few_bytes() -> FastTokenizer:
    """It drops what it does not know."""
    fast = FastTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return fast


def removing() -> FastTokenizer:
    fast = byte_tokenizer()._fast
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return fast


@pytest.mark.parametrize("fast", [word_level(), few_bytes(), removing()])
@pytest.mark.parametrize("text", ["x" * 5000, " " * 5000])
def test_a_long_text_may_have_few_tokens(fast: FastTokenizer, text: str) -> None:
    tokenizer = Tokenizer(fast)
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text)) < 5001


def test_a_text_without_tokens_is_refused_by_name() -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(RequestError, match=r"^prompt: the model's tokenizer does not take it: .*\[UNK\]"):
        Tokenizer(fast).encode("b")
