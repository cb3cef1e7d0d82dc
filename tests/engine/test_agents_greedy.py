"""Greedy tokens of ranks that agents start on other hosts are one host's: 2 hosts of 2 ranks, and 4 of 1.

The hosts are one machine's; their agents are threads, and each has its ranks as processes.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import small_model

from engine.conftest import WAIT_S, byte_tokenizer, greedy_outputs
from engine.test_agents import agent_thread, reserved_ports
from engine.test_engine import GREEDY, config, prompts
from planner.meshes import layouts
from weft.engine.controller.engine import Engine
from weft.engine.controller.startup import resolve_defaults
from weft.engine.hosts import agents
from weft.planner.spec import Mesh

LAYOUTS = [
    Mesh(mesh.attn_dp, mesh.attn_tp, mesh.ep, mesh.moe_tp, dcp)
    for mesh in layouts(4)
    if mesh.world == 4
    for dcp in (1, 2, 4)
    if mesh.attn_tp % dcp == 0
]
FORMS = {
    "whole": dict(split_vocabulary="off", moe_exchange="gather"),
    "split": dict(split_vocabulary="on", moe_exchange="dispatch"),
}
"""Options by name: split of the vocabulary, exchange of the experts' rows."""
DAILY = [
    (Mesh(1, 4, 2, 2, dcp=2), "split", 2),
    (Mesh(2, 2, 4, 1, dcp=2), "whole", 4),
]
CASES = [(mesh, form, hosts) for mesh in LAYOUTS for form in FORMS for hosts in (2, 4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """Save a model with one key head, to shard its tokens over all ranks; return transformers' outputs too."""
    directory = tmp_path_factory.mktemp("one-head")
    sizes = dict(num_key_value_heads=1, vocab_size=257, max_position_embeddings=256, num_hidden_layers=2)
    made = small_model("qwen2_moe", 4, directory, seed=3, **sizes)
    byte_tokenizer(directory)
    return directory, greedy_outputs(lambda tokens: made(tokens).logits, prompts(), GREEDY.max_tokens)


@pytest.fixture(autouse=True)
def no_host_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give agents the time that a busy machine needs between two messages."""
    monkeypatch.setattr(agents, "SILENT_S", WAIT_S)


@pytest.mark.parametrize(
    "mesh, form, hosts",
    [*DAILY, *(pytest.param(*case, marks=pytest.mark.nightly) for case in CASES if case not in DAILY)],
    ids=str,
)
def test_greedy_tokens_are_one_hosts(model: Any, tmp_path: Path, mesh: Mesh, form: str, hosts: int) -> None:
    directory, expected = model
    (key := tmp_path / "cluster.key").write_text("a secret of this test\n")
    layout: Any = {name: getattr(mesh, name) for name in ("attn_dp", "attn_tp", "ep", "moe_tp", "dcp")}
    here = dict(executor="process", device="cpu", nnodes=hosts)
    with ExitStack() as stack:
        port = stack.enter_context(reserved_ports())
        meeting: Any = dict(master_addr="127.0.0.1", master_port=port, cluster_key=key, join_timeout_s=WAIT_S)
        cluster = resolve_defaults(config(directory, **here, **layout, **FORMS[form], **meeting))
        said = [stack.enter_context(agent_thread(cluster, node)) for node in range(1, hosts)]
        with Engine(cluster) as engine:
            outputs = [result.token_ids for result in engine.generate(prompts(), GREEDY)]
            ran = {stat.step for stat in engine.comm_report()[0]}
            engine.check_idle()
    assert outputs == expected
    assert any("torchdist/gloo" in step for step in ran), ran
    assert [lines[-1] for lines in said] == [f"node {node}: node 0 has ended" for node in range(1, hosts)]
