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

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
Watch = Callable[[str], str | None]
"""See `SamplingParams.watch`."""


class ContextExceeded(ValueError):
    """A prompt that does not fit into the context with its output, in the words that OpenAI's clients look for.

    Attributes:
        field: what is too long, the prompt or the output.
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
    """How a request's tokens are sampled and when they end. Raises ValueError in one line for a value out of range.

    Fields that are not listed are as in OpenAI's and vLLM's APIs; the first are those of `Shaping`.

    Attributes:
        max_tokens: None: as many as fit; 0: the prompt runs and no token is sampled.
        seed: None: the engine chooses one.
        stop: strings that end the text and are left out of it.
        logprobs: alternatives for each token; 0: the sampled token's own; None: no logprobs.
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: (token, value added to its logit).
        bad_words: each as its tokens.
        allowed_token_ids: None: all.
        grammar: an llguidance grammar that the text follows (`weft.engine.grammar.grammar`), or one that is compiled
            already; min_tokens and bad_words are ignored then.
        keep_stop: a stop string or token is a part of the text.
        keep_special: special tokens are a part of the text.
        watch: makes, for each output, a function that gets the text of each token, and returns what the output ends
            with: a stop string, "" for anything else, or None where it goes on. All that text stays in the output.
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
        """Whether the controller must know all tokens so far before it can say how the next one is sampled."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.bad_words or self.grammar is not None)

    @cached_property
    def plain(self) -> bool:
        """Whether sampling after min_tokens needs the seed and the fields of `Shaping` alone."""
        named = self.logit_bias or self.allowed_token_ids is not None or self.logprobs is not None
        return not (named or self.depends_on_output)

    @cached_property
    def bad_endings(self) -> dict[int, dict[tuple[int, ...], set[int]]]:
        """By their number, the tokens before the last one of bad words, and the tokens that may not follow them."""
        found: dict[int, dict[tuple[int, ...], set[int]]] = {}
        for word in self.bad_words:
            found.setdefault(len(word) - 1, {}).setdefault(word[:-1], set()).add(word[-1])
        return found

    @property
    def named(self) -> int:
        """Number of tokens and words that it names."""
        lists = self.stop_token_ids, self.logit_bias, self.bad_words, self.allowed_token_ids or ()
        return sum(map(len, lists))

    def tokens_of(self, name: str) -> set[int]:
        """The tokens that a parameter names."""
        if name == "logit_bias":
            return {token for token, _ in self.logit_bias}
        if name == "bad_words":
            return {token for word in self.bad_words for token in word}
        return set(getattr(self, name) or ())


@dataclass(frozen=True)
class Sharing:
    """How a request shares the engine with others.

    Attributes:
        client: who asks; waiting clients take turns.
        priority: lower numbers run first, and give up their pages last.
        cache_salt: prefixes are reused among requests of the same salt only.
    """

    client: str = ""
    priority: int = 0
    cache_salt: str = ""


EQUALS = Sharing()
"""The default: one client, one priority, no salt."""


class TokenLogprob(Struct, frozen=True, gc=False):
    """A token, its natural-log probability under the raw logits, and the best alternatives (token, logprob).

    logprob is None where nothing comes before the token.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Output(Struct, frozen=True, gc=False):
    """One increment of a request's output. Its counts are totals so far.

    Attributes:
        text: newly final text. A stop string, or text that may become one, is not in it.
        finish_reason: set on the last increment.
        stop_reason: the stop string or token that matched.
        error: why the request ended early, with finish_reason "error", "timeout", or "abort" by the engine.
        queue_s: seconds that the request waited for a place in the batch.
        prompt_logprobs: of the prompt's tokens but the first, in the first increment, where they are asked for.
        refused: the error follows from the request alone.
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


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in a scheduler.

    Attributes:
        tokens: the prompt and the sampled tokens that the controller knows (`weft.engine.kv.tokens.token_array`).
        pending: tokens that steps under way sample for it; they follow `tokens`.
        computed: how many of all these have run, or will have run once the steps under way have; the rest still need
            a row. Their keys and values are in the pages of `allocation`.
        row: its row of the DP group's table on the ranks, while it has an allocation.
        sent_tables: its page tables as the ranks know them; empty before they know the sequence.
        decoding: its next row runs what was sampled last, which the ranks have.
        decode_tokens: tokens that its next decode row runs and samples, at most what is left of `to_run`.
        to_run: tokens that get a row if it ends by its length: all but the last.
        cached: prompt tokens that came from the prefix cache when it was first admitted.
        allowed, grammar: which tokens may come, as a mask and as a grammar; empty and None: all.
        scores: logprobs of the prompt's tokens but the first that are known, where they are asked for.
        fault: an unforeseen error of this request alone; the request ends with it at its next token.
        arrived, admitted, deadline: seconds of `time.monotonic`. admitted is None until it first gets a place in the
            batch; deadline is None where it may take any time.
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
    decode_tokens: int = 1
    cached: int | None = None
    allocation: CacheAllocation | None = None
    allowed: bytes = b""
    grammar: Grammar | None = None
    scores: list[TokenLogprob] = field(default_factory=list)
    fault: Exception | None = None
    sharing: Sharing = EQUALS
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
    def output_tokens(self) -> int:
        """Number of tokens sampled so far, without those that are pending."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def ending(self) -> bool:
        """Whether a step under way samples its last token: no row is left to run."""
        return self.pending > 0 and len(self.tokens) + self.pending > self.to_run

    @property
    def stalled(self) -> bool:
        """Whether its next row has to wait for a token that a step under way samples."""
        return self.pending > 0 and self.params.depends_on_output

    @property
    def to_score(self) -> int:
        """Number of its prompt's tokens with logprobs that are requested and not known."""
        return 0 if self.params.prompt_logprobs is None else self.prompt_tokens - 1 - len(self.scores)

    @property
    def queue_s(self) -> float:
        """Seconds that it waited for its first place in the batch, so far."""
        return (time.monotonic() if self.admitted is None else self.admitted) - self.arrived

    def forget_pages(self) -> None:
        """Forgets its cached keys and values and its pending tokens: every token needs a row again.

        Its pages are not freed.
        """
        self.computed, self.pending, self.allocation = 0, 0, None
        self.row, self.sent_tables, self.decoding = -1, [], False
