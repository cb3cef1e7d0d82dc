"""The table of transports: one row is all that a transport takes, a plugin's too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support import run_world

from comm.processes import run_threads
from e2e.here import weft_here
from weft.comm import transport_registry as registry
from weft.comm.peer import PeerTransport
from weft.comm.reference import ReferenceTransport
from weft.comm.shm import ShmTransport
from weft.comm.transport import CommError, LiveSizes, Transport, offer_of
from weft.comm.transport_registry import GLOO, NCCL, PEER, REFERENCE, SHM, TRANSPORTS, automatic, transports
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import enabled_transports
from weft.engine.controller.engine import Engine
from weft.engine.controller.startup import check_plans
from weft.engine.messages.request import SamplingParams
from weft.planner.cost import costs
from weft.planner.exchange import all_gatherv
from weft.planner.spec import LayoutError, Mesh
from weft.plugins import PluginError

pytestmark = pytest.mark.usefixtures("planned_once")

TOY = str(Path(__file__).with_name("toy.py"))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def test_a_plugins_transport_serves(model_dir: Path) -> None:
    """Tokens equal a lone rank's, and every exchange of the report is the toy's."""
    prompts, found = [[1, 2, 3, 4, 5], [9, 8]], []
    toy = dict(attn_tp=2, moe_tp=2, transport="toy", plugins=(TOY,))
    for options in (toy, dict(executor="thread")):
        with Engine(EngineConfig(model=model_dir, device="cpu", kv_tokens=512, **options)) as engine:
            found.append([r.token_ids for r in engine.generate(prompts, GREEDY)])
            if options is toy:
                ran, _ = engine.comm_report()
                assert ran and all(stat.step.endswith("· toy") for stat in ran)
    assert found[0] == found[1]


def test_commands_know_it_by_its_row() -> None:
    code, out, _ = weft_here("serve", "--plugins", TOY, "--help")
    assert code == 0 and "{auto,shm,gloo,peer,nccl,toy}" in out
    assert "toy" not in weft_here("serve", "--help")[1]
    toy = ("--plugins", TOY, "--transport", "toy", "--tokens", "1")
    code, out, err = weft_here("plan", "--attn-dp", "2", *toy)
    assert code == 0 and "edges of toy; times by cpu-gloo" in out, err
    code, _, err = weft_here("plan", "--attn-dp", "2", "--attn-tp", "2", *toy)
    assert (code, err) == (2, "weft: toy takes at most 2 ranks; this layout has 4\n")
    for command, names in (
        ("serve", "('auto', 'shm', 'gloo', 'peer', 'nccl', 'toy')"),
        ("plan", "('shm', 'gloo', 'peer', 'nccl', 'toy', 'reference')"),
    ):
        code, _, err = weft_here(command, "--plugins", TOY, "--transport", "nope")
        said = re.sub(r"[\s│]+", " ", err)
        assert code == 2 and f"invalid choice 'nope' for argument '--transport'. Expected one of {names}" in said
    code, _, err = weft_here("serve", "--plugins", "no_such_plugin", "--transport", "toy")
    assert code == 2 and err.startswith("weft: plugin no_such_plugin cannot be imported")


def test_the_engine_knows_it_by_its_row() -> None:
    with pytest.raises(ValueError, match=r"transport is 'toy'; it must be one of auto, shm, gloo, peer, nccl$"):
        EngineConfig(transport="toy")
    with pytest.raises(ValueError, match=r"it must be one of auto, shm, gloo, peer, nccl, toy$"):
        EngineConfig(transport="nope", plugins=(TOY,))
    two = EngineConfig(attn_tp=2, moe_tp=2, transport="toy", plugins=(TOY,))
    assert [entry.name for entry in enabled_transports(two)] == ["toy"]
    four = EngineConfig(attn_tp=4, moe_tp=4, transport="toy", plugins=(TOY,))
    with pytest.raises(LayoutError, match="toy takes at most 2 ranks; this layout has 4"):
        check_plans(four, four.read_model())


def test_a_row_that_is_there_already_is_refused(tmp_path: Path) -> None:
    (plugin := tmp_path / "twice.py").write_text(
        "from dataclasses import replace\nfrom weft.comm.transport_registry import GLOO\n"
        "TRANSPORTS = (replace(GLOO, name='another'),)\n"
    )
    with pytest.raises(PluginError, match=r"twice.py adds transport gloo, but there is another of this name"):
        transports([str(plugin)])
    assert list(transports([TOY, TOY])) == ["shm", "gloo", "peer", "nccl", "toy"]


def test_auto_takes_those_of_the_device_that_serve_so_many() -> None:
    assert automatic(transports(), "cpu", 16) == (SHM, GLOO) and automatic(transports(), "cpu", 17) == (GLOO,)
    assert automatic(transports(), "cuda", 8) == (PEER, NCCL) and automatic(transports(), "cuda", 9) == (NCCL,)
    assert enabled_transports(EngineConfig(device="cpu")) == (SHM, GLOO)
    assert enabled_transports(EngineConfig(device="cpu", transport="gloo")) == (GLOO,)
    assert enabled_transports(EngineConfig(executor="thread")) == (REFERENCE,)
    many = EngineConfig(attn_tp=20, moe_tp=20, device="cpu", transport="shm")
    with pytest.raises(LayoutError, match="shm takes at most 16 ranks, of one host; this layout has 20"):
        enabled_transports(many)


def test_over_hosts_one_of_the_transports_crosses_them() -> None:
    two_of_two = dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2, nnodes=2)
    assert enabled_transports(EngineConfig(device="cpu", **two_of_two)) == (SHM, GLOO)
    four_of_one = EngineConfig(device="cpu", **two_of_two | dict(nnodes=4))
    assert enabled_transports(four_of_one) == (GLOO,), "no rank shares memory with another"
    alone = "shm runs on one host, but this layout spans 2: drop --transport, or use gloo$"
    with pytest.raises(LayoutError, match=alone):
        enabled_transports(EngineConfig(device="cpu", transport="shm", **two_of_two))


def test_windows_of_nccl_are_a_plugin_of_benchmarks() -> None:
    known = transports(["weft_bench.nccl_window"])
    assert known["nccl_window"].name == NCCL.name and not known["nccl_window"].auto
    assert automatic(known, "cuda", 2) == (PEER, NCCL)


@pytest.mark.parametrize("entry", [*TRANSPORTS, REFERENCE], ids=lambda entry: entry.option)
def test_an_offer_has_the_limits_of_its_row(entry: registry.TransportEntry) -> None:
    offer = offer_of(entry, Mesh(2, 2, 2, 2), costs("h200-nvlink").of(entry.name, 4))
    assert (offer.transport, offer.max_ranks, offer.max_hosts) == (entry.name, entry.max_ranks, entry.max_hosts)
    assert offer.max_normed_bytes == entry.max_normed_bytes and bool(offer.epilogues) == ("torchdist" not in entry.name)
    assert offer.serves(2, 1) and offer.serves(2, 2) == (entry not in (SHM, PEER))


def test_transports_are_what_their_rows_say() -> None:
    assert [kind.entry for kind in (ShmTransport, PeerTransport, ReferenceTransport)] == [SHM, PEER, REFERENCE]


class Unopened:
    """An opening that is asked for something."""

    class Asked(Exception):
        pass

    def __getattr__(self, name: str) -> object:
        raise Unopened.Asked(name)


@pytest.mark.parametrize("entry", TRANSPORTS, ids=lambda entry: entry.option)
def test_every_row_names_a_module_that_opens_it(entry: registry.TransportEntry) -> None:
    with pytest.raises(Unopened.Asked):
        entry.open(Unopened())  # type: ignore[arg-type]


def live_sizes_are_refused(transport: Transport, mesh: Mesh | None = None) -> None:
    sizes = LiveSizes((2, 2), torch.ones(2, dtype=torch.int32))
    assert not transport.entry.takes_live_sizes
    with pytest.raises(CommError, match=f"{transport.entry.name} takes no row counts in device memory"):
        transport.exchange(torch.ones(2, 4), all_gatherv(2), (0, 1), sizes)


def test_who_takes_no_live_sizes_refuses_them(tmp_path: Path) -> None:
    run_world(2, live_sizes_are_refused)
    run_threads(Mesh(1, 2, 1, 2), tmp_path, live_sizes_are_refused)
