"""Tools: calls told apart from text however it is cut, and whole conversations with the official client."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from server.conftest import QuietEngine, Served, output, serve, shared_templates
from weft.engine.grammar.grammar import Grammars
from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.parsers import OutputSyntax, parser
from weft.serve.chat.service import Service
from weft.serve.chat.tool_formats import TOOL_FORMATS, ToolFormat, tool_format_of
from weft.serve.chat.tools import OutputDelta
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.errors import ApiError
from weft.serve.http.metrics import Metrics
from weft.serve.http.options import Options

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 4}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{{ '\\n' }}"
    "{% endfor %}"
)
UNMARKED = TEMPLATE.replace("<tool_call>", "[").replace("</tool_call>", "]")
"""It asks for no form of calls."""


HARMONY, XML, GLM, HERMES, DEEPSEEK, DEEPSEEK_31, KIMI, MINIMAX, LLAMA = TOOL_FORMATS
NAMES = ["harmony", "xml", "glm", "hermes", "deepseek", "deepseek-v3.1", "kimi", "minimax", "llama"]


def parse(
    pieces: list[str], form: ToolFormat = HERMES, functions: Any = (), hidden: Any = ()
) -> tuple[str, list[tuple[str, Any]]]:
    found, parts = parser(OutputSyntax(form), functions, hidden), OutputDelta()
    for at, piece in enumerate(pieces):
        parts += found.push(piece, last=at == len(pieces) - 1)
    return parts.thought + parts.text, [(c.name, loaded(c.arguments)) for c in parts.calls]


def test_a_mark_alone_is_text_where_calls_come_first() -> None:
    marked = parser(OutputSyntax(HERMES, bare=True))
    assert marked.push("<tool_", last=False) == OutputDelta()
    assert marked.push("call>", last=True) == OutputDelta("<tool_call>")


def loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:  # the call has begun before anybody could know
        return arguments


@pytest.mark.parametrize(
    "completion, text, calls",
    [
        (CALL, "", 1),
        (f"{CALL}\n{CALL}", "", 2),
        (f"I look. {CALL}", "I look. ", 1),
        ("a <tool and <tool_calls> b", "a <tool and <tool_calls> b", 0),
        ("<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", 0),
        ("a <tool_call>{", "a ", 0),
        ("a <tool_cal", "a ", 0),
        (CALL.removesuffix("</tool_call>"), "", 1),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", 0),
        ("", "", 0),
    ],
    ids=range(10),
)
def test_calls_however_they_are_cut(completion: str, text: str, calls: int) -> None:
    wanted = (text, [("weather", {"city": "Zürich"})] * calls)
    assert parse([completion]) == wanted and parse([*completion, ""]) == wanted
    for seed in range(20):
        cuts = sorted(random.Random(seed).choices(range(len(completion) + 1), k=4))
        assert parse([completion[a:b] for a, b in zip([0, *cuts], [*cuts, len(completion)], strict=True)]) == wanted


XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n<b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=what>\n["wind"]\n</parameter>\n</function>\n</tool_call>'
)
FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
PLAIN = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
MANY = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
KIMI_MANY = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
MINIMAX_CALL = '<minimax:tool_call>\n<invoke name="{}">\n{}</invoke>\n</minimax:tool_call>'
WEATHER = {
    "name": "weather",
    "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "what": {"type": "array"}}},
}
TIME = {"name": "time", "parameters": {"properties": {"city": {"type": "string"}}}}
ASKED = {"city": "Zürich\n<b>", "days": 3, "what": ["wind"]}
ASKED_JSON = json.dumps(ASKED)

GLM_CALL = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich\n<b></arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
    '<arg_key>what</arg_key>\n<arg_value>["wind"]</arg_value>\n</tool_call>'
)
THOUGHT = "<|channel|>analysis<|message|>Hm, a<b. <|end|><|start|>assistant"
SAID = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello <|b"
HARMONY_CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
TIMED = ("time", {})
TWICE = [TIMED, ("time", {"city": "x"})]


@pytest.mark.parametrize(
    "form, completion, wanted",
    [
        (XML, f"I look.{XML_CALL}\n{XML_CALL}", ("I look.", [("weather", ASKED)] * 2)),
        (XML, "<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", [])),
        (XML, "<tool_call>\n<function=a>\n</function>\n</tool_call>", ("", [("a", {})])),
        (
            XML,
            "<tool_call>\n<function=weather>\n<parameter=city>",
            ("", [("weather", {})]),
        ),
        (
            DEEPSEEK,
            "So: " + MANY.format(FENCED.format("weather", ASKED_JSON) + "\n" + FENCED.format("a", "{}")),
            ("So: ", [("weather", ASKED), ("a", {})]),
        ),
        (DEEPSEEK_31, MANY.format(PLAIN.format("weather", ASKED_JSON) * 2), ("", [("weather", ASKED)] * 2)),
        (DEEPSEEK_31, MANY.format(PLAIN.format("weather", "{")), ("", [("weather", "{")])),
        (DEEPSEEK_31, MANY.format(PLAIN.format("weather", "x")), (MANY.format(PLAIN.format("weather", "x")), [])),
        (GLM, f"I look.\n{GLM_CALL}\n{GLM_CALL}", ("I look.\n", [("weather", ASKED)] * 2)),
        (GLM, GLM_CALL.replace(">\n<", "><").replace("weather\n", "weather"), ("", [("weather", ASKED)])),  # GLM-4.7
        (GLM, "<tool_call>time</tool_call>", ("", [("time", {})])),
        (GLM, "<tool_call>other</tool_call>", ("<tool_call>other</tool_call>", [])),
        (LLAMA, json.dumps({"name": "weather", "parameters": ASKED}), ("", [("weather", ASKED)])),
        (LLAMA, '{"name": "time", "parameters": {}}; {"name": "time", "parameters": {"city": "x"}}', ("", TWICE)),
        (LLAMA, '{"name": "other", "parameters": {}}', ('{"name": "other", "parameters": {}}', [])),
        (LLAMA, '{"a": [1]}', ('{"a": [1]}', [])),
        (LLAMA, 'So: {"name": "time", "parameters": {}}', ('So: {"name": "time", "parameters": {}}', [])),
        (HARMONY, THOUGHT + FINAL, ("Hm, a<b. Hello <|b", [])),
        (
            HARMONY,
            THOUGHT + SAID + HARMONY_CALL.format("weather", ASKED_JSON),
            ("Hm, a<b. I look.", [("weather", ASKED)]),
        ),
        (HARMONY, f"<|start|>assistant{HARMONY_CALL.format('time', '{}')}<|call|>", ("", [("time", {})])),
        (HARMONY, " to=functions.time<|channel|>commentary json<|message|>{}<|call|>" + FINAL, ("Hello <|b", [TIMED])),
        (HARMONY, HARMONY_CALL.format("time", "{"), ("", [("time", "{")])),
        (HARMONY, HARMONY_CALL.format("time", "x"), ("x", [])),
        (HARMONY, HARMONY_CALL.format("other", "{}"), ("{}", [])),
        (HARMONY, THOUGHT, ("Hm, a<b. ", [])),
        (HARMONY, "Hello", ("Hello", [])),
        (HARMONY, THOUGHT + "<|channel|>fin", ("Hm, a<b. ", [])),
    ],
    ids=range(27),
)
def test_calls_of_every_form_however_they_are_cut(form: ToolFormat, completion: str, wanted: Any) -> None:
    assert parse([completion, ""], form, [WEATHER, TIME]) == wanted
    assert parse([*completion, ""], form, [WEATHER, TIME]) == wanted
    assert parse([completion], form, [WEATHER, TIME]) == wanted


STRINGS = json.dumps({"a": 'x</tool_call>{"\\', "b": [{}, "}"]})
STREAMED = {
    HERMES: '<tool_call>\n{{"name": "time", "arguments": {}}}\n</tool_call>',
    LLAMA: '{{"name": "time", "parameters": {}}}; {{"name": "time", "parameters": {}}}',
    DEEPSEEK: MANY.format(FENCED).replace("{}\n```json", "time\n```json"),
    DEEPSEEK_31: MANY.format(PLAIN).replace("{}<｜tool▁sep｜>", "time<｜tool▁sep｜>"),
    KIMI: KIMI_MANY.format(KIMI_CALL.replace("{}", "time", 1).replace("{}", "0", 1)),
    HARMONY: THOUGHT + HARMONY_CALL.replace("{}", "time", 1),
}


@pytest.mark.parametrize("form", STREAMED, ids=["hermes", "llama", "deepseek", "deepseek-v3.1", "kimi", "harmony"])
def test_arguments_come_as_they_are_written(form: ToolFormat) -> None:
    """Every character at once; what ends a call elsewhere does not within a string."""
    completion = STREAMED[form].format(STRINGS, STRINGS)
    found, parts, pieces = parser(OutputSyntax(form), [TIME]), OutputDelta(), 0
    for character in completion:
        new = found.push(character, last=False)
        pieces += bool(new.arguments)
        parts += new
    parts += found.push("", last=True)
    calls = completion.count(STRINGS)
    assert [(c.name, c.arguments) for c in parts.calls] == [("time", STRINGS)] * calls
    assert pieces >= calls * (len(STRINGS) - 3) and not parts.text


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=NAMES)
def test_any_output_is_read_alike_however_it_is_cut(form: ToolFormat) -> None:
    """Pieces of calls come in any order; few of them make calls."""
    whole = [SPELLED[form], STREAMED[form].format(STRINGS, STRINGS)] if form in STREAMED else [SPELLED[form]]
    pieces = [
        form.begin,
        form.end,
        *form.tokens,
        '{"name": "time", ',
        '"arguments": ',
        "{",
        "}",
        '"',
        "\\",
        "<",
        "\n",
        ";",
    ]
    pieces += ["time", "x", "```json", *whole, *(text[: len(text) // 2] for text in whole)]
    for seed in range(100):
        sampled = random.Random(seed)
        completion = "".join(sampled.choices(pieces, k=sampled.randrange(1, 12)))
        wanted = read_in_pieces(form, [completion])
        cuts = sorted(sampled.choices(range(len(completion) + 1), k=6))
        cut = [completion[a:b] for a, b in zip([0, *cuts], [*cuts, len(completion)], strict=True)]
        assert read_in_pieces(form, cut) == wanted and read_in_pieces(form, [*completion, ""]) == wanted, (
            seed,
            completion,
        )


def read_in_pieces(form: ToolFormat, pieces: list[str]) -> Any:
    found, parts = parser(OutputSyntax(form), [WEATHER, TIME]), OutputDelta()
    for at, piece in enumerate(pieces):
        parts += found.push(piece, last=at == len(pieces) - 1)
    assert not parts.arguments
    return parts.text, parts.thought, [(c.name, c.arguments) for c in parts.calls]


ONE = "<tool_call>\n<function=time>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM_ONE = "<tool_call>time\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
MINIMAX_ONE = MINIMAX_CALL.format("time", '<parameter name="city">{}</parameter>\n')
HERMES_ONE = '<tool_call>\n{{"name": "time", "arguments": {{"city": "{}"}}}}\n</tool_call>'
OTHER = "<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\n"
AT_B = [("time", {"city": "B"})]


@pytest.mark.parametrize(
    "form, completion, wanted",
    [
        (XML, ONE.replace("</tool_call>", OTHER + "</tool_call>"), ("", [*AT_B, ("weather", {"days": 3})])),
        (XML, ONE.replace("</function>\n", ""), ("", AT_B)),
        (XML, ONE.replace("\n</tool_call>", ""), ("", AT_B)),
        (XML, ONE.replace("<tool_call>\n", ""), ("", AT_B)),
        (XML, "I look.\n" + ONE.replace("<tool_call>\n", ""), ("I look.\n", AT_B)),
        (XML, ONE.replace("</parameter>\n", ""), ("", AT_B)),
        (XML, ONE.replace("</parameter>\n</function>\n", ""), ("", AT_B)),
        (XML, ONE.replace("\n", ""), ("", AT_B)),
        (XML, ONE.replace("\n</parameter>", "</parameter>"), ("", AT_B)),
        (XML, f"{ONE}\nDone.\n{ONE}", ("Done.\n", AT_B * 2)),
        (XML, "<function=other>\n<parameter=a>\n1", ("<function=other>\n<parameter=a>\n1", [])),
        (XML, "A <tool_call> and a <function=time>.", ("A <tool_call> and a <function=time>.", [])),
        (GLM, GLM_ONE.replace("<tool_call>", ""), ("", AT_B)),
        (GLM, GLM_ONE.replace("</arg_value>\n", ""), ("", AT_B)),
        (GLM, GLM_ONE + "\ntime flies", ("time flies", AT_B)),
        (GLM, "time flies", ("time flies", [])),
        (GLM, "<tool_call>time", ("", [TIMED])),
        (HERMES, HERMES_ONE.replace("<tool_call>\n", "").format("B"), ("", AT_B)),
        (HERMES, HERMES_ONE.format("B").replace("</tool_call>", ""), ("", AT_B)),
        (HERMES, '<tool_call>{"arguments": {"city": "B"}, "name": "time"}</tool_call>x', ("x", AT_B)),
        (HERMES, '<tool_call>{"name": "time", "arguments": "{\\"city\\": \\"B\\"}"}</tool_call>', ("", AT_B)),
        (HERMES, 'As {"name": "time", "arguments": {}}', ('As {"name": "time", "arguments": {}}', [])),
        (DEEPSEEK_31, PLAIN.format("time", "{}"), ("", [TIMED])),
        (KIMI, KIMI_CALL.format("time", 0, "{}"), ("", [TIMED])),
        (HARMONY, HARMONY_CALL.format("time", "<|call|>"), ("", [TIMED])),
        (MINIMAX, MINIMAX_ONE.replace("<minimax:tool_call>\n", ""), ("", AT_B)),
    ],
    ids=range(26),
)
def test_tags_that_are_missing_lose_no_call_and_are_not_shown(form: ToolFormat, completion: str, wanted: Any) -> None:
    completion = completion.replace("{}", "B") if wanted[1] and form.tags else completion
    for end in range(len(completion) + 1):
        assert parse([completion[:end], completion[end:]], form, [WEATHER, TIME]) == wanted
    assert parse([*completion, ""], form, [WEATHER, TIME]) == wanted


@pytest.mark.parametrize("value", ["</tool_call>", "</parameter>", "<tool_call>", "<function=x>", ONE, GLM_ONE, "</"])
@pytest.mark.parametrize("form, call", [(XML, ONE), (GLM, GLM_ONE), (MINIMAX, MINIMAX_ONE), (HERMES, HERMES_ONE)])
@pytest.mark.parametrize("around", ["{}", "a{}b", "\n{}\n"])
def test_a_value_may_hold_any_tag(form: ToolFormat, call: str, value: str, around: str) -> None:
    value = around.format(value)
    written = json.dumps(value)[1:-1] if form is HERMES else value
    completion = call.format(written) if form is HERMES else call.replace("{}", written, 1)
    assert parse([completion], form, [WEATHER, TIME]) == ("", [("time", {"city": value})])
    assert parse([*completion, ""], form, [WEATHER, TIME]) == ("", [("time", {"city": value})])


def test_a_parameter_that_is_not_what_its_schema_says_is_text() -> None:
    values = "<parameter=days>\nmany\n</parameter><parameter=x>\n1\n</parameter>"
    call = f"<tool_call><function=weather>{values}</function></tool_call>"
    assert parse([call], XML, [WEATHER]) == ("", [("weather", {"days": "many", "x": "1"})])


def test_a_template_says_which_form() -> None:
    for template, form in [
        ("<tool_call>\n<function=example>", XML),
        ("<tool_call> {{ tool.name }}", HERMES),
        (MANY.format("function<｜tool▁sep｜>\n```json"), DEEPSEEK),
        (MANY, DEEPSEEK_31),
        ("{{- '<tool_call>' + tc.name -}}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>", GLM),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', LLAMA),
        ("<|start|>assistant<|channel|>analysis<|message|>", HARMONY),
        ("{{ messages }}", None),
    ]:
        assert tool_format_of(template) is form


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_is_no_text(quiet: QuietEngine, stream: bool) -> None:
    """Models that write to several readers are parsed, also where they are offered no tools."""
    quiet.tokenizer.chat_template = "{# <|start|>assistant<|channel|> #}" + TEMPLATE

    def say() -> None:
        for piece in (THOUGHT[:20], THOUGHT[20:], FINAL):
            quiet.say(output(piece))
        quiet.say(output("", "stop"))

    for served in serve(quiet):
        threading.Thread(target=say).start()
        found = chat(served, stream, tools=[])
        said = [c.choices[0].delta for c in found] if stream else [found.choices[0].message]
        assert "".join(part.content or "" for part in said) == "Hello <|b"
        assert "".join(getattr(part, "reasoning_content", None) or "" for part in said) == "Hm, a<b. "


def test_calls_in_later_chunks_are_numbered_on(quiet: QuietEngine) -> None:
    """Clients put a call's pieces together by its number, so each call needs one of its own."""
    quiet.tokenizer.chat_template = "{# <tool_call> #}" + TEMPLATE
    named = [CALL, CALL.replace("weather", "time"), CALL]

    def say() -> None:
        for piece in (named[0], f"\n{named[1]}\n{named[2]}"):
            quiet.say(output(piece))
        quiet.say(output("", "stop"))

    for served in serve(quiet):
        threading.Thread(target=say).start()
        calls: dict[int, str] = {}
        for chunk in chat(served, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                calls[call.index] = calls.get(call.index, "") + (call.function.name or "")
        assert calls == {0: "weather", 1: "time", 2: "weather"}


def test_special_tokens_are_kept_for_the_parser_alone(quiet: QuietEngine) -> None:
    service = Service(EngineClient(quiet, Metrics(quiet)), ("small",), shared_templates(quiet), Options(), None)  # type: ignore[arg-type]
    quiet.tokenizer.chat_template = "{# <tool_call> #}" + TEMPLATE
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS})
    plain = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    assert not service.chat_job(body).params.keep_special
    quiet.tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "<|end|>"]})
    del quiet.text_processor.special
    assert service.chat_job(body).params.keep_special and not service.chat_job(plain).params.keep_special
    found = service.chat_job(body).parsers
    assert found is not None and found().push(f"a<|end|>{CALL}", last=True).text == "a"
    shown = service.chat_job(body.model_copy(update={"skip_special_tokens": False})).parsers
    assert shown is not None and shown().push("a<|end|>", last=True).text == "a<|end|>"


def test_special_tokens_are_no_text() -> None:
    hidden = {"<|end|>", "<tool_call>"}
    wanted = ("ab", [("weather", {"city": "Zürich"})])
    assert parse(["a", "<|end|>", "b", CALL, "<|end|>"], HERMES, (), hidden) == wanted
    assert parse(["<tool_call>", "no JSON", "</tool_call>"], HERMES, (), hidden) == ("no JSON</tool_call>", [])


SPELLED = {
    HARMONY: HARMONY_CALL.format("time", '{"city":"Bern"}'),
    XML: "<tool_call>\n<function=time>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>",
    GLM: "<tool_call>time\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>",
    HERMES: '<tool_call>\n{"name":"time","arguments":{"city":"Bern"}}\n</tool_call>',
    DEEPSEEK: MANY.format(FENCED.format("time", '{"city":"Bern"}')),
    DEEPSEEK_31: MANY.format(PLAIN.format("time", '{"city":"Bern"}')),
    KIMI: KIMI_MANY.format(KIMI_CALL.format("time", 0, '{"city":"Bern"}')),
    MINIMAX: MINIMAX_CALL.format("time", '<parameter name="city">Bern</parameter>\n'),
    LLAMA: '{"name":"time","parameters":{"city":"Bern"}}',
}


@pytest.mark.parametrize("marks", ["text", "added tokens", "special tokens"])
@pytest.mark.parametrize("form", TOOL_FORMATS, ids=NAMES)
def test_a_grammar_takes_what_its_parser_reads(chat_model_dir: Path, form: ToolFormat, marks: str) -> None:
    """Also where the marks are tokens of their own, special or, as <tool_call> is in Qwen3, not."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model_dir)
    tokens = [AddedToken(t, normalized=False) for t in form.tokens if t in SPELLED[form] and marks != "text"]
    tokenizer.add_tokens(tokens, special_tokens=marks == "special tokens")
    grammars = Grammars(tokenizer, len(tokenizer), [0])
    grammar = form.grammar([t["function"] for t in TOOLS], several=True, named=grammars.named)
    for spelled in (SPELLED[form], SPELLED[form].replace("Bern", "Be")):
        state = grammars.start(grammar)
        for token in tokenizer.encode(spelled, add_special_tokens=False):
            assert state.mask(b"")[token // 8] >> token % 8 & 1, tokenizer.decode([token])
            state.accept(token)
        assert state.mask(b"")[0] & 1, "it may end here"
    assert parse([SPELLED[form]], form, [WEATHER, TIME])[1] == [("time", {"city": "Bern"})]


@pytest.mark.parametrize("marks", ["text", "special tokens"])
@pytest.mark.parametrize("form", TOOL_FORMATS, ids=NAMES)
def test_strict_calls_are_held_to_their_schema_among_free_text(
    chat_model_dir: Path, form: ToolFormat, marks: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model_dir)
    if marks == "special tokens":
        tokenizer.add_special_tokens({"additional_special_tokens": list(form.tokens)})
    grammars = Grammars(tokenizer, len(tokenizer), [0])
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    assert ChatRequest.model_validate(asked).calls_grammar(form, grammars) is None
    strict = [TOOLS[0], {"type": "function", "function": TOOLS[1]["function"] | {"strict": True}}]
    body = ChatRequest.model_validate(asked | {"tools": strict})
    if form is HARMONY and marks == "text":
        with pytest.raises(ApiError, match="strict is not supported with this tokenizer"):
            body.calls_grammar(form, grammars)
        return
    grammar = body.calls_grammar(form, grammars)
    assert grammar is not None

    def taken(text: str) -> int:
        """Characters that may come, and whether the text may end there."""
        state = grammars.start(grammar)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for at, token in enumerate(tokens):
            if not state.mask(b"")[token // 8] >> token % 8 & 1:
                return len(tokenizer.decode(tokens[:at]))
            state.accept(token)
        return len(text) if state.mask(b"")[0] & 1 else -1

    call = SPELLED[form].replace("Bern", "Ber")
    other = call.replace("city", "town")
    before = {HARMONY: THOUGHT, LLAMA: ""}.get(form, "I look: a < b, <tool, {}.\n")
    free = THOUGHT + FINAL if form is HARMONY else "Hello {you} <b>\n"
    texts = [free, before + call] + ([] if form in (HARMONY, LLAMA) else [before + call + call, call + "\nBye <b"])
    assert [taken(text) for text in texts] == [len(text) for text in texts]
    assert taken(before + other) == len(before) + other.index("town")


@pytest.mark.parametrize(
    ("form", "choice"),
    [
        pytest.param(form, choice, id=f"{name}-{choice}", marks=[pytest.mark.nightly] * ((at + second) % 2))
        for at, (form, name) in enumerate(zip(TOOL_FORMATS, NAMES, strict=True))
        for second, choice in enumerate(("required", "time"))
    ],
)
def test_every_form_can_be_made_to_call(
    served: Served, monkeypatch: pytest.MonkeyPatch, form: ToolFormat, choice: str
) -> None:
    marked = "".join("{# " + mark + " #}" for mark in form.marks)
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", marked + UNMARKED)
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    message = chat(served, tool_choice=named, parallel_tool_calls=False, temperature=1).choices[0].message
    assert not message.content
    [call] = message.tool_calls
    assert call.function.name in ("weather", "time") and choice in ("required", call.function.name)
    assert list(json.loads(call.function.arguments)) == ["city"]


def test_some_of_the_tools(tooled: Served) -> None:
    """The model sees those alone, and must call one of them where the mode says so; in both of OpenAI's shapes."""
    time: Any = {"type": "function", "function": {"name": "time"}}
    asked: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [time]}}
    forced = chat(tooled, tool_choice=asked, parallel_tool_calls=False)
    assert [call.function.name for call in forced.choices[0].message.tool_calls] == ["time"]
    assert forced.usage.prompt_tokens == len("time;user:hi\n")
    asked["allowed_tools"]["mode"] = "auto"
    assert chat(tooled, tool_choice=asked, max_tokens=1).usage.prompt_tokens == len("time;user:hi\n")
    flat: Any = {"model": "small", "input": "hi", "tools": [{"type": "function"} | t["function"] for t in TOOLS]}
    flat["tool_choice"] = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
    response = tooled.client().responses.create(**flat, max_output_tokens=200, temperature=9, parallel_tool_calls=False)
    assert [item.name for item in response.output] == ["time"]
    assert response.usage.input_tokens == len("time;user:hi\n") and response.tool_choice.type == "allowed_tools"


@pytest.fixture
def tooled(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", TEMPLATE)
    yield served


def chat(served: Served, stream: bool = False, **more: Any) -> Any:
    messages = more.pop("messages", [{"role": "user", "content": "hi"}])
    body: Any = {"model": "small", "messages": messages, "tools": TOOLS, "max_tokens": 200, "temperature": 9, "seed": 5}
    return served.client().chat.completions.create(**body | more, stream=stream)


def test_calls_that_must_be(tooled: Served) -> None:
    choice = chat(tooled, tool_choice="required", parallel_tool_calls=False).choices[0]
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert call.function.name in ("weather", "time") and list(json.loads(call.function.arguments)) == ["city"]
    named = chat(tooled, tool_choice={"type": "function", "function": {"name": "time"}}).choices[0]
    assert [c.function.name for c in named.message.tool_calls] == ["time"]


PLACE: Any = {"type": "object", "properties": {"place": {"enum": ["x"]}}, "required": ["place"]}
NAMED: Any = {"type": "function", "function": {"name": "time"}}


def test_a_forced_call_has_precedence_over_another_grammar(tooled: Served) -> None:
    """All three APIs accept both, as instructor asks for both."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    for choice in ("required", NAMED):
        message = chat(tooled, tool_choice=choice, response_format=form, parallel_tool_calls=False).choices[0].message
        assert not message.content and list(json.loads(message.tool_calls[0].function.arguments)) == ["city"]
    flat: Any = {"type": "function", "name": "time", "parameters": TOOLS[1]["function"]["parameters"]}
    text: Any = {"format": {"type": "json_schema", "name": "place", "schema": PLACE}}
    asked: Any = {"model": "small", "input": "hi", "tools": [flat], "tool_choice": "required", "text": text}
    asked["parallel_tool_calls"] = False
    [item] = tooled.client().responses.create(**asked, temperature=9, max_output_tokens=200).output
    assert item.type == "function_call" and list(json.loads(item.arguments)) == ["city"]
    body: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "stream": False}
    body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    body |= {"tools": [{"name": "time", "input_schema": flat["parameters"]}], "temperature": 9}
    body |= {"output_config": {"format": {"type": "json_schema", "schema": PLACE}}}
    with tooled.http() as http:
        [block] = http.post("/v1/messages", json=body).json()["content"]
    assert block["type"] == "tool_use" and list(block["input"]) == ["city"]


@pytest.mark.parametrize("form", [HERMES, DEEPSEEK, XML], ids=["hermes", "deepseek", "xml"])
def test_calls_that_may_be_made_are_an_alternative_to_another_grammar(quiet: QuietEngine, form: ToolFormat) -> None:
    """Agents with tools and a type of their output ask for both, and call first."""
    service = Service(EngineClient(quiet, Metrics(quiet)), ("small",), shared_templates(quiet), Options(), None)  # type: ignore[arg-type]
    quiet.tokenizer.chat_template = "".join("{# " + mark + " #}" for mark in form.marks) + UNMARKED
    asked: Any = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    asked["response_format"] = {
        "type": "json_schema",
        "json_schema": {"schema": PLACE | {"additionalProperties": False}},
    }
    compiled = service.chat_job(ChatRequest.model_validate(asked)).params.grammar

    def taken(text: str) -> int:
        state, tokens = quiet.text_processor.grammars.start(compiled), quiet.tokenizer.encode(text)
        for at, token in enumerate(tokens):
            if not state.mask(b"")[token // 8] >> token % 8 & 1:
                return at
            state.accept(token)
        return len(text) if state.mask(b"")[0] & 1 else -1

    for text in ('{"place":"x"}', SPELLED[form].replace("Bern", "Be")):
        assert taken(text) == len(text)
    assert taken("Hello") == 0 and taken('{"place":"y"}') == len('{"place":"')


def test_streamed_calls_are_the_same(tooled: Served) -> None:
    whole = chat(tooled, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    chunks = [c.choices[0] for c in chat(tooled, True, tool_choice="required", parallel_tool_calls=False)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert {c.index for c in calls} == {0} and chunks[-1].finish_reason == "tool_calls"
    [call] = whole
    assert [c.function.name for c in calls if c.function.name] == [call.function.name]
    assert "".join(c.function.arguments for c in calls) == call.function.arguments and len(calls) > 2


@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_streamed_call_is_put_together_by_the_official_client(quiet: QuietEngine, end: Any) -> None:
    quiet.tokenizer.chat_template = TEMPLATE
    completion = f"I look.{CALL}\n{CALL}"
    body: Any = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}

    def say(size: int) -> None:
        for at in range(0, len(completion), size):
            quiet.say(output(completion[at : at + size]))
        quiet.say(output("", end))

    found: list[Any] = []
    for size in (3, 7, 40, len(completion)):
        for served in serve(quiet):
            quiet.listeners.clear()
            threading.Thread(target=say, args=(size,)).start()
            if size == len(completion):
                found.append(served.client().chat.completions.create(**body).choices[0])
                continue
            with served.client().chat.completions.stream(**body) as stream:
                events = list(stream)
                found.append(stream.current_completion_snapshot.choices[0])
            deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
            assert len(deltas) > 2 or size == 40
    for choice in found:
        assert choice.message.content == "I look." and choice.finish_reason == {"stop": "tool_calls"}.get(end, end)
        called = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
        assert called == [("weather", '{"city": "Zürich"}')] * 2


def test_a_conversation_with_calls(tooled: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    prompt = 'weather;time;user:hi\nassistant:<tool_call>{"city": "Bern"}</tool_call>\ntool:rain\n'
    assert chat(tooled, messages=messages, max_tokens=1).usage.prompt_tokens == len(prompt)
    without = chat(tooled, tool_choice="none", max_tokens=1)
    assert without.usage.prompt_tokens == len("user:hi\n") and without.choices[0].message.tool_calls is None


def test_bad_calls_are_refused(tooled: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{"}}
    for body, text in [
        ({"messages": [{"role": "assistant", "tool_calls": [call]}]}, "arguments of a call of weather are not JSON"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x', which is not among the tools"),
        ({"tool_choice": "required", "response_format": {"type": "xml"}}, "'xml' is not supported"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
                }
            },
            "'x', which is not among the tools",
        ),
    ]:
        with tooled.http() as http:
            hello = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
            completion = http.post("/v1/chat/completions", json=hello | body)
        assert completion.status_code == 400 and text in completion.text, completion.text
