"""The model that comes with Weft, written anew as a plugin: `weft generate DIR --plugins DIR/model.py` loads it."""

from dataclasses import dataclass

from torch import nn

from weft.engine.models.config_json.common_fields import common_fields
from weft.engine.models.layers.attention import Attention, Heads
from weft.engine.models.layers.basic import Embedding, Layer, RMSNorm
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.models.layers.moe import MoEConfig, SparseMoE
from weft.engine.models.layers.rotary import Rotary
from weft.engine.models.layers.routing import Routing
from weft.stream.stream import GROUP


class DecoderLayer(Layer):
    def __init__(self, b, path, c):
        super().__init__(path)
        self.input_norm = RMSNorm(b, f"{path}.input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.attention = Attention(b, f"{path}.self_attn", c.hidden_size, c.heads)
        self.post_norm = RMSNorm(b, f"{path}.post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.moe = SparseMoE(b, f"{path}.mlp", c.hidden_size, c.moe)

    def forward(self, stream, rotary, caches):
        stream.add(self.attention(stream.read(self.input_norm, rows=GROUP), rotary, caches))
        stream.add(self.moe(stream.read(self.post_norm, rows=self.moe.takes)))


class Tiny(Layer):
    def __init__(self, b, c):
        super().__init__("model")
        self.config, self.rotary = c, Rotary(c.rope, b.device)
        self.embed = Embedding(b, "model.embed_tokens", c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(b, f"model.layers.{i}", c) for i in range(c.num_layers))
        self.norm = RMSNorm(b, "model.norm", c.hidden_size, c.rms_norm_eps)

    def forward(self, stream, batch, caches):
        hidden = self.embed(batch.tokens)
        rotary = self.rotary(batch.positions, hidden.value.dtype)
        stream.add(hidden)
        for layer in self.layers:
            layer(stream, rotary, caches)
        rows = stream.read(self.norm, rows=GROUP).require_complete("head")[batch.sample_rows]
        return nn.functional.linear(rows, self.embed.weight).float()


@dataclass(frozen=True)
class TinyConfig(ModelConfig):
    moe: MoEConfig
    heads: Heads

    def build(self, b):
        return Tiny(b, self)


def read(fields):
    """Every field of config.json must be asked for: one that is skipped would be refused."""
    common = common_fields(fields, head_dim=fields.need("hidden_size") // fields.need("num_attention_heads"))
    moe = MoEConfig(
        experts=fields.need("num_experts"),
        inner=fields.need("moe_intermediate_size"),
        routing=Routing(k=fields.need("num_experts_per_tok"), renormalise=True),
        shared=fields.need("shared_expert_intermediate_size"),
    )
    heads = Heads(common["num_heads"], common["num_kv_heads"], common["head_dim"], bias=True)
    return TinyConfig(**common, moe=moe, heads=heads)


FAMILIES = {"tiny": read}
