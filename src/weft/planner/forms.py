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
"""Up to so many tokens in each DP group dispatch is considered."""


class FormCosts:
    """A step's time by gather and by dispatch, where a planner's chain has both forms."""

    def __init__(self, planner: Planner, dispatch: Dispatch):
        self.mesh, self.dispatch, chain = planner.mesh, dispatch, planner.chain
        alone = [replace(chain, reads=reads, others=()) for reads in chain.forms]
        copy, recipes = planner.slices_copy, planner.blocks.recipes
        self._planners = [Planner(self.mesh, c, planner.offers, slices_copy=copy, recipes=recipes) for c in alone]

    def us(self, tokens: int) -> list[float]:
        """µs of a step of `tokens` tokens in each DP group by gather, and by dispatch; infinite where impossible."""
        return [self._us(planner, tokens) for planner in self._planners]

    def pays_from(self) -> int | None:
        """Power of two of tokens from which dispatch is faster in all steps; None: not up to MAX_TOKENS."""
        tokens, found = MAX_TOKENS, None
        while tokens:
            gather, dispatch = self.us(tokens)
            if dispatch < math.inf or gather < math.inf:  # otherwise no step is so large
                if dispatch >= gather:
                    break
                found = tokens
            tokens //= 2
        return found

    def _us(self, planner: Planner, tokens: int) -> float:
        try:
            return planner.plan((tokens,) * self.mesh.attn_dp).us
        except LayoutError:
            return math.inf


def forms_of(planner: Planner) -> FormCosts | None:
    """None where a chain has one form alone."""
    values = (inside.value for reads in planner.chain.others for read in reads for inside in read.inside)
    dispatch = next((value for value in values if isinstance(value, Dispatch)), None)
    return None if dispatch is None else FormCosts(planner, dispatch)


def forms_dict(forms: FormCosts, tokens: int) -> dict[str, Any]:
    """For so many tokens in each DP group: µs of a step in each form, null where it is not possible; and where dispatch
    pays.

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
    """`forms_dict` for people, for several numbers of tokens."""
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
