"""Completions that follow a grammar, sampled from random logits: what comes out is always of its kind."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from weft.engine.assets import embedded_model_dir
from weft.engine.grammar.grammar import grammar
from weft.engine.grammar.nullable import each_with_null
from weft.engine.messages.request import SamplingParams, Watch
from weft.engine.models.config_json.fields import ModelError
from weft.engine.output.request_output import prepare
from weft.engine.output.text_processor import TextProcessor
from weft.engine.scheduler.sampling_rows import adjust, sampling
from weft.engine.worker.sampler import sample

TOKENIZER = AutoTokenizer.from_pretrained(embedded_model_dir())
TEXT_PROCESSOR = TextProcessor(TOKENIZER, embedded_model_dir(), 1024, (2,))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def generated(
    params: SamplingParams, seed: int, text_processor: TextProcessor = TEXT_PROCESSOR
) -> tuple[str, str | None]:
    """Text and finish reason, where every logit is random."""
    made = prepare([5], params, print, seed, 400, text_processor)
    generator, text = torch.Generator().manual_seed(seed), ""
    while True:
        logits = torch.randn(1, text_processor.vocabulary, generator=generator)
        s = made.sequence
        token = sample(logits, [sampling(s)], [len(s.tokens)], {0: adjust(s)}).item()
        made.accept(token)
        increment = made.take()
        text += increment.text
        if increment.finish_reason:
            return text, increment.finish_reason


@pytest.mark.parametrize("seed", range(5))
def test_completions_are_of_their_kind(seed: int) -> None:
    text, reason = generated(SamplingParams(max_tokens=None, grammar=grammar("json", SCHEMA)), seed)
    read = json.loads(text)
    assert reason == "stop" and len(read["name"]) <= 5 and 0 <= read["age"] <= 99 and set(read) == {"name", "age"}
    choice = grammar("choice", ["yes", "no", 'a "quoted" one'])
    assert generated(SamplingParams(max_tokens=None, grammar=choice), seed)[0] in ("yes", "no", 'a "quoted" one')
    pattern = r"[A-Z]{2}-\d{3,4}"
    assert re.fullmatch(pattern, generated(SamplingParams(max_tokens=None, grammar=grammar("regex", pattern)), seed)[0])
    for text in ('start: "a" ("b" | "c")~3', 'root ::= "a" ("b" | "c") ("b" | "c") ("b" | "c")'):
        assert re.fullmatch(
            "a[bc]{3}", generated(SamplingParams(max_tokens=None, grammar=grammar("grammar", text)), seed)[0]
        )


def test_a_vocabulary_larger_than_the_tokenizers() -> None:
    """Its end token and most others are unknown to the tokenizer, as with a preset and made-up weights."""
    larger = TextProcessor(TOKENIZER, embedded_model_dir(), 2000, (1500,))
    assert larger.token_name(70) == TEXT_PROCESSOR.token_name(70) and larger.token_name(1999) == "<[1999]>"
    asked = SamplingParams(max_tokens=None, grammar=grammar("choice", ["yes", "no"]))
    assert generated(asked, 3, larger) in [("yes", "stop"), ("no", "stop")]


def test_nullable_of_a_schema_is_no_property_and_no_value() -> None:
    """Names of properties and JSON values that look like OpenAPI's `nullable` stay."""
    value = {"type": "string", "nullable": True}
    schema = {"properties": {"nullable": True, "type": {"const": value}}, "enum": [value], "default": value}
    assert each_with_null(deepcopy(schema)) == schema
    inner = {"items": {"$defs": {"default": value}}, "prefixItems": [value]}
    text = json.dumps(inner).replace('"string", "nullable": true', '["string", "null"]')
    assert each_with_null(inner) == json.loads(text)
    text, _ = generated(SamplingParams(max_tokens=None, grammar=grammar("json", {"const": 5, "nullable": True})), 3)
    assert text in ("5", "null")


def test_two_completions_of_one_grammar_do_not_meet() -> None:
    one, two = (TEXT_PROCESSOR.grammars.start(grammar("choice", ["ab", "cd"])) for _ in range(2))
    [token] = TEXT_PROCESSOR.tokenizer.encode("a", add_special_tokens=False)
    before = two.mask(b"")
    one.accept(token)
    assert two.mask(b"") == before != one.mask(b"")


@pytest.mark.parametrize(
    "kind, what",
    [("json", {"type": "nonsense"}), ("regex", "("), ("grammar", "start: nothing"), ("grammar", ""), ("json", "[")],
)
def test_a_bad_grammar_is_refused_in_one_line(kind: str, what: object) -> None:
    with pytest.raises(ValueError) as error:
        TEXT_PROCESSOR.grammars.start(grammar(kind, what))
    assert "\n" not in str(error.value)


def test_allowed_tokens_narrow_a_grammar() -> None:
    digits = {d: TEXT_PROCESSOR.tokenizer.encode(d, add_special_tokens=False)[0] for d in "123"}
    params = SamplingParams(grammar=grammar("regex", "[0-9]{4}"), allowed_token_ids=tuple(digits.values()))
    assert re.fullmatch("[123]{4}", generated(params, 3)[0])
    with pytest.raises(ValueError, match="leaves no token"):
        prepare([5], SamplingParams(allowed_token_ids=(2,), min_tokens=2), print, 0, 400, TEXT_PROCESSOR)


@pytest.mark.parametrize("count", [2_100, 50_000])
def test_many_choices(count: int) -> None:
    texts = [f"{i:05d} is my choice" for i in range(count)]
    how = SamplingParams(max_tokens=None, grammar=grammar("choice", texts))
    assert generated(how, 1) in [(text, "stop") for text in texts]


def test_a_choice_may_begin_another_or_be_empty() -> None:
    for texts in (["a", "ab", "abc"], ["", "b"], ["", ""], [""], ['"\\\n', "é😀"]):
        how = SamplingParams(max_tokens=None, grammar=grammar("choice", texts))
        assert {generated(how, seed)[0] for seed in range(20)} <= set(texts)


def test_many_optional_properties() -> None:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    names = [f"p{i}" for i in range(900)]
    schema = {"type": "object", "properties": dict.fromkeys(names, digit), "additionalProperties": False}
    text, reason = generated(SamplingParams(max_tokens=60, grammar=grammar("json", schema)), 2)
    assert reason in ("stop", "length") and text.startswith("{")


CHAIN = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(3000)}
COSTLY: list[tuple[str, Any, str]] = [
    ("json", {"type": "integer", "multipleOf": 9_999_991}, "takes more than 2 s of a processor"),
    ("json", {"$defs": CHAIN | {"d3000": {"type": "null"}}, "$ref": "#/$defs/d0"}, "nested too deeply"),
    ("regex", "a{10}" + "{10}" * 8, "too many expressions"),
    ("grammar", "root ::= " + " | ".join(f'"{i}"' for i in range(10_000)), "at most 65536"),
    ("grammar", "start: " + " | ".join(f'"w{i}"' for i in range(9_000)), "max is 8192"),
    ("choice", ["a" * 2000] * 1100, "too long; give at most 2097152"),
    ("json", json.dumps({"enum": ["a" * 2000] * 1100}), "too long; give at most 2097152"),
    ("json", "[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize("kind, what, why", COSTLY, ids=[why for _, _, why in COSTLY])
def test_a_grammar_that_costs_too_much_is_refused(kind: Any, what: Any, why: str) -> None:
    """Not the process that is asked: without limits, the first takes minutes, and the second ends it."""
    with pytest.raises(ValueError, match=why) as error:
        TEXT_PROCESSOR.grammars.start(grammar(kind, what))
    assert "\n" not in str(error.value)
    assert generated(SamplingParams(max_tokens=None, grammar=grammar("regex", "[a-z]{3}")), 1)[1] == "stop"


def test_the_process_that_tries_grammars_may_be_killed() -> None:
    grammars = TextProcessor(TOKENIZER, embedded_model_dir(), 1024, (2,)).grammars
    grammars.start(grammar("regex", "a"))
    process = grammars._sandbox._process
    assert process is not None
    process.kill()
    process.wait()
    grammars.start(grammar("regex", "b"))
    assert grammars._sandbox._process not in (None, process)


def test_grammars_are_kept_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, tried = TextProcessor(TOKENIZER, embedded_model_dir(), 1024, (2,)).grammars, []

    def bytes_of(text: str) -> int:
        tried.append(text)
        return 40

    monkeypatch.setattr(grammars._sandbox, "bytes_of", bytes_of)
    monkeypatch.setattr("weft.engine.grammar.grammar.KEPT_BYTES", 100)
    one, two, three = (grammar("regex", text) for text in "abc")
    for text in (one, two, one, three, one, two):
        grammars.start(text)
    assert tried == [one, two, three, two], "the one that was asked for least lately makes way"
    assert sum(kept.bytes for kept in grammars._kept.values()) <= 100
    monkeypatch.setattr("weft.engine.grammar.grammar.KEPT_BYTES", 10)
    assert grammars.start(grammar("regex", "d")).accept(
        TEXT_PROCESSOR.tokenizer.encode("d", add_special_tokens=False)[0]
    )
    assert not grammars._kept
    monkeypatch.setattr("weft.engine.grammar.grammar.MAX_BYTES", 39)
    with pytest.raises(ValueError, match="at most"):
        grammars.start(one)


def test_what_a_grammar_takes_is_measured() -> None:
    small, large = (
        TEXT_PROCESSOR.grammars.compiled(grammar("json", {"enum": [f"{i:08d}" for i in range(n)]})).bytes
        for n in (2, 20_000)
    )
    assert large > small + 2**21


def test_a_prompt_that_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(ValueError, match="1000000000000 in the prompt"):
        prepare(range(10**12), SamplingParams(), print, 0, 400, TEXT_PROCESSOR)


def test_a_tokenizer_may_have_more_tokens_than_the_model() -> None:
    text_processor = TextProcessor(TOKENIZER, embedded_model_dir(), 1000, (2,))
    params = SamplingParams(max_tokens=None, grammar=grammar("regex", "[a-z]{9}"), allowed_token_ids=tuple(range(1000)))
    for how in (params, replace(params, allowed_token_ids=None)):
        text, reason = generated(how, 1, text_processor)
        assert re.fullmatch("[a-z]{9}", text) and reason == "stop"
    assert text_processor.token_name(1010) == TOKENIZER.decode([1010])


def test_a_completion_that_its_grammar_and_its_tokens_leave_nothing_for_ends_with_an_error() -> None:
    [other] = TEXT_PROCESSOR.tokenizer.encode("b", add_special_tokens=False)
    params = SamplingParams(max_tokens=9, grammar=grammar("regex", "[0-9]{4}"), allowed_token_ids=(other,))
    assert generated(params, 3)[1] == "error"


def test_what_the_model_directory_says_of_completions(tmp_path: Path) -> None:
    for file in embedded_model_dir().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    written = {"eos_token_id": [0, 1], "temperature": 0.7, "top_k": 20, "max_new_tokens": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    text_processor = TextProcessor(TOKENIZER, tmp_path, 1024, (2,))
    ends = "token 0 also ends completions, token 1 also ends completions"
    assert TOKENIZER.eos_token_id == 2
    assert text_processor.says == f"temperature 0.7 by default, top_k 20 by default, {ends}"
    assert text_processor.ends == {0, 1, 2} and text_processor.defaults == {"temperature": 0.7, "top_k": 20}
    assert TEXT_PROCESSOR.defaults == {"temperature": 0.0}, "do_sample is false"
    for eos in (0, None):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert TextProcessor(TOKENIZER, tmp_path, 1024, (2,)).ends == ({0, 2} if eos == 0 else {2})
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read: Expecting"):
        TextProcessor(TOKENIZER, tmp_path, 1024, (2,))


def test_a_tokenizers_end_token_ends_completions_too(tmp_path: Path) -> None:
    """config.json and generation_config.json of fine-tunes often name another one, such as 0."""
    own = TOKENIZER.eos_token_id
    assert own not in (None, 0)
    for written in ({}, {"eos_token_id": None}, {"eos_token_id": 5}):
        (tmp_path / "generation_config.json").write_text(json.dumps(written))
        text_processor = TextProcessor(TOKENIZER, tmp_path, 1024, (0, -1, 5000))
        assert text_processor.ends == {0, own} | ({5} if written.get("eos_token_id") else set())
        assert f"token {own}, of the tokenizer, also ends completions" in text_processor.says


@pytest.mark.parametrize(
    "written, error",
    [
        ("[]", "holds a list, not a JSON object"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"eos_token_id": "x"}', "eos_token_id='x' is not an integer"),
        ('{"eos_token_id": [2, "x"]}', "eos_token_id=.2, 'x'. is not a list of int"),
        ('{"eos_token_id": true}', "eos_token_id=True is not an integer"),
        ('{"temperature": "hot"}', "temperature='hot' is not a number"),
        ('{"temperature": -1}', "temperature is -1.0; it must be between 0 and 100"),
        ('{"temperature": NaN}', "temperature=nan is not a number"),
        ('{"top_p": 0}', "top_p is 0.0; it must be above 0"),
        ('{"top_k": 1.5}', "top_k=1.5 is not an integer"),
        ('{"top_k": 99999999999}', "top_k=99999999999 is not at most"),
        ('{"min_p": [1]}', "min_p=.1. is not a number"),
        ('{"do_sample": "no"}', "do_sample='no' is not true or false"),
        ('{"top_p": 0.5, "top_p": 0.6}', "'top_p' is there twice"),
    ],
)
def test_a_generation_config_that_cannot_be_used_is_refused_at_start(tmp_path: Path, written: str, error: str) -> None:
    (tmp_path / "generation_config.json").write_text(written)
    with pytest.raises(ModelError, match=rf"generation_config\.json.* {error}") as raised:
        TextProcessor(TOKENIZER, tmp_path, 1024, (2,))
    assert "\n" not in str(raised.value)


def at_o(end: str) -> Watch:
    return lambda text: end if "o" in text else None


@pytest.mark.parametrize("keep", [False, True])
def test_what_stays_in_the_text(keep: bool) -> None:
    tokens = [*TEXT_PROCESSOR.tokenizer.encode("a stop b", add_special_tokens=False), 1, 2]
    params = SamplingParams(max_tokens=None, stop=("zzz",), keep_special=keep, keep_stop=keep)
    made = prepare([5], params, print, 0, 400, TEXT_PROCESSOR)
    increments = [made.take() for token in tokens if made.accept(token)]
    text = "".join(o.text for o in increments)
    assert increments[-1].finish_reason == "stop" and text == ("a stop b<|im_start|><|im_end|>" if keep else "a stop b")
    for params, wanted, reason in (
        (SamplingParams(max_tokens=None, stop=("sto",), keep_stop=keep), "a sto" if keep else "a ", "sto"),
        (SamplingParams(max_tokens=None, watch=lambda: at_o("op")), "a sto", "op"),
        (SamplingParams(max_tokens=None, watch=lambda: at_o("")), "a sto", None),
    ):
        made, text = prepare([5], params, print, 0, 400, TEXT_PROCESSOR), ""
        for token in tokens:
            made.accept(token)
            increment = made.take()
            text += increment.text
            if increment.finish_reason:
                break
        assert text.startswith(wanted) and increment.finish_reason == "stop" and increment.stop_reason == reason
