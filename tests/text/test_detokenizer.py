"""Streamed text against the library's own decoding of all ids at once, for every decoder that there is."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from wavegraph.text.decoders import stages_of
from wavegraph.text.detokenizer import CONTEXT
from wavegraph.text.stream import OutputText
from wavegraph.text.tokenizer import Tokenizer

D = decoders
BYTE_TOKENS = [
    f"<0x{byte:02X}>" for byte in (0x20, 0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xED, 0xA0, 0xC3, 0xA9, 0xFF)
]
PIECES = [
    *(
        "▁",
        "▁▁",
        "▁Hello",
        "▁world",
        "world",
        "a",
        "ab",
        "b",
        "##a",
        "##ing",
        ".",
        "n't",
        "!",
        "a</w>",
        "</w>",
        " ",
        "  a ",
    ),
    *("", "|", "<pad>", "<0x+1>", "<0xZZ>", "é", "€", "😀", "\ufffd", "aa", "x▁y", "do", "not", "'m"),
    *("Ġa", "Ċ", "â", "Ĥ", "¬", "ð", "Ł", "ĺ", "Ģ", "í", "ł", "Ã", "©", "ÿ"),
    *BYTE_TOKENS,
]
SPECIALS = ["<s>", "</s>"]
LLAMA = D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse(), D.Strip(" ", 1, 0)])
REAL = {
    "gpt2, llama 3, qwen": D.ByteLevel(),
    "llama 2, mistral": LLAMA,
    "gemma": D.Sequence([D.Replace("▁", " "), D.ByteFallback(), D.Fuse()]),
    "t5, xlm-r": D.Metaspace(),
    "albert": D.Metaspace(prepend_scheme="first"),
    "nllb": D.Sequence([D.Metaspace(prepend_scheme="never")]),
    "byte-level, then metaspace": D.Sequence([D.ByteLevel(), D.Metaspace()]),
    "bert": D.WordPiece(cleanup=True),
    "bert, uncleaned": D.WordPiece(cleanup=False),
    "gpt": D.BPEDecoder(suffix="</w>"),
    "wav2vec": D.CTC(),
    "none": None,
    "nothing": D.Sequence([]),
}


def tokenizer_with(decoder: Any) -> Tokenizer:
    fast = FastTokenizer(models.WordLevel({piece: index for index, piece in enumerate(PIECES)}, unk_token="a"))
    if decoder is not None:
        fast.decoder = decoder
    fast.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    fast.add_tokens([AddedToken("<tool é>", special=False)])
    return Tokenizer(fast)


COUNT = len(PIECES) + len(SPECIALS) + 1
IDS = st.lists(st.integers(0, COUNT), max_size=24)  # the last has no token
FEW = st.lists(st.integers(0, COUNT), min_size=1, max_size=3).flatmap(  # long, and alike
    lambda few: st.lists(st.sampled_from(few), min_size=CONTEXT, max_size=5 * CONTEXT)
)
RUNS = st.lists(  # bytes side by side, as a model writes them
    st.one_of(st.integers(0, COUNT), st.sampled_from([PIECES.index(token) for token in BYTE_TOKENS])), max_size=40
)
LATE = st.tuples(RUNS, FEW).map(lambda parts: parts[0] + parts[1])

TOKEN_DECODERS = st.sampled_from(
    [
        *(
            D.Replace("▁", " "),
            D.Replace("a", "bc"),
            D.Replace(Regex("a+b?"), "▁"),
            D.Replace("aa", "x"),
            D.ByteFallback(),
        ),
        *(D.Metaspace(), D.Metaspace(prepend_scheme="never"), D.WordPiece(), D.BPEDecoder(), D.CTC(), D.ByteLevel()),
        *(D.Fuse(), D.Strip(" ", 1, 0), D.Strip("a", 3, 0)),
    ]
)
CHAINS = st.lists(TOKEN_DECODERS, max_size=5).map(D.Sequence)


def expected(tokenizer: Tokenizer, ids: Sequence[int], skip: bool) -> str:
    text: str = tokenizer._fast.decode(list(ids), skip_special_tokens=skip)
    return text


def check_stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> None:
    """Every text is a beginning of the next, and the last is that of prompt and output without the prompt's."""
    base, whole = expected(tokenizer, prompt, skip), expected(tokenizer, prompt + ids, skip)
    at = next((i for i, (a, b) in enumerate(zip(base, whole, strict=False)) if a != b), min(len(base), len(whole)))
    stream = tokenizer.stream(skip, prompt)
    for index, token in enumerate(ids):
        stream.append(token)
        assert whole[at:].startswith(stream.text)
        now = expected(tokenizer, prompt + ids[: index + 1], skip)
        if now.startswith(base):
            assert stream.text + stream.held() == now[len(base) :]
    stream.finish()
    assert stream.text == whole[at:]
    assert tokenizer.decode(prompt + ids, skip_special_tokens=skip) == whole


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=60, deadline=None)
@given(ids=IDS | RUNS, skip=st.booleans())
def test_a_stream_is_what_all_ids_decode_to(name: str, ids: list[int], skip: bool) -> None:
    check_stream(tokenizer_with(REAL[name]), [], ids, skip)


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=60, deadline=None)
@given(prompt=IDS | RUNS | FEW | LATE, ids=IDS | RUNS, skip=st.booleans())
def test_an_output_goes_on_from_its_prompt(name: str, prompt: list[int], ids: list[int], skip: bool) -> None:
    check_stream(tokenizer_with(REAL[name]), prompt, ids, skip)


@settings(max_examples=300, deadline=None)
@given(chain=CHAINS, prompt=IDS | RUNS | FEW | LATE, ids=IDS | RUNS | FEW)
def test_any_chain_of_decoders(chain: Any, prompt: list[int], ids: list[int]) -> None:
    check_stream(tokenizer_with(chain), prompt, ids)


@settings(deadline=None)
@given(ids=FEW, split=st.integers(0, 40))
@pytest.mark.parametrize(
    "chain", [[D.ByteLevel()], [D.Fuse(), D.Replace("aa", "x")], [D.Fuse(), D.Strip("a", 9, 0)], [D.ByteFallback()]]
)
def test_a_prompt_that_decides_nothing_for_long(chain: Any, ids: list[int], split: int) -> None:
    check_stream(tokenizer_with(D.Sequence(chain)), ids[:split], ids[split:])


def strip(text: str, content: str, start: int, stop: int) -> str:
    """What Strip says it does, where the library's panics."""
    left = text[len(text[:start]) - len(text[:start].lstrip(content)) :]
    tail = left[max(0, len(left) - stop) :]
    return left[: len(left) - len(tail) + len(tail.rstrip(content))] if stop else left


@settings(max_examples=100, deadline=None)
@given(
    ids=st.lists(st.sampled_from([PIECES.index(each) for each in ("a", "ab", "aa", "b", "", "é")]), max_size=12),
    start=st.integers(0, 3),
    stop=st.integers(0, 3),
    split=st.integers(0, 12),
)
def test_strip_at_both_ends(ids: list[int], start: int, stop: int, split: int) -> None:
    pieces = [PIECES[token] for token in ids]
    each = tokenizer_with(D.Strip("a", start, stop))
    assert each.decode(ids) == "".join(strip(piece, "a", start, stop) for piece in pieces)
    joined = tokenizer_with(D.Sequence([D.Fuse(), D.Strip("a", start, stop)]))
    whole, base = joined.decode(ids), joined.decode(ids[:split])
    assert whole == strip("".join(pieces), "a", start, stop)
    stream = joined.stream(prompt=ids[:split])
    for token in ids[split:]:
        stream.append(token)
        assert stream.text in whole
    stream.finish()
    if whole.startswith(base):
        assert base + stream.text == whole


def test_bytes_that_become_no_character_are_replacement_characters() -> None:
    tokenizer = tokenizer_with(LLAMA)
    ids = [PIECES.index(token) for token in ("▁Hello", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "a")]
    stream = tokenizer.stream()
    seen = []
    for token in ids:
        stream.append(token)
        seen.append(stream.text)
    assert seen == ["Hello"] * 5 + ["Hello\ufffd\ufffd\ufffd\ufffda"]


def test_an_output_that_completes_a_character_of_the_prompt_has_it() -> None:
    tokenizer = tokenizer_with(D.ByteLevel())
    stream = tokenizer.stream(prompt=[PIECES.index(token) for token in ("Ġa", "â", "Ĥ")])
    assert (stream.text, stream.held()) == ("", "")
    stream.append(PIECES.index("¬"))
    assert stream.text == "€"


def test_of_a_long_prompt_only_the_end_is_read() -> None:
    tokenizer = tokenizer_with(LLAMA)
    reads = []
    detokenizer = tokenizer._detokenizer
    piece = detokenizer.piece
    detokenizer.piece = lambda *given: reads.append(given) or piece(*given)  # type: ignore[method-assign, func-returns-value]
    tokenizer.stream(prompt=[PIECES.index("▁world")] * 100_000)
    assert len(reads) == CONTEXT


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "llama 2, mistral",
            {"▁world": b" world", "world": b"world", "<0xE2>": b"\xe2", "<tool é>": "<tool é>".encode()},
        ),
        ("gpt2, llama 3, qwen", {"Ġa": b" a", "â": b"\xe2", "€": "€".encode(), "<s>": b"<s>"}),
        ("t5, xlm-r", {"▁world": b" world", "▁▁": b"  "}),
        ("bert", {"##ing": b"ing", "a": b" a", "n't": b"n't"}),
        ("gpt", {"a</w>": b"a ", "a": b"a"}),
        ("wav2vec", {"a": b"a", "<pad>": b"", "|": b" "}),
        ("none", {"a": b" a"}),
    ],
)
def test_what_a_token_says_in_the_midst_of_a_text(name: str, said: dict[str, bytes]) -> None:
    tokenizer = tokenizer_with(REAL[name])
    ids = {piece: tokenizer._fast.token_to_id(piece) for piece in said}
    assert {piece: tokenizer.token_bytes(token) for piece, token in ids.items()} == said
    assert tokenizer.token_bytes(COUNT + 7) == b""


def test_a_decoder_of_another_time_says_its_text_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    class New:
        def __getstate__(self) -> bytes:
            return json.dumps({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "New"}]}).encode()

        def decode(self, tokens: list[str]) -> str:
            return "-".join(tokens)

    (stage,) = stages_of(New())  # type: ignore[arg-type]
    assert [*stage.push("a"), *stage.push("b")] == []
    other = stage.copy()
    assert [*other.push("c")] == []
    assert (list(stage.end()), list(other.end())) == (["a-b"], ["a-b-c"])
    assert "no text before an output is complete" in caplog.text


@pytest.mark.parametrize(
    ("name", "pieces", "places", "text"),
    [
        ("llama 2, mistral", ["▁Hello", "▁world", "a"], [0, 5, 11], "Hello worlda"),
        ("llama 2, mistral", ["a", "<0xE2>", "<0x82>", "<0xAC>", "b"], [0, 1, 1, 1, 2], "a€b"),
        ("llama 2, mistral", ["a", "<0xE2>", "<0xFF>", "b"], [0, 1, 1, 3], "a\ufffd\ufffdb"),
        ("gpt2, llama 3, qwen", ["a", "â", "Ĥ", "¬", "b"], [0, 1, 1, 1, 2], "a€b"),
        ("gpt2, llama 3, qwen", ["a", "â", "Ĥ", "b", "ÿ", "b"], [0, 1, 1, 2, 3, 4], "a\ufffdb\ufffdb"),
        ("bert", ["a", "##ing", "b", "</s>", "!"], [0, 1, 4, 6, 6], "aing b!"),
        ("gpt", ["a</w>", "b", "</w>"], [0, 1, 3], "a b"),
    ],
)
def test_where_tokens_begin(name: str, pieces: list[str], places: list[int], text: str) -> None:
    tokenizer = tokenizer_with(REAL[name])
    stream = tokenizer.stream()
    assert [stream.place(tokenizer._fast.token_to_id(piece)) for piece in pieces] == places
    stream.finish()
    assert stream.text == text


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=30, deadline=None)
@given(prompt=IDS, ids=IDS | RUNS)
def test_tokens_begin_in_order_and_within_their_text(name: str, prompt: list[int], ids: list[int]) -> None:
    stream = tokenizer_with(REAL[name]).stream(prompt=prompt)
    places = [stream.place(token) for token in ids]
    stream.finish()
    assert places == sorted(places)
    assert max(places, default=0) <= len(stream.text)


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=40, deadline=None)
@given(
    prompt=IDS, ids=IDS | RUNS, stop=st.sampled_from([" wo", "€", "\ufffd", "ab", " ", "a b", "lo"]), both=st.booleans()
)
def test_stop_strings_are_found_in_any_text(
    name: str, prompt: list[int], ids: list[int], stop: str, both: bool
) -> None:
    tokenizer = tokenizer_with(REAL[name])
    stops = (stop, "world") if both else (stop,)
    output, stream = OutputText(tokenizer.stream(prompt=prompt), stops, False), tokenizer.stream(prompt=prompt)
    before = ""
    for token in ids:
        output.append(token)
        stream.append(token)
        assert output.text.startswith(before)
        before = output.text
        if output.matched is not None:
            break
    output.finish()
    stream.finish()
    found = [(stream.text.find(each) + len(each), -len(each), each) for each in stops if each in stream.text]
    assert output.matched == (min(found)[2] if found else None)
    assert output.text == (stream.text[: sum(min(found)[:2])] if found else stream.text)


@pytest.mark.parametrize(
    ("chain", "prompt", "piece", "text"),
    [
        ([D.ByteFallback()], ["<0xFF>", *["<0x41>"] * 20], "<0x41>", "\ufffd"),  # one run with what is invalid
        ([D.Fuse(), D.Strip(" ", 30, 0)], ["a", *[" "] * 20], " ", " "),
        ([D.Fuse(), D.Strip(" ", 30, 0)], [" "] * 20, " ", ""),
        ([D.Fuse(), D.Replace("aa", "x")], ["a"] * 21, "b", "b"),
        ([D.WordPiece()], ["a", *["</s>"] * 20], "b", " b"),
    ],
)
def test_what_lies_far_back_in_the_prompt(chain: Any, prompt: list[str], piece: str, text: str) -> None:
    tokenizer = tokenizer_with(D.Sequence(chain))
    ids = [tokenizer._fast.token_to_id(each) for each in (*prompt, piece)]
    stream = tokenizer.stream(prompt=ids[:-1])
    stream.append(ids[-1])
    stream.finish()
    assert stream.text == text
    check_stream(tokenizer, ids[:-1], ids[-1:])
