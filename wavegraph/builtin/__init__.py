"""The built-in model: a small Ouro with random weights and a real tokenizer, for use with no download.

Its text means nothing; its work is that of a real checkpoint. `builtin_path` returns a folder like any
checkpoint's. Configuration and tokenizer are part of the package; weights (4 MB) are drawn at first use and
kept in a cache folder, ``$WAVEGRAPH_CACHE`` or else ``~/.cache/wavegraph``.
"""

import hashlib
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from safetensors.numpy import save

from wavegraph.builtin.weights import WEIGHTS_SHA256, make_weights
from wavegraph.errors import OutputError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """What the package holds of the model: the bytes of ``config.json`` and ``tokenizer.json``."""

    config: bytes
    tokenizer: bytes

    @classmethod
    def load(cls) -> "PackagedModel":
        """Read both from the installed package."""
        package = resources.files(__name__)
        config, tokenizer = (package.joinpath(name).read_bytes() for name in ("config.json", "tokenizer.json"))
        return cls(config, tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, as the configuration says."""
        return int(json.loads(self.config)["vocab_size"])

    @property
    def key(self) -> str:
        """A name for this content: configuration, tokenizer and weights."""
        return hashlib.sha256(self.config + self.tokenizer + WEIGHTS_SHA256.encode()).hexdigest()[:16]


def cache_dir() -> Path:
    """``$WAVEGRAPH_CACHE``, or else ``~/.cache/wavegraph``. `OutputError` if there is no home folder."""
    chosen = os.environ.get("WAVEGRAPH_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "wavegraph"
    except RuntimeError as error:
        raise OutputError("WAVEGRAPH_CACHE is not set and there is no home folder: set it") from error


def builtin_path() -> Path:
    """The folder of the built-in model: ``config.json``, ``model.safetensors`` (float32), ``tokenizer.json``.

    Made in the cache folder if it is not there yet. It appears there whole or not at all, also when several
    processes make it at once or one of them is killed. Raises `OutputError` if it has to be made and the
    cache folder cannot be written.
    """
    model = PackagedModel.load()
    folder = cache_dir() / f"builtin-{model.key}"
    if not folder.is_dir():
        try:
            write_model(model, folder)
        except OSError as error:
            raise OutputError(
                f"the built-in model cannot be stored in {folder.parent} ({error.strerror}): "
                "set WAVEGRAPH_CACHE to a folder that can be written"
            ) from error
    return folder


def write_model(model: PackagedModel, folder: Path) -> None:
    """Write the whole checkpoint to ``folder``, which appears complete, by a rename, or not at all.

    A folder that is there already (another process was faster) is left as it is. Raises OSError.
    """
    staging = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    staging.mkdir(parents=True)
    try:
        (staging / "config.json").write_bytes(model.config)
        (staging / "tokenizer.json").write_bytes(model.tokenizer)
        (staging / "model.safetensors").write_bytes(save(make_weights(model.config)))
        for file in staging.iterdir():
            _flush(file)
        try:
            staging.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _flush(file: Path) -> None:
    """Bring a file to the disk, so that a rename cannot outlive its content in a crash."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
