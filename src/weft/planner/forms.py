"""Costs of the forms of experts: both forms of a chain, planned for several numbers of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.planner.experts import Dispatch
from weft.planner.plan import Planner
from weft.planner.show import columns
from weft.planner.spec import LayoutError

MAX_TOKENS = 1 << 16
"""Maximum tokens per DP group for which dispatch is considered."""


class FormCosts:
    """Step times by gather and by dispatch, for a planner with both forms in its chain."""

    def __init__(self, planner: Planner, dispatch: Dispatch):
        self.mesh, self.dispatch, chain = planner.mesh, dispatch, planner.chain
        alone = [replace(chain, reads=reads, others=()) for reads in chain.forms]
        copy, recipes = planner.slices_copy, planner.blocks.recipes
        self._planners = [Planner(self.mesh, c, planner.offers, slices_copy=copy, recipes=recipes) for c in alone]

    def us(self, tokens: int) -> list[float]:
        """Return the µs of a step by gather and by dispatch, `tokens` per DP group; infinite if impossible."""
        return [self._us(planner, tokens) for planner in self._planners]

    def pays_from(self) -> int | None:
        """Return the power of two of tokens from which dispatch is always faster; None: not up to MAX_TOKENS."""
        tokens, threshold = MAX_TOKENS, None
        while tokens:
            gather, dispatch = self.us(tokens)
            if dispatch < math.inf or gather < math.inf:  # otherwise the step is too large for both
                if dispatch >= gather:
                    break
                threshold = tokens
            tokens //= 2
        return threshold

    def _us(self, planner: Planner, tokens: int) -> float:
        try:
            return planner.plan((tokens,) * self.mesh.attn_dp).us
        except LayoutError:
            return math.inf


def forms_of(planner: Planner) -> FormCosts | None:
    """Return the costs of both forms; None if a chain has only one."""
    values = (inside.value for reads in planner.chain.others for read in reads for inside in read.inside)
    dispatch = next((value for value in values if isinstance(value, Dispatch)), None)
    return None if dispatch is None else FormCosts(planner, dispatch)


def forms_dict(forms: FormCosts, tokens: int) -> dict[str, Any]:
    """Return the µs of a step in each form (null if impossible) and the tokens per DP group from which dispatch pays.

    ranks: expected number of ranks that a row goes to.
    """
    gather, dispatch = (None if us == math.inf else us for us in forms.us(tokens))
    return {
        "gather_us": gather,
        "dispatch_us": dispatch,
        "dispatch_pays_from": forms.pays_from(),
        "ranks": forms.dispatch.share * forms.mesh.world,
    }


def forms_text(forms: FormCosts, counts: Sequence[int]) -> str:
    """Return `forms_dict` as a text, for several numbers of tokens."""
    experts, k, world = forms.dispatch.experts, forms.dispatch.k, forms.mesh.world
    ranks = forms.dispatch.share * world
    first = forms.pays_from()
    pays = "nowhere" if first is None else f"from {first:,} token{'s' * (first != 1)} in each DP group on"
    rows = [("  tokens in each DP group", "by gather", "by dispatch")]
    for tokens in counts:
        gather, dispatch = ("too large" if us == math.inf else f"{us:,.0f} µs" for us in forms.us(tokens))
        rows.append((f"  {tokens:,}", gather, dispatch))
    return "\n".join(
        [
            f"experts: a row goes to {k} of {experts}, on {ranks:.1f} of {world} ranks in the mean",
            f"dispatch pays {pays}",
            *columns(rows),
        ]
    )
