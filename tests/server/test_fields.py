"""Every field that is served: what it does to a completion, as a client sees it."""

from __future__ import annotations

import json
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from server.conftest import Served, shared_templates
from server.test_tools import TEMPLATE, TOOLS
from weft.engine.assets import embedded_model_dir
from weft.serve.chat.prompts import Prompts
from weft.serve.chat.protocol import CompletionRequest

C, H = "/v1/completions", "/v1/chat/completions"
GREEDY: Any = {"prompt": "abc", "temperature": 0, "max_tokens": 12, "ignore_eos": True}


def ask(served: Served, path: str = C, **body: Any) -> Any:
    with served.http() as http:
        completion = http.post(path, json=body)
    assert completion.status_code == 200, completion.text
    return completion.json()


def raw(served: Served, **body: Any) -> list[bytes]:
    chat = ask(served, H, messages=[{"role": "user", "content": "hi"}], logprobs=True, **body)
    return [bytes(e["bytes"]) for e in chat["choices"][0]["logprobs"]["content"]]


FIXED: Any = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def test_logprobs_hold_the_bytes_of_half_characters(served: Served) -> None:
    pieces = raw(served, **FIXED)
    assert all(len(piece) == 1 for piece in pieces if piece != b"<eos>"), "a byte tokenizer has one byte a token"
    chat = ask(served, H, messages=[{"role": "user", "content": "hi"}], **FIXED)
    text = chat["choices"][0]["message"]["content"]
    assert b"".join(p for p in pieces if p != b"<eos>").decode(errors="replace") == text


def test_bias_penalties_and_allowed_tokens(served: Served) -> None:
    free = raw(served, **FIXED)
    token = served.engine.tokenizer.encode("Z")[0]
    assert raw(served, logit_bias={token: 100}, **FIXED) == [b"Z"] * 12
    letters = served.engine.tokenizer.encode("xyz")
    assert set(raw(served, allowed_token_ids=letters, **FIXED)) <= {b"x", b"y", b"z"}
    assert raw(served, logit_bias={token: 100}, presence_penalty=2, **FIXED) == [b"Z"] * 12
    biased = {letter: 60 for letter in letters}
    spread = raw(served, logit_bias=biased, frequency_penalty=2, **FIXED)
    assert len(set(spread)) > len(set(raw(served, logit_bias=biased, **FIXED))) or len(set(spread)) == 3
    assert raw(served, repetition_penalty=1.0, **FIXED) == free
    assert raw(served, repetition_penalty=5.0, **FIXED) != free


def test_bad_words_are_banned_at_the_start_of_a_text_and_after_a_space(served: Served) -> None:
    text_processor = served.engine.text_processor
    for word in ("cab", " cab"):
        params = CompletionRequest(prompt="x", bad_words=[word]).sampling(text_processor)
        assert {text_processor.tokenizer.decode(tokens) for tokens in params.bad_words} == {"cab", " cab"}


def test_bad_words_do_not_come(served: Served) -> None:
    allowed = served.engine.tokenizer.encode("xyz")
    free = b"".join(raw(served, allowed_token_ids=allowed, **FIXED)).decode()
    word = free[3:5]
    held = b"".join(raw(served, allowed_token_ids=allowed, bad_words=[word], **FIXED)).decode()
    assert word in free and word not in held and held.startswith(free[: free.index(word) + 1])


def test_stop_strings_stay_where_they_are_wanted(served: Served) -> None:
    body = GREEDY | {"allowed_token_ids": served.engine.tokenizer.encode("xyz")}
    free = ask(served, **body)["choices"][0]["text"]
    stop = free[3:5]
    cut = free[: free.index(stop)]
    assert ask(served, **body, stop=stop)["choices"][0]["text"] == cut
    assert ask(served, **body, stop=stop, include_stop_str_in_output=True)["choices"][0]["text"] == cut + stop


def test_special_tokens_stay_where_they_are_wanted(served: Served) -> None:
    body = GREEDY | {"logit_bias": {0: 100}, "max_tokens": 2}
    assert ask(served, **body)["choices"][0]["text"] == ""
    assert ask(served, **body, skip_special_tokens=False)["choices"][0]["text"] == "<eos><eos>"


def test_prompts_are_cut_to_their_end(served: Served) -> None:
    whole = ask(served, **GREEDY | {"prompt": "bc"})
    assert ask(served, **GREEDY, truncate_prompt_tokens=2)["choices"][0]["text"] == whole["choices"][0]["text"]
    long = ask(served, **GREEDY | {"prompt": "a" * 300, "max_tokens": 1}, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == 255
    for limit in ("max_tokens", "max_completion_tokens"):
        body = {"messages": [{"role": "user", "content": "a" * 300}], limit: 9, "truncate_prompt_tokens": -1}
        assert ask(served, H, **body, ignore_eos=True)["usage"]["total_tokens"] == 256, "next to the output"


def test_long_prompts_are_cut_to_their_end_and_no_more_of_them_is_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []

    def encode(self: Any, text: str, special: bool, plain: Any = Prompts.encode) -> list[int]:
        encoded.append(text)
        return list(plain(self, text, special))

    monkeypatch.setattr(Prompts, "encode", encode)
    whole = ask(served, **GREEDY | {"prompt": "bc"})["choices"][0]["text"]
    for prompt in ("a" * 2_000_000 + "bc", ["a" * 2_000_000 + "bc"]):
        cut = ask(served, **GREEDY | {"prompt": prompt}, truncate_prompt_tokens=2)
        assert cut["choices"][0]["text"] == whole and cut["usage"]["prompt_tokens"] == 2
    with served.http() as http:
        messages = [{"role": "user", "content": "a" * 2_000_000}]
        for path, body in ((H, {"max_tokens": 1}), ("/tokenize", {})):
            completion = http.post(path, json=body | {"messages": messages, "truncate_prompt_tokens": 12})
            assert completion.status_code == 200, completion.text
            assert (completion.json().get("count") or completion.json()["usage"]["prompt_tokens"]) == 12
    assert max(map(len, encoded)) < 1000
    for limit in (256, 10**9):
        with served.http() as http:
            refused = http.post(C, json={"prompt": "a" * 2_000_000, "truncate_prompt_tokens": limit})
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_the_last_tokens_of_a_text_are_those_of_its_end() -> None:
    """Merges of the tokenizer across the cut differ from the whole text's."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir())
    config = SimpleNamespace(max_choices=1)
    engine: Any = SimpleNamespace(tokenizer=tokenizer, max_model_len=200, config=config)
    prompts, draw = Prompts(engine, shared_templates(engine), False), random.Random(0)
    words = ["Tom", "has", "3", "apples,", "", "how", "many\n", "Tomasz", "now?", "über", "10000", "17 more;"]
    for _ in range(5):
        text = " ".join(draw.choices(words, k=3000))
        for kept in (1, 7, 199):
            body = CompletionRequest(prompt=text, truncate_prompt_tokens=kept)
            assert prompts.of_completion(body) == [tokenizer.encode(text)[-kept:]]


def test_counts_in_every_chunk(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with served.http() as http:
        completion = http.post(C, json=GREEDY | {"stream": True, "stream_options": options})
    chunks = [json.loads(line[6:]) for line in completion.text.splitlines() if line.startswith("data: {")]
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 12 and counts[0] < 12


def test_the_template_gets_its_arguments(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ greeting }}{% for m in messages %}{{ m.content }}|{% endfor %}"
    template += "{% if add_generation_prompt %}>{% endif %}"
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def count(**more: Any) -> int:
        return ask(served, H, messages=messages, max_tokens=1, **more)["usage"]["prompt_tokens"]

    assert count() == len("a|b|>") and count(add_generation_prompt=False) == len("a|b|")
    assert count(chat_template_kwargs={"greeting": "hello"}) == len("helloa|b|>")
    assert count(continue_final_message=True) == len("a|b")


SCHEMA: Any = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": SCHEMA},
    ],
    ids=range(5),
)
@pytest.mark.parametrize("stream", [False, True])
def test_outputs_of_a_schema(served: Served, form: Any, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "temperature": 1, "seed": 3, "n": 2}
    with served.http() as http:
        completion = http.post(H, json=body | form | {"stream": stream})
    assert completion.status_code == 200, completion.text
    if stream:
        chunks = [json.loads(line[6:]) for line in completion.text.splitlines() if line.startswith("data: {")]
        texts = ["", ""]
        for choice in (c for chunk in chunks for c in chunk["choices"]):
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        assert all(c["finish_reason"] == "stop" for c in completion.json()["choices"])
        texts = [c["message"]["content"] for c in completion.json()["choices"]]
    assert all(0 <= json.loads(text)["n"] <= 9 for text in texts)


def test_other_kinds_of_structure(served: Served) -> None:
    body = {"prompt": "abc", "max_tokens": 200, "temperature": 1, "seed": 3}

    def text(**form: Any) -> str:
        return str(ask(served, **body, **form)["choices"][0]["text"])

    assert text(guided_choice=["one", "two"]) in ("one", "two")
    assert text(structured_outputs={"choice": ["one"]}) == "one"
    assert re.fullmatch("[ab]{5}", text(regex="[ab]{5}")) and re.fullmatch("[ab]{5}", text(guided_regex="[ab]{5}"))
    assert text(ebnf='root ::= "yes" | "no"') in ("yes", "no")
    assert text(guided_grammar='start: "yes" | "no"') in ("yes", "no")
    held = ask(served, **body | {"max_tokens": 60}, response_format={"type": "json_object"})["choices"][0]
    assert held["text"].startswith("{") and (held["finish_reason"] == "length" or json.loads(held["text"]) is not None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_its_grammar_leaves_nothing_for_is_the_clients_error(served: Served, stream: bool) -> None:
    body = {"prompt": "abc", "regex": "a[0-9]{4}", "allowed_token_ids": served.engine.tokenizer.encode("ab")}
    with served.http() as http:
        completion = http.post(C, json=body | {"max_tokens": 9, "stream": stream})
    text = completion.text.splitlines()[-4].removeprefix("data: ") if stream else completion.text
    error = json.loads(text)["error"]
    assert completion.status_code == (200 if stream else 400), completion.text
    assert error["type"] == "invalid_request_error" and "cannot go on in its grammar" in error["message"]


def test_choices_and_properties_may_be_many(served: Served) -> None:
    texts = [f"{i:04d}" for i in range(2100)]
    chosen = ask(served, prompt="abc", max_tokens=9, guided_choice=texts)["choices"][0]
    assert chosen["text"] in texts and chosen["finish_reason"] == "stop"
    names = {f"p{i}": {"type": "boolean"} for i in range(900)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    assert ask(served, prompt="abc", max_tokens=9, guided_json=schema)["choices"][0]["text"].startswith("{")


def test_a_prompt_is_scored_as_it_would_be_sampled(served: Served) -> None:
    """Scores of a prompt's tokens equal the ones of their sampling, however the prompt was cut and cached."""
    ids = served.engine.tokenizer.encode("abc")
    sampled = ask(served, C, prompt=ids, logprobs=3, allowed_token_ids=served.engine.tokenizer.encode("xyz"), **FIXED)
    text, table = sampled["choices"][0]["text"], sampled["choices"][0]["logprobs"]
    for more in ({"max_tokens": 0}, {"max_tokens": 1}, {"max_tokens": 1, "stream": True}):
        body = {"prompt": "abc" + text, "echo": True, "logprobs": 3, "temperature": 0} | more
        with served.http() as http:
            completion = http.post(C, json=body)
        if "stream" in more:
            chunks = [json.loads(line[6:]) for line in completion.text.splitlines() if line.startswith("data: {")]
            choice = chunks[0]["choices"][0]
        else:
            choice = completion.json()["choices"][0]
        echoed = choice["logprobs"]
        assert choice["text"].startswith("abc" + text) and len(echoed["tokens"]) == 15 + more["max_tokens"]
        assert echoed["token_logprobs"][0] is None and echoed["top_logprobs"][0] is None
        assert echoed["token_logprobs"][3:15] == pytest.approx(table["token_logprobs"], abs=1e-4)
        assert echoed["tokens"][3:15] == table["tokens"] and echoed["text_offset"][:4] == [0, 1, 2, 3]
        assert [len(top) for top in echoed["top_logprobs"][1:]] == [3] * (14 + more["max_tokens"])


def test_prompt_logprobs(served: Served) -> None:
    ids = served.engine.tokenizer.encode("hello")
    choice = ask(served, C, prompt=ids, prompt_logprobs=2, max_tokens=0)["choices"][0]
    assert choice["text"] == "" and choice["finish_reason"] == "length" and choice["prompt_logprobs"][0] is None
    for token, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True):
        assert str(token) in entry and 2 <= len(entry) <= 3 and all(e["logprob"] <= 0 for e in entry.values())
    messages = [{"role": "user", "content": "hi"}]
    chat = ask(served, H, messages=messages, prompt_logprobs=0, max_tokens=1)
    assert len(chat["choices"][0]["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert ask(served, C, prompt=[5], prompt_logprobs=1, max_tokens=0)["choices"][0]["prompt_logprobs"] == [None]
    broken = ask(served, C, prompt=served.engine.tokenizer.encode("ä")[:1] * 3, echo=True, logprobs=1, max_tokens=0)
    assert broken["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xc3"] * 3
    full = ask(served, C, prompt="a" * 256, max_tokens=0, echo=True, logprobs=0)
    assert full["usage"] == full["usage"] | {"prompt_tokens": 256, "completion_tokens": 0}


@pytest.mark.parametrize("alternatives, prompt", [(1, 3), (3, 1), (0, 2), (2, 0)])
def test_each_table_has_as_many_alternatives_as_were_asked_for(served: Served, alternatives: int, prompt: int) -> None:
    """Scores of a prompt for two tables are computed for the longer one."""
    body = dict(prompt="abcd", max_tokens=2, temperature=0, ignore_eos=True, echo=True)
    [choice] = ask(served, C, **body, logprobs=alternatives, prompt_logprobs=prompt)["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [alternatives] * 5
    for entry in choice["prompt_logprobs"][1:]:  # and the token itself, if it is none of them
        assert max(prompt, 1) <= len(entry) <= prompt + 1
    messages = [{"role": "user", "content": "hi"}]
    chat = ask(served, H, messages=messages, logprobs=True, top_logprobs=alternatives, prompt_logprobs=prompt, **FIXED)
    entries = chat["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [alternatives] * len(entries)
    assert all(len(entry) <= prompt + 1 for entry in chat["choices"][0]["prompt_logprobs"][1:])


@pytest.mark.parametrize("path", [C, H])
@pytest.mark.parametrize("form", [None, {"guided_choice": ["<tool_call>", "<tool_cat>"]}], ids=["text", "held back"])
def test_token_ids_are_returned(served: Served, monkeypatch: pytest.MonkeyPatch, path: str, form: Any) -> None:
    """Token ids are in vLLM's places. All of them come in streams too, where a parser holds back the text of some."""
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", TEMPLATE)
    body = FIXED | {"n": 2, "ignore_eos": False, "return_token_ids": True} | (form or {})
    body |= {"prompt": "abc"} if path == C else {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    tokenizer = served.engine.tokenizer
    prompt = tokenizer.encode("abc" if path == C else "weather;time;user:hi\n")
    whole = ask(served, path, **body)
    with served.http() as http:
        text = http.post(path, json=body | {"stream": True}).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for choice in whole["choices"]:
        streamed = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [t for c in streamed for t in c.get("token_ids", ())] == choice["token_ids"]
        said = choice["text"] if path == C else choice["message"]["content"]
        assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == said
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    if path == C:
        assert all(choice["prompt_token_ids"] == prompt for choice in whole["choices"])
        assert sum("prompt_token_ids" in choice for chunk in chunks for choice in chunk["choices"]) == 2
    else:
        assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert "token_ids" not in json.dumps(ask(served, path, **body | {"return_token_ids": False}))
