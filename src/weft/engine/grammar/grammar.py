"""Completions that follow a grammar, by llguidance: a JSON schema, a regular expression, a choice, or a Lark
grammar."""

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

from weft.engine.grammar.grammar_sandbox import LIMITS, GrammarSandbox, in_a_line

Kind = Literal["json", "regex", "choice", "grammar"]
SEPARATORS = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
"""Of JSON, as regular expressions. Where any whitespace may come, some models write nothing else until the length."""
MAX_TEXT = 2**21
"""Characters of a grammar."""
MAX_GBNF = 2**16
"""Characters of one as GBNF, which takes Python the square of its length to convert."""
MAX_BYTES = 2**26
"""Of memory that a compiled grammar may take."""
KEPT_BYTES = 2**28
"""Of memory that all take which are kept for the next request."""


def grammar(kind: Kind, what: Any, *, any_whitespace: bool = False) -> str:
    """As `SamplingParams.grammar` takes it. ValueError for what is not of its kind.

    json: a schema (json-schema.org), or its text; any_whitespace as in `schema_text`. regex: matches the whole text.
    choice: a list of texts. grammar: Lark or GBNF.
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
    """Return a JSON schema as `SamplingParams.grammar` takes it."""
    return json.dumps({"grammars": [{"json_schema": schema}]})


def choice_of(texts: Sequence[str]) -> str:
    """Lark of one of these texts. It is one terminal: each alternative of a rule takes a place in the parser's row."""
    some = " | ".join(json.dumps(text) for text in texts if text)
    rule = ("CHOICE?" if "" in texts else "CHOICE") if some else '""'
    return f"start: {rule}\n" + (f"CHOICE: {some}\n" if some else "")


def _sized(text: str, limit: int = MAX_TEXT) -> str:
    if len(text) > limit:
        raise ValueError(f"a grammar of {len(text)} characters is too long; give at most {limit}")
    return text


def schema_text(schema: Any, *, any_whitespace: bool = False) -> str:
    """A JSON schema as grammars embed it. any_whitespace: it may stand wherever JSON allows it, without end; else one
    space may follow a comma or a colon. What the schema's own "x-guidance" says comes first.
    """
    schema = {} if schema is True else schema
    own = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if isinstance(own, dict) and not any_whitespace:
        schema = schema | {"x-guidance": SEPARATORS | own}
    return json.dumps(schema)


def followed(lead: str, grammar: str, name: str = "output") -> str:
    """Return a grammar around another. lead: Lark, in which `@NAME` stands for the other."""
    inner = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": lead}, inner[0] | {"name": name}, *inner[1:]]})


def either(lark: str, grammar: str) -> str:
    """Return a grammar of outputs that follow the one or the other."""
    return followed(lark.replace("start:", "start: @other |", 1), grammar, "other")


class Grammar:
    """The state of one completion in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher):
        self._matcher = matcher

    def mask(self, allowed: bytes) -> bytes:
        """Which tokens may come next, as `weft.engine.scheduler.sampling_rows.bits`; of `allowed` only, where
        that is not empty.
        """
        mask = self._matcher.compute_bitmask()
        if not allowed:
            return mask
        both = int.from_bytes(mask, "little") & int.from_bytes(allowed, "little")
        return both.to_bytes(len(allowed), "little")

    def accept(self, token: int) -> bool:
        """Takes the next token; True where the text is complete and nothing can follow.

        Raises ValueError where the grammar does not allow the token, which is sampled only where no token is allowed,
        or where the grammar grows beyond llguidance's limits.
        """
        if not self._matcher.consume_token(token):
            why = (self._matcher.get_error() or "no token may come").splitlines()[0]
            raise ValueError(f"the completion cannot go on in its grammar: {why}")
        return self._matcher.is_stopped()


@dataclass(frozen=True, eq=False)
class Compiled:
    """A grammar that any number of completions may follow. bytes: memory that it takes, about."""

    matcher: llguidance.LLMatcher
    bytes: int

    def start(self) -> Grammar:
        """At its beginning."""
        return Grammar(self.matcher.deep_copy())


class Grammars:
    """Compiles grammars for one tokenizer. vocabulary: the model's, which may be larger, or smaller where tokens were
    added to the tokenizer alone. ends: the model's end tokens.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Iterable[int]):
        self._tokenizer, self._ends = tokenizer, list(ends)
        self._size = max(vocabulary, len(tokenizer))
        self._sandbox = GrammarSandbox(self._described)
        self._kept: OrderedDict[str, Compiled] = OrderedDict()  # the one that was asked for last at the end
        self._look, self._compile = threading.Lock(), threading.Lock()

    @cached_property
    def tokens(self) -> llguidance.LLTokenizer:
        """What llguidance knows of the tokenizer: the bytes of each token."""
        return llguidance.hf.from_tokenizer(self._tokenizer, self._size, self._ends or None)

    @cached_property
    def named(self) -> frozenset[str]:
        """Tokens that only their name in a grammar matches, as no text does: the special ones, and llguidance takes
        every added token between < and > for one."""
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        return frozenset(token.content for number, token in added if self.tokens.is_special_token(number))

    def start(self, grammar: str | Compiled) -> Grammar:
        """At its beginning. Raises and waits as `compiled`, for a text."""
        return (self.compiled(grammar) if isinstance(grammar, str) else grammar).start()

    def compiled(self, grammar: str) -> Compiled:
        """It may take seconds, in which other threads run. ValueError for a grammar that is none, or takes too much."""
        with self._look:
            if (known := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return known
        with self._compile:  # one at a time, and each once
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
                raise ValueError(in_a_line(matcher.get_error()))
        except ValueError as error:
            raise ValueError(f"the grammar cannot be used: {error}") from error
        return Compiled(matcher, size)

    def _described(self) -> dict[str, Any]:
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return {"tokenizer": backend.to_str(), "vocabulary": self._size, "ends": self.tokens.eos_tokens}
