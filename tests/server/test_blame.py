"""Errors blame the field that the client sent, by its name in the API that the client speaks."""

from __future__ import annotations

from typing import Any

import pytest

from server.conftest import QuietEngine, serve
from server.test_message_shape import GPT_OSS, QWEN_3
from weft.engine.grammar.grammar import grammar
from weft.engine.messages.request import ContextExceeded, SamplingParams
from weft.engine.output.request_output import prepare
from weft.serve.dialects.anthropic_messages import MessagesRequest
from weft.serve.dialects.responses import ResponsesRequest

P, H, R, M = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER: Any = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {
    P: {"prompt": "hi"},
    H: {"messages": USER},
    R: {"input": "hi"},
    M: {"messages": USER, "max_tokens": 5},
}
BAD: Any = {"type": "object", "properties": {"a": {"type": "strin"}}}
TOOL: Any = {"name": "f", "parameters": BAD}
TOOLS: Any = [{"type": "function", "function": {"name": "g"}}, {"type": "function", "function": TOOL}]
FLAT: Any = [{"type": "function"} | tool["function"] for tool in TOOLS]
INPUT: Any = [{"name": "f", "input_schema": BAD}]
CALL: Any = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}
FORMAT: Any = {"type": "json_schema", "name": "n", "schema": BAD}
SCHEMA = "response_format.json_schema.schema"
LONG = "a" * 3000
CASES: list[tuple[str, dict[str, Any], str]] = [
    (H, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (H, {"max_completion_tokens": -1}, "max_completion_tokens"),
    (H, {"max_tokens": -1}, "max_tokens"),
    (H, {"n": 17}, "n"),
    (H, {"stop": ["a"] * 17}, "stop"),
    (H, {"guided_json": BAD}, "guided_json"),
    (H, {"guided_regex": "a(b"}, "guided_regex"),
    (H, {"structured_outputs": {"regex": "a(b"}}, "structured_outputs.regex"),
    (H, {"structured_outputs": {"json": BAD}}, "structured_outputs.json"),
    (H, {"response_format": {"type": "xml"}}, "response_format.type"),
    (H, {"response_format": {"type": "json_schema"}}, SCHEMA),
    (H, {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}}, SCHEMA),
    (H, {"tools": TOOLS, "tool_choice": "required"}, "tools.1.function.parameters"),
    (H, {"messages": [*USER, {"role": "critic"}]}, "messages.1.role"),
    (H, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    (P, {"prompt": LONG}, "prompt"),
    (P, {"prompt": ["a"] * 17}, "prompt"),
    (P, {"ebnf": "start: foo"}, "ebnf"),
    (P, {"logprobs": 21, "echo": True}, "logprobs"),
    (R, {"max_output_tokens": -1}, "max_output_tokens"),
    (R, {"input": []}, "input"),
    (R, {"input": LONG}, "input"),
    (R, {"instructions": "a", "input": [*USER, {"role": "critic", "content": "a"}]}, "input.1.role"),
    (R, {"input": [*USER, CALL]}, "input.1.arguments"),
    (R, {"tools": FLAT, "tool_choice": "required"}, "tools.1.parameters"),
    (R, {"tools": [{"type": "function"}]}, "tools.0.name"),
    (R, {"tools": FLAT, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice"),
    (R, {"text": {"format": FORMAT}}, "text.format.schema"),
    (R, {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    (M, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    (M, {"stop_sequences": [""]}, "stop_sequences"),
    (M, {"stop_sequences": ["a"] * 17}, "stop_sequences"),
    (M, {"tools": INPUT, "tool_choice": {"type": "any"}}, "tools.0.input_schema"),
    (M, {"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name"),
    (M, {"output_config": {"format": {"type": "json_schema", "schema": BAD}}}, "output_config.format.schema"),
    (M, {"metadata": {"user_id": 5}}, "metadata.user_id"),
]


EFFORTS: list[tuple[str, dict[str, Any], str]] = [
    (H, {"reasoning_effort": "none"}, "reasoning_effort"),
    (R, {"reasoning": {"effort": "none"}}, "reasoning.effort"),
    (M, {"output_config": {"effort": "none"}}, "output_config.effort"),
]


@pytest.mark.parametrize("template, cases", [(QWEN_3, CASES), (GPT_OSS, EFFORTS)], ids=["qwen3", "gpt-oss"])
def test_the_field_at_fault(quiet: QuietEngine, template: str, cases: Any) -> None:
    quiet.tokenizer.chat_template = template
    for served in serve(quiet):
        with served.http() as http:
            for path, body, field in cases:
                response = http.post(path, json=ASKED[path] | body)
                error = response.json()["error"]
                assert response.status_code == 400 and "\n" not in error["message"], (body, error)
                assert field in error["message"] or field == "tool_choice", (body, error)
                assert path == M or error["param"] == field, (body, error)


@pytest.mark.parametrize(
    "kind, what, reason",
    [
        ("guided_regex", "a(b", "unclosed group at character 1 of the regular expression, '(b'"),
        ("guided_regex", "x" * 300 + "[z-a]", "the start must be <= the end at character 301 of"),
        ("guided_json", {"type": "string", "pattern": "(?=x)"}, "look-around"),
        ("guided_grammar", "start: /(/", "unclosed group at character 0"),
        ("guided_regex", "(?x)a\n(b", "unclosed group"),
    ],
    ids=range(5),
)
def test_what_is_wrong_with_a_regular_expression(quiet: QuietEngine, kind: str, what: Any, reason: str) -> None:
    kinds: Any = {"guided_regex": "regex", "guided_json": "json", "guided_grammar": "grammar"}
    with pytest.raises(ValueError, match="cannot be used") as error:
        quiet.text_processor.grammars.compiled(grammar(kinds[kind], what))
    assert reason in str(error.value) and "\n" not in str(error.value), error.value


def test_a_context_overflow_in_openais_words(quiet: QuietEngine) -> None:
    """Clients such as litellm look for them."""
    for prompt, output, advice in [(90, 20, "at most 10 with max_tokens"), (100, None, "shorten the prompt")]:
        with pytest.raises(ContextExceeded) as error:
            prepare([1] * prompt, SamplingParams(max_tokens=output), print, 0, 100, quiet.text_processor)
        words = f"requested {prompt + (output or 1)} tokens ({prompt} in the prompt, {output or 1} in the completion)."
        said = str(error.value)
        assert said.startswith(f"This model's maximum context length is 100 tokens. However, you {words}")
        assert advice in said and error.value.field == ("max_tokens" if output else "prompt")


def test_translated_messages_have_the_clients_places() -> None:
    items = [{"role": "user", "content": "a"}, {"type": "function_call_output", "call_id": "c", "output": "b"}]
    names = ResponsesRequest.model_validate({"input": items}).chat().names
    assert names["messages.1.role"] == names["messages.1"] == "input.1"
    assert names["messages.0"] == "input.0" and "messages.0.role" not in names  # an item has a role too
    results = [{"type": "tool_result", "tool_use_id": "t", "content": "b"}]
    body = {"system": "s", "messages": [{"role": "user", "content": results}], "max_tokens": 1}
    names = MessagesRequest.model_validate(body).chat().names
    assert names["messages.0.content"] == names["messages.0.role"] == names["messages.0"] == "system"
    assert names["messages.1.role"] == names["messages.1"] == "messages.0.content.0"
