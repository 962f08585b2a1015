"""Text of one output as its tokens arrive: stop strings and characters that straddle tokens."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from wavegraph.builtin import builtin_path
from wavegraph.text.stream import OutputText
from wavegraph.text.tokenizer import Tokenizer

FAST = FastTokenizer.from_file(str(builtin_path() / "tokenizer.json"))
TOKENIZER = Tokenizer(FAST)

ALPHABET = "ab €😀\ufffd"
TEXTS = st.text(ALPHABET, max_size=24)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4).map(tuple)


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the match that is complete first begins, and which it is; the longest, of those that end together."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, _, stop = min(found)
    return end - len(stop), stop


def split_anywhere(text: str, cuts: list[int]) -> list[int]:
    """Tokens of ``text``, which is encoded in pieces: the ids are not those of the whole."""
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [token for start, end in pairwise(edges) for token in TOKENIZER.encode(text[start:end])]


@settings(max_examples=400)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 100), max_size=8), stops=STOPS, include=st.booleans())
def test_any_tokens_give_the_text_up_to_the_first_match(
    text: str, cuts: list[int], stops: tuple[str, ...], include: bool
) -> None:
    output = OutputText(TOKENIZER.stream(), stops, include)
    seen = []
    for token in split_anywhere(text, cuts):
        output.append(token)
        seen.append(output.text)
        if output.matched is not None:
            break
    output.finish()
    match = first_match(text, stops)
    if match is None:
        assert (output.text, output.matched) == (text, None)
    else:
        at, stop = match
        assert output.matched == stop
        assert output.text == text[: at + len(stop) * include]
    for before in seen:
        assert output.text.startswith(before)
    assert seen == sorted(seen, key=len)


@given(ids=st.lists(st.integers(0, FAST.get_vocab_size() - 1), max_size=30), stops=STOPS)
def test_any_ids_stream_as_prefixes_of_their_text(ids: list[int], stops: tuple[str, ...]) -> None:
    output = OutputText(TOKENIZER.stream(), stops, False)
    seen = []
    for token in ids:
        output.append(token)
        seen.append(output.text)
        if output.matched is not None:
            break
    output.finish()
    match = first_match(TOKENIZER.decode(ids[: len(seen)]), stops)
    assert (match is None) == (output.matched is None)
    whole = TOKENIZER.decode(ids[: len(seen)])
    assert output.text == (whole if match is None else whole[: match[0]])
    for before in seen:
        assert output.text.startswith(before)


@pytest.mark.parametrize(
    ("stops", "text", "want", "matched"),
    [
        (("abcd", "c"), "xabcdx", "xab", "c"),  # complete first, whatever the tokens
        (("bc", "abc"), "xabcx", "x", "abc"),  # they end together: the longest
        (("abc",), "xab", "xab", None),  # held back to the end, then let go
        (("aab",), "aaab", "a", "aab"),
        (("€",), "a€b", "a", "€"),
    ],
)
def test_which_match_counts(stops: tuple[str, ...], text: str, want: str, matched: str | None) -> None:
    for ids in (TOKENIZER.encode(text), split_anywhere(text, list(range(len(text))))):
        output = OutputText(TOKENIZER.stream(), stops, False)
        for token in ids:
            output.append(token)
        output.finish()
        assert (output.text, output.matched) == (want, matched)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    output = OutputText(TOKENIZER.stream(), ("end.",), False)
    seen = []
    for char in "the ending":
        for token in TOKENIZER.encode(char):
            output.append(token)
        seen.append(output.text)
    assert seen == ["t", "th", "th", "the ", "the ", "the ", "the ", "the endi", "the endin", "the ending"]


def as_in_vllm(texts: list[str], stops: tuple[str, ...], min_tokens: int) -> tuple[int, list[str]] | None:
    """After which token of ``texts``, the text after each one, a stop string ends the output, and which ones may."""
    scanned = 0
    for count, text in enumerate(texts, 1):
        if count > min_tokens:
            new = len(text) - scanned
            found = [stop for stop in stops if new and text.find(stop, max(0, len(text) - new - len(stop) + 1)) >= 0]
            if found:
                return count, found
        scanned = len(text)
    return None


@settings(max_examples=300)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 100), max_size=24), stops=STOPS, min_tokens=st.integers(0, 12))
def test_the_first_tokens_end_nothing(text: str, cuts: list[int], stops: tuple[str, ...], min_tokens: int) -> None:
    stream, output = TOKENIZER.stream(), OutputText(TOKENIZER.stream(), stops, True, min_tokens)
    ids, texts, seen = split_anywhere(text, cuts), [], [""]
    for token in ids:
        stream.append(token)
        texts.append(stream.text)
        output.append(token)
        assert output.text.startswith(seen[-1])
        seen.append(output.text)
        if output.matched is not None:
            break
    want = as_in_vllm(texts, stops, min_tokens)
    if want is None:
        output.finish()
        assert (output.text, output.matched) == (text, None)
    else:
        assert (len(texts), output.matched in want[1]) == (want[0], True)
        assert output.text.endswith(output.matched or "?")


@pytest.mark.parametrize(
    ("min_tokens", "text", "matched"),
    [
        (0, "ab", "ab"),
        (1, "ab", "ab"),
        (2, "abcab", "ab"),
        (4, "abcab", "ab"),
        (5, "abcabc", None),
        (9, "abcabc", None),
    ],
)
def test_a_stop_string_counts_once_its_end_comes_late_enough(min_tokens: int, text: str, matched: str | None) -> None:
    output = OutputText(TOKENIZER.stream(), ("ab",), True, min_tokens)
    for char in "abcabc":
        output.append(TOKENIZER.encode(char)[0])
        if output.matched:
            break
    output.finish()
    assert (output.text, output.matched) == (text, matched)
