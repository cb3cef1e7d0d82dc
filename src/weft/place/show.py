"""Plans for people (text) and programs (JSON-ready dictionaries)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from weft.place.plan import Counts, Plan, Planner, ReadPlan


def fold(site: str) -> str:
    """A read's name with its layer number folded, so that equal layers share a line."""
    return re.sub(r"\b\d+\b", "*", site)


def plan_dict(planner: Planner, counts: Counts) -> dict[str, Any]:
    """The plan and the naive plan for `counts` tokens in each DP group, every step of every read."""
    plan, naive = planner.plan(counts), planner.naive(counts)
    return {
        "layout": str(planner.mesh),
        "counts": list(plan.counts),
        "cost": {o.transport: o.cost.name for o in planner.offers},
        "plan": _totals(planner, plan) | {"reads": [_read(planner, plan, r) for r in plan.reads]},
        "naive": _totals(planner, naive) | {"reads": [_read(planner, naive, r) for r in naive.reads]},
    }


def plan_text(planner: Planner, counts: Counts) -> str:
    """The same for reading: equal layers on one line, the naive plan under it, the saving last."""
    plan, naive = planner.plan(counts), planner.naive(counts)
    ours, theirs = _totals(planner, plan), _totals(planner, naive)
    models = ", ".join(dict.fromkeys(o.cost.name for o in planner.offers))
    lines = [f"layout {planner.mesh} · {plan.counts[0]} tokens in each DP group · cost model {models}"]
    for name, p, total in (("plan", plan, ours), ("naive", naive, theirs)):
        lines += [
            "",
            f"{name}: {total['us']:.0f} µs, {total['collectives']} collectives, {total['bytes']:,} bytes a rank",
        ]
        lines += _table(planner, p)
    saved = 1 - ours["us"] / theirs["us"] if theirs["us"] else 0.0
    moved = 1 - ours["bytes"] / theirs["bytes"] if theirs["bytes"] else 0.0
    lines += ["", f"saving: {saved:.0%} of the predicted time, {moved:.0%} of the bytes"]
    return "\n".join(lines)


def _totals(planner: Planner, plan: Plan) -> dict[str, Any]:
    moves = list(plan.moves())
    moved = sum(planner.bytes_received(edge, plan.counts) for _, _, edge in moves)
    return {"us": plan.us, "collectives": len(moves), "bytes": int(moved)}


def _read(planner: Planner, plan: Plan, read: ReadPlan) -> dict[str, Any]:
    steps = []
    for s in read.steps:
        step: dict[str, Any] = {"op": s.op, "us": s.us}
        if s.edge is None:
            step |= {"rows": s.rows.name}
        else:
            step |= {
                "edge": s.edge.kind,
                "group": s.edge.group,
                "from": str(s.edge.src),
                "to": str(s.edge.dst),
                "operand": s.operand if isinstance(s.operand, str) else f"delta {s.operand}",
                "bytes": int(planner.bytes_received(s.edge, plan.counts)),
                "transport": s.transport,
            }
        steps.append(step)
    return {"site": read.read.site, "us": read.us, "residual": read.residual.name, "steps": steps}


def _table(planner: Planner, plan: Plan) -> list[str]:
    rows = [("read", "×", "step", "on", "bytes/rank", "µs", "by")]
    for sites, read in _folded(plan.reads):
        first = (fold(read.read.site), str(sites))
        for s in read.steps:
            operand = s.operand if isinstance(s.operand, str) else f"delta {s.operand}"
            if s.edge is None:
                cells = (str(s.op), f"{s.rows.name} rows", "", f"{s.us:.1f}", "local")
            else:
                moved = planner.bytes_received(s.edge, plan.counts)
                what = f"{s.edge} + residual + norm" if s.op == "finish" else str(s.edge)
                cells = (what, operand, f"{int(moved):,}" if s.edge.moves else "", f"{s.us:.1f}", s.transport)
            rows.append((*first, *cells))
            first = ("", "")
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            c.rjust(w) if i in (1, 4, 5) else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))
        ).rstrip()
        for r in rows
    ]


def _folded(reads: Iterable[ReadPlan]) -> list[tuple[int, ReadPlan]]:
    """Reads whose folded name, steps and residual are equal, counted, in the order first seen."""
    seen: dict[tuple[object, ...], list[ReadPlan]] = {}
    for r in reads:
        seen.setdefault((fold(r.read.site), r.steps, r.residual), []).append(r)
    return [(len(same), same[0]) for same in seen.values()]
