"""Plans as people and programs read them."""

from __future__ import annotations

import json

import pytest

from weft.planner.chain import Chain, Read
from weft.planner.cost import Offer, costs
from weft.planner.edges import legal_edges
from weft.planner.plan import Planner
from weft.planner.show import plan_dict, plan_text, size_text
from weft.planner.spec import LayoutError, Mesh, Rows

MESH = Mesh(2, 2, 2, 2)
EVERY = frozenset(e.kind for edges in legal_edges(MESH).values() for e in edges if e.moves)
SUMS = EVERY - {"all_gatherv"}


def planner(kinds: frozenset[str], *names: str) -> Planner:
    """Return the planner of three decoder layers: experts over the world, attention over attn_tp."""
    group, whole = MESH.placement(Rows.GROUP), MESH.placement(Rows.WORLD)
    attention, experts = MESH.placement(Rows.GROUP, "attn_tp"), MESH.placement(Rows.WORLD, "world")
    reads = []
    for i in range(3):
        reads.append(Read(f"model.layers.{i}.input_layernorm", group, (experts if i else group,)))
        reads.append(Read(f"model.layers.{i}.post_attention_layernorm", whole, (attention,)))
    reads.append(Read("model.norm", group, (experts,)))
    offers = [Offer(name, kinds, kinds & SUMS, costs("cpu").of(name, 4)) for name in names]
    return Planner(MESH, Chain(tuple(reads), 512, 2), offers)


@pytest.mark.parametrize("names", [("shm",), ("shm", "torchdist/gloo")])
@pytest.mark.parametrize("kinds", [EVERY, EVERY - {"all_reduce"}, frozenset({"all_reduce", "all_gatherv"})])
@pytest.mark.parametrize("tokens", [0, 1, 64, 1 << 20])
def test_a_plan_fits_the_terminal(names: tuple[str, ...], kinds: frozenset[str], tokens: int) -> None:
    lines = plan_text(planner(kinds, *names), (tokens, tokens)).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("model." in line for line in lines), "what is the same in every row is left out"


def test_a_step_says_what_it_does() -> None:
    text = plan_text(planner(EVERY, "shm"), (64, 64))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "edges of shm; times by cpu-shm" in lines
    assert any(line.startswith("plan: ") and line.endswith(", all by shm") for line in lines)
    assert "layers.*.post_attention_layernorm × 3" in lines
    assert any(line.startswith("reduce_scatterv world → OWN +norm 96.0 KiB ") for line in lines)
    naive = text[text.index("naive:") : text.index("saving:")]
    assert "3 × all_reduce attn_tp, 3 × all_gatherv attn_dp, 3 × all_reduce world" in " ".join(naive.split())
    assert lines[-1].startswith("saving: ") and lines[-1].endswith("fewer bytes")


def test_a_naive_plan_that_nobody_offers() -> None:
    made = planner(EVERY - {"all_reduce"}, "shm")
    text = plan_text(made, (4, 4))
    assert "naive: not offered, " in text and text.endswith("what these transports do not offer")
    found = json.loads(json.dumps(plan_dict(made, (4, 4)), allow_nan=False))
    assert found["naive"]["us"] is None and found["plan"]["us"] > 0


def test_the_naive_plan_may_be_the_one_to_follow() -> None:
    made = planner(EVERY, "shm")
    naive = Planner(made.mesh, made.chain, made.offers, "naive")
    assert naive.plan((5, 3)) == made.naive((5, 3)) != made.plan((5, 3))
    text = plan_text(naive, (5, 3))
    assert "plan (the naive one, as chosen): " in text and "saving: 0% of the predicted time" in text
    made = planner(EVERY - {"all_reduce"}, "shm")
    with pytest.raises(LayoutError, match="the naive plan requires all_reduce, not offered by shm"):
        Planner(made.mesh, made.chain, made.offers, "naive").plan((1, 1))


def test_programs_get_whole_numbers_and_names() -> None:
    found = plan_dict(planner(EVERY, "shm"), (5, 5))
    assert found["counts"] == [8, 8] and len(found["plan"]["reads"]) == 7
    moves = [s for r in found["plan"]["reads"] for s in r["steps"] if s.get("group")]
    assert sum(s["bytes"] for s in moves) == found["plan"]["bytes"]
    assert {s["transport"] for s in moves} == {"shm"}


def test_sizes() -> None:
    sizes = (0, 1, 1023, 1024, 1536, 640 << 10, 1 << 20, 3 << 30, 5 << 40)
    words = ("0 B", "1 B", "1,023 B", "1.0 KiB", "1.5 KiB", "640 KiB", "1.0 MiB", "3.0 GiB", "5,120 GiB")
    assert [size_text(size) for size in sizes] == list(words)
