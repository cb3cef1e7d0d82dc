"""Drafts of the next decode rows (`weft.engine.speculation`), within the limits of sequences and of a step."""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.config.config import EngineConfig
from weft.engine.messages.request import Sequence
from weft.engine.speculation.drafting import Speculation
from weft.engine.speculation.sources import SOURCES


def make_speculation(config: EngineConfig) -> Speculation | None:
    """Return the drafts of an engine; None: off."""
    if config.speculative == "off":
        return None
    source = None
    if not config.drafts_on_ranks:
        source = SOURCES[config.speculative](config.prompt_lookup_min, config.prompt_lookup_max)
    return Speculation(source, config.speculative_tokens, config.step_drafts)


def seeks_drafts(sequence: Sequence) -> bool:
    """Tell whether a sequence drafts once the tokens of all steps are known."""
    drafting = sequence.drafting
    return drafting is not None and len(sequence.tokens) + sequence.pending >= drafting.resumes and not sequence.ending


def propose(decoding: Iterable[Sequence], spare: int) -> None:
    """Set the drafts of sequences that decode, `spare` at most: not beyond a limit of length, nor where an end token or
    the grammar ends the text before them."""
    for sequence in decoding:
        sequence.drafts, drafting = None, sequence.drafting
        limit = min(spare, sequence.to_run - sequence.computed - 1)
        if drafting is None:
            continue
        if limit < 1 or sequence.pending or not seeks_drafts(sequence):
            drafting.given = ()
            continue
        drafts = drafting.propose(sequence.tokens, limit)
        try:
            followed = sequence.grammar.followed(drafts) if sequence.grammar and drafts else len(drafts)
        except Exception as error:  # ends this request alone, at its next token
            followed, sequence.fault = 0, error
        end = next((at for at, token in enumerate(drafts) if token in sequence.end_ids), followed)
        sequence.drafts = drafts[: min(end, followed)]
        spare -= len(sequence.drafts)
