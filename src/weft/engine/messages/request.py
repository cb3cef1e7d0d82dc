"""A request: its sampling parameters, the increments of its output, and its state in a scheduler."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from msgspec import Struct

from weft.engine.grammar.grammar import Compiled, Grammar
from weft.engine.kv.manager import CacheAllocation
from weft.engine.messages.rank_messages import PARAMETERS, Shaping
from weft.engine.speculation.drafting import Drafting

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
Watch = Callable[[str], str | None]
"""See `SamplingParams.watch`."""


class ContextExceeded(ValueError):
    """Error of a prompt that does not fit into the context with its output, in the words that OpenAI's clients match.

    Attributes:
        field: the part that is too long: prompt or output.
    """

    def __init__(self, context: int, prompt: int, output: int):
        self.field: Literal["prompt", "max_tokens"] = "prompt" if prompt >= context else "max_tokens"
        advice = f"ask for at most {context - prompt} with max_tokens" if prompt < context else "shorten the prompt"
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, you requested {prompt + output} tokens "
            f"({prompt} in the prompt, {output} in the completion). Please {advice}."
        )


@dataclass(frozen=True)
class SamplingParams(Shaping):
    """Sampling parameters and end conditions of a request. Raises ValueError in one line for a value out of range.

    Other fields are as in OpenAI's and vLLM's APIs; the first fields come from `Shaping`.

    Attributes:
        max_tokens: None: up to the context's limit; 0: the prompt runs and no token is sampled.
        seed: None: the engine chooses one.
        stop: strings that end the text and are omitted from it.
        logprobs: number of alternatives per token; 0: only the sampled token's logprob; None: no logprobs.
        prompt_logprobs: number of alternatives per prompt token.
        logit_bias: (token, value added to its logit).
        bad_words: tokens of each word.
        allowed_token_ids: None: all.
        grammar: llguidance grammar of the text (`weft.engine.grammar.grammar`), or a compiled one; min_tokens and
            bad_words are then ignored.
        keep_stop: include the stop string or token in the text.
        keep_special: include special tokens in the text.
        watch: returns, for each output, a function that gets the text of each token, and returns the end of the output:
            a stop string, "" for another end, or None to go on. All that text stays in the output.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: str | Compiled | None = None
    keep_stop: bool = False
    keep_special: bool = False
    watch: Callable[[], Watch] | None = None

    def __post_init__(self) -> None:
        rules = [
            (self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "0 or more"),
            (self.min_tokens >= 0, "min_tokens", "0 or more"),
            *((holds(getattr(self, name)), name, rule) for name, (rule, holds) in PARAMETERS.items()),
            (self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "between 0 and 20"),
            (self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "prompt_logprobs", "between 0 and 20"),
            (all(self.stop), "stop", "without empty strings"),
            (-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2"),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2"),
            (0 < self.repetition_penalty <= 100, "repetition_penalty", "above 0 and at most 100"),
            (all(-100 <= b <= 100 for _, b in self.logit_bias), "logit_bias", "between -100 and 100 for each token"),
            (all(self.bad_words), "bad_words", "without empty words"),
            (self.allowed_token_ids != (), "allowed_token_ids", "one token or more"),
        ]
        for holds, name, rule in rules:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {rule}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")

    @cached_property
    def depends_on_output(self) -> bool:
        """True if sampling the next token requires all earlier tokens on the controller."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.bad_words or self.grammar is not None)

    @cached_property
    def plain(self) -> bool:
        """True if sampling after min_tokens requires only the seed and the fields of `Shaping`."""
        named = self.logit_bias or self.allowed_token_ids is not None or self.logprobs is not None
        return not (named or self.depends_on_output)

    @cached_property
    def bad_endings(self) -> dict[int, dict[tuple[int, ...], set[int]]]:
        """Last tokens of bad words, by the number of tokens before them and these tokens."""
        found: dict[int, dict[tuple[int, ...], set[int]]] = {}
        for word in self.bad_words:
            found.setdefault(len(word) - 1, {}).setdefault(word[:-1], set()).add(word[-1])
        return found

    @property
    def named(self) -> int:
        """Number of tokens and words in all its lists."""
        lists = self.stop_token_ids, self.logit_bias, self.bad_words, self.allowed_token_ids or ()
        return sum(map(len, lists))

    def tokens_of(self, name: str) -> set[int]:
        """Return the tokens named by a parameter."""
        if name == "logit_bias":
            return {token for token, _ in self.logit_bias}
        if name == "bad_words":
            return {token for word in self.bad_words for token in word}
        return set(getattr(self, name) or ())


@dataclass(frozen=True)
class Sharing:
    """Terms on which a request shares the engine with others.

    Attributes:
        client: name of the client; waiting clients take turns.
        priority: lower numbers run first, and are preempted last.
        cache_salt: prefixes are reused only among requests with the same salt.
    """

    client: str = ""
    priority: int = 0
    cache_salt: str = ""


FAIR_SHARE = Sharing()
"""The default: one client, one priority, no salt."""


class TokenLogprob(Struct, frozen=True, gc=False):
    """A token, its natural-log probability under the raw logits, and the best alternatives (token, logprob).

    logprob: None for the first token of a prompt.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Output(Struct, frozen=True, gc=False):
    """One increment of a request's output. Its counts are totals so far.

    Attributes:
        text: newly final text, without stop strings and text that may become one.
        finish_reason: set on the last increment.
        stop_reason: the stop string or token that matched.
        error: reason of an early end, with finish_reason "error", "timeout", or "abort" by the engine.
        queue_s: seconds of waiting for a place in the batch.
        prompt_logprobs: logprobs of the prompt's tokens after the first, in the first increment, if requested.
        refused: the error is caused by the request alone.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    error: str | None = None
    queue_s: float = 0.0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    refused: bool = False


class End(Struct, frozen=True, array_like=True):
    """End of an output. Other fields are as in `Output`.

    Attributes:
        at: index of the last increment.
        fault: unforeseen error.
        token: whether the last increment has a token.
        in_text: whether the text includes that token.
    """

    at: int
    reason: FinishReason | None
    stop_reason: str | int | None = None
    error: str | None = None
    fault: Exception | None = None
    token: bool = True
    in_text: bool = True
    refused: bool = False


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in a scheduler.

    Attributes:
        tokens: the prompt and the sampled tokens known to the controller (`weft.engine.kv.tokens.token_array`).
        pending: number of tokens being sampled by steps in flight; they follow `tokens`.
        computed: number of these tokens that have run or run in steps in flight; the others still need a row. Their
            keys and values are in the pages of `allocation`.
        row: row of the DP group's table on the ranks, while the sequence has an allocation.
        sent_tables: page tables known to the ranks; empty before they know the sequence.
        decoding: the next row runs the last sampled token, which the ranks hold.
        drafting: how the sequence drafts; None: never.
        drafts: tokens that the next decode row runs after the last one; None: none were sought.
        to_run: tokens that get a row if the sequence ends by its length: all but the last.
        cached: prompt tokens from the prefix cache at the first admission.
        allowed, grammar: allowed tokens as a mask and as a grammar; empty and None: all.
        scores: known logprobs of the prompt's tokens after the first, if requested.
        fault: an unforeseen error of this request alone; it ends the request at its next token.
        arrived, admitted, deadline: seconds of `time.monotonic`. admitted is None until the first place in the batch;
            deadline is None without a time limit.
    """

    request: int
    tokens: array[int]
    prompt_tokens: int
    params: SamplingParams
    seed: int
    max_tokens: int
    end_ids: frozenset[int]
    computed: int = 0
    pending: int = 0
    row: int = -1
    sent_tables: list[list[int]] = field(default_factory=list)
    decoding: bool = False
    drafting: Drafting | None = None
    drafts: array[int] | None = None
    cached: int | None = None
    allocation: CacheAllocation | None = None
    allowed: bytes = b""
    grammar: Grammar | None = None
    scores: list[TokenLogprob] = field(default_factory=list)
    fault: Exception | None = None
    sharing: Sharing = FAIR_SHARE
    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    deadline: float | None = None
    to_run: int = field(init=False)

    def __post_init__(self) -> None:
        self.to_run = self.prompt_tokens + self.max_tokens - 1

    @property
    def left(self) -> int:
        """Number of tokens that still need a row."""
        return len(self.tokens) + self.pending - self.computed

    @property
    def decode_tokens(self) -> int:
        """Number of tokens that the next decode row runs, and of those that it samples."""
        return 1 if self.drafts is None else 1 + len(self.drafts)

    @property
    def output_tokens(self) -> int:
        """Number of tokens sampled so far, without pending ones."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def ending(self) -> bool:
        """True if a step in flight samples the last token: no row is left to run."""
        return self.pending > 0 and len(self.tokens) + self.pending > self.to_run

    @property
    def stalled(self) -> bool:
        """True if the next row has to wait for a pending token."""
        return self.pending > 0 and self.params.depends_on_output

    @property
    def to_score(self) -> int:
        """Number of prompt tokens with requested logprobs that are not known yet."""
        return 0 if self.params.prompt_logprobs is None else self.prompt_tokens - 1 - len(self.scores)

    @property
    def queue_s(self) -> float:
        """Seconds of waiting for the first place in the batch, so far."""
        return (time.monotonic() if self.admitted is None else self.admitted) - self.arrived

    def note_drafts(self, accepted: int) -> None:
        """Count the drafts of a step and its first `accepted` ones, and forget them."""
        assert self.drafting is not None and self.drafts is not None
        self.drafting.note(len(self.drafts), accepted)
        self.drafts = None

    def forget_pages(self) -> None:
        """Forget cached keys and values and pending tokens, without freeing pages: every token needs a row again."""
        self.computed, self.pending, self.allocation = 0, 0, None
        self.row, self.sent_tables, self.decoding, self.drafts = -1, [], False, None
