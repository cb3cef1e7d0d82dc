"""Output of one request: the engine's thread adds tokens; the reader's thread makes increments of them."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from random import Random

import numpy as np

from weft.engine.kv.tokens import token_array
from weft.engine.messages.rank_messages import Logprobs, Scored
from weft.engine.messages.request import (
    ContextExceeded,
    End,
    FinishReason,
    Output,
    SamplingParams,
    Sequence,
    TokenLogprob,
    Watch,
)
from weft.engine.output.detokenizer import TextStream
from weft.engine.output.text_processor import TextProcessor
from weft.engine.scheduler.sampling_rows import bits
from weft.engine.scheduler.scheduler import Scheduler

OutputCallback = Callable[["RequestOutput"], None]
Request = tuple[Seq[int], SamplingParams, OutputCallback]
"""Prompt tokens, sampling parameters, and the callback for increments."""
log = logging.getLogger(__name__)
NAMED = ("stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids")
"""Sampling parameters with lists of tokens."""
Named = tuple[frozenset[int], bytes]
"""A request's end tokens, and the mask of its allowed tokens; empty: all."""


NOT_YET = End(-1, None)
"""The end of an increment that is not the last."""


@dataclass(eq=False, slots=True)
class RequestOutput:
    """A request that runs or waits, and its output so far.

    The engine's thread adds tokens, sets `end` and calls the callback once per increment. `take` makes the increments,
    one after the other, on any thread.

    Attributes:
        callback: called with this object, on the engine's thread.
        eos: end tokens that are not reported as a stop reason.
        scheduler: scheduler of the request's DP group; None before it has one.
        name: name of the request in the log.
        end: None while the output goes on.
        over: the last increment was taken.
        end_seen: the callback of the last increment was called.
        watch: see `SamplingParams`.
    """

    sequence: Sequence
    callback: OutputCallback
    text: TextStream
    eos: frozenset[int]
    scheduler: Scheduler | None = None
    name: str = ""
    end: End | None = None
    over: bool = False
    end_seen: bool = False
    watch: Watch | None = None
    _checks_tokens: bool = field(init=False)  # a token may complete a stop string or a grammar
    _called: int = field(default=0, init=False)  # increments that the callback was called for
    _taken: int = field(default=0, init=False)
    _known: deque[Logprobs] = field(default_factory=deque, init=False)  # logprobs of tokens not taken yet
    _pieces: deque[str] = field(default_factory=deque, init=False)  # texts of tokens not taken yet, if they are checked

    def __post_init__(self) -> None:
        self._checks_tokens = bool(self.text.stops or self.watch) or self.sequence.grammar is not None

    # --- on the engine's thread -------------------------------------------------------------------------------

    def score(self, scored: Scored) -> None:
        """Store logprobs of the prompt's tokens; a repeated step gives the same ones."""
        s = self.sequence
        tokens = s.tokens[scored.first : scored.first + len(scored.logprobs)]
        try:
            made = [TokenLogprob(t, value, top) for t, (value, top) in zip(tokens, scored.logprobs, strict=True)]
            s.scores[scored.first - 1 : scored.first - 1 + len(made)] = made
        except Exception as error:
            s.fault = error

    def accept(self, token: int, known: Logprobs | None = None) -> int:
        """Add one sampled token; set `end` if it is the last. Returns the number of tokens so far.

        An error ends this request alone. known: the token's logprobs, if requested.
        """
        s = self.sequence
        at = len(s.tokens) - s.prompt_tokens
        try:
            if s.max_tokens > 0:
                s.tokens.append(token)
            if known is not None:
                self._known.append(known)
            if token in s.end_ids or at + 1 >= s.max_tokens or self._checks_tokens or s.fault:  # else it goes on
                self.end = self._end_with(token, at)
        except Exception as error:
            self.end = End(at, "error", fault=error)
        return at + 1 if s.max_tokens > 0 else 0

    def _end_with(self, token: int, at: int) -> End | None:
        """Return the end caused by a token; None if the output goes on. at: index of the token."""
        s = self.sequence
        if s.fault is not None:
            raise s.fault
        if s.max_tokens == 0:
            return End(at, "length", token=False)
        whole = False
        if s.grammar is not None:  # check it first: if it allows no token, any is sampled, even an end token
            try:
                whole = s.grammar.accept(token)
            except ValueError as error:
                return End(at, "error", error=str(error), refused=True)
        if token in s.end_ids and at + 1 >= s.params.min_tokens:
            return End(at, "stop", None if token in self.eos else token, in_text=s.params.keep_stop)
        if self.text.stops or self.watch:
            piece, stop = self.text.push(token, check_stop=at + 1 >= s.params.min_tokens)
            self._pieces.append(piece)
            if stop is None and self.watch is not None:
                stop = self.watch(piece)
            if stop is not None:
                return End(at, "stop", stop or None)
        if whole:
            return End(at, "stop")
        return End(at, "length") if at + 1 >= s.max_tokens else None

    def cut(self, reason: FinishReason, error: str | None = None) -> None:
        """End the output without another token."""
        self.end = End(self.sequence.output_tokens, reason, error=error, token=False)

    def notify(self) -> bool:
        """Call the callback for an increment, unless the end was seen. Returns whether this increment is the last.

        An error of the callback ends this request alone.
        """
        if self.end_seen:
            return False
        self._called += 1
        try:
            if not self.over:  # else `take` failed, and its caller knows
                self.callback(self)
        except Exception as error:
            self.end, self.over = End(self._taken, "error", fault=error), False
            with contextlib.suppress(Exception):
                self.callback(self)
            if not self.over:
                self.take()
            return True
        return self.end is not None and (self.over or self._called > self.end.at)

    # --- on any thread, one at a time -------------------------------------------------------------------------

    def take(self, count: int = 1) -> Output:
        """Return the next increment.

        An error in making it ends this request alone, with this increment.

        Args:
            count: calls of the callback that it covers; the counts of all calls sum to the calls of the callback.
        """
        s, at, end = self.sequence, self._taken, self.end
        last = NOT_YET if end is None or end.at >= at + count else end
        tokens: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        text = ""
        try:
            first, new = s.prompt_tokens + at, count if last is NOT_YET else last.at - at + last.token
            if last.fault is not None:
                raise last.fault
            tokens = tuple(s.tokens[first : first + new])
            if self._known:
                logprobs = tuple([TokenLogprob(token, *self._known.popleft()) for token in tokens])
            in_text = new if last.in_text or not last.token else new - 1
            if self._pieces:
                text = "".join([self._pieces.popleft() for _ in range(in_text)])
            elif in_text:
                text = self.text.push_all(tokens[:in_text])
            if last.reason:
                text += self.text.flush()
        except Exception as error:
            log.error("request %s ends with an error", self.name or s.request, exc_info=error)
            s.fault = error  # a running request ends with its next token
            tokens, text, logprobs = (), "", ()
            last = End(at, "error", error=f"internal error: {type(error).__name__}")
        self._taken, self.over = at + count, last.reason is not None
        return Output(
            text=text,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=last.reason,
            stop_reason=last.stop_reason,
            prompt_tokens=s.prompt_tokens,
            cached_tokens=s.cached or 0,
            completion_tokens=at + len(tokens),
            error=last.error,
            queue_s=s.queue_s,
            prompt_logprobs=tuple(s.scores) if at == 0 and last.error is None else (),
            refused=last.refused,
        )

    def take_token(self) -> tuple[int, int | None, Logprobs | None, End | None]:
        """Return the next increment without text: its index, its token and logprobs, and the end if it is the last."""
        s, at, end = self.sequence, self._taken, self.end
        last = end if end is not None and end.at <= at else None
        self._taken, self.over = at + 1, last is not None
        if last is not None and (last.fault is not None or not last.token):
            return at, None, None, last
        return at, s.tokens[s.prompt_tokens + at], self._known.popleft() if self._known else None, last


def check_count(count: int, limit: int) -> None:
    """Raise ValueError for more requests at once than the limit."""
    if count > limit:
        raise ValueError(f"{count} completions are asked for at once (prompts × n); the limit is {limit}")


def prepare_all(
    requests: Seq[Request], context: int, text_processor: TextProcessor, seeds: Random
) -> list[RequestOutput]:
    """Return `prepare` of each request, with a seed of its own."""
    checked = dict[tuple[int, ...], Named]()
    return [
        prepare(prompt, params, callback, seeds.getrandbits(62), context, text_processor, checked)
        for prompt, params, callback in requests
    ]


def prepare(
    prompt: Seq[int],
    params: SamplingParams,
    callback: OutputCallback,
    seed: int,
    context: int,
    text_processor: TextProcessor,
    checked: dict[tuple[int, ...], Named] | None = None,
) -> RequestOutput:
    """Return the output of a new request, before its first token and without a request number.

    Raises ValueError for a prompt that is empty, too long or holds unknown tokens, and for parameters that no token
    satisfies.

    Args:
        prompt: its tokens.
        seed: default for requests without a seed.
        context: maximum tokens of the prompt and the output together.
        checked: cache of checked parameters, shared by the choices of one request.
    """
    if not prompt:
        raise ValueError("prompt is empty; give at least one token")
    max_output = context - len(prompt)
    output = 1 if params.max_tokens is None else params.max_tokens
    if output > max_output:  # check before reading each token: there may be millions
        raise ContextExceeded(context, len(prompt), output)
    vocabulary = text_processor.vocabulary
    try:
        tokens = token_array(prompt)
        # `min` and `max` of a list take ten times as long; a negative token is over 2³¹ without its sign.
        known = np.frombuffer(tokens, np.uint32).max() < vocabulary
    except OverflowError:
        known = False
    if not known:
        raise ValueError(f"prompt: its tokens must be between 0 and {vocabulary - 1}")
    key = (*(id(getattr(params, name)) for name in NAMED), params.ignore_eos, params.min_tokens > 0)
    checked = {} if checked is None else checked
    if key not in checked:
        checked[key] = _check_named(params, text_processor)
    ends, allowed = checked[key]
    sequence = Sequence(
        request=0,
        tokens=tokens,
        prompt_tokens=len(prompt),
        params=params,
        seed=seed if params.seed is None else params.seed & (2**62 - 1),
        max_tokens=max_output if params.max_tokens is None else params.max_tokens,
        end_ids=ends,
        allowed=allowed,
        grammar=None if params.grammar is None else text_processor.grammars.start(params.grammar),
    )
    keep = params.keep_stop, params.keep_special
    text = TextStream(text_processor.detokenizer, params.stop, *keep)
    watch = params.watch() if params.watch else None
    return RequestOutput(sequence, callback, text, text_processor.ends, watch=watch)


def _check_named(params: SamplingParams, text_processor: TextProcessor) -> Named:
    vocabulary = text_processor.vocabulary
    for name in NAMED:
        if any(not 0 <= token < vocabulary for token in params.tokens_of(name)):
            raise ValueError(f"{name}: its tokens must be between 0 and {vocabulary - 1}")
    ends = frozenset() if params.ignore_eos else text_processor.ends
    if params.stop_token_ids:
        ends |= frozenset(params.stop_token_ids)
    allowed = frozenset(params.allowed_token_ids or ())
    banned = {w[0] for w in params.bad_words if len(w) == 1} | (ends if params.min_tokens else set())
    if allowed and not allowed - banned:
        raise ValueError("allowed_token_ids: it leaves no token that bad_words and min_tokens allow too")
    return ends, bits(allowed, vocabulary) if allowed else b""
