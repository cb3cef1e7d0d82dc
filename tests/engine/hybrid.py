"""A model family that Weft does not know, as a plugin: layers with a latent cache, a recurrent state and a window.

No model like it was ever trained; what it computes is written once more, in plain torch and on whole sequences, by
`PlainHybrid`, which shares nothing with it but the names of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.engine.attention.caches import StepCaches
from weft.engine.attention.forward_batch import Batch
from weft.engine.kv.cache_spec import Latent, Recurrent, Window
from weft.engine.models.config_json.common_fields import common_fields
from weft.engine.models.config_json.fields import Fields
from weft.engine.models.layers.basic import Builder, ColumnLinear, Embedding, Layer, Linear, Out, RMSNorm, RowLinear
from weft.engine.models.layers.mlp import GatedMLP
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.models.layers.rotary import Rotary, RotaryTable
from weft.stream.hidden import Hidden
from weft.stream.stream import GROUP, WORLD

VALUE, ROTATED, WINDOW = 16, 8, 6
DECAY = 0.9


@dataclass(frozen=True)
class HybridConfig(ModelConfig):
    """mixers: "latent", "recurrent" or "window" for each layer."""

    mixers: tuple[str, ...]
    intermediate_size: int

    def build(self, b: Builder) -> Any:
        return Hybrid(b, self)


def read(fields: Fields) -> HybridConfig:
    common = common_fields(fields, fields.need("head_dim"))
    return HybridConfig(
        **common, mixers=tuple(fields.need("mixers")), intermediate_size=fields.need("intermediate_size")
    )


FAMILIES = {"hybrid": read}


class LatentAttention(Layer):
    """All heads attend to one latent vector a token, of which the last elements carry the position."""

    def __init__(self, b: Builder, path: str, c: HybridConfig):
        super().__init__(path)
        width = VALUE + ROTATED
        self.q = ColumnLinear(
            b, f"{path}.q", c.hidden_size, [Out(f"{path}.q", c.num_heads * width, unit=width)], "attn_tp"
        )
        self.latent = Linear(b, f"{path}.latent", c.hidden_size, width)
        self.out = RowLinear(b, f"{path}.out", c.num_heads * VALUE, c.hidden_size, "attn_tp", unit=VALUE)
        self.cache = Latent(width, VALUE)

    def forward(self, x: Hidden, rotary: RotaryTable, caches: StepCaches) -> Hidden:
        latent = self.latent(x).require_complete(self.path)[:, None]

        def turn(y: Tensor) -> Tensor:
            return torch.cat((y[..., :VALUE], rotary(y[..., VALUE:])), dim=-1)

        def attend(q: Tensor) -> Tensor:
            q = turn(q.unflatten(-1, (-1, VALUE + ROTATED)))
            return caches.attend(self, q, turn(latent), scale=0.3)[0].flatten(1)

        return self.out(self.q(x).elementwise(attend, self.path))


class LinearAttention(Layer):
    """A state a head: it decays, takes in each token's key and value, and is read by its query. Keys are blurred with
    the key before, which is the second thing that is kept."""

    def __init__(self, b: Builder, path: str, c: HybridConfig):
        super().__init__(path)
        self.dim, features = c.head_dim, c.num_heads * c.head_dim
        outs = [Out(f"{path}.{name}", features, unit=c.head_dim) for name in "qkv"]
        self.qkv = ColumnLinear(b, f"{path}.qkv", c.hidden_size, outs, "attn_tp")
        self.out = RowLinear(b, f"{path}.out", features, c.hidden_size, "attn_tp", unit=c.head_dim)
        heads = self.qkv.sizes[0] // c.head_dim
        self.cache = Recurrent(((heads, self.dim, self.dim), (heads, self.dim)))

    def forward(self, x: Hidden, rotary: RotaryTable, caches: StepCaches) -> Hidden:
        def run(qkv: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in qkv.chunk(3, dim=-1))
            out = torch.empty_like(v)
            states, keys = caches.load(self)
            row = 0
            for sequence, (rows, _) in enumerate(caches.batch.spans or [(1, 0)] * len(v)):
                for _ in range(rows):
                    key = k[row] + 0.5 * keys[sequence]
                    states[sequence] = DECAY * states[sequence] + key[:, :, None] * v[row][:, None]
                    out[row] = (q[row][:, None] @ states[sequence])[:, 0]
                    keys[sequence] = k[row]
                    row += 1
            caches.store(self, (states, keys))
            return out.flatten(1)

        return self.out(self.qkv(x).elementwise(run, self.path))


class WindowAttention(Layer):
    """Each row sees the last few tokens; two heads share a key and a value."""

    def __init__(self, b: Builder, path: str, c: HybridConfig):
        super().__init__(path)
        self.dim = c.head_dim
        sizes = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
        outs = [
            Out(f"{path}.{n}", heads * c.head_dim, unit=c.head_dim, replicate=n != "q") for n, heads in sizes.items()
        ]
        self.qkv = ColumnLinear(b, f"{path}.qkv", c.hidden_size, outs, "attn_tp")
        self.out = RowLinear(b, f"{path}.out", c.num_heads * self.dim, c.hidden_size, "attn_tp", unit=self.dim)
        self.cache = Window(WINDOW, self.qkv.sizes[1] // self.dim, self.dim)

    def forward(self, x: Hidden, rotary: RotaryTable, caches: StepCaches) -> Hidden:
        def attend(qkv: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in qkv.split(self.qkv.sizes, dim=-1))
            return caches.attend(self, rotary(q), rotary(k), v, scale=0.3)[0].flatten(1)

        return self.out(self.qkv(x).elementwise(attend, self.path))


MIXERS = {"latent": LatentAttention, "recurrent": LinearAttention, "window": WindowAttention}


class Hybrid(Layer):
    """The decoder."""

    def __init__(self, b: Builder, c: HybridConfig):
        super().__init__("model")
        self.config = c
        self.embed = Embedding(b, "embed", c.vocab_size, c.hidden_size)
        self.rotary = Rotary(c.rope, b.device)
        self.mixers, self.mlps, self.norms = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for i, kind in enumerate(c.mixers):
            self.mixers.append(MIXERS[kind](b, f"layers.{i}.mixer", c))
            self.mlps.append(GatedMLP(b, f"layers.{i}.mlp", c.hidden_size, c.intermediate_size))
            for which in ("input", "post"):
                self.norms.append(RMSNorm(b, f"layers.{i}.{which}_norm", c.hidden_size, c.rms_norm_eps))
        self.norm = RMSNorm(b, "norm", c.hidden_size, c.rms_norm_eps)
        self.head = Linear(b, "head", c.hidden_size, c.vocab_size)

    def forward(self, stream: Any, batch: Batch, caches: StepCaches) -> Tensor:
        hidden = self.embed(batch.tokens)
        rotary = self.rotary(batch.positions, hidden.value.dtype)
        stream.add(hidden)
        for i, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            stream.add(mixer(stream.read(self.norms[2 * i], rows=GROUP), rotary, caches))
            stream.add(mlp(stream.read(self.norms[2 * i + 1], rows=WORLD)))
        rows = stream.read(self.norm, rows=GROUP).require_complete("head")[batch.sample_rows]
        return F.linear(rows, self.head.weight).float()


class PlainHybrid:
    """Reference of the same mathematics on a whole sequence, without caches, ranks or batches. weights: by name."""

    def __init__(self, config: HybridConfig, weights: dict[str, Tensor]):
        self.config, self.weights = config, weights

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return x / scale * self.weights[f"{name}.weight"]

    def turn(self, x: Tensor) -> Tensor:
        """`[T, heads, dim]` by its position."""
        base, dim = self.config.rope.parameters["rope_theta"], x.shape[-1]
        angle = torch.arange(len(x))[:, None] * base ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        ago = torch.arange(len(q))[:, None] - torch.arange(len(q))
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        scores = 0.3 * torch.einsum("qhd,khd->hqk", q, k)
        weights = scores.masked_fill((ago < 0) | (ago >= window), -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def mixer(self, x: Tensor, path: str, kind: str) -> Tensor:
        heads, dim = self.config.num_heads, self.config.head_dim
        if kind == "latent":
            q, latent = (
                self.linear(x, f"{path}.q").unflatten(-1, (heads, -1)),
                self.linear(x, f"{path}.latent")[:, None],
            )
            q, k = (torch.cat((y[..., :VALUE], self.turn(y[..., VALUE:])), -1) for y in (q, latent))
            out = self.attend(q, k, latent[..., :VALUE], 1 << 30)
        else:
            q, k, v = (self.linear(x, f"{path}.{name}").unflatten(-1, (-1, dim)) for name in "qkv")
            if kind == "window":
                out = self.attend(self.turn(q), self.turn(k), v, WINDOW)
            else:
                k = k + 0.5 * torch.cat((torch.zeros_like(k[:1]), k[:-1]))
                ago = torch.arange(len(q))[:, None] - torch.arange(len(q))
                decay = torch.where(ago < 0, 0.0, DECAY ** ago.clamp(min=0))
                out = torch.einsum("qhd,khd,qk,khe->qhe", q, k, decay, v)
        return self.linear(out.flatten(1), f"{path}.out")

    def logits(self, tokens: list[int]) -> Tensor:
        """Return the logits of the last token, `[vocabulary]`."""
        x = self.weights["embed.weight"][tokens]
        for i, kind in enumerate(self.config.mixers):
            x = x + self.mixer(self.norm(x, f"layers.{i}.input_norm"), f"layers.{i}.mixer", kind)
            y, mlp = self.norm(x, f"layers.{i}.post_norm"), f"layers.{i}.mlp"
            gate, up = (self.linear(y, f"{mlp}.{name}_proj") for name in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, f"{mlp}.down_proj")
        return self.linear(self.norm(x, "norm"), "head")[-1]
