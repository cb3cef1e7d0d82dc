"""Run the modes of clients that others wrote against a server, and print a table of what came of each.

    python -m venv build/clients && build/clients/bin/pip install -r tests/server/clients.txt
    build/clients/bin/python tests/server/client_modes.py http://127.0.0.1:8000

The server's model needs a chat template with tools; what the model says matters nothing, as grammars hold it to types.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pydantic


class Count(pydantic.BaseModel):
    """Number of pieces of fruit."""

    model_config = pydantic.ConfigDict(extra="forbid")

    n: Literal[1, 2, 3]
    kind: Literal["apple", "pear"]


MODEL, QUESTION = "small", [{"role": "user", "content": "Tom has 3 apples. How many apples does Tom have?"}]
SCHEMA = Count.model_json_schema()
FREE = {"JSON", "MD_JSON", "PARALLEL_TOOLS", "ANTHROPIC_JSON", "both"}
"""Modes in which nothing but the model's text decides: they must be served, whatever it is."""
LIMIT = 200


def counted(found: Any) -> None:
    assert isinstance(found, Count), found


def instructor_modes(url: str) -> Iterator[tuple[str, Callable[[], None]]]:
    import anthropic
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_retries": 0}
    for mode in instructor.Mode:
        if mode.name in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON", "FUNCTIONS", "PARALLEL_TOOLS"):
            many = mode.name == "PARALLEL_TOOLS"

            def whole(mode: Any = mode, many: bool = many) -> None:
                from collections.abc import Iterable

                patched = instructor.from_openai(client, mode=mode)
                model: Any = Iterable[Count] if many else Count
                found = patched.chat.completions.create(response_model=model, max_tokens=LIMIT, **asked)
                for one in found if many else [found]:
                    counted(one)

            yield mode.name, whole
            if not many:

                def streamed(mode: Any = mode) -> None:
                    patched = instructor.from_openai(client, mode=mode)
                    parts = patched.chat.completions.create_partial(response_model=Count, max_tokens=LIMIT, **asked)
                    *_, last = parts
                    assert last.n is not None

                yield f"{mode.name}, streamed", streamed
        elif mode.name in ("RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS"):

            def response(mode: Any = mode) -> None:
                patched = instructor.from_openai(client, mode=mode)
                counted(patched.responses.create(response_model=Count, input="How many?", model=MODEL, max_retries=0))

            yield mode.name, response
        elif mode.name in ("ANTHROPIC_TOOLS", "ANTHROPIC_JSON"):

            def message(mode: Any = mode) -> None:
                patched = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none"), mode=mode)
                counted(patched.messages.create(response_model=Count, max_tokens=LIMIT, **asked))

            yield mode.name, message


def litellm_modes(url: str) -> Iterator[tuple[str, Callable[[], None]]]:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it is fetched
    import litellm

    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "messages": QUESTION, "api_base": f"{url}/v1"}
    asked |= {"api_key": "none", "max_tokens": LIMIT, "num_retries": 0}
    tool = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
    form = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA, "strict": True}}

    def text() -> None:
        assert litellm.completion(**asked).choices[0].message.content

    def streamed() -> None:
        assert "".join(c.choices[0].delta.content or "" for c in litellm.completion(stream=True, **asked))

    def tools() -> None:
        message = litellm.completion(tools=[tool], tool_choice="required", **asked).choices[0].message
        Count.model_validate_json(message.tool_calls[0].function.arguments)

    def schema() -> None:
        Count.model_validate_json(litellm.completion(response_format=form, **asked).choices[0].message.content)

    def responses() -> None:
        made = {name: asked[name] for name in ("model", "api_base", "api_key")}
        assert litellm.responses(input="How many?", max_output_tokens=20, **made).output

    def overflow() -> None:
        long = [{"role": "user", "content": "How many? " * 2000}]
        try:
            litellm.completion(**asked | {"messages": long})
        except litellm.ContextWindowExceededError:
            return
        raise AssertionError("no ContextWindowExceededError")

    for function in (text, streamed, tools, schema, responses, overflow):
        yield function.__name__, function


def agents_modes(url: str) -> Iterator[tuple[str, Callable[[], None]]]:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    shapes = {"chats": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}

    @agents.function_tool
    def look(kind: Literal["apple", "pear"]) -> str:
        """Look how many there are."""
        return f"3 {kind}s"

    def run(shape: str, stream: bool, **more: Any) -> Any:
        settings = agents.ModelSettings(max_tokens=LIMIT, tool_choice=more.pop("tool_choice", None))
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)  # of this event loop
        model = shapes[shape](MODEL, client)
        agent = agents.Agent(name="a", instructions="Be kind.", model=model, model_settings=settings, **more)
        if not stream:
            return agents.Runner.run_sync(agent, "How many?", max_turns=4)

        async def streamed() -> Any:
            result = agents.Runner.run_streamed(agent, "How many?", max_turns=4)
            async for _ in result.stream_events():
                pass
            return result

        return asyncio.run(streamed())

    for shape in shapes:
        for stream in (False, True):

            def text(shape: str = shape, stream: bool = stream) -> None:
                assert run(shape, stream).final_output is not None

            def tools(shape: str = shape, stream: bool = stream) -> None:
                made = run(shape, stream, tools=[look], tool_choice="required").new_items
                assert any(item.type == "tool_call_output_item" for item in made)

            def typed(shape: str = shape, stream: bool = stream) -> None:
                counted(run(shape, stream, output_type=Count).final_output)

            def both(shape: str = shape, stream: bool = stream) -> None:
                counted(run(shape, stream, output_type=Count, tools=[look], tool_choice="required").final_output)

            for function in (text, tools, typed, both):
                yield f"{shape}, {function.__name__}{', streamed' * stream}", function


def pydantic_modes(url: str) -> Iterator[tuple[str, Callable[[], None]]]:
    import pydantic_ai
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai, claude = (
        OpenAIProvider(base_url=f"{url}/v1", api_key="none"),
        AnthropicProvider(base_url=url, api_key="none"),
    )
    models = {
        "chats": OpenAIChatModel(MODEL, provider=openai),
        "responses": OpenAIResponsesModel(MODEL, provider=openai),
        "messages": AnthropicModel(MODEL, provider=claude),
    }
    outputs = {"ToolOutput": pydantic_ai.ToolOutput, "NativeOutput": pydantic_ai.NativeOutput}
    for name, model in models.items():
        for kind, output in {"text": None, **outputs}.items():
            if (name, kind) == ("messages", "NativeOutput"):
                continue  # the client has it for names of Anthropic's models alone
            for stream in (False, True):

                def run(model: Any = model, output: Any = output, stream: bool = stream) -> None:
                    typed: Any = {} if output is None else {"output_type": output(Count)}
                    agent: Any = pydantic_ai.Agent(model, model_settings={"max_tokens": LIMIT}, retries=0, **typed)

                    async def streamed() -> Any:
                        async with agent.run_stream("How many?") as result:
                            return await result.get_output()

                    found = asyncio.run(streamed()) if stream else agent.run_sync("How many?").output
                    assert isinstance(found, str if output is None else Count)

                yield f"{name}, {kind}{', streamed' * stream}", run


def anthropic_modes(url: str) -> Iterator[tuple[str, Callable[[], None]]]:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": LIMIT}
    tools: Any = {"tools": [{"name": "count", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}

    def text() -> None:
        assert client.messages.create(system="Be kind.", **asked).content[0].type == "text"

    def called() -> None:
        Count.model_validate(client.messages.create(**asked, **tools).content[0].input)

    def streamed() -> None:
        with client.messages.stream(**asked, **tools) as stream:
            Count.model_validate(stream.get_final_message().content[0].input)

    def counts() -> None:
        assert client.messages.count_tokens(model=MODEL, messages=QUESTION, tools=tools["tools"]).input_tokens > 20

    def parsed() -> None:
        counted(client.messages.parse(output_format=Count, **asked).parsed_output)

    for function in (text, called, streamed, counts, parsed):
        yield function.__name__, function


CLIENTS = {
    "instructor": instructor_modes,
    "litellm": litellm_modes,
    "openai-agents": agents_modes,
    "pydantic-ai": pydantic_modes,
    "anthropic": anthropic_modes,
}


def main(url: str, *clients: str) -> int:
    """Print a line for each mode; return how many failed."""
    failed = 0
    for client, modes in CLIENTS.items():
        if clients and client not in clients:
            continue
        for mode, run in modes(url):
            try:
                run()
                said = "ok"
            except Exception as error:  # of any client
                said = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
                if FREE & set(mode.split(", ")) and "Error code" not in said:
                    said = "ok, with free text"
                else:
                    failed += 1
            print(f"{client:14} {mode:45} {said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
