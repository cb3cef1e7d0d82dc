"""Stop strings and single calls: what ends an output is looked for in the part that it concerns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from server.conftest import QuietEngine, shared_templates
from server.test_tools import (
    DEEPSEEK,
    HARMONY,
    HERMES,
    LLAMA,
    SPELLED,
    THOUGHT,
    TIME,
    TOOLS,
    UNMARKED,
    WEATHER,
)
from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.parsers import EndingParser, OutputSyntax, parser
from weft.serve.chat.service import Service
from weft.serve.chat.tool_formats import TOOL_FORMATS, ToolFormat
from weft.serve.chat.tools import OutputDelta
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.metrics import Metrics
from weft.serve.http.options import Options

HELLO: Any = [{"role": "user", "content": "hi"}]
THINKS = "{# <tool_call> <think> #}" + UNMARKED
CALL = '<tool_call>\n{"name": "time", "arguments": {"city": "Question: </tool_call>"}}\n</tool_call>'


def run(quiet: QuietEngine, completion: str, size: int = 1, **body: Any) -> tuple[OutputDelta, str | None, str]:
    """Return a client's view of an output in pieces: its parts, its end, and the text that was not generated."""
    quiet.tokenizer.chat_template = THINKS
    service = Service(EngineClient(quiet, Metrics(quiet)), ("small",), shared_templates(quiet), Options(), None)  # type: ignore[arg-type]
    job = service.chat_job(ChatRequest.model_validate({"messages": HELLO, "tools": TOOLS} | body))
    assert job.params.watch is not None and job.parsers is not None and not job.params.stop
    watch, shown, parts, end, at = job.params.watch(), job.parsers(), OutputDelta(), None, 0
    while end is None and at < len(completion):
        piece = completion[at : at + size]
        at += size
        end = watch(piece)
        parts += shown.push(piece, last=end is not None or at >= len(completion))
    return parts, end, completion[at:]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_stop_strings_end_the_text_alone(quiet: QuietEngine, size: int) -> None:
    """Not the thought, and not the arguments of a call."""
    thought = "<think>Question: who?</think>"
    parts, end, _ = run(quiet, thought + "Me. Question: you?", size, stop=["Question:"])
    assert (parts.text, parts.thought, end) == ("Me. ", "Question: who?", "Question:")
    parts, end, _ = run(quiet, thought + "I look. " + CALL, size, stop=["Question:"])
    assert (parts.text, len(parts.calls), end) == ("I look. ", 1, None)
    parts, end, _ = run(quiet, "Me. Quest" + CALL + "ion: you?", size, stop=["Question:"])
    assert (parts.text == "Me. Question: you?" and end is None) or size == 1000  # pieces of it are no stop string
    parts, end, rest = run(quiet, "a b c d", size, stop=["c", "b c"], include_stop_str_in_output=True)
    assert (parts.text, end) == ("a b c", "b c") and (rest or size == 1000)
    parts, end, _ = run(quiet, "a b a b", 1, stop="b", min_tokens=4)
    assert (parts.text, end) == ("a b a ", "b")


def test_a_thought_that_is_text_has_stop_strings(quiet: QuietEngine) -> None:
    parts, end, _ = run(quiet, "<think>Question: who?</think>", stop=["Question:"], separate_reasoning=False)
    assert (parts.text, end) == ("<think>", "Question:")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_one_call_ends_the_output_wherever_its_tag_is_named(quiet: QuietEngine, size: int) -> None:
    thought = "<think>I write </tool_call> and <tool_call>.</think>"
    parts, end, rest = run(quiet, thought + CALL + "\n" + CALL, size, parallel_tool_calls=False)
    assert parts.thought == "I write </tool_call> and <tool_call>." and end == "" and (rest or size == 1000)
    assert [call.arguments for call in parts.calls] == ['{"city": "Question: </tool_call>"}'] and not parts.text
    parts, end, _ = run(quiet, "No </tool_call> here.", size, parallel_tool_calls=False)
    assert (parts.text, end) == ("No </tool_call> here.", None)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_every_form_ends_with_one_call(form: ToolFormat) -> None:
    two = SPELLED[form] + "<|call|><|start|>assistant" * (form is HARMONY) + form.between + SPELLED[form]
    if form is DEEPSEEK:
        two = SPELLED[form].replace("<｜tool▁calls▁end｜>", "\n") + SPELLED[form].partition("<｜tool▁calls▁begin｜>")[2]
    for text in [two] + [THOUGHT + two] * (form is HARMONY):
        for pieces in ([text], [*text]):
            found = EndingParser(parser(OutputSyntax(form), [WEATHER, TIME], one_call=True), ())
            parts = until_it_ends(found, pieces)
            assert [call.name for call in parts.calls] == ["time"] and found.end == "" and not parts.text
        assert len(parser(OutputSyntax(form), [WEATHER, TIME]).push(text, last=True).calls) == 2


def until_it_ends(found: EndingParser, pieces: Sequence[str]) -> OutputDelta:
    parts = OutputDelta()
    for at, piece in enumerate(pieces):
        if found.end is None:
            parts += found.push(piece, last=at == len(pieces) - 1)
    return parts


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_output_with_a_grammar_of_its_own_begins_with_calls_or_has_none(quiet: QuietEngine, size: int) -> None:
    """Whatever tags are in its strings."""
    quiet.tokenizer.chat_template = THINKS.replace("<think>", "")
    service = Service(EngineClient(quiet, Metrics(quiet)), ("small",), shared_templates(quiet), Options(), None)  # type: ignore[arg-type]
    body = {"messages": HELLO, "tools": TOOLS, "response_format": {"type": "json_object"}}
    parsers = service.chat_job(ChatRequest.model_validate(body)).parsers
    assert parsers is not None and {HERMES, LLAMA} < set(TOOL_FORMATS)
    for output, calls in ((f'{{"a": {json.dumps(CALL)}}}', 0), ("<tool", 0), ("\n" + CALL, 1)):
        found, shown = OutputDelta(), parsers()
        for at in range(0, len(output), size):
            found += shown.push(output[at : at + size], last=at + size >= len(output))
        assert len(found.calls) == calls and found.text.strip() == ("" if calls else output)


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["alone", "tools"])
def test_an_output_with_a_grammar_of_its_own_has_no_channels(quiet: QuietEngine, tools: Any) -> None:
    """A mark of one may be in its strings."""
    quiet.tokenizer.chat_template = "{# <|start|>assistant<|channel|> #}" + UNMARKED
    service = Service(EngineClient(quiet, Metrics(quiet)), ("small",), shared_templates(quiet), Options(), None)  # type: ignore[arg-type]
    body = {"messages": HELLO, "tools": tools, "response_format": {"type": "json_object"}}
    assert service.chat_job(ChatRequest.model_validate(body)).parsers is None
    parsers = service.chat_job(ChatRequest.model_validate(body | {"response_format": {"type": "text"}})).parsers
    assert parsers is not None and parsers().push(THOUGHT + "<|channel|>final<|message|>Yes.", last=True).text == "Yes."


@pytest.mark.parametrize("size", [1, 1000])
def test_an_output_goes_on_in_the_channel_of_the_message_that_it_continues(quiet: QuietEngine, size: int) -> None:
    turn = "<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>"
    quiet.tokenizer.chat_template = "{# <|start|>assistant #}{% for m in messages %}" + turn + "{% endfor %}"
    service = Service(EngineClient(quiet, Metrics(quiet)), ("small",), shared_templates(quiet), Options(), None)  # type: ignore[arg-type]
    body = {"messages": [*HELLO, {"role": "assistant", "content": "Hel"}], "continue_final_message": True}
    parsers = service.chat_job(ChatRequest.model_validate(body)).parsers
    assert parsers is not None
    for output, text in (("lo.<|end|>", "lo."), ("lo, a <b>", "lo, a <b>")):
        shown = until_it_ends(
            EndingParser(parsers(), ()), [output[at : at + size] for at in range(0, len(output), size)]
        )
        assert (shown.text, shown.thought) == (text, "")
