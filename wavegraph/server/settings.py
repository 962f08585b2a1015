"""Options of the server, apart from those of the engine."""

import time
from dataclasses import dataclass, field

from wavegraph.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of one server. A bad value raises `ConfigError`. Times are in seconds.

    - ``model_name``: what clients call the model.
    - ``api_keys``: those that may call ``/v1*``; anybody may if there is none.
    - ``allow_origins``: web origins that browsers may call from (CORS); none by default.
    - ``max_pending``: the most sequences waiting or running; beyond it requests are refused with 429.
    - ``max_body_bytes``: the longest request body.
    - ``receive_timeout``: for a request's head to arrive, and then for its body.
    - ``request_timeout``: from a request's arrival to the end of its answer.
    - ``stall_timeout``: how long a client may leave its connection's full buffer unread.
    - ``keep_alive``: between two signs of life in a stream that has nothing to say.
    - ``dashboard``: serve ``/dashboard``, which needs no key.
    - ``created``: when the model came up, in Unix time.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    max_pending: int = 1024
    max_body_bytes: int = 4 << 20
    receive_timeout: float = 30.0
    request_timeout: float = 600.0
    stall_timeout: float = 30.0
    keep_alive: float = 15.0
    dashboard: bool = True
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        for name in ("max_pending", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {getattr(self, name)!r}")
        for name in ("receive_timeout", "request_timeout", "stall_timeout", "keep_alive"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be a number of seconds above 0, got {getattr(self, name)!r}")
        if not self.model_name:
            raise ConfigError("model_name must not be empty")
        if not all(key.isascii() and key.isprintable() and key for key in self.api_keys):
            raise ConfigError("api_keys must be printable ASCII, as an HTTP header can carry nothing else")
