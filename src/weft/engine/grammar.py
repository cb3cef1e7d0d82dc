"""Answers that follow a grammar, by llguidance: JSON of a schema, a regular expression, a choice, or a Lark grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any, Literal

import llguidance
import llguidance.hf

Kind = Literal["json", "regex", "choice", "grammar"]
SEPARATORS = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
"""Of JSON, as regular expressions. Where any whitespace may come, some models write nothing else until the length."""


def grammar(kind: Kind, what: Any, *, any_whitespace: bool = False) -> str:
    """As `SamplingParams.grammar` takes it. ValueError for what is not of its kind.

    json: a schema (json-schema.org), or its text; any_whitespace as in `schema_text`. regex: matches the whole text.
    choice: a list of texts. grammar: Lark or GBNF.
    """
    try:
        if kind == "json":
            what = schema_text(json.loads(what) if isinstance(what, str) else what, any_whitespace=any_whitespace)
        elif kind == "choice":
            what = json.dumps(what)
        return str(llguidance.grammar_from(kind, what))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def schema_text(schema: Any, *, any_whitespace: bool = False) -> str:
    """A JSON schema as grammars embed it. any_whitespace: it may stand wherever JSON allows it, without end; else one
    space may follow a comma or a colon. What the schema's own "x-guidance" says comes first.
    """
    schema = {} if schema is True else schema
    own = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if isinstance(own, dict) and not any_whitespace:
        schema = schema | {"x-guidance": SEPARATORS | own}
    return json.dumps(schema)


def followed(lead: str, grammar: str) -> str:
    """A grammar that begins otherwise. lead: Lark, in which `@answer` stands for the grammar."""
    inner = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": lead}, inner[0] | {"name": "answer"}, *inner[1:]]})


class Grammar:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def mask(self, allowed: bytes) -> bytes:
        """Which tokens may come next, as `weft.engine.sampling.bits`; of `allowed` only, where that is not empty."""
        mask = self._matcher.compute_bitmask()
        return bytes(a & b for a, b in zip(mask, allowed, strict=False)) if allowed else mask

    def accept(self, token: int) -> bool:
        """Takes the next token; True where the text is whole and nothing can follow.

        Raises ValueError where the grammar does not allow the token, as none is drawn unless no other may come at all;
        or where the grammar has grown beyond llguidance's limits.
        """
        if not self._matcher.consume_token(token):
            why = (self._matcher.get_error() or "no token may come").splitlines()[0]
            raise ValueError(f"the answer cannot go on in its grammar: {why}")
        return self._matcher.is_stopped()


class Grammars:
    """Compiles grammars for one tokenizer. vocabulary: the model's, which may be larger, or smaller where tokens were
    added to the tokenizer alone. ends: the model's end tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Iterable[int]):
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, list(ends)
        self._compiled = lru_cache(maxsize=64)(self._compile)

    @cached_property
    def tokens(self) -> llguidance.LLTokenizer:
        """What llguidance knows of the tokenizer: the bytes of each token."""
        size = max(self._vocabulary, len(self._tokenizer))
        return llguidance.hf.from_tokenizer(self._tokenizer, size, self._ends or None)

    @cached_property
    def named(self) -> frozenset[str]:
        """Tokens that only their name in a grammar matches, as no text does: the special ones, and llguidance takes
        every added token between < and > for one."""
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        return frozenset(token.content for number, token in added if self.tokens.is_special_token(number))

    def start(self, grammar: str) -> Grammar:
        """At its beginning. ValueError for a grammar that is none, or too large; compiling may take a second."""
        return Grammar(self._compiled(grammar).deep_copy())

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self.tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be used: {matcher.get_error().splitlines()[0]}")
        return matcher
