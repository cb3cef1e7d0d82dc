"""The text side of a model directory: its tokenizer, its end tokens, and its default sampling parameters."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from weft.engine.grammar.grammar import Grammars
from weft.engine.messages.rank_messages import PARAMETERS
from weft.engine.messages.request import SamplingParams
from weft.engine.models.config_json.common_fields import tokens
from weft.engine.models.config_json.directory import is_gguf
from weft.engine.models.config_json.fields import MAX_NUMBER, Fields, ModelError, first_line, read_json
from weft.engine.output.detokenizer import Detokenizer

ADVICE = "it needs the tokenizer.json and tokenizer_config.json that the model was published with"
DEFAULTS = (*PARAMETERS, "repetition_penalty")
"""Sampling parameters with defaults in generation_config.json."""
FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")
"""JSON files of a tokenizer's directory that transformers reads in addition to tokenizer.json."""


def read_tokenizer(source: Path | str) -> Any:
    """Return the transformers tokenizer of a directory, a GGUF file, or a name on the hub. Raises ModelError."""
    for path in (Path(source, file) for file in FILES):
        if path.exists():
            read_json(path)  # raises ModelError for invalid JSON
    try:
        if is_gguf(Path(source)):
            from weft.engine.models.weights import gguf_file  # its package is optional

            tokenizer: Any = gguf_file.read_tokenizer(Path(source))
        else:
            tokenizer = AutoTokenizer.from_pretrained(source)
        made = tokenizer.encode("text", add_special_tokens=False)
    except Exception as error:  # a broken file makes transformers and tokenizers raise anything
        raise ModelError(f"{source} has no usable tokenizer: {first_line(error)}; {ADVICE}") from error
    named = tokenizer.chat_template.values() if isinstance(tokenizer.chat_template, dict) else [tokenizer.chat_template]
    if not all(template is None or isinstance(template, str) for template in named):
        raise ModelError(f"{source} has no usable tokenizer: chat_template is no text; {ADVICE}")
    if not made:  # for some types, transformers returns an empty tokenizer if files are missing
        raise ModelError(f"{source} has no usable tokenizer: no tokens come of a text; {ADVICE}")
    return tokenizer


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
            named = tokens(fields, "eos_token_id")
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
