"""From what a client sends to the tokens of its prompts, within limits that are checked first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from weft.engine.controller.engine import Engine
from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.protocol import CommonRequest, CompletionRequest
from weft.serve.chat.templates import Templates
from weft.serve.http.errors import ApiError

SPARE_TOKENS = 64
"""By which a text that is cut to its last tokens is longer than those when it is encoded."""


class Prompts:
    """Of one engine. ApiError 400 for what cannot be served. Long texts take a while: not for the event loop.

    templates: what renders chat templates; takes_templates: whether requests may bring them.
    """

    def __init__(self, engine: Engine, templates: Templates, takes_templates: bool):
        self._engine, self._tokenizer, self._templates = engine, engine.tokenizer, templates
        self._takes_templates = takes_templates

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token, which no token of a text exceeds."""
        return max(map(len, self._tokenizer.get_vocab()))

    def of_completion(self, body: CompletionRequest) -> list[list[int]]:
        """Each prompt's tokens."""
        prompt: Any = body.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            raise ApiError(400, "prompt is empty; give one or more", param="prompt")
        self.check_choices(len(prompt) * body.n, "prompt" if body.n == 1 else "n")
        kept, special = self._kept(body), body.add_special_tokens
        if kept is None:
            self.check_length(sum(len(p) for p in prompt if isinstance(p, str)), "prompt", len(prompt))
        return [self._tokens(p, kept, special) for p in prompt]

    def of_chat(self, body: ChatRequest) -> list[int]:
        """The tokens of its messages and tools, through the chat template."""
        return self.of_chat_text(self.chat_text(body), body)

    def of_chat_text(self, text: str, body: ChatRequest) -> list[int]:
        """The tokens of what `chat_text` gave."""
        return self._tokens(text, self._kept(body), body.add_special_tokens)

    def chat_text(self, body: ChatRequest) -> str:
        """What the chat template makes of its messages and tools."""
        self.check_choices(body.n, "n")
        if body.chat_template is not None and not self._takes_templates:
            message = "chat_template is not taken here; start weft serve with --trust-request-chat-template"
            raise ApiError(400, message, param="chat_template")
        whole = self._kept(body) is None
        if whole and (count := len(body.messages)) > self._engine.max_model_len:  # none is less than a token
            raise self._too_long(f"{count} messages", "messages")
        if whole:
            characters = sum(m.characters for m in body.messages) + sum(len(json.dumps(f)) for f in body.offered)
            self.check_length(characters, "messages")
        text = body.prompt(self._tokenizer, self._templates)
        if whole:
            self.check_length(len(text), "messages")
        return text

    def encode(self, text: str, special: bool) -> list[int]:
        """A text's tokens; special: with those that the tokenizer puts around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens that a client names."""
        vocabulary = self._engine.text_processor.vocabulary
        if not all(0 <= token < vocabulary for token in tokens):  # the tokenizer would fail on some of them
            raise ApiError(400, f"prompt: its tokens must be between 0 and {vocabulary - 1}", param="prompt")
        return str(self._tokenizer.decode(tokens))

    def check_choices(self, count: int, param: str) -> None:
        """Refuses more choices than the engine takes at once."""
        limit = self._engine.config.max_choices
        if count > limit:
            message = f"{param}: the request has {count} choices (prompts × n); at most {limit} are allowed"
            raise ApiError(400, message, param=param)

    def check_length(self, characters: int, param: str, prompts: int = 1) -> None:
        """Refuses text that cannot fit, before it is encoded: that takes a hundred times its size of memory."""
        if characters > prompts * self._engine.max_model_len * self._longest_token:
            raise self._too_long(f"{characters} characters", param)

    def _too_long(self, what: str, param: str) -> ApiError:
        context = f"This model's maximum context length is {self._engine.max_model_len} tokens"
        message = f"{context}. However, {what} cannot fit. Please shorten {param}."
        return ApiError(400, message, param=param, code="context_length_exceeded")

    def _kept(self, body: CommonRequest) -> int | None:
        """How many of a prompt's last tokens are kept; None: all. -1 keeps what fits beside the output."""
        longest, wanted = self._engine.max_model_len - 1, body.truncate_prompt_tokens
        if wanted is None or wanted > longest:
            return None  # what is longer than the context is refused as ever
        if wanted == -1:
            wanted = longest + 1 - max(body.output_limit or 1, 1)
        return max(wanted, 1)

    def _tokens(self, prompt: str | list[int], kept: int | None, special: bool) -> list[int]:
        """A prompt's tokens, of which so many are kept. Of a text only an end is encoded that holds more tokens than
        those: where it is cut its tokens differ, and no further than the spare ones.
        """
        if isinstance(prompt, str):
            begin = 0 if kept is None else -(kept + SPARE_TOKENS) * self._longest_token
            prompt = self.encode(prompt[begin:], special)
        return prompt if kept is None else prompt[-kept:]
