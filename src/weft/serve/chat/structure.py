"""Grammar of an output, under any of the names that clients have for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from weft.engine.grammar.grammar import Kind, grammar
from weft.serve.chat.protocol import GrammarFields, ResponseFormat
from weft.serve.http.errors import ApiError, bad_field

ANY_OBJECT = {"type": "object"}
SCHEMA_FIELD = "response_format.json_schema.schema"
NAMES: dict[str, Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Older name of vLLM or name of SGLang → kind of grammar."""


class RequestedGrammar(NamedTuple):
    """Requested grammar, for `SamplingParams.grammar`, and the field that requests it."""

    grammar: str
    field: str


def grammar_of(body: GrammarFields, *, any_whitespace: bool = False) -> RequestedGrammar | None:
    """Return the grammar of a request's output; None if it is free. ApiError 400.

    any_whitespace: of JSON, as in `weft.engine.grammar.grammar.schema_text`.
    """
    requests: list[tuple[str, Kind, Any]] = [
        (name, kind, getattr(body, name)) for name, kind in NAMES.items() if getattr(body, name) is not None
    ]
    if body.response_format is not None:
        requests += _response_format(body.response_format)
    if (structured := body.structured_outputs) is not None:
        named: tuple[tuple[str, Kind, Any], ...] = (
            ("json", "json", structured.json_),
            ("json_object", "json", ANY_OBJECT if structured.json_object else None),
            ("regex", "regex", structured.regex),
            ("choice", "choice", structured.choice),
            ("grammar", "grammar", structured.grammar),
        )
        requests += [(f"structured_outputs.{name}", kind, what) for name, kind, what in named if what is not None]
    if not requests:
        return None
    if len(requests) > 1:
        names = " and ".join(name for name, _, _ in requests)
        raise ApiError(400, f"{names} ask for two grammars; ask for one", param=requests[1][0])
    [(name, kind, what)] = requests
    if what == []:
        raise bad_field(name, " has no choice; give one or more")
    try:
        return RequestedGrammar(grammar(kind, what, any_whitespace=any_whitespace), name)
    except ValueError as error:
        raise bad_field(name, f": {str(error).splitlines()[0]}") from error


def _response_format(form: ResponseFormat) -> list[tuple[str, Kind, Any]]:
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            rest = ": the type json_schema needs a schema; give one, or use the type json_object"
            raise bad_field(SCHEMA_FIELD, rest)
        return [(SCHEMA_FIELD, "json", form.json_schema.schema_)]
    if form.type not in ("text", "json_object"):
        rest = f": {form.type!r} is not supported; use text, json_object or json_schema"
        raise bad_field("response_format.type", rest)
    if form.json_schema is not None:
        rest = f" has no meaning for the type {form.type}; use the type json_schema"
        raise bad_field("response_format.json_schema", rest)
    return [("response_format", "json", ANY_OBJECT)] if form.type == "json_object" else []
