"""Forms of models' tool calls, recognised by texts in their chat templates."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import regex

from weft.engine.grammar.grammar import schema_text
from weft.serve.chat.tool_arguments import NAME, SPACE, Tags
from weft.serve.chat.tool_grammars import CallRules, Functions, literals, quoted

TEXT = "TEXT: /(.|\\n)+/\n"
"""Lark terminal that matches everything except special tokens."""
MAX_CALLS = 16
"""Maximum calls in an output of required calls."""


@dataclass(frozen=True)
class Call:
    """Call of a function, with its arguments as JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def plain(self) -> dict[str, Any]:
        """Return the call in OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolFormat:
    """Form of a model's calls.

    Attributes:
        marks: texts that a chat template of this form all contains.
        call: returns Lark rules; the rule `call` is one call.
        opening: pattern of the text before a call's arguments, from the block's beginning or another call's end.
            Groups: `name` of the function; `open`, the beginning of the arguments, if not at the end; `id` of the
            call, if the form has ids.
        begin, end: texts around the calls; empty if calls are the whole output.
        closing: further text after the arguments of a call.
        tags: tags around parameters; None if arguments are JSON.
        bare: pattern of a call without `begin`, at the start of a line and of a known function.
        only_known: names of unknown functions make no call.
        objects: a call is a JSON object with the name and the arguments, in any order.
        head, between, tail: texts around the calls of an output of required calls.
        tokens: texts of the form that may be special tokens, which text then cannot match.
        channels: every output has parts for several readers, even without calls.
    """

    marks: tuple[str, ...]
    call: Callable[[CallRules], str]
    opening: str = ""
    begin: str = ""
    end: str = ""
    closing: tuple[str, ...] = ()
    tags: Tags | None = None
    bare: str = ""
    only_known: bool = False
    objects: bool = False
    head: str = ""
    between: str = "\n"
    tail: str = ""
    tokens: tuple[str, ...] = ()
    channels: bool = False

    @cached_property
    def opens(self) -> Any:
        """Pattern of `opening`."""
        return regex.compile(self.opening)

    @cached_property
    def begins(self) -> Any:
        """Pattern of `begin`, as group `begin`, or of `bare`."""
        begin = [f"(?P<begin>{re.escape(self.begin)})"] * bool(self.begin)
        return regex.compile("|".join(begin + [self.bare] * bool(self.bare)) or "(?!)")

    @cached_property
    def closes(self) -> Any:
        """Pattern of each text that may follow the arguments of a call."""
        return regex.compile(SPACE + "(?:" + "|".join(map(re.escape, filter(None, (*self.closing, self.end)))) + ")")

    def grammar(
        self,
        functions: Functions,
        several: bool,
        named: Collection[str] = (),
        *,
        among_text: bool = False,
        any_whitespace: bool = False,
    ) -> str:
        """Return the grammar of outputs that are only calls of these functions, or text that contains such calls.

        named: tokens; see `Grammars.named`. any_whitespace: of JSON, as in `weft.engine.grammar.grammar.schema_text`.
        ValueError if this form has no calls among text.
        """
        named = set(named) & set(self.tokens)
        literal = literals(named)
        if among_text and self.begin and self.begin not in named:  # the beginning of a call then ends a text
            literal = literals({*named, self.begin}, {self.begin: "begun"})
        calls = "call"
        if several and not self.channels:
            calls += f" ({literal(self.between)} call)~0..{MAX_CALLS - 1}"
        calls = f"{literal(self.head)} {calls} {literal(self.tail)}"
        rules = self.call(CallRules(functions, literal, partial(schema_text, any_whitespace=any_whitespace)))
        if not among_text:
            return f"start: {calls}\n{rules}"
        if self.channels:
            if not {"<|channel|>", "<|message|>", "<|end|>", "<|start|>"} <= named:
                raise ValueError("its marks are no tokens of this tokenizer")
            start = 'start: (message <|end|> <|start|> "assistant")* (message | call)\n'
            start += f"message: <|channel|> /analysis|commentary|final/ <|message|> TEXT?\n{TEXT}"
        elif not self.begin:
            start = f"start: {calls} | /(\\s*[^\\s{{](.|\\n)*)?/\n"
        elif self.begin in named:
            start = f"start: TEXT? (calls TEXT?)*\ncalls: {calls}\n{TEXT}"
        else:
            start = f"start: calls* TEXT?\ncalls: {calls}\nbegun[lazy]: /(.|\\n)*/ {quoted(self.begin)}\n{TEXT}"
        return start + rules


def tool_format_of(template: str) -> ToolFormat | None:
    """Return the form of a chat template; None if it has no tools."""
    return next((form for form in TOOL_FORMATS if all(mark in template for mark in form.marks)), None)


# Hermes, Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>

JSON_CALL = (
    rf'{SPACE}\{{{SPACE}"name"{SPACE}:{SPACE}"(?P<name>{NAME})"{SPACE},'
    rf'{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?P<open>\{{)'
)


def _json_call(rules: CallRules) -> str:
    around = rules.literal("<tool_call>\n"), rules.literal("\n</tool_call>")
    return f"call: {around[0]} body {around[1]}\nbody: {rules.object('arguments')}"


# Qwen3-Coder, Qwen3.5, Step-3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>

XML = Tags(
    open=rf"<parameter=(?P<key>{NAME})>",
    close="</parameter>",
    call_end="</function>",
    call=rf"<function=(?P<name>{NAME})>",
    begin="<tool_call>",
    end="</tool_call>",
    lines=True,
)


def _xml_call(rules: CallRules) -> str:
    literal = rules.literal
    around = literal("<tool_call>\n"), literal("</function>\n</tool_call>")
    parameter = literal("<parameter="), literal(">\n"), literal("</parameter>\n")
    names = [literal(f"<function={f['name']}>\n") for f in rules.functions]
    return rules.tagged(names, around, parameter, end="\n")


# GLM-4.5 to 4.7: <tool_call>NAME, <arg_key>KEY</arg_key>, <arg_value>VALUE</arg_value>, …</tool_call>

GLM = Tags(
    open=rf"<arg_key>(?P<key>{NAME})</arg_key>{SPACE}<arg_value>",
    close="</arg_value>",
    call_end="",
    call=rf"(?P<name>{NAME})(?P<open>{SPACE}(?:<arg_key>|</tool_call>))",
    begin="<tool_call>",
    end="</tool_call>",
)


def _glm_call(rules: CallRules) -> str:
    literal = rules.literal
    line = ' "\\n"? '  # GLM-4.5 writes line breaks, GLM-4.7 does not
    around = literal("<tool_call>"), literal("</tool_call>") + line
    between = literal("</arg_key>") + line + literal("<arg_value>")
    names = [literal(f["name"]) + line for f in rules.functions]
    return rules.tagged(names, around, (literal("<arg_key>"), between, literal("</arg_value>") + line))


# MiniMax-M2: <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>…

MINIMAX = Tags(
    open=rf'<parameter name="(?P<key>{NAME})">',
    close="</parameter>",
    call_end="</invoke>",
    call=rf'<invoke name="(?P<name>{NAME})">',
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
)


def _minimax_call(rules: CallRules) -> str:
    literal = rules.literal
    parameter = literal('<parameter name="'), literal('">'), literal("</parameter>\n")
    names = [literal(f'<invoke name="{f["name"]}">\n') for f in rules.functions]
    return rules.tagged(names, ('""', literal("</invoke>\n")), parameter)


# DeepSeek: <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, JSON in a fence (V3), or NAME<｜tool▁sep｜>JSON (V3.1)

DEEPSEEK_CALL = (
    rf"{SPACE}<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>{NAME})"
    rf"(?:<｜tool▁sep｜>|\n```json){SPACE}(?P<open>\{{)"
)


def _deepseek_call(before: str, between: str, after: str) -> Callable[[CallRules], str]:
    def call(rules: CallRules) -> str:
        begin = f"<｜tool▁call▁begin｜>{before}"
        return rules.headed(lambda name: rules.literal(f"{begin}{name}{between}"), f"{after}<｜tool▁call▁end｜>")

    return call


# Kimi-K2: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON<|tool_call_end|>

KIMI_CALL = (
    rf"{SPACE}<\|tool_call_begin\|>{SPACE}(?P<id>(?:functions\.)?(?P<name>[\w.-]{{1,256}}):\d{{1,9}}){SPACE}"
    rf"<\|tool_call_argument_begin\|>{SPACE}(?P<open>\{{)"
)


def _kimi_call(rules: CallRules) -> str:
    def head(name: str) -> str:
        begin = rules.literal(f"<|tool_call_begin|>functions.{name}:")
        return f"{begin} /[0-9]{{1,3}}/ {rules.literal('<|tool_call_argument_begin|>')}"

    return rules.headed(head, "<|tool_call_end|>")


# GPT-OSS ("harmony"): <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>


def _harmony_call(rules: CallRules) -> str:
    begin, end = "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"
    return rules.headed(lambda name: rules.literal(f"{begin}{name}{end}"), "")


_MANY = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_in_many = partial(
    ToolFormat,
    opening=DEEPSEEK_CALL,
    begin=_MANY[0],
    end=_MANY[1],
    closing=("```", "<｜tool▁call▁end｜>"),
    bare="<｜tool▁call▁begin｜>",
    head=_MANY[0],
    tail=_MANY[1],
    tokens=(*_MANY, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)


def _tagged(mark: str, call: Callable[[CallRules], str], tags: Tags, parameter: str = "", **more: Any) -> ToolFormat:
    """Return a form with these tags. mark: text of its chat templates next to `tags.begin`. parameter: beginning of a
    parameter's tag, if calls may be outside of a block."""
    bare = rf"(?m:^)[ \t]{{0,64}}{tags.call}{SPACE}(?:{parameter}|{tags.call_end})" if parameter else ""
    around = tags.begin, tags.end
    return ToolFormat(
        (tags.begin, mark), call, SPACE + tags.call, *around, (tags.call_end,), tags, bare, tokens=around, **more
    )


TOOL_FORMATS = (
    ToolFormat(
        ("<|start|>assistant", "<|channel|>"),
        _harmony_call,
        tokens=("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"),
        channels=True,
    ),
    _tagged("<function=", _xml_call, XML, "<parameter="),
    _tagged("<arg_key>", _glm_call, GLM, between="", only_known=True),
    ToolFormat(
        ("<tool_call>",),
        _json_call,
        JSON_CALL,
        begin="<tool_call>",
        end="</tool_call>",
        objects=True,
        tokens=("<tool_call>", "</tool_call>"),
    ),
    _in_many((_MANY[0], "```json"), _deepseek_call("function<｜tool▁sep｜>", "\n```json\n", "\n```")),
    _in_many(_MANY[:1], _deepseek_call("", "<｜tool▁sep｜>", ""), between=""),
    ToolFormat(
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        _kimi_call,
        KIMI_CALL,
        begin=_SECTION[0],
        end=_SECTION[1],
        closing=("<|tool_call_end|>",),
        bare=r"<\|tool_call_begin\|>",
        head=_SECTION[0],
        between="",
        tail=_SECTION[1],
        tokens=(*_SECTION, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    _tagged(
        "<invoke name=",
        _minimax_call,
        MINIMAX,
        "<parameter name=",
        head=f"{MINIMAX.begin}\n",
        between="",
        tail=MINIMAX.end,
    ),
    ToolFormat(
        ('{"name": function name, "parameters": ',),  # Llama 3.1 to 3.3: the same, several with ; between
        lambda rules: f"call: {rules.object('parameters')}",
        JSON_CALL,
        closing=(";", ","),
        only_known=True,
        objects=True,
        between="; ",
    ),
)
"""All forms; the first with all its marks in a chat template is the template's."""
