"""Plain data that ranks need to sample a sequence's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from weft.engine.messages.rank_messages import PARAMETERS, Adjust, Sampling, Score
from weft.engine.messages.request import Sequence


def sampling(sequence: Sequence) -> Sampling:
    """Return the sampling parameters of all tokens of a sequence."""
    return Sampling(seed=sequence.seed, **{name: getattr(sequence.params, name) for name in PARAMETERS})


def adjust(sequence: Sequence) -> Adjust | None:
    """Return the adjustments of the next token; None: none. They depend on the sequence alone, so a repeated step
    samples the same token.
    """
    p = sequence.params
    if p.plain and (not p.min_tokens or sequence.output_tokens + sequence.pending >= p.min_tokens):
        return None
    return Adjust(
        logprobs=-1 if p.logprobs is None else p.logprobs,
        banned=() if sequence.grammar else _banned_tokens(sequence),
        added=_logit_bias(sequence),
        repetition=p.repetition_penalty,
        repeated=tuple(sorted(set(sequence.tokens))) if p.repetition_penalty != 1 else (),
        mask=sequence.allowed if sequence.grammar is None else sequence.grammar.mask(sequence.allowed),
    )


def scoring(sequence: Sequence, rows: int) -> Score | None:
    """Return the prompt tokens with logprobs from the next rows; None if they are known or not requested."""
    if not sequence.to_score or sequence.params.prompt_logprobs is None:
        return None
    first = sequence.computed + 1
    tokens = sequence.tokens[first : min(first + rows, sequence.prompt_tokens)]
    return Score(tuple(tokens), sequence.params.prompt_logprobs) if tokens else None


def bits(tokens: Iterable[int], vocabulary: int) -> bytes:
    """Return a mask: bit t % 8 of byte t // 8 is set for each token t."""
    mask = bytearray(-(-vocabulary // 8))
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


def _logit_bias(sequence: Sequence) -> tuple[tuple[int, float], ...]:
    """Return the bias minus the penalties of the tokens so far: presence once, frequency per occurrence."""
    p = sequence.params
    if not (p.presence_penalty or p.frequency_penalty):
        return p.logit_bias
    added = dict(p.logit_bias)
    for token, times in Counter(sequence.tokens[sequence.prompt_tokens :]).items():
        added[token] = added.get(token, 0.0) - p.presence_penalty - p.frequency_penalty * times
    return tuple(added.items())


def _banned_tokens(sequence: Sequence) -> tuple[int, ...]:
    """Return end tokens before min_tokens, and the last token of each bad word after its other tokens."""
    p, output = sequence.params, sequence.tokens
    banned = set(sequence.end_ids) if sequence.output_tokens + sequence.pending < p.min_tokens else set()
    for length, endings in p.bad_endings.items() if p.bad_words else ():
        if length <= sequence.output_tokens:
            banned |= endings.get(tuple(output[len(output) - length :]), set())
    return tuple(sorted(banned))
