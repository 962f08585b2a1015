"""A request in mid-life as one piece of data: what one engine exports and another imports.

This is the seam for prefill/decode separation: a prompt half way through its wavefront, or a request that is
decoding, goes on elsewhere with the same tokens. Transport is the caller's.
"""

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from wavegraph.errors import RequestError
from wavegraph.outputs import TokenLogprob
from wavegraph.sampling import SamplingParams
from wavegraph.scheduler.plan import ExitRule, RequestSpec
from wavegraph.scheduler.request import RequestSnapshot

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RequestState:
    """Everything about a live request.

    ``compatibility`` is a digest of what both engines must share (model, dtype, page size, depths, KV layout).
    ``snapshot`` holds tokens and frontier vector, ``pages`` the content of its pages by pool, ``[pages, …]`` on the
    CPU. The sampler has no state of its own: its draws depend on seed and position alone.
    """

    compatibility: str
    snapshot: RequestSnapshot
    params: SamplingParams
    prompt: str | None
    index: int
    seed: int
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None]
    pages: dict[str, Tensor]

    def to_bytes(self) -> bytes:
        """Safetensors: the pages as tensors, the rest as JSON in the header's metadata."""
        snapshot = asdict(self.snapshot)
        snapshot["spec"]["stop_token_ids"] = sorted(self.snapshot.spec.stop_token_ids)
        head = {
            "format": FORMAT,
            "compatibility": self.compatibility,
            "snapshot": snapshot,
            "params": asdict(self.params),
            "prompt": self.prompt,
            "index": self.index,
            "seed": self.seed,
            "logprobs": [asdict(entry) for entry in self.logprobs],
            "prompt_logprobs": [asdict(entry) if entry else None for entry in self.prompt_logprobs],
        }
        tensors = self.pages or {"none": torch.zeros(0)}
        text = json.dumps(head)
        return save(tensors, metadata={"wavegraph.request": text, "digest": _digest(text)})

    @classmethod
    def from_bytes(cls, data: bytes) -> "RequestState":
        """The state that `to_bytes` wrote. Raises `RequestError` for anything else, whatever the pages hold."""
        try:
            size = int.from_bytes(data[:8], "little")
            metadata = json.loads(data[8 : 8 + size])["__metadata__"]
            head = json.loads(metadata["wavegraph.request"])
            if metadata["digest"] != _digest(metadata["wavegraph.request"]):
                raise ValueError("its digest differs, so it was damaged on its way")
            pages = load(data)
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise RequestError(f"request state: is not one that `RequestState.to_bytes` wrote: {error}") from error
        if head["format"] != FORMAT:
            raise RequestError(f"request state: has format {head['format']}; this version reads {FORMAT}")
        pages.pop("none", None)
        params = head["params"]
        params["logit_bias"] = {int(token): value for token, value in params["logit_bias"].items()}
        return cls(
            head["compatibility"],
            _snapshot(head["snapshot"]),
            SamplingParams(**params),
            head["prompt"],
            head["index"],
            head["seed"],
            [_logprob(entry) for entry in head["logprobs"]],
            [_logprob(entry) if entry else None for entry in head["prompt_logprobs"]],
            pages,
        )


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _logprob(data: dict[str, Any]) -> TokenLogprob:
    top = {int(token): value for token, value in data.pop("top").items()}
    return TokenLogprob(**data, top=top)


def _snapshot(data: dict[str, Any]) -> RequestSnapshot:
    spec = data.pop("spec")
    rule = spec.pop("exit_rule")
    stop = frozenset(spec.pop("stop_token_ids"))
    rebuilt = RequestSpec(**spec, stop_token_ids=stop, exit_rule=ExitRule(**rule) if rule is not None else None)
    return RequestSnapshot(spec=rebuilt, **data)
