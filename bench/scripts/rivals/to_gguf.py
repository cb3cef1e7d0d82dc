"""Write GGUF files of a checkpoint of checkpoint.py, by llama.cpp's converter: MODEL/FORMAT.gguf.

python bench/scripts/rivals/to_gguf.py LLAMA_CPP_SOURCES MODEL bf16 f16
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any


def add_missing(self: Any, writer: Any, quiet: bool = False) -> None:
    """Add one merge, as llama.cpp refuses none, and the rank that it requires of a DeepSeek without 27 layers."""
    writer.add_token_merges(["Ġ Ġ"])
    if writer.arch == "deepseek2":
        writer.add_q_lora_rank(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="folder with the sources of llama.cpp")
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("formats", nargs="+", help="such as bf16 and f16")
    asked = parser.parse_args()
    sys.path[:0] = [str(asked.sources / "gguf-py"), str(asked.sources)]
    import gguf
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # the converter knows no made-up tokenizer
    gguf.SpecialVocab.add_to_gguf = add_missing
    for kind in asked.formats:
        out = asked.model / f"{kind}.gguf"
        sys.argv = ["convert_hf_to_gguf.py", str(asked.model), "--outtype", kind, "--outfile", str(out)]
        runpy.run_path(str(asked.sources / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
