"""Bundles: what was compiled for a model and a machine, in a folder, to be loaded without a compiler.

::

    DIR/manifest.json    format, fingerprint of everything specialised on (target and ladder too), digests of all files,
                         and of each kernel how it is launched and what it takes
    DIR/files/…          what the target needs: for ``cpu`` the library of operators, for a GPU one cubin a kernel; the
                         cost model, if there is one
    DIR/complete         digest of the manifest; written last

A bundle is written beside its place and exchanged with what is there, so a writer that is killed leaves the old one or
the new one (or none, where the file system has no exchange); of two writers the last wins. `read_bundle` believes
nothing: marker, manifest and every file are checked.

The ``cpu`` target runs one instruction set, the same wherever the bundle is accepted, and so with the same bits.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavegraph.buckets.cost import CostModel
from wavegraph.buckets.ladder import Ladder
from wavegraph.errors import BundleError
from wavegraph.model.ops.triton.cubin import Cubin

FORMAT = 2
CPU = "cpu"
"""The target of bundles for CPUs; others are named by their compute capability, such as ``sm_90``."""

_libc = ctypes.CDLL(None)

_MANIFEST, _FILES, _MARKER = "manifest.json", "files", "complete"
_COST = "cost.json"

# A list of what the CPU must have; it may have more. All other fields must be equal.
FEATURES = "cpu_features"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A whole bundle. ``files`` are paths by their names in it, checked when it was read.

    ``kernels`` are those of a GPU's bundle, as `wavegraph.startup.precompile` describes them.
    """

    folder: Path
    fingerprint: dict[str, Any]
    files: dict[str, Path]
    kernels: tuple[dict[str, Any], ...] = ()

    @property
    def target(self) -> str:
        """`CPU`, or the kind of GPU it is for."""
        return str(self.fingerprint["target"])

    @property
    def ladder(self) -> Ladder:
        """The row counts to record."""
        return Ladder(self.fingerprint["ladder"])

    @property
    def isa(self) -> str:
        """The instruction set that a ``cpu`` bundle runs."""
        return str(self.fingerprint["isa"])

    @property
    def library(self) -> Path:
        """The library of operators of a ``cpu`` bundle."""
        return next(path for name, path in self.files.items() if name.endswith(".so"))

    @property
    def cost(self) -> CostModel | None:
        """What steps take on the machine that was profiled, if that is in it."""
        return CostModel.from_file(self.files[_COST]) if _COST in self.files else None

    def cubins(self) -> dict[str, Cubin]:
        """The binaries of a GPU's bundle, by the names of their `KernelSpec`."""
        return {
            kernel["name"]: Cubin(self.files[kernel["file"]], kernel["entry"], kernel["shared"])
            for kernel in self.kernels
        }

    def differences(self, here: Mapping[str, Any]) -> list[str]:
        """Every field of `fingerprint` that does not fit ``here``, with both values."""
        found = []
        for name in sorted({*self.fingerprint, *here}):
            ours, theirs = self.fingerprint.get(name), here.get(name)
            if name == FEATURES and isinstance(ours, list) and isinstance(theirs, list):
                missing = sorted(set(ours) - set(theirs))
                if missing:
                    found.append(f"{name}: the bundle needs {', '.join(ours)}, this CPU lacks {', '.join(missing)}")
            elif ours != theirs:
                found.append(f"{name}: {_shown(ours)} in the bundle, {_shown(theirs)} here")
        return found

    def check_fits(self, here: Mapping[str, Any]) -> None:
        """Raise `BundleError` naming every difference to ``here``."""
        found = self.differences(here)
        if found:
            raise BundleError(f"{self.folder}: does not fit ({'; '.join(found)}); precompile it anew, here")


def write_bundle(
    folder: Path, fingerprint: Mapping[str, Any], files: Mapping[str, Path], kernels: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write a bundle to ``folder``, copying ``files`` (by their names in it), in place of a bundle that is there.

    Raises `BundleError` if something else is there, or it cannot be written; nothing is changed then.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _working_folder(folder) as work:
            contents = work / "bundle"
            (contents / _FILES).mkdir(parents=True)
            digests = {}
            for name, path in files.items():
                shutil.copyfile(path, contents / _FILES / name)
                digests[name] = _sha256((contents / _FILES / name).read_bytes())
            manifest = {"format": FORMAT, "fingerprint": dict(fingerprint), "files": digests, "kernels": list(kernels)}
            _seal(contents, manifest)
            _move_into_place(contents, folder, work)
    except OSError as error:
        raise BundleError(f"{folder}: cannot be written ({error}); name another folder") from error


def add_cost(folder: Path, cost: CostModel) -> Bundle:
    """Put a cost model into the bundle in ``folder``, in place of one that it has; all else stays.

    The bundle is written anew and exchanged, as by `write_bundle`. Raises `BundleError` as that and `read_bundle` do.
    """
    bundle, content = read_bundle(folder), json.dumps(cost.to_dict(), indent=1).encode()
    try:
        with _working_folder(folder) as work:
            contents = work / "bundle"
            (contents / _FILES).mkdir(parents=True)
            for name, path in bundle.files.items():
                shutil.copyfile(path, contents / _FILES / name)
            (contents / _FILES / _COST).write_bytes(content)
            manifest = json.loads(_read(folder, _MANIFEST))
            manifest["files"][_COST] = _sha256(content)
            _seal(contents, manifest)
            _move_into_place(contents, folder, work)
    except OSError as error:
        raise BundleError(f"{folder}: cannot be written ({error}); name another folder") from error
    return read_bundle(folder)


def _seal(contents: Path, manifest: Mapping[str, Any]) -> None:
    """Write manifest and marker beside the files, and have the disk hold it all."""
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (contents / _MANIFEST).write_text(text, encoding="utf-8")
    (contents / _MARKER).write_text(_sha256(text.encode()), encoding="utf-8")
    _flush(contents)


def read_bundle(folder: str | Path) -> Bundle:
    """The bundle in ``folder``. Raises `BundleError` that says what is damaged, or that there is none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise BundleError(f"{folder}: is no bundle, since there is no such folder; make one with wavegraph precompile")
    marker, text = _read(folder, _MARKER), _read(folder, _MANIFEST)
    if marker.decode(errors="replace").strip() != _sha256(text):
        raise _damaged(folder, f"{_MANIFEST} is not what was written")
    manifest = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise BundleError(
            f"{folder}: has format {manifest.get('format')}, but this version reads {FORMAT}; precompile it anew"
        )
    files = {}
    for name, digest in manifest["files"].items():
        files[name] = folder / _FILES / name
        if _sha256(_read(folder, f"{_FILES}/{name}")) != digest:
            raise _damaged(folder, f"{_FILES}/{name} is not what was written")
    return Bundle(folder, manifest["fingerprint"], files, tuple(manifest["kernels"]))


@contextmanager
def _working_folder(folder: Path) -> Iterator[Path]:
    """A folder of this writer's own beside ``folder``; those of writers that were killed are removed.

    A writer holds a lock on its folder as long as it lives.
    """
    prefix = f".{folder.name}.partial-"
    with ExitStack() as held:
        with _locked(folder.parent):
            for other in folder.parent.glob(f"{prefix}*"):
                with suppress(BlockingIOError, FileNotFoundError), _locked(other, wait=False):
                    shutil.rmtree(other, ignore_errors=True)
            work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=prefix))
            held.enter_context(_locked(work))
        held.callback(shutil.rmtree, work, ignore_errors=True)
        yield work


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[int]:
    """Hold a folder's lock; yields its descriptor. Raises `BlockingIOError` if not to wait for another holder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield handle
    finally:
        os.close(handle)


def _move_into_place(contents: Path, folder: Path, work: Path) -> None:
    """Put ``contents`` in the place of ``folder``, one writer at a time; what was there ends in ``work``."""
    with _locked(folder.parent) as parent:
        exchanged = False
        if folder.exists():
            if not folder.is_dir() or not _was_made_here(folder):
                raise BundleError(f"{folder}: holds something that is no bundle; name another folder")
            exchanged = _exchange(contents, folder)
            if not exchanged:
                folder.rename(work / "old")
        if not exchanged:
            contents.rename(folder)
        os.fsync(parent)


def _exchange(first: Path, second: Path) -> bool:
    """Let two folders change places in one move (Linux ``renameat2``); False where that is not to be had."""
    with suppress(AttributeError):  # an old libc
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        return bool(_libc.renameat2(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0)
    return False


def _was_made_here(folder: Path) -> bool:
    """Whether a folder holds nothing but a bundle, whole or not."""
    return {path.name for path in folder.iterdir()} <= {_MANIFEST, _FILES, _MARKER}


def _flush(folder: Path) -> None:
    """Have the disk hold all of ``folder`` before it is moved."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # some file systems cannot, for folders
            os.fsync(handle)
        os.close(handle)


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        raise _damaged(folder, f"{name} is missing") from None
    except OSError as error:
        raise BundleError(f"{folder}: {name} cannot be read ({error.strerror}); check its permissions") from error


def _damaged(folder: Path, reason: str) -> BundleError:
    return BundleError(f"{folder}: is no whole bundle, since {reason}; precompile it anew")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)
