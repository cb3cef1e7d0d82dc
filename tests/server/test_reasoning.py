"""Thoughts between <think> tags: apart from the text and the calls, whole and streamed, and before any grammar."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from server.conftest import QuietEngine, Served, output, serve, shared_templates
from server.test_tools import CALL, TOOLS
from weft.engine.grammar.grammar import Grammars, grammar
from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.parsed_output import ParsedOutput
from weft.serve.chat.parsers import ALL_TEXT, OutputSyntax, ReasoningSplitter, Start, after_reasoning, parser, start_of
from weft.serve.chat.service import Service
from weft.serve.chat.tool_formats import TOOL_FORMATS
from weft.serve.chat.tools import OutputDelta
from weft.serve.dialects.anthropic_messages import MessagesRequest
from weft.serve.dialects.responses import ResponsesRequest
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.errors import ApiError
from weft.serve.http.metrics import Metrics
from weft.serve.http.options import Options, ReasoningParser

HERMES = next(form for form in TOOL_FORMATS if form.marks == ("<tool_call>",))
THOUGHT = "<think>\nHm, a<b.\n\nSo </thin\n</think>\n\n"
SPLIT = "Hm, a<b.\n\nSo </thin"
OPENS = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}\n{% endfor %}<think>\n"
MAY_THINK = OPENS.removesuffix("<think>\n") + "{# <think></think> #}"
HELLO: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "effort, template, gpt_oss",
    [
        (None, ",,", ""),
        ("none", "none,False,False", None),
        ("minimal", "minimal,,", "low"),
        ("medium", "medium,,", "medium"),
        ("max", "max,,", "high"),
    ],
)
def test_reasoning_effort_is_the_templates(
    quiet: QuietEngine, effort: str | None, template: str, gpt_oss: str | None
) -> None:
    """Each endpoint has its own name for it; None: GPT-OSS cannot omit its thought."""
    message = {"messages": HELLO, "max_tokens": 1, "output_config": {"effort": effort}}
    bodies = [
        ChatRequest.model_validate({"messages": HELLO, "reasoning_effort": effort}),
        ResponsesRequest.model_validate({"input": "hi", "reasoning": {"effort": effort, "summary": "auto"}}).chat(),
        MessagesRequest.model_validate(message).chat(),
    ]
    said = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}|"
    shown = said + "{{ reasoning_effort }},{{ enable_thinking }},{{ thinking }}"

    def prompt(chat: ChatRequest) -> str:
        return chat.prompt(quiet.tokenizer, shared_templates(quiet)).rpartition("|")[2]

    for chat in bodies:
        quiet.tokenizer.chat_template = shown
        assert prompt(chat) == template
        chosen = chat.model_copy(update={"chat_template_kwargs": {"thinking": 1}})
        assert prompt(chosen).endswith(",1")
        quiet.tokenizer.chat_template = "{# <|start|>assistant<|channel|> #}" + said + "{{ reasoning_effort }}"
        if gpt_oss is not None:
            assert prompt(chat) == gpt_oss
        else:
            with pytest.raises(ApiError, match="this model always thinks; use low, medium or high"):
                prompt(chat)


@pytest.mark.parametrize(
    "start, completion, wanted",
    [
        ("free", f"{THOUGHT}Yes.\n", ("Yes.\n", SPLIT, 0)),
        ("inside", f"{THOUGHT}Yes.", ("Yes.", SPLIT, 0)),
        ("inside", THOUGHT.removeprefix("<think>\n") + "Yes.", ("Yes.", SPLIT, 0)),
        ("free", f"\n{THOUGHT}{CALL}", ("", SPLIT, 1)),
        ("free", "<think>\n\n</think>\n\nYes.", ("Yes.", "", 0)),
        ("free", f"<think>{CALL}</think>{CALL}", ("", CALL, 1)),
        ("free", "Yes. <think>no</think>", ("Yes. <think>no</think>", "", 0)),
        ("free", " <thin", (" <thin", "", 0)),
        ("free", "<think>\nHm", ("", "Hm", 0)),
        ("inside", "Hm</th", ("", "Hm</th", 0)),
        ("inside", "</think>", ("", "", 0)),
        ("inside", "", ("", "", 0)),
        ("free", "", ("", "", 0)),
    ],
    ids=range(13),
)
def test_thoughts_however_they_are_cut(start: Start, completion: str, wanted: Any) -> None:
    for seed in range(30):
        cuts = sorted(random.Random(seed).choices(range(len(completion) + 1), k=seed))
        pieces = [completion[a:b] for a, b in zip([0, *cuts], [*cuts, len(completion)], strict=True)]
        for split in (pieces, [*completion, ""]):
            found, parts = ReasoningSplitter(parser(OutputSyntax(HERMES)), start), OutputDelta()
            for at, piece in enumerate(split):
                parts += found.push(piece, last=at == len(split) - 1)
            assert (parts.text, parts.thought, len(parts.calls)) == wanted


def test_where_an_output_begins() -> None:
    assert start_of("user: hi\nassistant: <think>\n") == "inside"
    assert start_of("user: what is <think>?\nassistant:") == "free"
    assert start_of("assistant: <think>\n\n</think>\n\n") is None
    assert start_of("assistant:<think>Hm", "<think>Hm") == "inside"
    assert start_of("assistant:<think>Hm</think>Y", "<think>Hm</think>Y") is None


def service(quiet: QuietEngine, how: ReasoningParser = "auto") -> Service:
    client, options = EngineClient(quiet, Metrics(quiet)), Options(reasoning_parser=how)  # type: ignore[arg-type]
    return Service(client, ("small",), shared_templates(quiet), options, None)


def parts(of: Service, completion: str, **more: Any) -> OutputDelta:
    made = of.chat_job(ChatRequest.model_validate({"messages": HELLO} | more)).parsers
    return made().push(completion, last=True) if made else OutputDelta(completion)


def test_who_thinks(quiet: QuietEngine) -> None:
    """Template or tokenizer decide, unless the option says it; and clients may have the thought omitted or unsplit."""
    assert parts(service(quiet), THOUGHT + "Yes.").text == THOUGHT + "Yes."
    assert parts(service(quiet, "think"), THOUGHT + "Yes.") == OutputDelta("Yes.", thought=SPLIT)
    quiet.tokenizer.add_tokens([AddedToken("</think>")])
    assert parts(service(quiet), THOUGHT + "Yes.") == OutputDelta("Yes.", thought=SPLIT)
    quiet.tokenizer.chat_template = OPENS
    assert parts(service(quiet), "Hm</think>Yes.") == OutputDelta("Yes.", thought="Hm")
    assert parts(service(quiet), "Hm</think>Yes.", include_reasoning=False) == OutputDelta("Yes.")
    assert parts(service(quiet), "Hm</think>Yes.", separate_reasoning=False) == OutputDelta("Hm</think>Yes.")
    assert parts(service(quiet, "off"), "Hm</think>Yes.") == OutputDelta("Hm</think>Yes.")


def test_marks_that_are_special_tokens_are_seen_by_the_parser_alone(quiet: QuietEngine) -> None:
    quiet.tokenizer.chat_template = MAY_THINK
    body = ChatRequest.model_validate({"messages": HELLO})
    assert not service(quiet).chat_job(body).params.keep_special
    quiet.tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|x|>"]})
    del quiet.text_processor.special
    assert service(quiet).chat_job(body).params.keep_special
    assert parts(service(quiet), "<think>H<|x|>m</think>Y<|x|>es.") == OutputDelta("Yes.", thought="Hm")


def test_tokens_of_a_thought_are_counted() -> None:
    made = ParsedOutput(ReasoningSplitter(parser(ALL_TEXT), "inside"))
    for at, piece in enumerate(["H", "m", "</think>", "Y", "es."], 1):
        made.add(msgspec.structs.replace(output(piece), completion_tokens=at))
    assert made.reasoning_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_of_a_chat(quiet: QuietEngine, stream: bool) -> None:
    """Templates may open the thought; a thought that a client sends back reaches the template."""
    quiet.tokenizer.chat_template = OPENS
    pieces = ["H", "m\n</", "think>", "\nYes."]

    def say() -> None:
        for piece in pieces:
            quiet.say(output(piece))
        quiet.say(output("", "stop"))

    for served in serve(quiet):
        threading.Thread(target=say).start()
        found: Any = served.client().chat.completions.create(model="small", messages=HELLO, stream=stream)
        said = [c.choices[0].delta for c in found] if stream else [found.choices[0].message]
        assert "".join(part.content or "" for part in said) == "Yes."
        for name in ("reasoning_content", "reasoning"):
            assert "".join(getattr(part, name, None) or "" for part in said) == "Hm"
    for name in ("reasoning_content", "reasoning"):
        asked = ChatRequest.model_validate({"messages": [{"role": "assistant", "content": "Yes.", name: "Hm"}]})
        assert asked.prompt(quiet.tokenizer, shared_templates(quiet)) == "assistant:HmYes.\n<think>"


SCHEMA: Any = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
SCHEMA |= {"additionalProperties": False}


@pytest.mark.parametrize("marks", ["text", "added tokens", "special tokens"])
@pytest.mark.parametrize("kind", ["json", "calls"])
@pytest.mark.parametrize("start", ["inside", "free"])
def test_a_grammar_begins_after_the_thought(chat_model_dir: Path, marks: str, kind: str, start: Start) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model_dir)
    tokens = [AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>") if marks != "text"]
    tokenizer.add_tokens(tokens, special_tokens=marks == "special tokens")
    grammars = Grammars(tokenizer, len(tokenizer), [0])
    inner, completion = grammar("json", SCHEMA), '{"n":true}'
    if kind == "calls":
        inner = HERMES.grammar([t["function"] for t in TOOLS], several=False, named=grammars.named)
        completion = '<tool_call>\n{"name":"time","arguments":{"city":"Bern"}}\n</tool_call>'
    made = after_reasoning(inner, start, grammars.named)

    def accepted(text: str) -> str:
        """Return the part of the text that the grammar accepts, with a point where it may end there."""
        state, ids = grammars.start(made), tokenizer.encode(text, add_special_tokens=False)
        for at, token in enumerate(ids):
            if not state.mask(b"")[token // 8] >> token % 8 & 1:
                return str(tokenizer.decode(ids[:at]))
            state.accept(token)
        return text + "." if state.mask(b"")[0] & 1 else text

    thought = "<think>" * (start == "free") + 'Hm\n{"n": <b\n</think>'
    for between in ("", "\n\n"):
        assert accepted(thought + between + completion) == thought + between + completion + "."
    assert accepted(thought + "Yes") == thought
    assert accepted(thought.removesuffix("</think>")) == thought.removesuffix("</think>")
    if start == "free":
        assert accepted(completion) == completion + "." and accepted("x") == ""
    else:
        assert accepted('x{"n":true}') == 'x{"n":true}', "all text is thought until that ends"


def test_an_output_that_follows_a_grammar_thinks_before(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freely, here until its length; but not where the prompt has closed the thought."""
    body: Any = {"model": "small", "messages": HELLO, "max_tokens": 60, "temperature": 0}
    body |= {"extra_body": {"guided_choice": ["yes", "no"]}}
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", OPENS)
    cut = served.client().chat.completions.create(**body).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", "") and cut.message.reasoning_content
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", OPENS + "</think>")
    whole = served.client().chat.completions.create(**body).choices[0]
    assert whole.message.content in ("yes", "no")


def test_bad_input(quiet: QuietEngine) -> None:
    quiet.tokenizer.chat_template = "{# <|start|>assistant<|channel|> #}" + MAY_THINK
    for served in serve(quiet):
        with served.http() as http:
            completion = http.post("/v1/chat/completions", json={"messages": HELLO, "separate_reasoning": False})
    assert completion.status_code == 400 and completion.json()["error"]["param"] == "separate_reasoning"
