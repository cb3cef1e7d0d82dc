"""Tokens of a request's prompts, and limits that are checked before tokenising."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.protocol import CommonRequest, CompletionRequest
from weft.serve.chat.templates import Templates
from weft.serve.http.errors import ApiError, bad_field
from weft.serve.http.remote_engine import AnyEngine

SPARE_TOKENS = 64
"""Extra tokens to encode of a text that is truncated to its last tokens."""


class Prompts:
    """Tokeniser of an engine's prompts. Raises ApiError 400. Long texts are slow: do not call it on the event loop.

    templates: renders chat templates. takes_templates: requests may have their own.
    """

    def __init__(self, engine: AnyEngine, templates: Templates, takes_templates: bool):
        self._engine, self._tokenizer, self._templates = engine, engine.tokenizer, templates
        self._takes_templates = takes_templates

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def of_completion(self, body: CompletionRequest) -> list[list[int]]:
        """Return the tokens of each prompt."""
        prompt: Any = body.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            raise bad_field("prompt", " is empty; give one or more")
        self.check_choices(len(prompt) * body.n, "prompt" if body.n == 1 else "n")
        max_tokens, special = self._kept(body), body.add_special_tokens
        if max_tokens is None:
            self.check_length(sum(len(p) for p in prompt if isinstance(p, str)), "prompt", len(prompt))
        return [self._tokens(p, max_tokens, special) for p in prompt]

    def of_chat(self, body: ChatRequest, text: str | None = None) -> list[int]:
        """Return the tokens of a chat's messages and tools. text: result of `chat_text`, if it is there already."""
        return self._tokens(self.chat_text(body) if text is None else text, self._kept(body), body.add_special_tokens)

    def chat_text(self, body: ChatRequest) -> str:
        """Return a chat's messages and tools, rendered by the chat template."""
        self.check_choices(body.n, "n")
        if body.chat_template is not None and not self._takes_templates:
            rest = " is not accepted here; start weft serve with --trust-request-chat-template"
            raise bad_field("chat_template", rest)
        untruncated = self._kept(body) is None
        if untruncated and (count := len(body.messages)) > self._engine.max_model_len:  # each has at least one token
            raise self._too_long(f"{count} messages", "messages")
        if untruncated:
            characters = sum(m.characters for m in body.messages) + sum(len(json.dumps(f)) for f in body.offered)
            self.check_length(characters, "messages")
        text = body.prompt(self._tokenizer, self._templates)
        if untruncated:
            self.check_length(len(text), "messages")
        return text

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text. special: add the tokenizer's special tokens around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a client's tokens."""
        vocabulary = self._engine.text_processor.vocabulary
        if not all(0 <= token < vocabulary for token in tokens):  # the tokenizer fails on some others
            raise bad_field("prompt", f": its tokens must be between 0 and {vocabulary - 1}")
        return str(self._tokenizer.decode(tokens))

    def check_choices(self, count: int, param: str) -> None:
        """Raise ApiError 400 for more choices than the engine accepts."""
        limit = self._engine.config.max_choices
        if count > limit:
            raise bad_field(param, f": the request has {count} choices (prompts × n); at most {limit} are allowed")

    def check_length(self, characters: int, param: str, prompts: int = 1) -> None:
        """Raise ApiError 400 of `param` if `characters` in `prompts` cannot fit: encoding takes 100 times that."""
        if characters > prompts * self._engine.max_model_len * self._longest_token:
            raise self._too_long(f"{characters} characters", param)

    def _too_long(self, what: str, param: str) -> ApiError:
        context = f"This model's maximum context length is {self._engine.max_model_len} tokens"
        message = f"{context}. However, {what} cannot fit. Please shorten {param}."
        return ApiError(400, message, param=param, code="context_length_exceeded")

    def _kept(self, body: CommonRequest) -> int | None:
        """Return the number of last tokens to keep; None: all. A request's -1 keeps all that fit with the output."""
        longest, requested = self._engine.max_model_len - 1, body.truncate_prompt_tokens
        if requested is None or requested > longest:
            return None  # longer prompts than the context are refused as usual
        if requested == -1:
            requested = longest + 1 - max(body.output_limit or 1, 1)
        return max(requested, 1)

    def _tokens(self, prompt: str | list[int], kept: int | None, special: bool) -> list[int]:
        """Return the last `kept` tokens of a prompt, all for None."""
        if isinstance(prompt, str):
            # Encode only an end of the text: tokens differ near the cut, within the spare tokens.
            begin = 0 if kept is None else -(kept + SPARE_TOKENS) * self._longest_token
            prompt = self.encode(prompt[begin:], special)
        return prompt if kept is None else prompt[-kept:]
