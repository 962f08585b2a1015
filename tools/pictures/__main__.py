"""Write the pictures to ``docs/images``."""

from pathlib import Path

from tools.pictures import files

FOLDER = Path(__file__).parents[2] / "docs" / "images"

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
