"""Write GGUF files of a checkpoint of checkpoint.py, by llama.cpp's converter: MODEL/FORMAT.gguf.

python bench/scripts/rivals/to_gguf.py LLAMA_CPP_SOURCES MODEL bf16 f16
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

SOURCES, MODEL = map(Path, sys.argv[1:3])
sys.path[:0] = [str(SOURCES / "gguf-py"), str(SOURCES)]

import gguf  # noqa: E402
from conversion.base import TextModel  # noqa: E402


def add_missing(self: Any, writer: Any, quiet: bool = False) -> None:
    """Add one merge, as llama.cpp refuses none, and the rank that it requires of a DeepSeek without 27 layers."""
    writer.add_token_merges(["Ġ Ġ"])
    if writer.arch == "deepseek2":
        writer.add_q_lora_rank(0)


TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # the converter knows no made-up tokenizer
gguf.SpecialVocab.add_to_gguf = add_missing
for kind in sys.argv[3:]:
    sys.argv = ["convert_hf_to_gguf.py", str(MODEL), "--outtype", kind, "--outfile", str(MODEL / f"{kind}.gguf")]
    runpy.run_path(str(SOURCES / "convert_hf_to_gguf.py"), run_name="__main__")
