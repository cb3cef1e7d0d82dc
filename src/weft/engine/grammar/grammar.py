"""Constrained decoding by llguidance: JSON schemas, regular expressions, choices, and Lark grammars."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import llguidance
import llguidance.hf

from weft.engine.grammar.grammar_sandbox import LIMITS, GrammarSandbox, one_line_error
from weft.engine.grammar.nullable import each_with_null

Kind = Literal["json", "regex", "choice", "grammar"]
SEPARATORS = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
"""Separators of JSON, as regular expressions. If any whitespace is allowed, some models write nothing else."""
MAX_TEXT = 2**21
"""Maximum characters of a grammar."""
MAX_GBNF = 2**16
"""Maximum characters of a GBNF grammar: conversion is quadratic in its length."""
MAX_BYTES = 2**26
"""Maximum memory of a compiled grammar."""
KEPT_BYTES = 2**28
"""Maximum memory of all compiled grammars in the cache."""


def grammar(kind: Kind, what: Any, *, any_whitespace: bool = False) -> str:
    """Return a grammar for `SamplingParams.grammar`. Raises ValueError if `what` is invalid for its kind.

    Args:
        kind: json, regex, choice or grammar.
        what: a schema (json-schema.org) or its text; an expression for the whole text; a list of texts; Lark or GBNF.
        any_whitespace: see `schema_text`.
    """
    try:
        if kind == "choice":
            return _sized(choice_of(what))
        if kind == "json":
            what = _sized(what) if isinstance(what, str) else what
            what = schema_text(json.loads(what) if isinstance(what, str) else what, any_whitespace=any_whitespace)
        elif kind == "grammar" and "::=" in what:
            _sized(what, MAX_GBNF)
        return str(llguidance.grammar_from(kind, _sized(what)))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def json_grammar(schema: Any) -> str:
    """Return a JSON schema as a grammar for `SamplingParams.grammar`."""
    return json.dumps({"grammars": [{"json_schema": schema}]})


def choice_of(texts: Sequence[str]) -> str:
    """Return Lark for one of these texts, as a terminal: alternatives of a rule would each cost an item of a row."""
    some = " | ".join(json.dumps(text) for text in texts if text)
    rule = ("CHOICE?" if "" in texts else "CHOICE") if some else '""'
    return f"start: {rule}\n" + (f"CHOICE: {some}\n" if some else "")


def _sized(text: str, limit: int = MAX_TEXT) -> str:
    if len(text) > limit:
        raise ValueError(f"a grammar of {len(text)} characters is too long; give at most {limit}")
    return text


def schema_text(schema: Any, *, any_whitespace: bool = False) -> str:
    """Return a JSON schema with separators; its own "x-guidance" takes precedence. OpenAPI's `nullable` allows null.

    any_whitespace: allow unlimited whitespace wherever JSON does; else one space may follow a comma or a colon.
    """
    schema = {} if schema is True else schema
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if isinstance(options, dict) and not any_whitespace:
        schema = schema | {"x-guidance": SEPARATORS | options}
    text = json.dumps(schema)
    return json.dumps(each_with_null(json.loads(text))) if '"nullable": true' in text else text


def followed(lead: str, grammar: str, name: str = "output") -> str:
    """Return a grammar that embeds `grammar` as `name`. lead: Lark with `@NAME` in the place of the other."""
    inner = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": lead}, inner[0] | {"name": name}, *inner[1:]]})


def either(lark: str, grammar: str) -> str:
    """Return a grammar of outputs that match either of two."""
    return followed(lark.replace("start:", "start: @other |", 1), grammar, "other")


class Grammar:
    """The state of one completion in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def mask(self, allowed: bytes) -> bytes:
        """Return the mask of the allowed next tokens (`weft.engine.scheduler.sampling_rows.bits`), within `allowed`
        unless that is empty.
        """
        mask = self._matcher.compute_bitmask()
        if not allowed:
            return mask
        both = int.from_bytes(mask, "little") & int.from_bytes(allowed, "little")
        return both.to_bytes(len(allowed), "little")

    def masks(self, allowed: bytes, drafts: Sequence[int]) -> list[bytes]:
        """Return the `mask` before the drafts and after each. Requires drafts that are `followed`."""
        masks = [self.mask(allowed)]
        for draft in drafts:
            self._matcher.consume_token(draft)
            masks.append(self.mask(allowed))
        self._matcher.rollback(len(drafts))
        return masks

    def followed(self, drafts: Sequence[int]) -> int:
        """Return the number of leading drafts that the grammar allows, without one after which nothing can follow."""
        count = self._matcher.try_consume_tokens(list(drafts))
        ended = self._matcher.is_stopped()
        self._matcher.rollback(count)
        return count - ended if count else 0

    def accept(self, token: int) -> bool:
        """Advance by a sampled token. Returns True if the text is complete and nothing can follow.

        Raises ValueError if the grammar rejects the token, which happens only where it allows none, or if it exceeds
        llguidance's limits.
        """
        if not self._matcher.consume_token(token):
            why = (self._matcher.get_error() or "no token may come").splitlines()[0]
            raise ValueError(f"the completion cannot go on in its grammar: {why}")
        return self._matcher.is_stopped()


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled grammar `text`, shared by any number of completions. bytes: its approximate memory."""

    matcher: llguidance.LLMatcher
    bytes: int
    text: str

    def start(self) -> Grammar:
        """Return the state at the grammar's beginning."""
        return Grammar(self.matcher.deep_copy())


class Grammars:
    """Compiler and cache of grammars for one tokenizer.

    vocabulary: number of the model's tokens, which may differ from the tokenizer's. ends: the model's end tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Iterable[int]):
        # llguidance refuses an end that its tokenizer lacks, as that of a shape with made-up weights.
        self._tokenizer, self._ends = tokenizer, [token for token in ends if token < len(tokenizer)]
        self._size = max(vocabulary, len(tokenizer))
        self._sandbox = GrammarSandbox(self._described)
        self._kept: OrderedDict[str, Compiled] = OrderedDict()  # most recently used last
        self._look, self._compile = threading.Lock(), threading.Lock()

    @cached_property
    def tokens(self) -> llguidance.LLTokenizer:
        """The tokenizer in llguidance's form: the bytes of each token."""
        return llguidance.hf.from_tokenizer(self._tokenizer, self._size, self._ends or None)

    @cached_property
    def named(self) -> frozenset[str]:
        """Tokens that a grammar matches by name only, never by text: special ones; llguidance counts every added token
        between < and > as special."""
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        return frozenset(token.content for number, token in added if self.tokens.is_special_token(number))

    def start(self, grammar: str | Compiled) -> Grammar:
        """Return the state at a grammar's beginning. A text is compiled first: see `compiled`."""
        return (self.compiled(grammar) if isinstance(grammar, str) else grammar).start()

    def compiled(self, grammar: str) -> Compiled:
        """Compile a grammar, for seconds at most; other threads run on. Raises ValueError if invalid or too large."""
        with self._look:
            if (known := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return known
        with self._compile:  # one at a time, and each grammar only once
            if (known := self._kept.get(grammar)) is None:
                known = self._tried(grammar)
                with self._look:
                    self._kept[grammar] = known
                    while sum(c.bytes for c in self._kept.values()) > KEPT_BYTES:
                        self._kept.popitem(last=False)
            return known

    def _tried(self, grammar: str) -> Compiled:
        try:
            size = self._sandbox.bytes_of(_sized(grammar))
            if size > MAX_BYTES:
                raise ValueError(f"compiled it takes {size >> 20} MiB; at most {MAX_BYTES >> 20} are given")
            matcher = llguidance.LLMatcher(self.tokens, grammar, log_level=0, limits=LIMITS)
            if matcher.is_error():
                raise ValueError(one_line_error(matcher.get_error()))
        except ValueError as error:
            raise ValueError(f"the grammar cannot be used: {error}") from error
        return Compiled(matcher, size, grammar)

    def _described(self) -> dict[str, Any]:
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return {"tokenizer": backend.to_str(), "vocabulary": self._size, "ends": self.tokens.eos_tokens}
