"""Trains the embedded model: a small Qwen2-MoE that solves arithmetic word problems and shows its work.

    python examples/train_embedded.py --out /tmp/embedded --device cuda
    python examples/train_embedded.py --out /tmp/smoke --steps 5 --problems 2000 --rows 8 --eval 16  # any CPU

It makes the problems (weft_bench.word_problems), trains a tokenizer on the training split, trains the model on
conversations of a few problems, saves an ordinary Hugging Face folder, loads that folder again and reports the
exact match on held-out problems: unseen phrases and unseen numbers. The seeds are fixed, so --steps alone decides
the result up to rounding; --minutes ends the schedule early on a clock.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import load_balancing_loss_func
from transformers.utils.logging import disable_progress_bar

from weft_bench.word_problems import Problem, extract, generate, prompt

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SYSTEM = f"{START}system\nYou are a helpful assistant.{END}\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 1024
POSITIONS = 1024
ROW = 256
"""Tokens of one training row: a conversation of two or three problems."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write the model to")
    add(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda or cpu (default: what is there)",
    )
    add("--steps", type=int, default=4000, help="optimizer steps (default 4000)")
    add("--minutes", type=float, default=math.inf, help="end the training after this long (default: never)")
    add("--rows", type=int, default=256, help=f"rows of {ROW} tokens in a step (default 256)")
    add(
        "--problems",
        type=int,
        default=1_200_000,
        help="different training problems to make (default 1200000)",
    )
    add("--lr", type=float, default=1e-3, help="peak learning rate (default 0.001)")
    add("--eval", type=int, default=1000, help="held-out problems of the final score (default 1000)")
    add("--eval-every", type=int, default=1000, help="steps between saves and quick scores (default 1000)")
    add("--seed", type=int, default=0, help="seed of weights, data and order (default 0)")
    args = parser.parse_args()

    disable_progress_bar()
    torch.manual_seed(args.seed)
    problems = make_problems(args.problems, args.seed)
    print(
        f"{len(problems)} training problems, for example:\n{problems[0].question}\n{problems[0].solution}",
        flush=True,
    )
    tokenizer = train_tokenizer(problems[:50_000])
    tokenizer.save_pretrained(args.out)
    data = pack(problems, tokenizer, args.seed).to(args.device)
    print(f"{len(data.tokens)} rows of {ROW} tokens, {data.fill():.0%} full", flush=True)

    model = Qwen2MoeForCausalLM(model_config()).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters", flush=True)
    for step in train(model, data, args):
        if step % args.eval_every == 0:
            save(model, args.out)
            print(f"step {step}: quick held-out score {score(args.out, 200, args.device):.3f}", flush=True)
    save(model, args.out)
    print(f"held-out exact match {score(args.out, args.eval, args.device):.4f} over {args.eval}", flush=True)


def make_problems(count: int, seed: int) -> list[Problem]:
    """Return about `count` different training problems: repeats are dropped."""
    # A fixed number of processes, each with a seed, so that the data is the same on every machine.
    with ProcessPoolExecutor(4) as pool:
        parts = pool.map(generate, ["train"] * 4, [-(-count // 4)] * 4, range(seed, seed + 4))
        return list(dict.fromkeys(problem for part in parts for problem in part))


def train_tokenizer(problems: list[Problem]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with the ChatML template; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in (PAD, START, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (f"user\n{p.question}\nassistant\n{p.solution}\nsystem\n" for p in problems)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def model_config() -> Qwen2MoeConfig:
    """Heads divide over 4 ranks, experts and the features within each over 8."""
    return Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )


@dataclass(frozen=True)
class Rows:
    """tokens: int64 `[rows, ROW]`, padded right; learn: where a token is part of a solution and is learnt."""

    tokens: Tensor
    learn: Tensor

    def to(self, device: str) -> Rows:
        return Rows(self.tokens.to(device), self.learn.to(device))

    def fill(self) -> float:
        return float((self.tokens != 0).float().mean())


def pack(problems: list[Problem], tokenizer: PreTrainedTokenizerFast, seed: int) -> Rows:
    """Pack conversations of several problems into rows, so that later turns of a chat are learnt too.

    The last row, which is not full, is dropped.
    """
    fast = tokenizer.backend_tokenizer
    asked = [f"{START}user\n{p.question}{END}\n{START}assistant\n" for p in problems]
    as_chat = tokenizer.apply_chat_template(prompt(problems[0].question), tokenize=False, add_generation_prompt=True)
    assert asked[0] == as_chat, "training and serving must see the same prompt"
    questions = fast.encode_batch_fast(asked)
    answers = fast.encode_batch_fast([f"{p.solution}{END}\n" for p in problems])
    system = fast.encode(SYSTEM).ids
    rng = random.Random(seed)
    tokens = torch.zeros(len(problems), ROW, dtype=torch.int64)
    learn = torch.zeros(len(problems), ROW, dtype=torch.bool)
    row, ids, taught = 0, list[int](), list[bool]()
    for question, answer in zip(questions, answers, strict=True):
        if len(ids) + len(question.ids) + len(answer.ids) > ROW:
            tokens[row, : len(ids)] = torch.tensor(ids)
            learn[row, : len(ids)] = torch.tensor(taught)
            row, ids, taught = row + 1, [], []
        if not ids and rng.random() < 0.1:
            ids, taught = list(system), [False] * len(system)
        ids += question.ids + answer.ids
        # The newline after <|im_end|> is the template's, never the model's.
        taught += [False] * len(question.ids) + [True] * (len(answer.ids) - 1) + [False]
    return Rows(tokens[:row].clone(), learn[:row].clone())


def train(model: Qwen2MoeForCausalLM, data: Rows, args: argparse.Namespace) -> Iterator[int]:
    """Run the schedule, yielding the number of each step once it is done."""
    config = model.config
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=args.device != "cpu",
    )
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.empty(0, dtype=torch.int64)
    began = time.monotonic()
    for step in range(1, args.steps + 1):
        minutes = (time.monotonic() - began) / 60
        done = max(step / args.steps, minutes / args.minutes)
        if done > 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / 200) * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)
        while len(order) < args.rows:
            order = torch.cat([order, torch.randperm(len(data.tokens), generator=generator)])
        rows, order = order[: args.rows].to(args.device), order[args.rows :]
        tokens, learn = data.tokens[rows], data.learn[rows]
        with torch.autocast(args.device, torch.bfloat16):
            # No attention mask: padding lies to the right, where causal attention never looks.
            seen = model.model(tokens[:, :-1], output_router_logits=True, use_cache=False)
            logits = model.lm_head(seen.last_hidden_state[learn[:, 1:]])
        loss = F.cross_entropy(logits.float(), tokens[:, 1:][learn[:, 1:]])
        # Layer by layer: balance over all the layers together would let each layer use few experts.
        filled = (tokens[:, :-1] != 0).long()
        uneven = [
            load_balancing_loss_func((gate.float(),), config.num_experts, config.num_experts_per_tok, filled)
            for gate in seen.router_logits
        ]
        balance = torch.stack(uneven).mean()
        (loss + config.router_aux_loss_coef * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == 1:
            now = (time.monotonic() - began) / 60
            print(f"step {step}: loss {loss:.4f}, balance {balance:.3f} (2 is even), {now:.2f} min", flush=True)
        yield step


def save(model: Qwen2MoeForCausalLM, out: Path) -> None:
    """Save the weights in bfloat16, one tensor per expert, with the configuration of greedy generation."""
    config = model.config
    copy = Qwen2MoeForCausalLM(config).to(torch.bfloat16)
    copy.load_state_dict({name: value.to("cpu", torch.bfloat16) for name, value in model.state_dict().items()})
    copy.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    copy.save_pretrained(out)


@torch.inference_mode()
def score(folder: Path, count: int, device: str, batch: int = 500) -> float:
    """Return the exact match of greedy replies in float32 on `count` held-out problems; print three misses."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    problems = generate("heldout", count, seed=1234)
    right, misses = 0, []
    for at in range(0, count, batch):
        part = problems[at : at + batch]
        chats = [
            tokenizer.apply_chat_template(prompt(p.question), tokenize=False, add_generation_prompt=True) for p in part
        ]
        inputs = tokenizer(chats, return_tensors="pt", padding=True).to(device)
        replies = model.generate(**inputs, max_new_tokens=96)[:, inputs["input_ids"].shape[1] :]
        for problem, reply in zip(part, tokenizer.batch_decode(replies, skip_special_tokens=True), strict=True):
            if extract(reply) == problem.answer:
                right += 1
            else:
                misses.append(f"  {problem.question}\n    wanted {problem.solution}\n    got    {reply[:200]}")
    print("\n".join(misses[:3]), flush=True)
    return right / count


if __name__ == "__main__":
    main()
