"""The `compiled` backend: the tape of `recorded` for a model over C++ operators, one node for each of their calls.

The operators come with the model (`wavegraph.model.ops.cpu`); over others it is `recorded` by another name.
"""

from wavegraph.capture.backends.recorded import RecordedBackend


class CompiledBackend(RecordedBackend):
    """Replays C++ operators over static buffers."""

    name = "compiled"
