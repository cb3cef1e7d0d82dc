"""Options of vLLM, SGLang and earlier versions of Weft, with their names in Weft today."""

from __future__ import annotations

import re
from collections.abc import Sequence

from weft.planner.spec import LayoutError, Mesh

NAMES = {
    "--attn-tp": "tensor-parallel-size tp-size tp",
    "--attn-dp": "data-parallel-size dp-size dp enable-dp-attention",
    "--ep, with --moe-tp for the ranks that share each expert": "enable-expert-parallel expert-parallel-size ep-size",
    "--dcp": "decode-context-parallel-size dcp-size",
    "--moe-exchange": "all2all-backend moe-a2a-backend",
    "--master-addr, with --master-port": "dist-init-addr data-parallel-address",
    "--ray, with --nnodes": "distributed-executor-backend",
    "--max-model-len": "context-length",
    "--max-running": "max-num-seqs max-running-requests",
    "--max-waiting": "max-queued-requests",
    "--max-batch-tokens": "max-num-batched-tokens chunked-prefill-size max-prefill-tokens",
    "--kv-tokens": "max-total-tokens num-gpu-blocks-override",
    "--page-size": "block-size",
    "--no-prefix-cache": "no-enable-prefix-caching disable-radix-cache",
    "--no-overlap": "no-async-scheduling disable-overlap-schedule",
    "--api-servers": "api-server-count",
    "--kv-dtype": "kv-cache-dtype",
    "--gpu-memory-fraction": "gpu-memory-utilization mem-fraction-static",
    "--float8, of weights that the checkpoint has in FP8": "quantization",
    "--speculative ngram|mtp|eagle3|draft [--draft-model DIR]": (
        "speculative-config speculative-algorithm speculative-algo"
    ),
    "--draft-model, with --speculative draft or eagle3": "speculative-draft-model-path speculative-draft-model",
    "--speculative-tokens": "speculative-num-draft-tokens speculative-num-steps",
    "--prompt-lookup-max": "speculative-ngram-max-match-window-size",
    "--prompt-lookup-min": "speculative-ngram-min-match-window-size",
    "--no-cuda-graphs": "enforce-eager disable-cuda-graph",
    "--cors-origins": "allowed-origins",
    "--log-level": "uvicorn-log-level",
    "--log-level warning": "disable-log-requests no-enable-log-requests",
    "HF_HOME, a variable of the environment": "download-dir",
    "seed, a field of each request": "random-seed",
    "the first argument, the model's directory": "model model-path",
    "a part of the model's directory; leave it out": "tokenizer tokenizer-path",
    "found by the model's chat template; leave it out": "tool-call-parser enable-auto-tool-choice",
    "always so; leave it out": ("enable-prefix-caching enable-chunked-prefill async-scheduling enable-metrics"),
    "not needed, as no code of the model is run; --plugins adds model families": "trust-remote-code",
    "not supported: layers are split by --attn-tp and --ep": "pipeline-parallel-size pp-size",
}
"""Weft's name or remark → names in vLLM or SGLang, without the leading dashes."""
RENAMED = {"experts": "moe-exchange"}
"""Renamed options of Weft: old → new, without the dashes."""
RENAMED_IN_PLAN = {"hosts": "nnodes", "layout": "attn-dp"}
"""Renamed options of `weft plan`; a layout is now four options, from --attn-dp to --moe-tp."""
ADVICE = {name: advice for advice, names in NAMES.items() for name in names.split()}


def hint(arguments: Sequence[str]) -> str | None:
    """Return a line about the first argument that is an option of vLLM or SGLang, not of Weft; None if none is."""
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith("-") and (advice := ADVICE.get(option.lstrip("-").replace("_", "-"))):
            return f"{option} is an option of vLLM or SGLang; in Weft it is {advice}"
    return None


def renamed(arguments: Sequence[str], command: str = "") -> tuple[list[str], list[str]]:
    """Return the arguments with today's names of options, and a line per old name. Raises LayoutError."""
    names = RENAMED | (RENAMED_IN_PLAN if command == "plan" else {})
    result, lines, following = list[str](), list[str](), iter(arguments)
    for argument in following:
        option, *value = argument.partition("=")
        if option.startswith("--") and (name := names.get(option[2:].replace("_", "-"))):
            whole = ["".join((f"--{name}", *value))]
            new = layout_arguments(value[1] or next(following, "")) if name == "attn-dp" else whole
            lines.append(f"{option} is now {' '.join(new) if name == 'attn-dp' else f'--{name}'}")
            result += new
        else:
            result.append(argument)
    return result, lines


def layout_arguments(text: str) -> list[str]:
    """Return the options of a short layout: `2x2,4x1` is --attn-dp 2 --attn-tp 2 --ep 4 --moe-tp 1. LayoutError."""
    match = re.fullmatch(r"(\d+)x(\d+)(?:,(\d+)x(\d+))?", text.replace(" ", ""))
    if match is None:
        raise LayoutError(f"layout {text!r} is not ATTN_DPxATTN_TP,EPxMOE_TP, such as 2x2,4x1")
    dp, tp, ep, moe_tp = match.groups()
    return ["--attn-dp", dp, "--attn-tp", tp, "--ep", ep or dp, "--moe-tp", moe_tp or tp]


def command_of(
    engine: str, model: str, mesh: Mesh, kv_dtype: str = "auto", mixed_batch_tokens: int | None = None
) -> str:
    """Return the command line of vLLM or SGLang for a layout, or a line that says why the engine has no such layout.

    Args:
        engine: vllm or sglang.
        model: its name or directory.
        kv_dtype: dtype of the cache, as an option of Weft.
        mixed_batch_tokens: the option of Weft. vLLM limits the rows of all steps. SGLang limits the rows of prompts in
            a step, of all DP groups together, and decodes in such steps only with an option.
    """
    whole, tp, dp = mesh.ep == mesh.world, mesh.attn_tp, mesh.attn_dp
    if mesh.world > 1 and not whole and mesh.ep != 1 and (mesh.ep, mesh.moe_tp) != (dp, tp):
        return f"{engine} has no layout with ep={mesh.ep} of {mesh.world} ranks"
    more = " --kv-cache-dtype fp8_e4m3" * (kv_dtype != "auto")
    if engine == "vllm":
        if mixed_batch_tokens is not None:
            more += f" --max-num-batched-tokens {mixed_batch_tokens}"
        expert = " --enable-expert-parallel" * (whole and mesh.world > 1)
        dcp = f" --decode-context-parallel-size {mesh.dcp}" * (mesh.dcp > 1)
        data = f" --data-parallel-size {dp}" * (dp > 1)
        return f"vllm serve {model} --tensor-parallel-size {tp}{data}{expert}{dcp}{more}"
    if mesh.dcp > 1:
        return f"sglang has no layout with dcp={mesh.dcp}"
    if mixed_batch_tokens is not None:
        more += f" --chunked-prefill-size {mixed_batch_tokens * dp} --enable-mixed-chunk"
    data = f" --dp-size {dp} --enable-dp-attention" * (dp > 1)
    expert = f" --ep-size {mesh.ep}" * (mesh.ep > 1)
    return f"python -m sglang.launch_server --model-path {model} --tp-size {mesh.world}{data}{expert}{more}"
