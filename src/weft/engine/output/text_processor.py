"""The text side of a model directory: its tokenizer, its end tokens, and its default sampling parameters."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from weft.engine.grammar.grammar import Grammars
from weft.engine.messages.rank_messages import PARAMETERS
from weft.engine.messages.request import SamplingParams
from weft.engine.models.config_json.fields import MAX_NUMBER, Fields, ModelError, read_json
from weft.engine.output.detokenizer import Detokenizer

DEFAULTS = (*PARAMETERS, "repetition_penalty")
"""Sampling parameters with defaults in generation_config.json."""


class TextProcessor:
    """Converter between text and tokens of one model. Raises ModelError, in one line, for an unreadable file.

    Args:
        tokenizer: a transformers fast tokenizer.
        vocabulary: number of the model's tokens.
        eos: end tokens of config.json.

    Attributes:
        ends: all end tokens: `eos`, generation_config.json's, and the tokenizer's.
        defaults: default sampling parameters of requests; `do_sample: false` is temperature 0.
        says: one line on settings from generation_config.json and the tokenizer.
    """

    def __init__(self, tokenizer: Any, directory: Path, vocabulary: int, eos: tuple[int, ...]):
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        path = directory / "generation_config.json"
        fields = Fields(read_json(path) if path.exists() else {})
        try:
            self.defaults: dict[str, float] = _defaults(fields)
            named = fields.tokens("eos_token_id")
        except ValueError as error:
            raise ModelError(f"{path}: {error}") from error
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.ends = frozenset(token for token in (*eos, *named, *own) if 0 <= token < vocabulary)
        texts = [f"{name} {value:g} by default" for name, value in self.defaults.items()]
        for token in sorted(self.ends - set(eos)):
            of = "" if token in named else ", of the tokenizer,"
            texts.append(f"token {token}{of} also ends completions")
        self.says = ", ".join(texts)

    @cached_property
    def detokenizer(self) -> Detokenizer:
        """Detokenizer of the model."""
        return Detokenizer(self.tokenizer)

    @cached_property
    def special(self) -> frozenset[str]:
        """Texts of the special tokens."""
        added = self.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        added = self.tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        return frozenset(number for number, token in added if token.special)

    def token_name(self, token: int) -> str:
        """Return a token's text; `bytes:\\xe2` and so on for a part of a character, so that names are unique."""
        raw = self.grammars.tokens.decode_bytes([token])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiler of grammars over the vocabulary."""
        return Grammars(self.tokenizer, self.vocabulary, sorted(self.ends))


def _defaults(fields: Fields) -> dict[str, float]:
    """Return the sampling parameters of a generation_config.json. Raises ValueError for an invalid value."""
    found: dict[str, float] = {}
    for name in DEFAULTS:
        if fields.get(name) is not None:
            whole = isinstance(getattr(SamplingParams, name), int)
            found[name] = fields.size(name, low=0) if whole else fields.number(name, low=-MAX_NUMBER)
    if not fields.flag("do_sample", True):
        found["temperature"] = 0.0
    SamplingParams(**found)  # type: ignore[arg-type]
    return found
