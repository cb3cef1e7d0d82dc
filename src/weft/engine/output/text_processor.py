"""The text side of a model directory: its tokenizer, its end tokens, and its default sampling parameters."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from weft.engine.output.detokenizer import Detokenizer
from weft.engine.output.grammar import Grammars
from weft.models.model_config import ModelError, first_line

ADVICE = "it needs the tokenizer.json and tokenizer_config.json that the model was published with"
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that generation_config.json may set for requests that give none."""


def read_tokenizer(source: Path | str) -> Any:
    """The transformers tokenizer of a directory, or of a name that transformers knows. Raises ModelError."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        made = tokenizer.encode("text", add_special_tokens=False)
    except Exception as error:  # whatever transformers and tokenizers make of a broken file
        raise ModelError(f"{source} has no usable tokenizer: {first_line(error)}; {ADVICE}") from error
    if not made:  # for some types, transformers makes an empty one of no files
        raise ModelError(f"{source} has no usable tokenizer: no tokens come of a text; {ADVICE}")
    return tokenizer


class TextProcessor:
    """Converts between text and tokens for one model. Raises ModelError, in one line, for a file that cannot be read.

    Args:
        tokenizer: a transformers fast tokenizer.
        directory: the tokenizer's.
        vocabulary: number of the model's tokens.
        eos: end tokens of its config.json.

    Attributes:
        ends: all end tokens: `eos` and those of generation_config.json.
        defaults: sampling parameters of requests that give none; `do_sample: false` is temperature 0.
        says: what generation_config.json changes, in one line.
    """

    def __init__(self, tokenizer: Any, directory: Path, vocabulary: int, eos: tuple[int, ...]):
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        path = directory / "generation_config.json"
        try:
            written = json.loads(path.read_text()) if path.exists() else {}
        except ValueError as error:
            raise ModelError(f"{path} is not JSON: {error}") from error
        more = written.get("eos_token_id", ())
        added = set(more if isinstance(more, list | tuple) else (more,)) - {*eos, None}
        self.ends = frozenset(eos) | added
        self.defaults: dict[str, float] = {k: written[k] for k in DEFAULTS if written.get(k) is not None}
        if written.get("do_sample") is False:
            self.defaults["temperature"] = 0.0
        texts = [f"{name} {value:g} by default" for name, value in self.defaults.items()]
        texts += [f"token {token} also ends completions" for token in sorted(added)]
        self.says = ", ".join(texts)

    @cached_property
    def detokenizer(self) -> Detokenizer:
        """Makes text of tokens."""
        return Detokenizer(self.tokenizer)

    @cached_property
    def special(self) -> frozenset[str]:
        """The special tokens, as they stand in a text that keeps them."""
        added = self.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The numbers of the special tokens."""
        added = self.tokenizer.backend_tokenizer.get_added_tokens_decoder().items()
        return frozenset(number for number, token in added if token.special)

    def token_name(self, token: int) -> str:
        """A token's text; `bytes:\\xe2` and so on for a part of a character, so that different ones differ."""
        raw = self.grammars.tokens.decode_bytes([token])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars over the vocabulary."""
        return Grammars(self.tokenizer, self.vocabulary, sorted(self.ends))
