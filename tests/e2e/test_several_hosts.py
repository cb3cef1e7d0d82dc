"""Options of several hosts: what launchers say, and what is refused in one line before anything starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.__main__ import main as chaos
from e2e.here import weft_here
from weft.comm.ports import reserve
from weft.serve.cli.command import EngineArguments
from weft.serve.cli.several_hosts import first_host, with_launcher

KEY = Path("cluster.key")
TORCHRUN = dict(TORCHELASTIC_RUN_ID="1", GROUP_WORLD_SIZE="2", GROUP_RANK="1", MASTER_ADDR="a", MASTER_PORT="29500")
LWS = dict(LWS_GROUP_SIZE="2", LWS_WORKER_INDEX="1", LWS_LEADER_ADDRESS="a")
SRUN = dict(SLURM_STEP_NUM_NODES="2", SLURM_NODEID="1", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NODELIST="a,b")


def place(environ: dict[str, str], **options: Any) -> tuple[int, int | None, str | None]:
    found = with_launcher(EngineArguments().values() | options, environ)
    assert found["master_port"] == 29600, "torchrun's own store listens on its port"
    return found["nnodes"], found["node_rank"], found["master_addr"]


@pytest.mark.parametrize("environ", [TORCHRUN, LWS, SRUN], ids=["torchrun", "LeaderWorkerSet", "srun"])
def test_launchers_fill_in_what_is_left_out(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert place(environ, cluster_key=KEY) == (2, 1, "a")
    assert "weft: node 1 of 2, node 0 at a, by " in capsys.readouterr().err
    assert place(environ, nnodes=3, node_rank=2, master_addr="b", cluster_key=KEY) == (3, 2, "b")
    assert place(environ, nnodes=1) == (1, None, None)
    assert not capsys.readouterr().err


@pytest.mark.nightly
def test_what_torchrun_sets() -> None:
    """Two hosts of torchrun itself, each with one process, which says what it understands."""
    say = "import os; from weft.serve.cli.several_hosts import launcher; print(launcher(os.environ))"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    with reserve() as reserved:
        endpoint = f"127.0.0.1:{reserved.getsockname()[1]}"
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--no-python", sys.executable, "-c", say]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        said = sorted(process.communicate(timeout=300)[0].strip() for process in both)
    for node, text in enumerate(said):
        assert re.fullmatch(rf"Launcher\(name='torchrun', nnodes=2, node={node}, master='[^']+'\)", text), text


def test_one_host_needs_nothing() -> None:
    assert place({}) == (1, None, None)
    assert place(SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}) == (1, None, None)


def test_the_first_of_slurms_hosts() -> None:
    lists = {"gpu[03-05,9],login": "gpu03", "a,b": "a", "n7": "n7", "r1-n[12]-ib,x": "r1-n12-ib", "": None}
    lists |= {"rack[1-2]n[7,9]": "rack1n7", "a[001-128]": "a001", "a[1,3-4]b[2-3]c,d": "a1b2c", "n[5]": "n5"}
    assert {nodes: first_host(nodes) for nodes in lists} == lists


@pytest.mark.parametrize(
    "options, environ, text",
    [
        (dict(nnodes=2), {}, "--nnodes 2 requires --node-rank: 0 on the host of --master-addr, then 1 and so on"),
        (dict(nnodes=2, node_rank=0), {}, "--nnodes 2 requires --master-addr, the address of node 0$"),
        (dict(nnodes=2, node_rank=0, master_addr="a"), {}, "--nnodes 2 requires --cluster-key FILE, .*head -c 32"),
        (
            dict(),
            TORCHRUN,
            "--cluster-key FILE, .* or --nnodes 1 to serve on this host alone, without the others of torchrun",
        ),
        (dict(master_addr="a"), {}, "--master-addr is for several hosts: add --nnodes"),
        (dict(), TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, "torchrun started 4 processes .* --nproc-per-node 1"),
        (
            dict(cluster_key=KEY),
            {k: v for k, v in LWS.items() if "INDEX" not in k},
            "--nnodes 2 requires --node-rank: 0 ",
        ),
        (
            dict(cluster_key=KEY),
            {k: v for k, v in SRUN.items() if "NODEID" not in k},
            "--nnodes 2 requires --node-rank: 0 ",
        ),
        (dict(), SRUN | {"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 tasks on 2 hosts; .* --ntasks-per-node 1"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], environ: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        place(environ, **options)


def test_chaos_says_where_hosts_may_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos.hosts_rig.shutil.which", lambda name: None)
    code, _, err = weft_here("--hosts", "2", command=chaos)
    missing = "no namespaces here: the programs unshare, nsenter, mount, ip are missing"
    assert (code, err) == (2, f"weft: --hosts makes hosts of namespaces, as root with CAP_SYS_ADMIN: {missing}\n")


def test_commands_refuse_it_in_one_line(tmp_path: Path) -> None:
    (key := tmp_path / "key").write_text("short")
    both = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--cluster-key", str(key))
    two = ("--attn-tp", "2", "--device", "cpu")
    for command in (("serve",), ("generate", "--prompt", "x"), ("eval",), ("profile",)):
        code, _, err = weft_here(*command, *two, *both, "--node-rank", "1")
        assert code == 1 and err.startswith(f"weft: --cluster-key {key} has fewer than 16 bytes"), err
    code, _, err = weft_here("serve", *two, *both, "--node-rank", "2")
    assert (code, err) == (2, "weft: node_rank 2 is none of 2 host(s): they are 0 to 1\n")
    key.write_text("long enough for a secret")
    soon = (*both, "--node-rank", "1", "--join-timeout-s", "1")
    code, _, err = weft_here("serve", "--attn-tp", "4", "--dcp", "2", *soon)
    assert code == 2 and err.startswith("weft: dcp=2: the ranks of a dcp group must hold the same key-value heads"), err
    code, _, err = weft_here("generate", "--prompt", "x", *both, "--node-rank", "1")
    assert (code, err) == (2, "weft: hosts=2 does not divide the 1 ranks; nearest that do: 1\n")
    code, _, err = weft_here(*two, *both, "--node-rank", "0", command=chaos)
    assert (code, err) == (2, "weft: chaos makes its hosts on this machine: give --hosts in place of --nnodes\n")
    code, _, err = weft_here(*two, "--hosts", "3", command=chaos)
    assert (code, err) == (2, "weft: hosts=3 does not divide the 2 ranks; nearest that do: 2\n")
    code, _, err = weft_here("doctor", "--nnodes", "2", "--node-rank", "0")
    assert code == 2 and err.startswith("weft: --nnodes 2 requires --master-addr"), err
