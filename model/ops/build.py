"""Builds the C++ operators once, keeps them, and loads them.

One shared library holds the kernels of every instruction set that the compiler knows; which of them runs is
chosen when it is loaded. It is built into a cache folder (``$WAVEGRAPH_CACHE``, else ``~/.cache/wavegraph``) under
a key of everything that shapes it, or by `build_library` into any folder, to be loaded without a compiler.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from wavegraph.errors import WavegraphError

logger = logging.getLogger("wavegraph")

SOURCES = Path(__file__).parents[1] / "csrc"

_AVX512 = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")

# Flags of each instruction set that kernels.cpp is compiled for.
_X86_ISAS: dict[str, tuple[str, ...]] = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}

ISA_FEATURES: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": ("avx2", "fma"),
    "avx512": ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx512_bf16": ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"),
    "amx": ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16"),
}
"""What the kernels of each instruction set need of a CPU, by the names of ``/proc/cpuinfo``."""

# -ffp-contract=off: only the sources say where a product and a sum are fused, or bits would depend on the loop.
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")

Progress = Callable[[int, int], None]
"""Called with the compiler's jobs done and in all."""

_compiler_runs: list[str] = []
_loaded: Path | None = None


class BuildError(WavegraphError):
    """The C++ operators cannot be built or loaded here; the ATen operators remain."""


def compiler_runs() -> tuple[str, ...]:
    """Command lines of all compiler processes that this process has started."""
    return tuple(_compiler_runs)


def loaded_library() -> Path | None:
    """The library in use by this process, if one was loaded."""
    return _loaded


def ensure_loaded(progress: Progress | None = None) -> Path:
    """Load the cached library, built first if it is not there. Does nothing if a library is loaded already.

    Raises `BuildError` if there is neither a library nor a way to build one.
    """
    return _loaded if _loaded is not None else load_library(cached_library(progress))


def load_library(path: Path) -> Path:
    """Load a library that `build_library` made, and return the one in use.

    A process holds one: operators cannot be registered twice. Raises `BuildError` if ``path`` is damaged or cannot be
    loaded, or if another build was loaded before.
    """
    global _loaded
    if _loaded is not None:
        if _loaded.name != path.name:
            raise BuildError(f"{path}: {_loaded} is loaded already, of another build; load one library per process")
        return _loaded
    try:
        if not _is_whole(path):
            raise BuildError(f"{path}: is not the file that was built; delete it, and it is built again")
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(f"{path}: cannot be loaded ({error}); delete it, and it is built again") from error
    _loaded = path
    return path


def cached_library(progress: Progress | None = None) -> Path:
    """Path of the library in the cache folder, built first if it is not there.

    Safe with several processes: one builds, the others wait for it. A library appears whole or not at all.
    """
    compiler = find_compiler()
    folder = _cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in folder.glob(f"wavegraph_ops-{_key(compiler)}-*.so"):
                if _is_whole(path):
                    return path
                path.unlink()
            for abandoned in folder.glob("build-*"):  # by a process that was killed: the lock is ours
                shutil.rmtree(abandoned)
            return build_library(folder, progress)
    except OSError as error:
        raise BuildError(f"WAVEGRAPH_CACHE: {folder} cannot be written ({error}); name another folder") from error


def build_library(folder: Path, progress: Progress | None = None) -> Path:
    """Compile all instruction sets into one library in ``folder``, replaced atomically, and return its path.

    Its name ends in a digest of its content. Raises `BuildError` with the compiler's last words if it fails.
    """
    compiler = find_compiler()
    isas = {"portable": ()} | {isa: flags for isa, flags in _isas().items() if _accepts(compiler, flags)}
    logger.info("building the C++ operators with %s (once; some 20 seconds)", compiler[0])
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        jobs = [_compile_command(compiler, "bindings.cpp", Path(scratch, "bindings.o"), _torch_flags())]
        for isa, flags in isas.items():
            jobs.append(
                _compile_command(compiler, "kernels.cpp", Path(scratch, f"{isa}.o"), (f"-DWG_ISA={isa}", *flags))
            )
        report = progress or (lambda done, total: None)
        report(0, len(jobs) + 1)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for done, _ in enumerate(pool.map(_run, jobs), 1):
                report(done, len(jobs) + 1)
        library = Path(scratch, "library.so")
        _run([*compiler, "-shared", *(job[-1] for job in jobs), *_link_flags(), "-o", str(library)])
        report(len(jobs) + 1, len(jobs) + 1)
        path = folder / f"wavegraph_ops-{_key(compiler)}-{_digest(library.read_bytes())}.so"
        os.replace(library, path)
    return path


def find_compiler() -> tuple[str, ...]:
    """The C++ compiler as the start of a command line: ``$CXX``, else g++, whose vector extensions the sources use.

    Raises `BuildError` if there is none.
    """
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(command[0]) is None:
        raise BuildError(f"no C++ compiler: there is no program {command[0]!r}; install g++, or name one in CXX")
    return tuple(command)


def _cache_folder() -> Path:
    named = os.environ.get("WAVEGRAPH_CACHE")
    return Path(named) / "ops" if named else Path.home() / ".cache" / "wavegraph" / "ops"


def _isas() -> dict[str, tuple[str, ...]]:
    return _X86_ISAS if platform.machine() in ("x86_64", "AMD64") else {}


def sources_digest() -> str:
    """A digest of the operators' sources and the flags they are compiled with."""
    parts = [repr((_FLAGS, _isas()))]
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        parts += [source.name, source.read_text()]
    return _digest("\0".join(parts).encode())


def cpu_features() -> frozenset[str]:
    """What this CPU has, by the names of ``/proc/cpuinfo``; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def _key(compiler: Sequence[str]) -> str:
    """A digest of everything that shapes a build."""
    return _digest("\0".join((torch.__version__, _run([*compiler, "--version"]), sources_digest())).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _is_whole(path: Path) -> bool:
    """Whether a library's content is what its name says. Loading a truncated one would end the process."""
    return path.stem.endswith(f"-{_digest(path.read_bytes())}")


def _torch_flags() -> tuple[str, ...]:
    include = Path(torch.__file__).parent / "include"
    abi = int(torch.compiled_with_cxx11_abi())
    api = include / "torch" / "csrc" / "api" / "include"
    return (f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-isystem", str(include), "-isystem", str(api))


def _link_flags() -> tuple[str, ...]:
    return (
        f"-L{Path(torch.__file__).parent / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        "-fopenmp",
        "-s",
    )


def _compile_command(compiler: Sequence[str], source: str, output: Path, flags: Sequence[str]) -> list[str]:
    return [*compiler, *_FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(output)]


def _accepts(compiler: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether the compiler knows these flags."""
    try:
        _run([*compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull])
    except BuildError:
        return False
    return True


def _run(command: Sequence[str]) -> str:
    """Output of a compiler process. Raises `BuildError` if it cannot be started or fails."""
    _compiler_runs.append(shlex.join(command))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: cannot be started ({error}); name another compiler in CXX") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{shlex.join(command)}: failed; the compiler said: {error.stderr[-2000:]}") from error
    return done.stdout
