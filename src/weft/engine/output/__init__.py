"""Outputs of requests, made of sampled tokens: text, stops, grammars, logprobs."""
