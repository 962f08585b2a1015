"""From a checkpoint folder, or a Hub id, to a `Model` in memory: strict, streaming, safetensors only.

All names, shapes and dtypes are checked against the config before the first weight is read. Weights are then
copied block by block into the fused buffers: a checkpoint is never held twice.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wavegraph.errors import CheckpointError, ConfigError
from wavegraph.model.config import DTYPES, OuroConfig, parse_json, read_json
from wavegraph.model.ops.base import Ops
from wavegraph.model.weights import CPU, Model, build_model, check_max_model_len, check_tensors

__all__ = ["Model", "Progress", "checkpoint_dtype", "load_model", "resolve_checkpoint"]

Progress = Callable[[int, int], None]
"""Called with (bytes of weights read so far, bytes in all)."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# Besides these, the client lets through errors of the HTTP library it is built on (which one depends on its
# version): its own HTTP error derives from their base.
_HUB_ERRORS: tuple[type[Exception], ...] = (OSError, HFValidationError, *HfHubHTTPError.__bases__)

# What the operating system and pathlib say to names that can be none: too long, with a NUL, of an unknown user's
# home, links in a circle.
_PATH_ERRORS = (OSError, ValueError, RuntimeError)

_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# The library maps the file, and every mapped page that was read counts as resident until the mapping goes. So
# each block is read through a mapping of its own.
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies and what its file's header says of it. ``dtype`` is a torch name."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (of one element, for a vector)."""
        size = torch.empty((), dtype=getattr(torch, self.dtype)).element_size()
        for length in self.shape[1:]:
            size *= length
        return size

    @property
    def rows(self) -> int:
        """Length of the first dimension."""
        return self.shape[0]


def load_model(
    path_or_hub_id: str | Path,
    *,
    ops: Ops,
    dtype: str = "auto",
    max_model_len: int | None = None,
    device: torch.device = CPU,
    progress: Progress | None = None,
) -> Model:
    """Load an Ouro checkpoint from a folder or the Hugging Face Hub into buffers on ``device``, packed for ``ops``.

    ``dtype`` is float32, bfloat16, float16, or auto: the config's, else that of the stored embedding. Weights
    stored as another of the three are converted. ``max_model_len`` (positions with rotary angles) defaults to
    the config's ``max_position_embeddings``. ``progress(done, total)`` hears of the bytes read.

    Raises `CheckpointError` if the folder, its files or the tensors in them are not a whole checkpoint of
    this config, `ConfigError` for a config this engine does not run, or a bad ``dtype`` or ``max_model_len``.
    """
    folder = resolve_checkpoint(path_or_hub_id)
    config = OuroConfig.from_file(folder)
    check_max_model_len(config, max_model_len)
    check_dtype(dtype)
    stored = _read_headers(folder)
    check_tensors(config, {name: tensor.shape for name, tensor in stored.items()}, folder)
    fill = _Reader(stored, progress).fill
    torch_dtype = _dtype(config, dtype, stored)
    return build_model(config, fill, ops=ops, dtype=torch_dtype, max_model_len=max_model_len, device=device)


def check_dtype(dtype: str) -> None:
    """Raises `ConfigError` unless ``dtype`` is one that `load_model` takes."""
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype: must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")


def checkpoint_dtype(folder: Path, config: OuroConfig, dtype: str = "auto") -> torch.dtype:
    """The dtype that `load_model` would load ``folder`` in; headers are read only if nothing else says it.

    Raises as `load_model` does.
    """
    check_dtype(dtype)
    if dtype == "auto" and config.dtype is None:
        stored = _read_headers(folder)
        check_tensors(config, {name: tensor.shape for name, tensor in stored.items()}, folder)
        return _dtype(config, dtype, stored)
    return _dtype(config, dtype, {})


def _dtype(config: OuroConfig, dtype: str, stored: dict[str, _Stored]) -> torch.dtype:
    if dtype == "auto":
        dtype = config.dtype or stored["model.embed_tokens.weight"].dtype
    found: torch.dtype = getattr(torch, dtype)
    return found


def resolve_checkpoint(path_or_hub_id: str | Path, *, cache_dir: str | Path | None = None) -> Path:
    """The local folder of a checkpoint, downloaded (or found in the local cache) if it is a Hub id.

    A path that exists wins. What is written as a path (absolute, or starting with ``.`` or ``~``), and
    whatever is not of the form ``owner/name``, is never looked up on the Hub. Only safetensors, configuration
    and tokenizer files are fetched. ``cache_dir`` overrides the Hub's own cache folder. Raises
    `CheckpointError`.
    """
    name = str(path_or_hub_id)
    if not name:
        raise CheckpointError("the checkpoint's name is empty; give its folder, or a Hub id written as owner/name")
    try:
        folder = Path(name).expanduser()
        found, is_folder = folder.exists(), folder.is_dir()
    except _PATH_ERRORS as error:
        raise CheckpointError(f"{_short(name)}: is no usable path ({_reason(error)}); give another folder") from error
    if is_folder:
        return folder
    if found:
        raise CheckpointError(f"{name}: is a file; give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"{name}: no such folder; give a checkpoint's folder, or a Hub id written as owner/name")
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES), cache_dir=cache_dir))
    except _HUB_ERRORS as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{name}: no such folder here, and the Hub gives no such checkpoint ({reason}); "
            "check the name and the network, or give a local folder"
        ) from error


def _read_headers(folder: Path) -> dict[str, _Stored]:
    """Every tensor of the checkpoint by name, from the headers of its files."""
    if (folder / SINGLE_FILE).is_file():
        return _read_header(_inside(folder, SINGLE_FILE))
    if (folder / INDEX_FILE).is_file():
        return _read_shards(folder, _weight_map(folder / INDEX_FILE))
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if others:
        raise CheckpointError(
            f"{folder}: holds only pickled weights ({others[0]}), which can run code when read and are never "
            f"opened; convert them to {SINGLE_FILE}"
        )
    raise CheckpointError(f"{folder}: holds no weights; it must have {SINGLE_FILE} or {INDEX_FILE}")


def _weight_map(index_file: Path) -> dict[str, str]:
    """The ``weight_map`` of an index: file name of each tensor."""
    weight_map: Any = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file}: weight_map must name a file for each tensor, got {weight_map!r}")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file:
            raise CheckpointError(f"{index_file}: {tensor} must be mapped to a file name, got {file!r}")
    return weight_map


def _read_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, _Stored]:
    """The tensors of all shards; the index and the shards must agree on who holds what."""
    shards = {name: _read_header(_inside(folder, name)) for name in dict.fromkeys(weight_map.values())}
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise CheckpointError(f"{folder / name}: lacks {tensor}, which {INDEX_FILE} says it holds")
    for name, header in shards.items():
        for tensor in header:
            if tensor not in weight_map:
                raise CheckpointError(f"{folder / name}: holds {tensor}, which {INDEX_FILE} does not name")
            if weight_map[tensor] != name:
                raise CheckpointError(f"{tensor}: is in two shards, {weight_map[tensor]} and {name}, of {folder}")
    return {tensor: shards[name][tensor] for tensor, name in weight_map.items()}


def _inside(folder: Path, name: str) -> Path:
    """The file ``name`` of ``folder``. Refused if it lies elsewhere, by its name or through a link.

    The Hub's cache is the one exception: files of a snapshot there are links into the ``blobs`` beside it.
    """
    file = folder / name
    try:
        root, target = folder.resolve(), file.resolve()
        found = file.is_file()
    except _PATH_ERRORS as error:
        raise CheckpointError(
            f"{folder}: holds no file {_short(name)} ({_reason(error)}); copy the checkpoint again"
        ) from error
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    lexical = not Path(name).is_absolute() and ".." not in Path(name).parts
    if not lexical or not (target.is_relative_to(root) or target.parent == blobs):
        raise CheckpointError(f"{name}: points outside the checkpoint's folder {folder}; name a file inside it")
    if not found:
        raise CheckpointError(f"{file}: no such file, but {INDEX_FILE} names it; copy the checkpoint again")
    return file


def _short(name: str) -> str:
    """A name from outside, fit to be shown."""
    return repr(name if len(name) <= 80 else f"{name[:60]}…{name[-10:]}")


def _reason(error: Exception) -> str:
    """Why a path cannot be used, without the path."""
    return (error.strerror or "") if isinstance(error, OSError) else str(error).split(":")[0].rstrip(".")


def _read_header(file: Path) -> dict[str, _Stored]:
    """Name, shape and dtype of all tensors of one file.

    The library checks header and file length, but lets the last of two tensors of one name win.
    """
    found = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                tensor = opened.get_slice(name)
                stored_dtype = tensor.get_dtype()
                if stored_dtype not in _STORED_DTYPES:
                    raise CheckpointError(
                        f"{file}: {name} is stored as {stored_dtype}; only {', '.join(_STORED_DTYPES)} can be loaded"
                    )
                found[name] = _Stored(file, tuple(tensor.get_shape()), _STORED_DTYPES[stored_dtype])
        with file.open("rb") as raw:
            parse_json(raw.read(int.from_bytes(raw.read(8), "little")), file)
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error
    return found


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file}: cannot be read as safetensors ({error}); copy the checkpoint again")


class _Reader:
    """Fills buffers from the files, block by block, and reports progress in stored bytes."""

    def __init__(self, stored: dict[str, _Stored], progress: Progress | None) -> None:
        self._stored = stored
        self._progress = progress
        self._done = 0
        self._total = sum(tensor.rows * tensor.row_bytes for tensor in stored.values())

    def fill(self, name: str, out: Tensor) -> None:
        """Copy the stored tensor into ``out``, of the same shape, converting to its dtype."""
        tensor = self._stored[name]
        for start, stop in _blocks(tensor.rows, max(1, _BLOCK_BYTES // tensor.row_bytes)):
            block = out[start:stop]
            try:
                with safe_open(tensor.file, framework="pt") as opened:
                    block.copy_(opened.get_slice(name)[start:stop])
            except (SafetensorError, OSError) as error:
                raise _damaged(tensor.file, error) from error
            if out.dtype == torch.float16 and tensor.dtype != "float16" and _has_infinity(block):
                raise CheckpointError(
                    f"{tensor.file}: {name} has values beyond float16's 65504; load it as bfloat16 or float32"
                )
            self._done += (stop - start) * tensor.row_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)


def _has_infinity(block: Tensor) -> bool:
    # By the extremes: isfinite would allocate, and small freed pieces between the weights stay resident.
    low, high = torch.aminmax(block)
    return bool(low == -torch.inf) or bool(high == torch.inf)


def _blocks(length: int, step: int) -> Iterable[tuple[int, int]]:
    return ((start, min(start + step, length)) for start in range(0, length, step))
