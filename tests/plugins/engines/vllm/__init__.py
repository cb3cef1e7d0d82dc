"""A stand-in for vLLM: what weft-vllm uses of it, over gloo. test_contracts.py holds it to vLLM's."""

import atexit
import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize, logprobs):
        self.max_tokens, self.logprobs = max_tokens, logprobs


class LLM:
    """Samples a token that follows from the prompt."""

    def __init__(self, model, load_format, skip_tokenizer_init, decode_context_parallel_size=1, **arguments):
        if decode_context_parallel_size > 1:
            raise ValueError("decode_context_parallel_size")
        self.arguments, self.tokens = arguments, 0
        atexit.register(print, "Processed prompts: 100%")  # follows the caller's last line
        if os.environ["VLLM_PLUGINS"] == "weft":
            print("INFO weft-vllm carries group tp:0, calls of up to 8388608 bytes", flush=True)

    def start_profile(self):
        self.tokens = 0

    def stop_profile(self):
        """Write kernels of 1 ms for each token, which overlap by a half, and something else."""
        folder = Path(self.arguments["profiler_config"]["torch_profiler_dir"])
        folder.mkdir(parents=True)
        kernels = [{"cat": "kernel", "ts": 500 * at, "dur": 1000} for at in range(2 * self.tokens - 1)]
        with gzip.open(folder / "rank0.pt.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": [*kernels, {"cat": "cpu_op", "ts": 0, "dur": 10**6}]}, file)

    def generate(self, prompts, sampling_params, use_tqdm=True):
        self.tokens += sampling_params.max_tokens
        return [self.output(sum(prompt["prompt_token_ids"]) % 97, sampling_params) for prompt in prompts]

    def output(self, first, sampling_params):
        tokens = [first + step for step in range(sampling_params.max_tokens)]
        logprobs = [{token: SimpleNamespace(logprob=-1.0 / (1 + token))} for token in tokens]
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])
