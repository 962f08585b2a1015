"""Ouro as a torch module to train, and its losses (arXiv 2510.25741, sections 3.3 and 3.4).

Written for batches of whole sequences, with gradients. Its parameters carry the public names, so that its
``state_dict()`` is a checkpoint.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from wavegraph.model.config import OuroConfig

CONTINUE_SLOPE = 50.0
CONTINUE_THRESHOLD = 0.005
"""``k`` and ``gamma`` of section 3.4: another loop is worth it if it gains more than 0.005 nats."""

BRANCH_NORM = 0.2
"""First value of the norms after attention and MLP: a loop begins as a small change, or depth does not learn."""


class Projection(nn.Linear):
    """A linear map without bias, whose products are taken in ``compute`` and handed on in float32."""

    def __init__(self, inputs: int, outputs: int, compute: torch.dtype) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., inputs]`` -> ``[..., outputs]``."""
        return functional.linear(x.to(self.compute), self.weight.to(self.compute)).float()


class Norm(nn.Module):
    """Root mean square norm with a plain weight ``[size]``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., size]``, normed."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: OuroConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Projection(config.hidden_size, config.q_size, compute)
        self.k_proj = Projection(config.hidden_size, config.kv_size, compute)
        self.v_proj = Projection(config.hidden_size, config.kv_size, compute)
        self.o_proj = Projection(config.q_size, config.hidden_size, compute)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [B, T, H]``, ``cos, sin [T, head_dim / 2]`` -> ``[B, T, H]``."""
        q, k, v = (
            each(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, config: OuroConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, config.intermediate_size, compute)
        self.up_proj = Projection(config.hidden_size, config.intermediate_size, compute)
        self.down_proj = Projection(config.intermediate_size, config.hidden_size, compute)

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, T, H]`` -> ``[B, T, H]``."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One shared layer, with a norm before and after each of its two parts."""

    def __init__(self, config: OuroConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.self_attn = Attention(config, compute)
        self.mlp = Mlp(config, compute)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm_2 = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm_2 = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [B, T, H]`` -> ``[B, T, H]``."""
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x), cos, sin))
        out: Tensor = x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))
        return out


class Body(nn.Module):
    """What the public names call ``model``: embedding, shared layers, final norm and gate."""

    def __init__(self, config: OuroConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, compute) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)

    def forward(self, token_ids: Tensor) -> Tensor:
        """``token_ids [B, T]`` -> normed states ``[S, B, T, H]`` after each of the S loops."""
        cos, sin = self._angles(token_ids.shape[1])
        x = self.embed_tokens(token_ids)
        states = []
        for _ in range(self.config.total_ut_steps):
            for layer in self.layers:
                x = layer(x, cos, sin)
            x = self.norm(x)
            states.append(x)
        return torch.stack(states)

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position's angles, ``[length, head_dim / 2]``."""
        exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32) / self.config.head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self.config.rope_theta**-exponents)
        return angles.cos(), angles.sin()


class LoopedModel(nn.Module):
    """The whole model: ``model`` and ``lm_head``. Matrix products are taken in ``compute``, all else in float32."""

    def __init__(self, config: OuroConfig, compute: torch.dtype) -> None:
        super().__init__()
        self.model = Body(config, compute)
        self.lm_head = Projection(config.hidden_size, config.vocab_size, compute)

    def initialise(self, seed: int) -> None:
        """Draw the first weights."""
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.endswith(("layernorm_2.weight", "layernorm.weight", "norm.weight")):
                    weight.fill_(BRANCH_NORM if name.endswith("_2.weight") else 1.0)
                elif name.endswith(".bias"):
                    weight.zero_()
                else:
                    small = name.startswith(("lm_head", "model.early_exit_gate"))
                    embedding = name.startswith("model.embed_tokens")
                    spread = 1.0 if embedding else 0.02 if small else 1 / math.sqrt(weight.shape[1])
                    weight.normal_(0.0, spread, generator=random)

    def score(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """``windows [B, T + 1]`` -> loss in nats of each next token, and logits of the gate, both ``[S, B, T]``."""
        states = self.model(windows[:, :-1])
        return self.losses(states, windows[:, 1:]), self.gate(states)

    def losses(self, states: Tensor, targets: Tensor) -> Tensor:
        """``states [S, B, T, H]``, ``targets [B, T]`` -> loss of each target after each loop ``[S, B, T]``."""
        wanted = targets.expand(len(states), -1, -1)
        logits = self.lm_head(states).flatten(0, 2)
        return functional.cross_entropy(logits, wanted.flatten(), reduction="none").view(wanted.shape)

    def gate(self, states: Tensor) -> Tensor:
        """``states [S, B, T, H]`` -> logits of leaving after each loop ``[S, B, T]``."""
        out: Tensor = self.model.early_exit_gate(states).squeeze(-1)
        return out


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = heads.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def exit_distribution(gate_logits: Tensor) -> Tensor:
    """``gate_logits [S, ...]`` -> chance to leave after each loop ``[S, ...]``; the last one takes what is left."""
    stay = torch.cumprod(torch.sigmoid(-gate_logits[:-1]), dim=0)
    before = torch.cat([torch.ones_like(stay[:1]), stay])
    return torch.cat([before[:-1] - stay, before[-1:]])


def expected_loss(loss: Tensor, gate_logits: Tensor, beta: float) -> Tensor:
    """Section 3.3: mean over tokens of the loss expected at exit, less ``beta`` times the exit's entropy.

    ``loss, gate_logits [S, ...]``; a scalar.
    """
    exits = exit_distribution(gate_logits)
    entropy = -(exits * exits.clamp_min(1e-9).log()).sum(0)
    return ((exits * loss).sum(0) - beta * entropy).mean()


def adaptive_loss(loss: Tensor, gate_logits: Tensor) -> Tensor:
    """Section 3.4: how far the gate's wish to go on is from what the loop just done has gained; a scalar.

    ``loss [S, ...]`` must carry no gradient. The gate after loop t (t = 2..S) is compared with the gain of loop t over
    loop t - 1.
    """
    gain = (loss[:-1] - loss[1:]).clamp_min(0.0)
    go_on = torch.sigmoid(CONTINUE_SLOPE * (gain - CONTINUE_THRESHOLD))
    each = functional.binary_cross_entropy_with_logits(-gate_logits[1:], go_on, reduction="none")
    return each.flatten(1).mean(1).sum() / len(loss)
