"""Options that users of vLLM, SGLang and earlier versions know, and what says the same in Weft."""

from __future__ import annotations

from collections.abc import Sequence

NAMES = {
    "--attn-tp": "tensor-parallel-size tp-size tp",
    "--attn-dp": "data-parallel-size dp-size dp enable-dp-attention",
    "--ep, beside --moe-tp for the ranks that share each expert": "enable-expert-parallel expert-parallel-size ep-size",
    "--dcp": "decode-context-parallel-size dcp-size",
    "--moe-exchange": "all2all-backend moe-a2a-backend",
    "--master-addr, with --master-port": "dist-init-addr data-parallel-address",
    "--ray, with --nnodes": "distributed-executor-backend",
    "--max-model-len": "context-length",
    "--max-running": "max-num-seqs max-running-requests",
    "--max-waiting": "max-queued-requests",
    "--max-batch-tokens": "max-num-batched-tokens chunked-prefill-size max-prefill-tokens",
    "--kv-tokens": "max-total-tokens num-gpu-blocks-override",
    "--kv-dtype": "kv-cache-dtype",
    "--gpu-memory-fraction": "gpu-memory-utilization mem-fraction-static",
    "--float8, of weights that the checkpoint has in FP8": "quantization",
    "--no-cuda-graphs": "enforce-eager disable-cuda-graph",
    "--cors-origins": "allowed-origins",
    "--log-level": "uvicorn-log-level",
    "the first argument, the model's directory": "model model-path",
    "a part of the model's directory; leave it out": "tokenizer tokenizer-path",
    "found by the model's chat template; leave it out": "tool-call-parser enable-auto-tool-choice",
    "always so; leave it out": "enable-prefix-caching enable-chunked-prefill async-scheduling",
    "not needed, as no code of the model runs; --plugins adds model families": "trust-remote-code",
    "not to be had: layers are split by --attn-tp and --ep": "pipeline-parallel-size pp-size",
}
"""What Weft calls it, or says of it: names in vLLM or SGLang, without the dashes before them."""
RENAMED = {"experts": "moe-exchange"}
"""Weft's own options that have another name now: old → new, without the dashes."""
ADVICE = {name: advice for advice, names in NAMES.items() for name in names.split()}


def hint(arguments: Sequence[str]) -> str | None:
    """A line for the first argument that is an option of vLLM or SGLang, not of Weft; None where there is none."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith("-") and (advice := ADVICE.get(option.lstrip("-").replace("_", "-"))):
            return f"{option} is an option of vLLM or SGLang; in Weft it is {advice}"
    return None


def renamed(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments with today's names of options, and a line for each old name among them."""
    found, lines = [], []
    for argument in arguments:
        option, *value = argument.partition("=")
        if option.startswith("--") and (name := RENAMED.get(option[2:].replace("_", "-"))):
            lines.append(f"{option} is now --{name}")
            option = f"--{name}"
        found.append("".join((option, *value)))
    return found, lines
