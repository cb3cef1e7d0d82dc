"""Drafts of the next decode rows (`weft.engine.speculation`), within the limits of sequences and of a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from weft.engine.config.config import EngineConfig
from weft.engine.messages.request import Sequence
from weft.engine.scheduler.scheduled import Scheduled
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


def plan_drafts(speculation: Speculation, running: Seq[Sequence], step: int) -> int:
    """Choose the maximum drafts of each running sequence in the step with this number, and return the largest."""
    price, active = speculation.prices.price(), [s.drafting for s in running if s.drafting and not s.ending]
    seeking = [drafting for drafting in active if step >= drafting.resumes]
    for drafting in seeking:  # the others wait, too, for the tokens of these
        drafting.plan(price and price._replace(fixed=price.fixed * len(running) / len(seeking)), step)
    largest = max((drafting.count for drafting in active), default=0)
    speculation.planned = (largest, price) if active else speculation.planned
    return largest


def note_step(speculation: Speculation | None, groups: Seq[Scheduled]) -> None:
    """Note that the results of a step have arrived, for the price of drafts. groups: the step's part of each group."""
    if speculation is not None:
        decode = 0 if any(group.rows.chunks for group in groups) else sum(len(g.rows.decode_rows) for g in groups)
        drafts = [len(s.drafts) for group in groups for s, _ in group.sampled if s.drafts is not None]
        speculation.prices.note(decode, sum(drafts) if drafts else None)


def propose(decoding: Seq[Sequence], spare: int) -> None:
    """Set the drafts of sequences that decode, `spare` at most: not beyond a limit of length, nor where an end token or
    the grammar ends the text before them."""
    for sequence in decoding:
        sequence.drafts, drafting = None, sequence.drafting
        limit = min(spare, sequence.to_run - sequence.computed - 1)
        if drafting is None:
            continue
        if limit < 1 or sequence.pending or not drafting.count:
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
