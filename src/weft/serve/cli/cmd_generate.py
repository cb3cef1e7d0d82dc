"""`weft generate`."""

from __future__ import annotations

import json
import queue
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from weft.serve.cli.command import EngineArguments, ModelDir, WithRay, engine_config, stop_on_sigterm, user_errors
from weft.serve.cli.ray_hosts import agents
from weft.serve.cli.several_hosts import run_agent
from weft.serve.cli.start import LayoutChoice, start_engine, with_layout


@dataclass(frozen=True)
class Command:
    """Complete prompts on the terminal, and print tokens as they are sampled.

    Examples:
      weft generate --chat --prompt "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
      weft generate DIR --prompt "Once upon a time" --max-tokens 64 --temperature 0.8 --seed 1
      weft generate DIR --prompt "One" "Two" --json
    """

    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT...")]
    """One or more prompts."""
    model: ModelDir = None
    engine: EngineArguments = field(default_factory=EngineArguments)
    layout: LayoutChoice = "given"
    ray: WithRay = False
    chat: bool = False
    """Render each prompt with the model's chat template, as a user message."""
    max_tokens: int = 128
    """Maximum tokens of an output."""
    temperature: float = 0.0
    """Sampling temperature; 0: greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of most probable tokens with at least this total probability."""
    top_k: int = 0
    """Number of most probable tokens to sample from; 0: all."""
    seed: int | None = None
    """Random seed: equal seeds sample equal tokens; omitted: a different seed each time."""
    stats: bool = False
    """Print on stderr how many drafts of --speculative were accepted."""
    json: bool = False
    """Print one JSON object per prompt once all are done, instead of text."""

    def run(self) -> int:
        """Generate the outputs and return the exit code. Raises UserError, LayoutError, ModelError, EngineError."""
        from weft.engine.messages.request import SamplingParams

        config = engine_config(self.model, self.engine, ray=self.ray)
        if config.node_rank:
            stop_on_sigterm()
            return run_agent(config)
        names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
        with user_errors():
            params = SamplingParams(**{name: getattr(self, name) for name in names})
        config = with_layout(config, self.layout)
        with agents(config, self.ray), start_engine(config) as engine:
            prompts = [self._tokens(engine.tokenizer, text) for text in self.prompt]
            with user_errors():
                if self.json:
                    self._print_json(engine.generate(prompts, params))
                else:
                    for text, prompt in zip(self.prompt, prompts, strict=True):
                        self._stream(engine, text, prompt, params)
            if self.stats:
                stats = engine.stats()
                text = f"{stats.generated_tokens} tokens in {stats.steps} steps"
                print(f"{text}, {sum(stats.accepted)} of {sum(stats.drafted)} drafts accepted", file=sys.stderr)
        return 0

    def _tokens(self, tokenizer: Any, text: str) -> list[int]:
        if self.chat:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=not self.chat))

    def _stream(self, engine: Any, text: str, prompt: list[int], params: Any) -> None:
        from weft.engine.config.config import EngineError

        if len(self.prompt) > 1:
            print(f"> {text}")
        increments: queue.SimpleQueue[Any] = queue.SimpleQueue()
        engine.submit(prompt, params, increments.put)
        while True:
            output = increments.get().take()
            sys.stdout.write(output.text)
            sys.stdout.flush()
            if output.finish_reason == "error":
                raise EngineError(engine.error or "the engine failed")
            if output.finish_reason:
                print()
                return

    def _print_json(self, results: list[Any]) -> None:
        for text, result in zip(self.prompt, results, strict=True):
            completion = {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}
            print(json.dumps({"prompt": text} | completion, ensure_ascii=False))
