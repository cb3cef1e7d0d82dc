"""Commands as a user runs them; README's are taken from README itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from e2e.here import weft_here

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


def weft(*arguments: str, timeout: float = 240, temporary: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(temporary))


def environment(temporary: Path | None) -> dict[str, str]:
    """With temporary files in a folder of the test's own, so that what is left behind can be told from others'.

    80 columns: what is looked for is not broken into lines where it is read.
    """
    return dict(os.environ) | {"COLUMNS": "80"} | ({"TMPDIR": str(temporary)} if temporary else {})


def test_readme_holds_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in COMMANDS:
        program, *rest = shlex.split(command)
        assert program in ("make", "weft"), command
        if program == "make":
            assert re.search(rf"^{rest[0]}:", makefile, re.MULTILINE), f"no make target {rest[0]}"


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("weft") and " serve" not in c])
def test_readme_command(command: str) -> None:
    done = weft(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    wanted = {"plan": "saving", "generate": "The answer is", "eval": "exact match", "bench": "shm"}
    assert wanted[shlex.split(command)[1]] in done.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("weft serve")])
def test_readme_serves(command: str, free_port: int, tmp_path: Path) -> None:
    arguments = shlex.split(command)[1:]
    arguments[arguments.index("--port") + 1] = str(free_port)
    server = subprocess.Popen(
        [sys.executable, "-m", "weft.cli.main", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/health", timeout=2) as answer:
                    assert json.load(answer) == {"status": "ok"}
                    break
            except OSError:
                time.sleep(0.2)
        else:
            pytest.fail(f"not healthy: {server.stderr.read() if server.poll() is not None else 'too slow'}")
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) in (0, 130, -signal.SIGTERM)
    assert not left_behind(tmp_path)


def left_behind(temporary: Path) -> list[str]:
    """Files in the temporary folder, but for torch's own cache, and processes that were given the folder."""
    files = [p.name for p in temporary.iterdir() if not p.name.startswith("torchinductor_")]
    return [c for c in commands() if str(temporary) in c] + files


def commands() -> list[str]:
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_readme_model_traces_and_plans() -> None:
    """The code block in README, on a layout where every step matters."""
    import torch
    from support import EVERY

    from weft.hidden import Hidden
    from weft.models.layers import Builder
    from weft.place.cost import Offer, costs
    from weft.place.plan import Planner
    from weft.place.spec import Mesh, Rows
    from weft.stream import TraceStream

    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    mesh, meta = Mesh(2, 2, 2, 2), torch.device("meta")
    layer = names["DecoderLayer"](Builder(mesh, 0, torch.float32, meta), "layers.0", 16)
    stream = TraceStream(mesh, 16, torch.float32, meta)
    stream.add(Hidden(torch.empty(0, 16, device="meta"), mesh.placement(Rows.GROUP), mesh, "embed"))
    layer(stream)
    stream.read(layer.input_norm, rows=Rows.GROUP)
    offers = [Offer("any", EVERY, frozenset(), costs("h200-nvlink").of("any", 4))]
    plan = Planner(mesh, stream.chain(), offers).plan((4, 4))
    assert sum(1 for _ in plan.moves()) == 3


BAD = [
    (["nonsense"], "no command 'nonsense'"),
    (["generate", "/nowhere", "--prompt", "x"], "/nowhere has no config.json"),
    (["plan", "--layout", "2x2,3x1"], "both must be the number of ranks"),
    (["plan", "--layout", "two"], "is not ATTN_DPxATTN_TP,EPxMOE_TP"),
    (["plan", "--cost", "abacus"], "no cost preset 'abacus'"),
    (["plan", "--layout", "4x4", "--transport", "peer"], "peer takes at most 8 ranks, of one host; this layout has 16"),
    (["plan", "--layout", "5x4", "--transport", "shm"], "shm takes at most 16 ranks, of one host; this layout has 20"),
    (["plan", "--transport", "peer", "--tokens", "1,16384"], "peer has max_bytes=8388608: give it max_bytes=16777216"),
    (["plan", "--transport", "peer", "--max-bytes", "1000", "--tokens", "1"], "give it max_bytes=1024"),
    (["plan", "--transport", "shm", "--cost", "h200x4"], "h200x4 has no times of shm, only of peer, torchdist/nccl"),
    (["plan", "--layout", "1x3"], "do not divide over"),
    (["plan", "--tokens", "few"], "are not whole numbers"),
    (["eval", "--questions", "0"], "questions is 0"),
    (["serve", "--attn-dp", "2", "--ep", "3"], "both must be the number of ranks"),
    (["serve", "--kv-tokens", "1"], "less than one page"),
    (["serve", "--port", "99999"], "no such port"),
    (["generate", "--prompt", "x", "--temperature", "-1"], "temperature is -1"),
]


@pytest.mark.parametrize("arguments, text", BAD, ids=[b[1] for b in BAD])
def test_bad_input_ends_in_one_line(arguments: list[str], text: str) -> None:
    code, _, err = weft_here(*arguments)
    assert code == 2, err
    assert text in err and err.count("\n") == 1 and err.startswith("weft: ")


def test_a_port_that_is_taken(free_port: int) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        done = weft("serve", "--port", str(free_port))
    assert (
        done.returncode == 2 and "choose another with --host or --port" in done.stderr and done.stderr.count("\n") == 1
    )


def test_plan_shows_what_it_saves_and_by_whose_times() -> None:
    for arguments, cost in (
        ([], "edges of peer, torchdist/nccl; times by h200x4"),
        (["--layout", "4x4"], "edges of torchdist/nccl; times by h200-nvlink"),
        (["--transport", "shm", "torchdist/gloo"], "edges of shm, torchdist/gloo; times by cpu-shm, cpu-gloo"),
    ):
        code, out, err = weft_here("plan", "--tokens", "64", *arguments)
        assert code == 0 and not err and cost in out.splitlines()
        saved = re.search(r"saving: (\d+)% of the predicted time", out)
        assert saved and (int(saved[1]) >= 20 or "4x4" in arguments)
        assert max(map(len, out.splitlines())) <= 80


def test_a_larger_limit_lets_a_plan_through() -> None:
    code, out, _ = weft_here("plan", "--transport", "peer", "--tokens", "16384", "--max-bytes", "16777216")
    assert code == 0 and "saving" in out


@pytest.mark.parametrize("command", ["serve", "generate", "eval", "plan", "demo"])
def test_help_teaches(command: str) -> None:
    code, out, _ = weft_here(command, "--help")
    assert code == 0 and "Example" in out and f"weft {command}" in out


def test_a_reader_that_leaves_early() -> None:
    command = f"{shlex.quote(sys.executable)} -m weft.cli.main plan --tokens 1,2,3 | true"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.stderr == ""


def test_json_is_json() -> None:
    plans = json.loads(weft_here("plan", "--layout", "2x2", "--tokens", "1,64", "--json")[1])
    assert [p["counts"] for p in plans] == [[1, 1], [64, 64]]
    assert plans[0]["plan"]["us"] <= plans[0]["naive"]["us"]
    lines = weft_here("generate", "--prompt", "a", "b", "--max-tokens", "3", "--json")[1].splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["a", "b"]


def test_the_demo(tmp_path: Path) -> None:
    done = weft("demo", "--questions", "3", timeout=280, temporary=tmp_path)
    assert max(map(len, done.stdout[done.stdout.index("layout ") :].splitlines())) <= 80
    assert done.returncode == 0, done.stderr
    for text in ("The answer is", "plan:", "naive:", "What ran", "saved", "of 3 answers are right", "has stopped"):
        assert text in done.stdout, text
    assert not left_behind(tmp_path)


def test_a_demo_that_is_ended_takes_its_server_along(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft.cli.main", "demo"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(tmp_path))
    assert demo.stdout is not None
    port = re.search(r"weft serve --port (\d+)", demo.stdout.readline())
    assert port is not None
    deadline = time.monotonic() + 120
    while not any(f"--port {port[1]} " in c for c in commands()) and time.monotonic() < deadline:
        time.sleep(0.05)
    demo.terminate()
    assert demo.wait(timeout=60) == 130
    demo.stdout.close()
    assert not [c for c in commands() if f"--port {port[1]} " in c]
