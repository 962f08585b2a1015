"""Backends by name."""

from wavegraph.capture.backends.base import Backend
from wavegraph.capture.backends.compiled import CompiledBackend
from wavegraph.capture.backends.cuda import CudaBackend
from wavegraph.capture.backends.eager import EagerBackend
from wavegraph.capture.backends.recorded import RecordedBackend
from wavegraph.errors import ConfigError

_BACKENDS: tuple[type[Backend], ...] = (CudaBackend, CompiledBackend, RecordedBackend, EagerBackend)


def create_backend(name: str) -> Backend:
    """A new backend. Raises `ConfigError` for a name that none has. For ``cuda``, there must be a GPU."""
    for backend in _BACKENDS:
        if backend.name == name:
            return backend()
    raise ConfigError(f"backend: {name!r} is unknown; use one of {', '.join(backend_names())}")


def backend_names() -> tuple[str, ...]:
    """What `create_backend` accepts."""
    return tuple(backend.name for backend in _BACKENDS)
