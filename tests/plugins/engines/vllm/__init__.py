"""A stand-in for vLLM: what weft-vllm uses of it, over gloo. test_contracts.py holds it to vLLM's."""

import atexit
from types import SimpleNamespace


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize, logprobs):
        self.max_tokens, self.logprobs = max_tokens, logprobs


class LLM:
    """Samples a token that follows from the prompt."""

    def __init__(self, model, load_format, skip_tokenizer_init, decode_context_parallel_size=1, **arguments):
        if decode_context_parallel_size > 1:
            raise ValueError("decode_context_parallel_size")
        self.arguments = arguments
        atexit.register(print, "Processed prompts: 100%")  # follows the caller's last line

    def generate(self, prompts, sampling_params, use_tqdm=True):
        return [self.output(sum(prompt["prompt_token_ids"]) % 97, sampling_params) for prompt in prompts]

    def output(self, first, sampling_params):
        tokens = [first + step for step in range(sampling_params.max_tokens)]
        logprobs = [{token: SimpleNamespace(logprob=-1.0 / (1 + token))} for token in tokens]
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])
