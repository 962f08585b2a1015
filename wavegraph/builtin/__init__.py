"""The built-in model: a small trained Ouro and its tokenizer, for use with no download.

What it is, what it was trained on and how well it does is in ``model/MODEL_CARD.md``; it is made by
`tools.train_builtin`.
"""

from pathlib import Path


def builtin_path() -> Path:
    """The folder of the built-in model, a checkpoint like any other, inside the package."""
    return Path(__file__).parent / "model"
