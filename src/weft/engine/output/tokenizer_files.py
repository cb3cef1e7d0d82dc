"""Reader of a model's tokenizer. API processes get it from the engine's process: transformers' reader imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from weft.engine.config.config import EngineConfig
from weft.engine.models.config_json.directory import is_gguf
from weft.engine.models.config_json.fields import ModelError, first_line, read_json

ADVICE = "it needs the tokenizer.json and tokenizer_config.json that the model was published with"
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


def load_tokenizer(config: EngineConfig) -> Any:
    """Load the tokenizer, and check its chat template, if it has one. Raises ModelError."""
    tokenizer = read_tokenizer(config.tokenizer)
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = config.chat_template.read_text()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            raise ModelError(f"--chat-template {config.chat_template} cannot be read: {why}") from error
    if tokenizer.chat_template:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
        except jinja2.TemplateSyntaxError as error:
            where = f"{config.chat_template or config.tokenizer}, line {error.lineno}"
            raise ModelError(f"the chat template of {where}, cannot be read: {first_line(error)}") from error
        except Exception:  # a template may reject this message, and accept others
            return tokenizer
    return tokenizer
