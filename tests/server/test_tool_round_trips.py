"""Made-up calls of every form and back: whole, cut at every character, streamed in pieces, and one alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import llguidance
import pytest
from transformers import AutoTokenizer

from server.tool_calls import FORMS, HARMONY, LLAMA, Made, ambiguous, as_json, made_up
from weft.engine.grammar.grammar import Grammars
from weft.serve.chat.parsers import EndingParser, OutputSyntax, parser
from weft.serve.chat.tool_formats import ToolFormat
from weft.serve.chat.tools import OutputDelta

SEEDS = pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 210), marks=pytest.mark.nightly)], ids=["few", "many"]
)
NAMES = pytest.mark.parametrize("name", FORMS)


def outputs(name: str, seeds: range) -> list[tuple[int, Made, str]]:
    """Made-up outputs with their texts; without what the form itself cannot say."""
    form, write, unclear = FORMS[name]
    found = []
    for seed in seeds:
        made = made_up(seed)
        if ambiguous(made, unclear):
            continue
        if form is LLAMA:
            made.before = ""
        before = made.before
        if form is HARMONY and before:
            before = f"<|channel|>final<|message|>{before}<|end|><|start|>assistant"
        found.append((seed, made, before + write(made.calls)))
    assert len(found) > 0.9 * len(seeds)
    return found


def read(form: ToolFormat, made: Made, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    found, parts = parser(OutputSyntax(form), made.functions), OutputDelta()
    for at, piece in enumerate(pieces):
        parts += found.push(piece, last=at == len(pieces) - 1)
    assert not parts.thought and not parts.arguments
    return parts.text, [(call.name, call.arguments) for call in parts.calls]


def strict(text: str) -> Any:
    """JSON without NaN and infinite numbers, and with the types of all values."""

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def spelled(value: Any) -> str:
    """Tell 1 from True, which Python does not."""
    return json.dumps(value)


def cut_in(text: str, pieces: list[int]) -> list[str]:
    return [text[a:b] for a, b in zip([0, *pieces], [*pieces, len(text)], strict=True)]


@SEEDS
@NAMES
def test_whole_and_streamed(name: str, seeds: range) -> None:
    form = FORMS[name][0]
    for seed, made, text in outputs(name, seeds):
        said, calls = read(form, made, [text])
        assert said.rstrip("\n") == made.before.rstrip("\n"), (seed, text)
        assert [(n, spelled(strict(a))) for n, a in calls] == [(n, spelled(a)) for n, a in made.calls], (seed, text)
        sampled = random.Random(seed)
        splits = [list(range(1, len(text)))]
        splits += [
            [at] for at in (range(len(text) + 1) if len(text) < 200 else sampled.choices(range(len(text)), k=20))
        ]
        splits += [sorted(sampled.choices(range(len(text) + 1), k=sampled.randrange(1, 20))) for _ in range(10)]
        for split in splits:
            pieces = cut_in(text, split)
            assert read(form, made, pieces) == (said, calls), (seed, pieces)
            assert read(form, made, [*pieces, ""]) == (said, calls), (seed, pieces)


@SEEDS
@NAMES
def test_cut_at_every_character(name: str, seeds: range) -> None:
    """A call that is cut comes as far as it was written, and its tags are never shown."""
    form = FORMS[name][0]
    for seed, made, text in outputs(name, seeds):
        named = 0
        for end in range(len(text)):
            cut = text[:end]
            said, calls = read(form, made, [cut])
            shown = said[:-1] if said[-1:] in "<{" else said  # one character says too little
            assert made.before.startswith((said.rstrip("\n"), shown.rstrip("\n"))), (seed, cut)
            assert len(calls) >= named, (seed, cut, "a call that was named is not lost again")
            named = len(calls)
            for (n, arguments), (wanted_name, wanted) in zip(calls[:-1], made.calls, strict=False):
                assert (n, spelled(strict(arguments))) == (wanted_name, spelled(wanted)), (seed, cut)
            for n, arguments in calls[-1:]:
                wanted_name, wanted = made.calls[len(calls) - 1]
                assert n == wanted_name, (seed, cut)
                if form.tags is None:
                    assert json.dumps(wanted, ensure_ascii=False).startswith(arguments), (seed, cut, arguments)
                    continue
                given = list(strict(arguments).items())
                assert [key for key, _ in given] == list(wanted)[: len(given)], (seed, cut, arguments)
                for key, value in given[:-1]:
                    assert spelled(value) == spelled(wanted[key]), (seed, cut, arguments)
                for key, value in given[-1:]:
                    written = as_json(wanted[key]), str(wanted[key])  # None is written so, too
                    assert not isinstance(value, str) or any(w.startswith(value) for w in written), (cut, value)


@SEEDS
@NAMES
def test_one_call(name: str, seeds: range) -> None:
    """The output ends with its first call, as soon as what was written says that it is whole."""
    form = FORMS[name][0]
    for seed, made, text in outputs(name, seeds):
        sampled = random.Random(seed)
        pieces = cut_in(text, sorted(sampled.choices(range(len(text) + 1), k=sampled.randrange(1, 60))))
        found, parts = EndingParser(parser(OutputSyntax(form), made.functions, one_call=True), ()), OutputDelta()
        for at, piece in enumerate(pieces):
            if found.end is None:
                parts += found.push(piece, last=at == len(pieces) - 1)
        assert parts.text.rstrip("\n") == made.before.rstrip("\n")
        [call] = parts.calls
        assert (call.name, spelled(strict(call.arguments))) == (made.calls[0][0], spelled(made.calls[0][1])), (
            seed,
            text,
        )
        assert found.end == "", (seed, text)


@SEEDS
@NAMES
def test_the_grammar_of_calls_takes_them(chat_model_dir: Path, name: str, seeds: range) -> None:
    """But for texts between tags with a < in them, and GPT-OSS's further calls, which that grammar leaves out."""
    form, write, _ = FORMS[name]
    tokenizer = AutoTokenizer.from_pretrained(chat_model_dir)
    tokens, taken = Grammars(tokenizer, len(tokenizer), [0]).tokens, 0
    for seed, made, _ in outputs(name, seeds):
        calls = made.calls[:1] if form is HARMONY else made.calls
        if form.tags and "<" in str([list(arguments.values()) for _, arguments in calls]):
            continue
        check_taken(tokenizer, tokens, form.grammar(made.functions, several=True), write(calls), seed)
        taken += 1
    assert taken > len(seeds) // 4


def check_taken(tokenizer: Any, tokens: Any, grammar: str, text: str, case: Any) -> None:
    matcher = llguidance.LLMatcher(tokens, grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text.strip().removesuffix("<|call|>"), add_special_tokens=False)
    accepted = matcher.try_consume_tokens(ids)
    assert accepted == len(ids), (case, text, tokenizer.decode(ids[:accepted]))
    assert matcher.is_accepting(), (case, text)


NULLABLE: list[tuple[dict[str, Any], Any]] = [
    ({"type": "string"}, "a"),
    ({"type": "integer"}, 5),
    ({"type": "boolean"}, True),
    ({"type": ["integer", "boolean"]}, 5),
    ({"type": "string", "enum": ["a", "b"]}, "b"),
    ({"const": 7}, 7),
    ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, True),
    ({"allOf": [{"type": "integer"}]}, 5),
    ({"$ref": "#/$defs/number"}, 5),
    ({"type": "object", "properties": {"b": {"type": "integer", "nullable": True}}}, {"b": None}),
    ({"type": "object", "properties": {"nullable": {"type": "integer"}}}, {"nullable": 5}),
]
"""Schemas, to which `nullable` is added, and values."""


@NAMES
def test_openapis_nullable_allows_null(chat_model_dir: Path, name: str) -> None:
    form, write, _ = FORMS[name]
    tokenizer = AutoTokenizer.from_pretrained(chat_model_dir)
    tokens = Grammars(tokenizer, len(tokenizer), [0]).tokens
    for schema, value in NULLABLE:
        parameters = {"type": "object", "properties": {"a": schema | {"nullable": True}}, "required": ["a"]}
        parameters |= {"$defs": {"number": {"type": "integer"}}}
        function = {"name": "f", "parameters": parameters}
        for given in (None, value):
            text = write([("f", {"a": given})])
            check_taken(tokenizer, tokens, form.grammar([function], several=True), text, schema)
            _, [(_, arguments)] = read(form, Made([function], "", []), [text])
            assert spelled(strict(arguments)) == spelled({"a": given})
