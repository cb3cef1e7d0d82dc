"""One answer as it grows: from drawn tokens to the increments that its listener gets."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.engine.language import Language
from weft.engine.messages import Logprobs, Scored
from weft.engine.request import FinishReason, Output, SamplingParams, Sequence, TokenLogprob
from weft.engine.sampling import bits
from weft.engine.scheduler import Scheduler
from weft.engine.text import TextStream

OnOutput = Callable[[Output], None]
log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Answer:
    """A request that runs or waits. eos: tokens that end the text without being named as its stop reason.

    scheduler: of the DP group that it was given to; None until then. name: in the log. over: its listener has heard the
    last increment.
    """

    sequence: Sequence
    text: TextStream
    eos: frozenset[int]
    scheduler: Scheduler | None = None
    name: str = ""
    over: bool = False

    def tell(self, output: Output) -> bool:
        """Gives its listener an increment; True where it is the last. Nothing once it is over.

        Whatever fails in hearing it is a fault of this answer alone, which ends with an error.
        """
        if self.over:
            return False
        try:
            self.sequence.on_output(output)
        except Exception as error:
            output = self._failed(error)
            with contextlib.suppress(Exception):
                self.sequence.on_output(output)
        self.over = output.finish_reason is not None
        return self.over

    def score(self, scored: Scored) -> None:
        """Takes logprobs of the prompt; those of a step that is run anew are the same again."""
        s = self.sequence
        tokens = s.tokens[scored.first : scored.first + len(scored.logprobs)]
        try:
            made = [TokenLogprob(t, value, top) for t, (value, top) in zip(tokens, scored.logprobs, strict=True)]
            s.scores[scored.first - 1 : scored.first - 1 + len(made)] = made
        except Exception as error:
            s.fault = error

    def accept(self, token: int, known: Logprobs | None = None) -> Output:
        """Takes one drawn token, and gives the increment that comes of it: with a finish_reason where the answer ends.

        Whatever fails in making it is a fault of this answer alone. known: the token's logprobs, where asked for.
        """
        try:
            if self.sequence.max_tokens > 0:
                self.sequence.tokens.append(token)
            return self._increment(token, known)
        except Exception as error:
            return self._failed(error)

    def _increment(self, token: int, known: Logprobs | None) -> Output:
        sequence, params = self.sequence, self.sequence.params
        if sequence.fault:
            raise sequence.fault
        if sequence.max_tokens == 0:
            return self._output("", reason="length")
        so_far = sequence.drawn
        enough = so_far >= params.min_tokens
        if enough and token in sequence.end_ids:
            text = self.text.push(token, check_stop=False)[0] if params.keep_stop else ""
            text += self.text.flush()
            return self._output(text, token, known, "stop", None if token in self.eos else token)
        text, stop = self.text.push(token, check_stop=enough)
        if stop is not None:
            return self._output(text, token, known, "stop", stop)
        try:
            if sequence.grammar and sequence.grammar.accept(token):
                return self._output(text + self.text.flush(), token, known, "stop")
        except ValueError as error:
            return self._output(text, token, known, "error", error=str(error))
        if so_far >= sequence.max_tokens:
            return self._output(text + self.text.flush(), token, known, "length")
        return self._output(text, token, known)

    def end(self, reason: FinishReason, error: str | None = None) -> Output:
        """The last increment of an answer that ends without another token."""
        try:
            return self._output(self.text.flush(), reason=reason, error=error)
        except Exception as fault:
            return self._failed(fault)

    def _failed(self, error: Exception) -> Output:
        log.error("request %s ends with an error", self.name or self.sequence.request, exc_info=error)
        return self._output("", reason="error", error=f"internal error: {type(error).__name__}")

    def _output(
        self,
        text: str,
        token: int | None = None,
        known: Logprobs | None = None,
        reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> Output:
        s = self.sequence
        so_far = s.drawn
        return Output(
            text=text,
            token_ids=() if token is None else (token,),
            logprobs=() if token is None or known is None else (TokenLogprob(token, *known),),
            finish_reason=reason,
            stop_reason=stop_reason,
            prompt_tokens=s.prompt_tokens,
            cached_tokens=s.cached or 0,
            completion_tokens=so_far,
            error=error,
            queue_s=s.queue_s,
            prompt_logprobs=tuple(s.scores) if so_far <= 1 and error is None else (),
        )


def prepare(
    prompt: Seq[int],
    params: SamplingParams,
    on_output: OnOutput,
    seed: int,
    context: int,
    language: Language,
) -> Answer:
    """The answer to a request, before its first token and without a number.

    seed: for a request that brings none. context: tokens that prompt and answer may have together. Raises ValueError
    for a prompt that is empty, too long or holds unknown tokens, and for parameters that no token satisfies.
    """
    tokens, vocabulary = list(prompt), language.vocabulary
    if not tokens:
        raise ValueError("the prompt is empty; give at least one token")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise ValueError(f"prompt tokens must be between 0 and {vocabulary - 1}")
    for name in ("stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids"):
        if any(not 0 <= token < vocabulary for token in params.tokens_of(name)):
            raise ValueError(f"the tokens of {name} must be between 0 and {vocabulary - 1}")
    most = context - len(tokens)
    if most < (params.max_tokens != 0):
        raise ValueError(f"the prompt has {len(tokens)} tokens; at most {context - 1} fit with the answer's first")
    if params.max_tokens is not None and params.max_tokens > most:
        raise ValueError(
            f"the prompt's {len(tokens)} tokens and max_tokens={params.max_tokens} exceed the context of "
            f"{context} tokens; ask for at most {most}"
        )
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else language.ends)
    allowed = frozenset(params.allowed_token_ids or ())
    if allowed and not allowed - {w[0] for w in params.bad_words if len(w) == 1} - (
        ends if params.min_tokens else set()
    ):
        raise ValueError("allowed_token_ids leaves no token that bad_words and min_tokens allow too")
    sequence = Sequence(
        request=0,
        tokens=tokens,
        prompt_tokens=len(tokens),
        params=params,
        seed=seed if params.seed is None else params.seed & (2**62 - 1),
        max_tokens=most if params.max_tokens is None else params.max_tokens,
        end_ids=ends,
        on_output=on_output,
        allowed=bits(allowed, vocabulary) if allowed else b"",
        grammar=None if params.grammar is None else language.grammars.start(params.grammar),
    )
    keep = params.keep_stop, params.keep_special
    return Answer(sequence, TextStream(language.detokenizer, params.stop, *keep, params.stop_after), language.ends)
