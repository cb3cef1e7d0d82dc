"""Plans as texts for people and as JSON-ready dictionaries for programs."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from weft.planner.chain import Counts
from weft.planner.op import finite
from weft.planner.plan import Plan, Planner, ReadPlan


def fold(site: str) -> str:
    """Return a read's name with its layer number folded, so that equal layers share a line."""
    return re.sub(r"\b\d+\b", "*", site)


def plan_dict(planner: Planner, counts: Counts) -> dict[str, Any]:
    """Return the plan and the naive plan for `counts` tokens in each DP group: all steps of all reads.

    bytes: received by the busiest rank. us: predicted; null if no transport offers a step of the naive plan.
    """
    plan, naive = planner.plan(counts), planner.naive(counts)
    return {
        "layout": str(planner.mesh),
        "counts": list(plan.counts),
        "cost": {o.transport: o.cost.name for o in planner.offers},
        "plan": _totals(planner, plan) | {"formats": _formats(planner, plan), "reads": _reads(planner, plan)},
        "naive": _totals(planner, naive) | {"reads": _reads(planner, naive)},
    }


def plan_text(planner: Planner, counts: Counts) -> str:
    """Return the plans as text of 80 columns: equal layers once, the naive plan in a sentence, the saving last."""
    plan, naive = planner.plan(counts), planner.naive(counts)
    models = ", ".join(dict.fromkeys(o.cost.name for o in planner.offers))
    by = list(dict.fromkeys(op.transport for _, op in plan.ops()))
    tokens = f"{plan.counts[0]:,} token{'s' * (plan.counts[0] != 1)}"
    lines = [
        f"layout {planner.mesh} · {tokens} in each DP group",
        f"edges of {', '.join(o.transport for o in planner.offers)}; times by {models}",
        "",
        f"plan{' (the naive one, as chosen)' * (planner.choice == 'naive')}: {_sum(planner, plan)}"
        + (f", all by {by[0]}" if len(by) == 1 else ""),
        *_table(planner, plan, one_transport=len(by) < 2),
        "",
        *(
            f"{entry['format']}: {entry['calls']} calls bring {size_text(entry['bytes'])} a rank instead of "
            f"{size_text(entry['plain_bytes'])}"
            for entry in _formats(planner, plan)
        ),
        *textwrap.wrap(f"naive: {_sum(planner, naive)}: {_kinds(naive)}", 79, subsequent_indent="  "),
        "",
    ]
    if naive.us == math.inf:
        return "\n".join([*lines, "saving: not known, as the naive plan requires what these transports do not offer"])
    plan_totals, naive_totals = _totals(planner, plan), _totals(planner, naive)
    saved = 1 - plan_totals["us"] / naive_totals["us"] if naive_totals["us"] else 0.0
    moved = plan_totals["bytes"] / naive_totals["bytes"] - 1 if naive_totals["bytes"] else 0.0
    change = f"{abs(moved):.0%} {'more' if moved > 0 else 'fewer'} bytes" if round(moved, 2) else "equal bytes"
    return "\n".join([*lines, f"saving: {saved:.0%} of the predicted time, with {change}"])


def size_text(size: float) -> str:
    """Return bytes as text: `512 B`, `10.5 KiB`."""
    power = min(max(int(size), 1).bit_length() - 1, 39) // 10
    number = size / 1024**power
    return f"{number:,.{int(power > 0 and number < 100)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a table's lines: first cells left-aligned, others right-aligned; a row may have fewer cells."""
    widths = [max(map(len, cells)) for cells in zip_longest(*rows, fillvalue="")]
    lines = []
    for first, *others in rows:
        cells = [f"  {cell:>{width}}" for cell, width in zip(others, widths[1:], strict=False)]
        lines.append((f"{first:{widths[0]}}" + "".join(cells)).rstrip())
    return lines


def _sum(planner: Planner, plan: Plan) -> str:
    total = _totals(planner, plan)
    us = "not offered" if plan.us == math.inf else f"{plan.us:,.0f} µs"
    return f"{us}, {total['collectives']} collectives, {size_text(total['bytes'])} a rank"


def _formats(planner: Planner, plan: Plan) -> list[dict[str, Any]]:
    """Return the calls of each format of rows, and the bytes that a rank receives with and without it."""
    sizes_of: dict[str, list[tuple[float, float]]] = {}
    for _, _, edge in plan.moves():
        if edge.src.wire is not None:
            plain = replace(edge, src=replace(edge.src, wire=None), dst=replace(edge.dst, wire=None))
            sizes = (planner.bytes_received(wire, plan.counts) for wire in (edge, plain))
            sizes_of.setdefault(str(edge.src.wire.format), []).append((next(sizes), next(sizes)))
    return [
        {
            "format": name,
            "calls": len(sizes),
            "bytes": int(sum(size for size, _ in sizes)),
            "plain_bytes": int(sum(size for _, size in sizes)),
        }
        for name, sizes in sizes_of.items()
    ]


def _kinds(plan: Plan) -> str:
    """Return how often each collective runs."""
    counts = Counter(f"{kind} {op.group}" for _, op in plan.ops(optional=False) for kind in op.collectives)
    return ", ".join(f"{times} × {kind}" for kind, times in counts.items()) or "nothing moves"


def _totals(planner: Planner, plan: Plan) -> dict[str, Any]:
    ops = [op for _, op in plan.ops(optional=False)]
    moved = sum(planner.received(op, plan.counts) for op in ops)
    return {"us": finite(plan.us), "collectives": sum(len(op.collectives) for op in ops), "bytes": moved}


def _reads(planner: Planner, plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "site": read.read.site,
            "us": finite(read.us),
            "residual": read.residual.name,
            "steps": [op.as_dict(planner.bytes_received, plan.counts) for op in read.ops()],
        }
        for read in plan.reads
    ]


def _table(planner: Planner, plan: Plan, one_transport: bool) -> list[str]:
    """Return a line for each op under its read: its text, the bytes that the busiest rank receives, µs."""
    rows: list[tuple[str, ...]] = []
    reads = _folded(plan)
    first = {read.read.site.split(".")[0] for _, read in reads}
    prefix = f"{first.pop()}." if len(first) == 1 else ""
    for times, read in reads:
        often = f"  × {times}" if times > 1 else ""
        form = "".join(f"  by {op.value.what}" for op in read.inside if op.parts)
        rows.append((f"  {fold(read.read.site).removeprefix(prefix)}{often}{form}",))
        for op in read.ops():
            named = op.brief() if one_transport or not op.kinds else str(op)
            condition = ", where a row asks for it" * op.optional
            moved = size_text(op.moved(planner.bytes_received, plan.counts)) if op.kinds else ""
            rows.append((f"    {named}{condition}", moved, f"{op.us:,.1f} µs"))
    return columns(rows)


def _folded(plan: Plan) -> list[tuple[int, ReadPlan]]:
    """Return the reads with equal folded names, residuals and ops, counted, in the order first seen."""
    seen: dict[tuple[object, ...], list[ReadPlan]] = {}
    for read in plan.reads:
        seen.setdefault((fold(read.read.site), read.steps, read.residual, read.inside), []).append(read)
    return [(len(same), same[0]) for same in seen.values()]
