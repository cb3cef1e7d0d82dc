"""Costs by name: presets, and tables as `weft tune` writes them, read, interpolated and refused."""

from __future__ import annotations

import json
import math
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weft.planner.chain import Chain, Read
from weft.planner.cost import PRESETS, Offer, costs, host_table, read_tuning
from weft.planner.plan import Plan, Planner
from weft.planner.spec import LayoutError, Mesh, Rows
from weft.tune.cpu_costs import median_filtered

ALL_REDUCE, REDUCE_SCATTERV, ALL_GATHERV = "all_reduce", "reduce_scatterv", "all_gatherv"
BASIC = frozenset((ALL_REDUCE, REDUCE_SCATTERV, ALL_GATHERV))
EVERY = BASIC | {"all_reduce+all_gatherv", "reduce_scatterv+all_reduce"}


def row(size: float, us: float, kind: str = ALL_REDUCE, ranks: int = 2, world: int = 2) -> dict[str, Any]:
    return {"kind": kind, "ranks": ranks, "world": world, "bytes": size, "us": us}


def table(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a table as `weft tune` writes it; the points need not come in order."""
    local, epilogue = [[4000, 40.0], [1000, 10.0]], [[1000, 0.0], [3000, 4.0]]
    return {"host": {}, "transports": {"shm": list(rows)}, "local": local, "epilogue": epilogue} | changes


def write(folder: Path, content: Any) -> str:
    path = folder / "table.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    "size, us",
    [(0, 8), (1, 8), (100, 8), (1000, 80), (10_000, 800), (20_000, 800 * 2**0.5), (40_000, 1600), (80_000, 3200)],
)
def test_between_sizes_and_beyond(size: float, us: float, tmp_path: Path) -> None:
    """Flat below the first, a straight line on logarithmic axes between, in proportion to the bytes beyond."""
    cost = costs(write(tmp_path, table(row(40_000, 1600), row(100, 8), row(10_000, 800)))).of("shm", 2)
    assert cost.collective_us(ALL_REDUCE, 2, size) == pytest.approx(us)


def test_local_steps(tmp_path: Path) -> None:
    cost = costs(write(tmp_path, table(row(1, 1)))).of("shm", 2)
    assert [cost.local_us(size) for size in (10, 2000, 8000)] == pytest.approx([10, 20, 80])
    assert [cost.epilogue_us(size) for size in (10, 2000, 6000)] == pytest.approx([0, 2, 8])  # a straight line from 0


def test_ranks_and_worlds_that_were_not_measured(tmp_path: Path) -> None:
    rows = [row(100, us, ranks=ranks, world=world) for ranks, world, us in ((2, 2, 1), (2, 4, 2), (4, 4, 5))]
    found = costs(write(tmp_path, table(*rows)))
    for world, two in ((2, 1), (3, 2), (4, 2), (8, 2)):  # the next larger world, else the largest
        assert found.of("shm", world).collective_us(ALL_REDUCE, 2, 100) == two
    for group, us in ((3, 5), (4, 5), (8, 10)):  # the next larger group, beyond the largest in proportion
        assert found.of("shm", 4).collective_us(ALL_REDUCE, group, 100) == us


def test_what_was_not_measured_is_named(tmp_path: Path) -> None:
    found = costs(write(tmp_path, table(row(100, 1))))
    with pytest.raises(LayoutError, match=r"table\.json has no times of torchdist/gloo, only of shm; .*weft tune"):
        found.of("torchdist/gloo", 2)
    assert found.of("reference", 1) == found.of("shm", 1), "a rank alone exchanges nothing"
    assert found.of("shm", 2).collective_us("broadcast", 2, 100) == math.inf, "so no plan takes it"
    assert found.of("shm", 2).collective_us(ALL_REDUCE, 2, 100, hosts=2) == math.inf


def test_kinds_that_one_world_lacks_are_taken_from_another(tmp_path: Path) -> None:
    rows = [row(100, 1, ranks=2, world=2), row(100, 3, ranks=4, world=4, kind="all_to_allv")]
    found = costs(write(tmp_path, table(*rows))).of("shm", 2)
    assert found.collective_us("all_to_allv", 2, 100) == 3 and found.collective_us(ALL_REDUCE, 2, 100) == 1


def test_hosts_are_priced_by_the_network_or_by_what_was_measured(tmp_path: Path) -> None:
    rows = [row(100, 1), row(100, 50, ranks=4) | {"hosts": 2}]
    network = {"us": 20.0, "hop_us": 5.0, "gb_s": 1e-3}
    measured = costs(write(tmp_path, table(*rows) | {"network": network})).of("shm", 2)
    assert measured.collective_us(ALL_REDUCE, 2, 100) == 1
    assert measured.collective_us(ALL_REDUCE, 4, 100, hosts=2) == 50
    assert measured.collective_us("all_gatherv", 8, 100, hosts=2) == 20 + 5 * 2 + 100
    preset = costs("h200-nvlink").of("torchdist/nccl", 16)
    assert preset.collective_us(ALL_REDUCE, 2, 0, hosts=2) == 20 > preset.collective_us(ALL_REDUCE, 2, 0)


NO_TABLES = {
    "cut off": '{"transports": {"shm": [',
    "not text": "\0\1",
    "a list": [],
    "a number": 17,
    "no local times": {"transports": {}},
    "transports in a list": table(transports=[]),
    "rows that are none": table(transports={"shm": [1]}),
    "a word for µs": table(row(1, 1) | {"us": "soon"}),
    "no bytes": table(row(0, 1)),
    "less than no time": table(row(1, -1)),
    "not a number": table(row(1, float("nan"))),
    "no points": table(row(1, 1), local=[]),
    "a point of three": table(row(1, 1), epilogue=[[1, 2, 3]]),
}


@pytest.mark.parametrize("content", NO_TABLES.values(), ids=NO_TABLES)
def test_a_file_that_is_no_table(content: Any, tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"table\.json is no table of weft tune: ") as error:
        costs(write(tmp_path, content))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path / "folder.json"):
        (tmp_path / "folder.json").mkdir(exist_ok=True)
        with pytest.raises(LayoutError, match=rf"{path.name} is no table of weft tune: "):
            costs(str(path))


@dataclass(frozen=True)
class Tuning:
    bytes: int = 1


def test_tuning(tmp_path: Path) -> None:
    path = Path(write(tmp_path, table(shm_tuning={"bytes": 8})))
    assert read_tuning(path, "shm_tuning", Tuning) == Tuning(8)
    for found in (read_tuning(path, "peer_tuning", Tuning), read_tuning(tmp_path / "none.json", "shm_tuning", Tuning)):
        assert found == Tuning()
    for content in ('{"shm', [], {"shm_tuning": 5}, {"shm_tuning": {"words": 8}}):
        with pytest.raises(LayoutError, match=r"table\.json is no table of weft tune, or of another version's .*: "):
            read_tuning(Path(write(tmp_path, content)), "shm_tuning", Tuning)


def test_where_the_host_keeps_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"tune-{socket.gethostname()}.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert host_table() == tmp_path / "weft" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert host_table() == tmp_path / ".cache" / "weft" / name


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_prices_every_transport(name: str) -> None:
    found = costs(name)
    assert found.of("shm", 2) is found.of("torchdist/nccl", 8) is PRESETS[name]
    small, large = (PRESETS[name].collective_us(ALL_REDUCE, 2, size) for size in (0, 1 << 20))
    assert large - small == pytest.approx((1 << 20) / (PRESETS[name].gb_s * 1e3))
    assert PRESETS[name].collective_us(ALL_REDUCE, 8, 0) == pytest.approx(small + 2 * PRESETS[name].hop_us)


def test_presets_of_cpus_and_unknown_names() -> None:
    assert costs("cpu").of("shm", 4) is PRESETS["cpu-shm"]
    assert costs("cpu").of("torchdist/gloo", 4) is PRESETS["cpu-gloo"]
    with pytest.raises(LayoutError, match=r"no cost preset 'abacus'; known: cpu, h200x4, cpu-gloo, .*FILE\.json"):
        costs("abacus")


def test_a_table_that_comes_with_the_package() -> None:
    """Measured for every exchange that its transports offer: nothing is left to a formula."""
    found = costs("h200x4")
    assert found.name == found.of("peer", 4).name == "h200x4"
    for transport, kinds in (("peer", EVERY), ("torchdist/nccl", BASIC)):
        for kind in kinds:
            small, large = (found.of(transport, 4).collective_us(kind, 4, size) for size in (1 << 13, 1 << 26))
            assert 1 < small < 50 < large
    assert found.of("peer", 4).collective_us(ALL_REDUCE, 4, 1 << 14) < 4  # µs, as docs/log/peer-memory.md says


def plan(name: str) -> Plan:
    """Plan a world's sum that a rank reads whole: an all_reduce, or a reduce_scatterv and an all_gatherv."""
    mesh = Mesh(1, 2, 1, 2)
    whole = mesh.placement(Rows.WORLD)
    reads = [Read("first", whole, (whole,)), Read("second", whole, (mesh.placement(Rows.WORLD, "world"),))]
    offers = [Offer("shm", BASIC, frozenset(), costs(name).of("shm", 2))]
    return Planner(mesh, Chain(tuple(reads), 16, 4), offers).plan((8,))


def test_a_plan_goes_by_the_table(tmp_path: Path) -> None:
    halves = [row(1, 10, REDUCE_SCATTERV), row(1, 10, ALL_GATHERV)]
    times = {"local": [[1, 1.0], [1 << 20, 1.0]], "epilogue": [[1, 0.0], [1 << 20, 0.0]]}
    made = {}
    for us in (5.0, 7.0, 9e6):
        rows = [r | {"bytes": size} for r in (row(1, us), *halves) for size in (1, 1 << 20)]
        made[us] = plan(write(tmp_path, table(*rows, **times)))
    assert made[7.0].us == pytest.approx(made[5.0].us + 2)
    kinds = {us: [s.edge.kind for r in p.reads for s in r.steps if s.op == "move"] for us, p in made.items()}
    assert kinds[5.0] == kinds[7.0] == [ALL_REDUCE] and kinds[9e6] == [REDUCE_SCATTERV, ALL_GATHERV]
    assert made[5.0].us != pytest.approx(plan("cpu-shm").us)


def test_an_outlier_among_measured_epilogues_is_evened_out() -> None:
    points = [(1, 0.8), (2, 0.7), (4, 9.0), (8, 0.9), (16, 1.0)]
    assert median_filtered(points) == [(1, 0.75), (2, 0.8), (4, 0.9), (8, 1.0), (16, 0.95)]
