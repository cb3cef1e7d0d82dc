"""One DP group's scheduler: which rows run in the next step.

Policy, in this order, within `max_batch_tokens` rows a step:
1. running sequences that need one row (they answer), oldest first;
2. running sequences that still read their prompt, oldest first, cut to what is left (chunked prefill: Sarathi-Serve,
   arXiv 2403.02310);
3. waiting ones, clients taking turns (`weft.engine.waiting`), while the whole prompt's pages can be had.
When a running sequence needs a page and none is to be had, the newest running one gives up its pages and waits again,
at the head of the queue; it will be computed anew. The oldest always goes on, so nobody starves.

Who owns what: tokens [0, computed) of a sequence have keys and values in its pages. Its first pages may be shared with
the prefix tree and others, and are never written again; rows are written at [computed, computed + rows), in pages that
it alone holds until they are full and inserted into the tree.
"""

from __future__ import annotations

import time

from weft.engine.config import EngineConfig
from weft.engine.messages import GroupRows, Part, Sampling
from weft.engine.pages import PagePool
from weft.engine.prefix import PrefixTree
from weft.engine.request import Sequence
from weft.engine.waiting import WaitingQueue


class Scheduler:
    """Holds the sequences of one DP group between `add` and `finish`.

    num_pages, page_size: of the group's cache. prefix_cache: whether to reuse pages of equal prefixes.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, max_batch_tokens: int, max_running: int, prefix_cache: bool = True
    ):
        self.page_size, self.max_batch_tokens, self.max_running = page_size, max_batch_tokens, max_running
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(self.pool, page_size) if prefix_cache else None
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._step: list[tuple[Sequence, int]] = []

    # --- requests in and out ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. ValueError where it could never fit in the cache."""
        most = sequence.prompt_tokens + sequence.max_tokens
        if self._pages_for(most) > self.pool.total:
            raise ValueError(
                f"prompt and answer may take {most} tokens, but the key-value cache of a group holds "
                f"{self.pool.total * self.page_size}; ask for fewer or start with a larger kv_tokens"
            )
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its pages are free, or the tree's, at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._remember(sequence)
            self._give_up_pages(sequence)
        else:
            self.waiting.remove(sequence)

    def cached_tokens(self, tokens: list[int]) -> int:
        """How many leading tokens of a prompt are cached here."""
        return self.tree.longest(tokens[: len(tokens) - 1]) if self.tree else 0

    @property
    def queued_tokens(self) -> int:
        """Rows that are still to run for what is here, were nothing more drawn: the wait of a newcomer.

        Asked for every newcomer, so it must not take longer the more wait.
        """
        return self.waiting.rows + sum(s.left for s in self.running)

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold; what only the tree holds can be had at any time and does not count."""
        return len({page for s in self.running for page in s.pages})

    # --- steps ------------------------------------------------------------------------------------------------

    def schedule(self) -> GroupRows:
        """The rows of the next step; `advance` must follow once they have run."""
        assert not self._step, "the last step has not been advanced"
        budget = self.max_batch_tokens
        for sequence in sorted(self.running, key=lambda s: s.left > 1):  # stable: oldest first within each
            if budget == 0:
                break
            if sequence in self.running and self._grow(sequence):  # an earlier one may have taken its pages
                budget -= self._plan_rows(sequence, budget)
        while budget and len(self.running) < self.max_running and (admitted := self._admit()):
            budget -= self._plan_rows(admitted, budget)
        tokens: list[int] = []
        parts: list[Part] = []
        for sequence, rows in self._step:
            tokens += sequence.tokens[sequence.computed : sequence.computed + rows]
            sampling = _sampling(sequence) if rows == sequence.left else None
            parts.append(Part(sequence.request, rows, sequence.computed, tuple(sequence.pages), sampling))
        return GroupRows(tuple(tokens), tuple(parts))

    def advance(self) -> list[Sequence]:
        """After the step has run: the sequences for which a token was drawn, in the order of its parts.

        The caller appends the tokens, or finishes the sequence.
        """
        sampled = []
        for sequence, rows in self._step:
            sequence.computed += rows
            if sequence.left == 0:
                sampled.append(sequence)
                if sequence.drawn == 0:  # the prompt is done: others may start from it
                    self._remember(sequence)
        self._step = []
        return sampled

    def check_idle(self) -> None:
        """With nothing running or waiting, every page must be free or the tree's. AssertionError otherwise."""
        assert not self.running and not self.waiting and not self._step
        held = self.tree.pages if self.tree else 0
        assert self.pool.free + held == self.pool.total, (self.pool.free, held, self.pool.total)

    # --- inside -----------------------------------------------------------------------------------------------

    def _plan_rows(self, sequence: Sequence, budget: int) -> int:
        rows = min(sequence.left, budget)
        self._step.append((sequence, rows))
        return rows

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _take(self, count: int) -> list[int] | None:
        if self.tree and self.pool.free < count:
            self.tree.evict(count - self.pool.free)
        return self.pool.take(count)

    def _grow(self, sequence: Sequence) -> bool:
        """Pages for all the sequence's tokens, at others' cost if need be; False where it had to give way itself."""
        missing = self._pages_for(len(sequence.tokens)) - len(sequence.pages)
        while missing > 0:
            pages = self._take(missing)
            if pages is not None:
                sequence.pages += pages
                return True
            planned = [s for s, _ in self._step]
            victim = next(s for s in reversed(self.running) if s is sequence or s not in planned)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self) -> Sequence | None:
        """Gives the next waiting sequence the cached pages of its prefix and new ones for the rest of its tokens.

        None where nobody waits, or there are too few pages for the one whose turn it is.
        """
        if not self.waiting:
            return None
        sequence = self.waiting.first()
        shared = self.tree.match(sequence.tokens[: len(sequence.tokens) - 1]) if self.tree else []
        fresh = self._take(self._pages_for(len(sequence.tokens)) - len(shared))
        if fresh is None:
            self.pool.release(shared)
            return None
        self.waiting.take()
        self.running.append(sequence)
        sequence.pages = shared + fresh
        sequence.computed = len(shared) * self.page_size
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_tokens)
        if sequence.admitted is None:
            sequence.admitted = time.monotonic()
        return sequence

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._give_up_pages(sequence)
        self.waiting.put_back(sequence)

    def _give_up_pages(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.computed = [], 0

    def _remember(self, sequence: Sequence) -> None:
        if self.tree:
            self.tree.insert(sequence.tokens[: sequence.computed], sequence.pages)


def _sampling(sequence: Sequence) -> Sampling:
    p = sequence.params
    banned = tuple(sorted(sequence.end_ids)) if sequence.drawn < p.min_tokens else ()
    return Sampling(
        temperature=p.temperature,
        top_p=p.top_p,
        top_k=p.top_k,
        seed=sequence.seed,
        index=sequence.drawn,
        logprobs=-1 if p.logprobs is None else p.logprobs,
        banned=banned,
    )


def make_schedulers(config: EngineConfig) -> list[Scheduler]:
    """One for each DP group, empty."""
    return [
        Scheduler(
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            prefix_cache=config.prefix_cache,
        )
        for _ in range(config.attn_dp)
    ]
