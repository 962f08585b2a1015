"""Every exception that Wavegraph raises on purpose.

::

    WavegraphError
    ├── InputError            the caller's input is wrong; nothing was changed       CLI exit code 2
    │   ├── ConfigError       an option or a model's config.json has a bad value
    │   ├── CheckpointError   a checkpoint cannot be read as what its config says
    │   ├── BundleError       a bundle is damaged, or was made for another model or machine
    │   ├── RequestError      one request is refused; all others go on
    │   └── OutputError       a result cannot be written where it was asked for
    ├── RequestFailedError    work for one request failed unforeseen; all others go on       CLI exit code 1
    ├── CaptureError          a program cannot be recorded, or a replay does not fit its capture
    └── EngineError           the engine cannot go on (device failure, broken invariant)   CLI exit code 1

Each message is one sentence that names the field, its value, the limit and the way out.
All rooms may import this module; it imports nothing.
"""


class WavegraphError(Exception):
    """Base of the tree above."""

    exit_code = 1


class InputError(WavegraphError):
    """The caller's input is wrong. Nothing was changed by the call."""

    exit_code = 2


class ConfigError(InputError):
    """An engine option, or a field of a model's ``config.json``, has a value that cannot be honoured."""


class CheckpointError(InputError):
    """A checkpoint's files are missing, damaged, or do not hold what its config says."""


class BundleError(InputError):
    """A bundle is damaged, or was made for another model, machine or version."""


class RequestError(InputError):
    """One request is refused; every other request goes on."""


class OutputError(InputError):
    """A result cannot be written where the caller asked for it."""


class RequestFailedError(WavegraphError):
    """Work for one request failed unforeseen; every other request goes on. ``cause`` is what it is counted under."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class CaptureError(WavegraphError):
    """A program cannot be recorded, or a replay's inputs differ from its capture."""


class EngineError(WavegraphError):
    """The engine cannot go on."""
