"""A model whose tokenizer is like Llama 2's: ``▁`` for a space, byte tokens, and the first space stripped."""

import shutil
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from wavegraph.builtin import builtin_path

PIECES = [
    *("<unk>", "<s>", "</s>", "▁Hello", "▁world", "world", "▁", "s", "▁wor", "ld"),
    *(f"<0x{byte:02X}>" for byte in range(256)),
]
BOS, HELLO, WORLD = PIECES.index("<s>"), PIECES.index("▁Hello"), PIECES.index("▁world")


def byte(value: int) -> int:
    """The token of a byte."""
    return PIECES.index(f"<0x{value:02X}>")


def fast_tokenizer() -> FastTokenizer:
    fast = FastTokenizer(models.WordLevel({piece: index for index, piece in enumerate(PIECES)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken(piece, special=True) for piece in PIECES[:3]])
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    return fast


def sentencepiece_folder(parent: Path) -> Path:
    """The built-in model with that tokenizer: only the tokens make sense, not the model."""
    folder = parent / "sentencepiece"
    shutil.copytree(builtin_path(), folder)
    fast_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder
