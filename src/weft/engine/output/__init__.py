"""From tokens to what a request gets: text, stops, grammars, logprobs."""
