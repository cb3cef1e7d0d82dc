"""Plain data that ranks need to sample a sequence's tokens."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from weft.engine.kv.tokens import token_array
from weft.engine.messages.rank_messages import PARAMETERS, Adjust, Sampling, Score
from weft.engine.messages.request import Sequence

NO_DRAFTS = token_array(())


def sampling(sequence: Sequence) -> Sampling:
    """Return the sampling parameters of all tokens of a sequence."""
    return Sampling(seed=sequence.seed, **{name: getattr(sequence.params, name) for name in PARAMETERS})


def adjust(sequence: Sequence, drafts: array[int] = NO_DRAFTS, mask: bytes | None = None) -> Adjust | None:
    """Return the adjustments of the token after the drafts; None: none. They depend on the sequence and on these drafts
    alone, so a repeated step samples the same token. mask: of the grammar at that token; None: found here.
    """
    p, sampled = sequence.params, sequence.output_tokens + sequence.pending + len(drafts)
    if p.plain and (not p.min_tokens or sampled >= p.min_tokens):
        return None
    tokens = sequence.tokens + drafts if drafts else sequence.tokens
    if mask is None:
        mask = sequence.allowed if sequence.grammar is None else sequence.grammar.mask(sequence.allowed)
    return Adjust(
        logprobs=-1 if p.logprobs is None else p.logprobs,
        banned=() if sequence.grammar else _banned_tokens(sequence, tokens, sampled),
        added=_logit_bias(sequence, tokens),
        repetition=p.repetition_penalty,
        repeated=tuple(sorted(set(tokens))) if p.repetition_penalty != 1 else (),
        mask=mask,
    )


def adjust_each(sequence: Sequence, first: int) -> Iterator[tuple[int, Adjust]]:
    """Yield the adjustments of the next token and of the token after each draft, numbered from `first`."""
    drafts, grammar = sequence.drafts or NO_DRAFTS, sequence.grammar
    masks = [sequence.allowed] * (len(drafts) + 1) if grammar is None else grammar.masks(sequence.allowed, drafts)
    for at, mask in enumerate(masks):
        if (adjustment := adjust(sequence, drafts[:at], mask)) is not None:
            yield first + at, adjustment


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


def _logit_bias(sequence: Sequence, tokens: array[int]) -> tuple[tuple[int, float], ...]:
    """Return the bias minus the penalties of the tokens so far: presence once, frequency per occurrence."""
    p = sequence.params
    if not (p.presence_penalty or p.frequency_penalty):
        return p.logit_bias
    added = dict(p.logit_bias)
    for token, times in Counter(tokens[sequence.prompt_tokens :]).items():
        added[token] = added.get(token, 0.0) - p.presence_penalty - p.frequency_penalty * times
    return tuple(added.items())


def _banned_tokens(sequence: Sequence, tokens: array[int], sampled: int) -> tuple[int, ...]:
    """Return end tokens before min_tokens, and the last token of each bad word after its other tokens."""
    p = sequence.params
    banned = set(sequence.end_ids) if sampled < p.min_tokens else set()
    for length, endings in p.bad_endings.items() if p.bad_words else ():
        if length <= len(tokens) - sequence.prompt_tokens:
            banned |= endings.get(tuple(tokens[len(tokens) - length :]), set())
    return tuple(sorted(banned))
