"""`weft eval`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

from weft.serve.cli.command import (
    EngineArguments,
    ModelDir,
    UserError,
    WithRay,
    engine_config,
    stop_on_sigterm,
    user_errors,
)
from weft.serve.cli.progress import progress_bar
from weft.serve.cli.ray_hosts import agents
from weft.serve.cli.several_hosts import run_agent
from weft.serve.cli.start import start_engine


@dataclass(frozen=True)
class Command:
    """Score a model on arithmetic word problems with templates and numbers outside its training data.

    An output counts when its number is correct in digits and in words. Decoding is greedy, so all layouts have the
    same score.

    Examples:
      weft eval                                     the embedded model, 200 questions
      weft eval --questions 1000 --attn-dp 2 --attn-tp 2
      weft eval DIR --json
    """

    model: ModelDir = None
    engine: EngineArguments = field(default_factory=EngineArguments)
    ray: WithRay = False
    questions: int = 200
    """Number of problems."""
    seed: int = 0
    """Seed of the problems."""
    max_tokens: int = 200
    """Maximum tokens of an output."""
    json: bool = False
    """Print one JSON object with all outputs instead."""

    def run(self) -> int:
        """Print the score. Raises UserError, LayoutError, ModelError, EngineError."""
        from weft.engine.messages.request import SamplingParams
        from weft_bench import word_problems

        if self.questions < 1:
            raise UserError(f"questions is {self.questions}; it must be 1 or more")
        config = engine_config(self.model, self.engine, ray=self.ray, max_waiting=self.questions)
        if config.node_rank:
            stop_on_sigterm()
            return run_agent(config)
        problems = word_problems.generate("heldout", self.questions, self.seed)
        params = SamplingParams(max_tokens=self.max_tokens, temperature=0.0)
        with agents(config, self.ray), start_engine(config) as engine:
            chats = [word_problems.prompt(p.question) for p in problems]
            texts = engine.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
            prompts = [engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
            began = time.perf_counter()
            with progress_bar() as bar, user_errors():
                task = bar.add_task("completing", total=len(prompts))
                results = engine.generate(prompts, params, lambda: bar.advance(task))
            outputs = [result.text for result in results]
            seconds = time.perf_counter() - began
            tokens = engine.stats().generated_tokens
        correct = [word_problems.extract(o) == p.answer for o, p in zip(outputs, problems, strict=True)]
        score = sum(correct) / len(correct)
        if self.json:
            rows = [
                {"question": p.question, "expected": p.answer, "output": o, "correct": c}
                for p, o, c in zip(problems, outputs, correct, strict=True)
            ]
            summary = {"score": score, "questions": len(rows), "layout": str(config.mesh)}
            print(json.dumps(summary | {"tokens_per_second": tokens / seconds, "results": rows}, ensure_ascii=False))
        else:
            counted = f"{sum(correct)} of {len(correct)}"
            print(f"exact match {score:.1%} ({counted}), {tokens / seconds:.0f} tokens/s, {config.mesh}")
        return 0
