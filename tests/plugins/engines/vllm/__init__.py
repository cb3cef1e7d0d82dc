"""A stand-in for vLLM: what weft-vllm uses of it, over gloo. test_contracts.py holds it to vLLM's."""
