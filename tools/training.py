"""The two stages of training as one run of numbered steps that can stop after any of them and go on later.

What step i does is decided by i alone (its windows, its learning rate), so a checkpoint is the weights, the optimiser
and the count; no random state has to be kept. On one machine, with one number of threads, an interrupted run gives the
same bits as an uninterrupted one.
"""

import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tools.looped import LoopedModel, adaptive_loss, expected_loss
from wavegraph.errors import CheckpointError
from wavegraph.model.config import OuroConfig

_WARM_UP = 0.05  # share of a stage's steps
_LAST_RATE = 0.02  # learning rate of a stage's last step, as a share of the highest
_MAX_NORM = 1.0
_DECAY = 0.1
_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to train. ``steps`` of stage I (all weights), then ``gate_steps`` of stage II (the gate alone).

    A step takes ``batch`` windows of ``window`` tokens. ``rate`` and ``gate_rate`` are the stages' highest learning
    rates; ``beta`` weighs the entropy of the exit in nats.
    """

    steps: int
    gate_steps: int
    batch: int
    window: int
    rate: float
    gate_rate: float
    beta: float
    seed: int

    @property
    def total(self) -> int:
        """Steps of both stages."""
        return self.steps + self.gate_steps


def windows_of(tokens: Tensor, recipe: Recipe, step: int) -> Tensor:
    """The windows ``[batch, window + 1]`` of a step, from ``tokens [N]``.

    Every epoch cuts the tokens anew, at a random phase, and takes the pieces in random order, each once.
    """
    pieces = (len(tokens) - recipe.window - 1) // recipe.window
    epoch, index = divmod(step, pieces // recipe.batch)
    random = torch.Generator().manual_seed(recipe.seed + 1 + epoch)
    phase = int(torch.randint(recipe.window, (), generator=random))
    order = torch.randperm(pieces, generator=random)[index * recipe.batch : (index + 1) * recipe.batch]
    starts = phase + recipe.window * order
    return tokens[starts[:, None] + torch.arange(recipe.window + 1)]


class Training:
    """A model on its way. ``step`` counts the steps that are done; ``loss`` is that of the last one."""

    def __init__(self, config: OuroConfig, recipe: Recipe, tokens: Tensor, compute: torch.dtype) -> None:
        self.recipe = recipe
        self.model = LoopedModel(config, compute)
        self.model.initialise(recipe.seed)
        self.step = 0
        self.loss = math.nan
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self._tokens = tokens
        self._optimizer = self._make_optimizer()

    @property
    def done(self) -> bool:
        """Whether both stages are."""
        return self.step == self.recipe.total

    @property
    def in_gate_stage(self) -> bool:
        """Whether the next step is one of stage II."""
        return self.step >= self.recipe.steps

    def advance(self) -> None:
        """One step."""
        wall, cpu = time.perf_counter(), time.process_time()
        if self.step == self.recipe.steps:
            self._optimizer = self._make_optimizer()
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        windows = windows_of(self._tokens, self.recipe, self.step)
        loss = self._gate_loss(windows) if self.in_gate_stage else self._whole_loss(windows)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([p for group in self._optimizer.param_groups for p in group["params"]], _MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss = float(loss.detach())
        self.step += 1
        self.seconds += time.perf_counter() - wall
        self.cpu_seconds += time.process_time() - cpu

    def save(self, file: Path, facts: dict[str, str]) -> None:
        """Write everything that the next step needs, with ``facts`` about its surroundings; whole or not at all."""
        state = {
            "facts": facts,
            "recipe": asdict(self.recipe),
            "progress": [self.step, self.loss, self.seconds, self.cpu_seconds],
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        staging = file.with_suffix(".new")
        torch.save(state, staging)
        os.replace(staging, file)

    def load(self, file: Path, facts: dict[str, str]) -> None:
        """Go on from what `save` wrote.

        Raises `CheckpointError` if it was written with another recipe or other facts.
        """
        state: dict[str, Any] = torch.load(file, weights_only=True)
        for name, now in (("recipe", asdict(self.recipe)), ("facts", facts)):
            for key, value in now.items():
                if state[name].get(key) != value:
                    raise CheckpointError(
                        f"{file}: was begun with {key} {state[name].get(key)!r}, and now it is {value!r}; "
                        "go on as it was begun, or name another folder"
                    )
        self.step, self.loss, self.seconds, self.cpu_seconds = state["progress"]
        self.model.load_state_dict(state["model"])
        if self.step > self.recipe.steps:
            self._optimizer = self._make_optimizer()
        self._optimizer.load_state_dict(state["optimizer"])

    def _make_optimizer(self) -> torch.optim.AdamW:
        """For the stage that the next step belongs to. Matrices decay, norms and gate do not."""
        gate = list(self.model.model.early_exit_gate.parameters())
        if self.in_gate_stage:
            return torch.optim.AdamW(gate, betas=_BETAS, weight_decay=0.0)
        own = {id(weight) for weight in gate}
        decays = [p for p in self.model.parameters() if p.dim() == 2 and id(p) not in own]
        plain = [p for p in self.model.parameters() if p.dim() == 1 and id(p) not in own]
        groups = [{"params": decays, "weight_decay": _DECAY}, {"params": plain + gate, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, betas=_BETAS, fused=True)

    def _rate(self) -> float:
        """Learning rate of the next step: a warm-up, then half a cosine down, in each stage."""
        recipe = self.recipe
        if self.in_gate_stage:
            highest, share = recipe.gate_rate, (self.step - recipe.steps) / recipe.gate_steps
        else:
            highest, share = recipe.rate, self.step / recipe.steps
        down = _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))
        return highest * min(1.0, (share + 1e-3) / _WARM_UP) * down

    def _whole_loss(self, windows: Tensor) -> Tensor:
        return expected_loss(*self.model.score(windows), self.recipe.beta)

    def _gate_loss(self, windows: Tensor) -> Tensor:
        with torch.no_grad():
            states = self.model.model(windows[:, :-1])
            loss = self.model.losses(states, windows[:, 1:])
        return adaptive_loss(loss, self.model.gate(states))
