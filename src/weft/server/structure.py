"""Which grammar an answer must follow, by any of the names that clients have for it."""

from __future__ import annotations

from typing import Any

from weft.engine.grammar import Kind, grammar
from weft.server.errors import ApiError
from weft.server.protocol import CommonRequest

ANY_OBJECT = {"type": "object"}
NAMES: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""vLLM's older names and SGLang's."""


def grammar_of(body: CommonRequest) -> str | None:
    """As `SamplingParams.grammar` takes it; None where the answer is free. ApiError 400."""
    wanted = [(name, kind, getattr(body, name)) for name, kind in NAMES.items() if getattr(body, name) is not None]
    wanted += _response_format(body.response_format or {"type": "text"})
    if (structured := body.structured_outputs) is not None:
        named: tuple[tuple[Kind, Any], ...] = (
            ("json", structured.json_),
            ("json", ANY_OBJECT if structured.json_object else None),
            ("regex", structured.regex),
            ("choice", structured.choice),
            ("grammar", structured.grammar),
        )
        wanted += [("structured_outputs", kind, what) for kind, what in named if what is not None]
    if not wanted:
        return None
    if len(wanted) > 1:
        names = " and ".join(name for name, _, _ in wanted)
        raise ApiError(400, f"{names} ask for two grammars; ask for one", param=wanted[1][0])
    [(name, kind, what)] = wanted
    if what == []:
        raise ApiError(400, f"{name} has no choice; give one or more", param=name)
    try:
        return grammar(kind, what)
    except ValueError as error:
        raise ApiError(400, f"{name}: {str(error).splitlines()[0]}", param=name) from error


def _response_format(form: dict[str, Any]) -> list[tuple[str, Kind, Any]]:
    kind = form.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", "json", ANY_OBJECT)]
    if kind == "json_schema":
        schema = form.get("json_schema")
        schema = schema.get("schema") if isinstance(schema, dict) else None
        if not isinstance(schema, dict):
            message = 'response_format needs a schema: {"type": "json_schema", "json_schema": {"schema": {…}}}'
            raise ApiError(400, message, param="response_format")
        return [("response_format", "json", schema)]
    message = f"response_format {kind!r} is not supported; use text, json_object or json_schema"
    raise ApiError(400, message, param="response_format")
