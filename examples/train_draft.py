"""Trains the draft layer of the embedded model, which `--speculative mtp` runs; the model itself stays as it is.

    python examples/train_draft.py --out /tmp/drafting --minutes 8
    python examples/train_draft.py --out /tmp/smoke --steps 2 --problems 2000 --rows 4

A row of the layer gets the model's last hidden state at a token and the next token, and predicts the one after it.
Later drafts get the layer's own state instead. The layer learns both from the conversations of train_embedded.py: it
runs `--passes` times over each row, as drafting does, and matches the model's distribution. It is saved with the
model's weights, under the names of Qwen3-Next's draft layer.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from train_embedded import make_problems, pack
from transformers import AutoTokenizer, Qwen2MoeForCausalLM
from transformers.models.qwen2_moe.modeling_qwen2_moe import (
    Qwen2MoeConfig,
    Qwen2MoeDecoderLayer,
    Qwen2MoeRMSNorm,
    apply_rotary_pos_emb,
)

from weft.engine.assets import embedded_model_dir
from weft_bench.word_problems import generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=embedded_model_dir(), help="folder of the model (default: the embedded one)")
    add("--out", type=Path, required=True, help="folder to write the model with its draft layer to")
    add("--steps", type=int, default=2000, help="optimizer steps (default 2000)")
    add("--minutes", type=float, default=math.inf, help="end the training after this long (default: never)")
    add("--rows", type=int, default=16, help="rows of 256 tokens in a step (default 16)")
    add("--problems", type=int, default=100_000, help="training problems to make (default 100000)")
    add("--passes", type=int, default=3, help="drafts of a row to learn (default 3)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (default 0.002)")
    add("--seed", type=int, default=0, help="seed of data and order (default 0)")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = Qwen2MoeForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = pack(make_problems(args.problems, args.seed), tokenizer, args.seed)
    draft = DraftLayer(model)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    order, began = torch.randperm(len(data.tokens)), time.monotonic()
    for step in range(1, args.steps + 1):
        done = max(step / args.steps, (time.monotonic() - began) / 60 / args.minutes)
        if done > 1:
            break
        optimizer.param_groups[0]["lr"] = (
            args.lr * min(1.0, step / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        )
        at = order.roll(-step * args.rows)[: args.rows]
        losses, right = learn(model, draft, data.tokens[at], data.learn[at], args.passes)
        torch.stack(losses).sum().backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == 1:
            values = ", ".join(f"{share:.3f}" for share in right)
            print(f"step {step}: right {values}, {(time.monotonic() - began) / 60:.2f} min", flush=True)
    save(draft, args.model, args.out)
    held = pack(generate("heldout", 400, seed=1234), tokenizer, args.seed)
    with torch.no_grad():
        _, right = learn(model, draft, held.tokens, held.learn, args.passes)
    print("held-out drafts that the model samples, by position: " + ", ".join(f"{share:.3f}" for share in right))


class DraftLayer(nn.Module):
    """Draft layer with the shapes of the model's last layer, which it begins from."""

    def __init__(self, model: Qwen2MoeForCausalLM):
        super().__init__()
        config: Qwen2MoeConfig = model.config
        width, last = config.hidden_size, model.model.layers[-1]
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            Qwen2MoeRMSNorm(width, config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * width, width, bias=False)
        half = torch.eye(width) / 2
        self.fc.weight.data = torch.cat([half, half], 1) + 0.01 * torch.randn(width, 2 * width)
        self.layer = Qwen2MoeDecoderLayer(config, config.num_hidden_layers - 1)
        self.layer.load_state_dict(last.state_dict())
        self.layer.requires_grad_(True)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the states `[rows, T, width]` of a pass; append its keys and values to `earlier`.

        A row of pass n sees the first pass up to n − 1 tokens before it, then one row of each pass.
        """
        both = [self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(both, -1))
        attention, rows = self.layer.self_attn, x.shape[1]
        normed = self.layer.input_layernorm(x)
        heads = (*x.shape[:2], -1, attention.head_dim)
        q, k, v = (
            f(normed).view(heads).transpose(1, 2) for f in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        k, v = (each.repeat_interleave(attention.num_key_value_groups, 1) for each in (k, v))
        earlier.append((k, v))
        behind = len(earlier) - 1
        first_k, first_v = earlier[0]
        scores = (q @ first_k.transpose(-1, -2)) * attention.scaling
        scores = scores.masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(-behind), -1e9)
        own = [(k.roll(behind - at, 2), v.roll(behind - at, 2)) for at, (k, v) in enumerate(earlier) if at]
        more = [(q * k).sum(-1, keepdim=True) * attention.scaling for k, _ in own]
        weights = torch.cat([scores, *more], -1).softmax(-1, dtype=torch.float32).to(v.dtype)
        out = weights[..., :rows] @ first_v
        for at, (_, v) in enumerate(own):
            out = out + weights[..., rows + at, None] * v
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        return self.norm(x + self.layer.mlp(self.layer.post_attention_layernorm(x)))


def learn(
    model: Qwen2MoeForCausalLM, draft: DraftLayer, tokens: Tensor, taught: Tensor, passes: int
) -> tuple[list[Tensor], list[float]]:
    """Return the loss of each pass, and the share of rows with as many right drafts."""
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            hidden = model.model(tokens, use_cache=False).last_hidden_state
            embeddings = model.model.embed_tokens(tokens[:, 1:])
            places = torch.arange(tokens.shape[1] - 1)[None]
            rotary = model.model.rotary_emb(embeddings, places)
        at, state = taught.roll(-2, 1)[:, :-1].clone(), hidden[:, :-1]
        at[:, -1] = False
        wanted = model.lm_head(hidden[:, 1:][at]).float()
        losses, right, earlier = [], [], list[tuple[Tensor, Tensor]]()
        so_far = torch.ones(at.shape, dtype=torch.bool)
        for number in range(passes):
            state = draft(embeddings, state if number == 0 else state.roll(1, 1), rotary, earlier)
            found = model.lm_head(state[at]).float()
            losses.append(F.kl_div(found.log_softmax(-1), wanted.softmax(-1), reduction="batchmean"))
            equal = torch.zeros(at.shape, dtype=torch.bool)
            equal[at] = found.argmax(-1) == wanted.argmax(-1)
            so_far = equal & (so_far if number == 0 else so_far.roll(1, 1))
            right.append(float(so_far[at].float().mean()))
    return losses, right


def save(draft: DraftLayer, model: Path, out: Path) -> None:
    """Write the model's folder with the draft layer, in bfloat16."""
    if out.resolve() != model.resolve():
        shutil.copytree(model, out, dirs_exist_ok=True)
    tensors = load_file(model / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if not name.startswith("mtp.")}
    for name, value in draft.state_dict().items():
        name, value = f"mtp.{name.replace('layer.', 'layers.0.', 1)}", value.to(torch.bfloat16).contiguous()
        if "mlp.experts." not in name:
            tensors[name] = value
            continue
        parts = value.chunk(2, 1) if name.endswith("gate_up_proj") else (value,)
        kinds = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
        for kind, part in zip(kinds, parts, strict=True):
            for expert, weight in enumerate(part):
                tensors[f"{name.rpartition('.')[0]}.{expert}.{kind}.weight"] = weight.contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
