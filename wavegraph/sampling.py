"""How tokens are chosen, and when a request ends."""

from dataclasses import dataclass

from wavegraph.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Greedy sampling, and the limits of one request's output. A bad value raises `RequestError`.

    - ``max_tokens``: the most tokens to generate, at least 1. A request also ends at the engine's
      ``max_model_len``.
    - ``stop_token_ids``: ids that end the request when sampled, besides the model's own end-of-sequence id.
    - ``ignore_eos``: go on past the model's end-of-sequence id (``stop_token_ids`` still end the request).
    - ``temperature``: only 0, greedy, exists; anything else is refused, not ignored.

    The token that ended a request is kept in ``token_ids`` and left out of ``text``.
    """

    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise RequestError(f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}")
        if type(self.ignore_eos) is not bool:
            raise RequestError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if isinstance(self.temperature, bool) or self.temperature != 0:
            raise RequestError(f"temperature must be 0 (greedy), the only sampling there is, got {self.temperature!r}")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise RequestError(f"stop_token_ids must be a tuple of token ids, got {self.stop_token_ids!r}")
        for token in self.stop_token_ids:
            if type(token) is not int or token < 0:
                raise RequestError(f"stop_token_ids: {token!r} is not a token id (an integer of at least 0)")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
