"""Messages in the shape that a chat template reads: templates of families, reduced to what they test for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from server.conftest import Served
from weft.serve.chat.message_shape import Message, MessageShape, find
from weft.serve.dialects.responses import ResponsesRequest

TOOLS = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
RESULT = "{% elif m.role == 'tool' %}<R>{{ m.content }}"
ENDS = "{% endif %}{% endfor %}"
QWEN_3 = (
    TOOLS + "{% if messages[0].role == 'system' %}<S>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<{{ m.role[0]|upper }}>{{ m.content }}{% elif m.role == 'assistant' %}<A>{{ m.content + '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}" + RESULT + ENDS
)
QWEN_35 = QWEN_3.replace(
    " or (m.role == 'system' and not loop.first)", " or (m.role == 'system' and not loop.first and raise_exception(''))"
)
DEEPSEEK_3 = (
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% endfor %}{{ ns.system }}{% for m in messages %}{% if m['role'] == 'user' %}<U>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' and m['content'] is none %}{% for c in m['tool_calls'] %}"
    "<｜tool▁calls▁begin｜>```json{{ c['function']['name'] + ' ' + c['function']['arguments'] }}{% endfor %}"
    "{% elif m['role'] == 'assistant' %}<A>{{ m['content'] }}" + RESULT + ENDS
)
DEEPSEEK_31 = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% elif m.role == 'assistant' %}<A>"
    "{% if m.content is not none %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    "{{ '<｜tool▁calls▁begin｜>' + c.function.arguments }}{% endfor %}" + RESULT + ENDS
)
GPT_OSS = (
    "{# <|start|>assistant<|channel|> #}{% set first = messages[0].role in ('system', 'developer') %}"
    "{% if first %}<D>{{ messages[0].content }}{% endif %}"
    + TOOLS
    + "{% for m in (messages[1:] if first else messages) %}"
    "{% if m.role == 'assistant' and 'tool_calls' in m %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% endif %}{% if m.thinking %}<T>{{ m.thinking }}{% endif %}<C>{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% elif m.role == 'assistant' %}<A>{{ m.content }}{% elif m.role == 'user' %}<U>{{ m.content }}" + RESULT + ENDS
)
HERMES = (
    TOOLS + "{% for m in messages %}{% if m.role in ('user', 'system') or (m.role == 'assistant' and not m.tool_calls) "
    "%}<{{ m.role }}>{{ m.content }}{% elif m.role == 'assistant' %}{% for c in m.tool_calls %}<tool_call>"
    "{{ c.function.arguments | tojson }}{% endfor %}" + RESULT + ENDS
)
LLAMA_3 = HERMES.replace(
    "{% for c in", "{% if m.tool_calls | length > 1 %}{{ raise_exception('one at once') }}{% endif %}{% for c in"
)
MISTRAL = (
    TOOLS + "{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}{% if m.role == 'user' %}"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}[INST]{{ m.content }}"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}{{ raise_exception('length 9') if c.id | length != 9 }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% elif m.role == 'assistant' %}{{ m.content }}"
    "{% elif m.role == 'tool' %}{{ raise_exception('length 9') if m.tool_call_id | length != 9 }}{{ m.content }}"
    "{% else %}{{ raise_exception('only user, assistant and tool') }}" + ENDS
)
MINIMAX = (
    "{% set first = messages[0].role == 'system' %}{{ messages[0].content if first }}"
    + TOOLS
    + "{% for m in (messages[1:] if first else messages) %}{% if m.role == 'user' %}<U>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<A>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for key, value in c.function.arguments.items() %}<{{ key }}>{{ value }}{% endfor %}{% endfor %}" + RESULT + ENDS
)
GLM = MINIMAX.replace("messages[0].role == 'system'", "false").replace("'user' %}", "'user' or m.role == 'system' %}")
KIMI = QWEN_3.replace("{{ m.content + '' }}", "{% if m['content'] %}{{ m['content'] }}{% endif %}")
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
GEMMA_2 = (
    "{% for m in messages %}{{ raise_exception('no system') if m.role == 'system' }}"
    "{{ raise_exception('alternate') if (m.role == 'user') != (loop.index0 % 2 == 0) }}{{ m.content }}{% endfor %}"
)
IN_PARTS = CHATML.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
NO_TOOLS: dict[str, Any] = {"tools": False, "calls": False}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (QWEN_3, {}),
    "qwen3.5": (QWEN_35, {"one_system": True}),
    "deepseek-v3": (
        DEEPSEEK_3,
        {"one_system": True, "no_text": "null", "text_arguments": True, "calls_apart": True, "tools": False},
    ),
    "deepseek-v3.1": (DEEPSEEK_31, {"text_arguments": True, "tools": False}),
    "gpt-oss": (GPT_OSS, {"one_system": True, "developer": True, "calls_apart": True, "one_call": True}),
    "hermes": (HERMES, {"calls_apart": True}),
    "llama": (LLAMA_3, {"calls_apart": True, "one_call": True}),
    "mistral": (MISTRAL, {"one_system": True, "calls_apart": True, "short_ids": True}),
    "minimax": (MINIMAX, {"one_system": True}),
    "glm": (GLM, {}),
    "kimi": (KIMI, {}),
    "smollm2": (CHATML, NO_TOOLS),
    "gemma-2": (GEMMA_2, NO_TOOLS),
    "parts": (IN_PARTS, NO_TOOLS | {"in_parts": True}),
}
CALLS = [
    {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": {"city": city}}}
    for name, city in (("weather", "Bern"), ("time", "Rom"))
]
RESULTS: list[Message] = [
    {"role": "tool", "tool_call_id": call["id"], "content": text}
    for call, text in zip(reversed(CALLS), ("noon", "rain"), strict=True)
]
CHAT: list[Message] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": CALLS},
    *RESULTS,
]


def rendered(template: str, messages: Sequence[Message], tools: Any = ()) -> str | None:
    try:
        return str(render_jinja_template([list(messages)], tools=list(tools) or None, chat_template=template)[0][0])
    except Exception:
        return None


def shape_of(template: str) -> MessageShape:
    return find(lambda messages, tools: rendered(template, messages, tools))


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_a_family(name: str) -> None:
    template, wanted = SHAPES[name]
    made = asdict(shape_of(template))
    plain = asdict(MessageShape())
    assert {key: made[key] for key in made.keys() - {"dropped"} if made[key] != plain[key]} == wanted
    assert ("tool" in made["dropped"]) == (not made["calls"] and name not in ("smollm2", "parts", "gemma-2"))


@pytest.mark.parametrize("name", [name for name, (_, shape) in SHAPES.items() if shape.get("calls", True)])
def test_nothing_of_a_conversation_is_lost(name: str) -> None:
    template = SHAPES[name][0]
    text = rendered(template, shape_of(template).built([*CHAT, {"role": "user", "content": "so?"}]))
    assert text is not None
    assert all(part in text for part in ("be kind", "hi", "I look.", "Bern", "Rom", "noon", "rain", "so?")), text


def test_what_templates_read_instead() -> None:
    """V3 finds calls by content that is null; GPT-OSS infers the function of a result from the call before it."""
    as_json = ('{"city": "Bern"}', '{"city": "Rom"}')
    bern, rom = (f"<｜tool▁calls▁begin｜>```json{n} {a}" for n, a in zip(("weather", "time"), as_json, strict=True))
    assert rendered(DEEPSEEK_3, shape_of(DEEPSEEK_3).built(CHAT)) == f"be kind<U>hi<A>I look.{bern}{rom}<R>noon<R>rain"
    assert rendered(GPT_OSS, shape_of(GPT_OSS).built(CHAT)) == (
        f"<D>be kind<U>hi<A>I look.<T>Hm.<C>{as_json[0]}<R>rain<C>{as_json[1]}<R>noon"
    )


def test_results_without_known_ids_belong_to_calls_by_order() -> None:
    """Also where all calls have one id, and where results are missing or too many."""
    shape = MessageShape(one_call=True)
    for ids, results, wanted in [
        ((None, None), ("a", "b"), "Bern a Rom b"),
        (("1", "1"), ("a", "b"), "Bern Rom a b"),
        (("1", "2"), ("a",), "Bern a Rom"),
        (("1", "2"), ("a", "b", "c"), "Bern a Rom b c"),
    ]:
        calls = [call | {"id": name} for call, name in zip(CALLS, ids, strict=True)]
        said = [{"role": "tool", "tool_call_id": ids[0] and ids[0] * (ids[0] == ids[1]), "content": r} for r in results]
        built = shape.built([{"role": "assistant", "content": "", "tool_calls": calls}, *said])
        texts = [m["content"] or m["tool_calls"][0]["function"]["arguments"]["city"] for m in built]
        assert " ".join(texts) == wanted


def test_items_of_one_output_are_one_message() -> None:
    """A text, a thought and calls, in any order; otherwise a template has turns that the model never wrote."""
    call, call_2 = ({"type": "function_call", "call_id": name, "name": "f"} for name in "12")
    result, user = {"type": "function_call_output", "call_id": "1", "output": "r"}, {"role": "user", "content": "hi"}
    text, thought = {"role": "assistant", "content": "I look."}, {"type": "reasoning", "content": [{"text": "Hm."}]}
    for items, wanted in [
        ([thought, text, call, call_2, result], [("I look.", "Hm.", 2), ("r", "", 0)]),
        ([call, text, result], [("I look.", "", 1), ("r", "", 0)]),
        ([thought, call, thought, call_2, result], [("", "Hm.Hm.", 2), ("r", "", 0)]),
        ([thought, user, thought, text], [("", "Hm.", 0), ("hi", "", 0), ("I look.", "Hm.", 0)]),
        ([text, text, {"type": "reasoning"}, user], [("I look.", "", 0), ("I look.", "", 0), ("hi", "", 0)]),
        ([call, result, call_2], [("", "", 1), ("r", "", 0), ("", "", 1)]),
    ]:
        made = [m.plain() for m in ResponsesRequest.model_validate({"input": [user, *items]}).chat().messages]
        found = [(m["content"], m.get("reasoning_content", ""), len(m.get("tool_calls", ()))) for m in made]
        assert found == [("hi", "", 0), *wanted]


# Over HTTP


def prompt(served: Served, path: str = "/tokenize", **body: Any) -> str:
    with served.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    return str(served.engine.tokenizer.decode(found["tokens"] if "tokens" in found else found["prompt_token_ids"]))


def refusal(served: Served, path: str = "/tokenize", **body: Any) -> tuple[str | None, str]:
    with served.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] is None or error["param"] in error["message"] or error["param"] == "tools"
    return error["param"], error["message"]


def test_roles_that_a_template_drops(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", QWEN_3)
    user = {"role": "user", "content": "hi"}
    developer = {"role": "developer", "content": "be kind"}
    assert prompt(served, messages=[developer, user]) == "<S>be kind<U>hi"
    assert prompt(served, messages=[user, developer]) == "<U>hi<S>be kind"
    for role in ("function", "critic"):
        param, message = refusal(served, messages=[user, {"role": role, "content": "no"}])
        assert param == "messages.1.role" and repr(role) in message
    call = {"role": "user", "content": "hi", "tool_calls": [{"function": {"name": "time"}}]}
    assert refusal(served, messages=[call])[0] == "messages.0.tool_calls"
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", CHATML)
    assert prompt(served, messages=[developer, {"role": "critic", "content": "no"}]) == "<system>be kind<critic>no"
    assert refusal(served, messages=[user, call | {"role": "assistant"}])[0] == "messages.1.tool_calls"
    assert prompt(served, messages=[user, {"role": "tool", "content": "rain"}]) == "<user>hi<tool>rain"


def test_several_systems_are_one_where_a_template_takes_one(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", QWEN_35)
    user = {"role": "user", "content": "hi"}
    systems = [{"role": "system", "content": "a"}, user, {"role": "system", "content": "b"}]
    assert prompt(served, messages=systems) == "<S>a\n\nb<U>hi"
    with served.http() as http:
        body = {"instructions": "a", "input": [{"role": "developer", "content": "b"}, user]}
        response = http.post("/v1/responses", json=body | {"max_output_tokens": 1}).json()
        assert response["usage"]["input_tokens"] == len("<S>a\n\nb<U>hi")
        counted = http.post("/v1/messages/count_tokens", json={"system": "a", "messages": systems[1:]}).json()
        assert counted["input_tokens"] == len("<S>a\n\nb<U>hi")


@pytest.mark.parametrize("template", [DEEPSEEK_31, DEEPSEEK_3], ids=["v3.1", "v3"])
def test_tools_that_a_template_never_renders_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", template)
    tool = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
    user = {"role": "user", "content": "hi"}
    assert "knows no tools" in refusal(served, messages=[user], tools=[tool])[1]
    function = {"name": "time", "arguments": '{"city": "Rom"}'}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
    text = prompt(served, messages=[user, called, {"role": "tool", "tool_call_id": "1", "content": "noon"}])
    assert '{"city": "Rom"}' in text and text.endswith("<R>noon")


def test_named_templates_of_a_tokenizer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"default": CHATML, "tool_use": QWEN_3 + "{# <tool_call> #}"}
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", named)
    tool = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
    user = {"role": "user", "content": "hi"}
    assert prompt(served, messages=[user]) == "<user>hi"
    assert prompt(served, messages=[user], tools=[tool]) == "time;<U>hi"
