"""`make chaos` in its short form: each fault once on two ranks. The long form: `make chaos ARGS="--faults 100"`."""

from __future__ import annotations

import json
import random
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from chaos.__main__ import main
from chaos.chaos_one_host import OneHostChaos
from chaos.clients import ask, questions
from weft.serve.cli import cmd_serve
from weft.serve.cli.command import EngineArguments, parse
from weft_bench.streamed_completion import LoadError


def test_nothing_is_lost_hangs_or_stays_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(seconds / 4))
    monkeypatch.setattr("chaos.faults.time", shorter)
    monkeypatch.setattr("chaos.chaos_one_host.time", shorter)
    nobody: Any = None
    kinds = len(OneHostChaos(nobody, nobody, 2, random.Random(0), set()).faults)
    report = tmp_path / "report.json"
    options = ["--attn-tp", "2", "--clients", "2", "--tokens", "24"]
    # The factor: tests order events, and do not time them.
    code = main([*options, "--faults", str(kinds), "--bound-factor", "60", "--json", str(report)])
    found, lines = json.loads(report.read_text()), capsys.readouterr().out.splitlines()
    assert code == 0 and found["passed"], json.dumps(found, indent=1)
    assert {row["count"] for row in found["faults"].values()} == {1} and len(found["faults"]) == kinds
    assert found["restarts"] >= 1, "several kills may fall into one"
    assert [line.split("  ")[0] for line in lines[1 : kinds + 1]] == sorted(found["faults"])
    assert lines[kinds + 2].startswith("requests: ") and lines[-1] == "passed"
    assert found["requests"]["completed"] > 0 and not found["requests"]["lost"]


FREE_DRAFTS = """
from weft.engine.speculation.draft_prices import Price, StepPrices

FAMILIES = {}
StepPrices.price = lambda self: Price(0.0, 0.0)
"""
"""Plug-in of a server that drafts in every step, whatever time steps take on a busy machine."""


@pytest.mark.nightly
@pytest.mark.parametrize("source", ["ngram", "mtp"])
def test_ranks_that_are_killed_in_the_middle_of_drafts(tmp_path: Path, source: str) -> None:
    report, plugin = tmp_path / "report.json", tmp_path / "free_drafts.py"
    plugin.write_text(FREE_DRAFTS)
    options = ["--attn-tp", "2", "--dtype", "float32", "--speculative", source, "--plugins", str(plugin)]
    options += ["--clients", "2", "--tokens", "48"]
    code = main([*options, "--faults", "8", "--bound-factor", "60", "--json", str(report)])
    found = json.loads(report.read_text())
    assert code == 0 and found["passed"], json.dumps(found, indent=1)
    assert any(fault.startswith("kill rank") for fault in found["faults"]) and found["restarts"] >= 1
    assert found["requests"]["completed"] > 0 and not found["requests"]["lost"] + found["requests"]["different"]
    assert found["after"]["drafts"] > found["requests"]["completed"], found


def losses(report: Path, layout: str, lost: int, *more: str) -> dict[str, Any]:
    """Lose ranks for good, under load; return the report."""
    options = ["--lose-for-good", str(lost), "--max-restarts", "1", "--clients", "2", "--tokens", "24", *more]
    code = main([*layout.split(), *options, "--json", str(report)])
    found: dict[str, Any] = json.loads(report.read_text())
    assert code == 0 and found["passed"], json.dumps(found, indent=1)
    assert found["requests"]["completed"] > 0 and not found["requests"]["lost"] + found["requests"]["different"]
    return found


@pytest.mark.nightly
def test_no_request_is_lost_with_a_rank_that_is_lost_for_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = losses(tmp_path / "report.json", "--attn-tp 3", 1)
    [loss] = found["losses"]
    assert loss["of"] == 3 and 0 < loss["given_up_s"] < loss["next_token_s"]
    assert found["restarts"] == 2, "a restart, and the one with two ranks"
    last = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"rank {loss['rank']} of 3 was lost on node 0: given up after ") for line in last)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", ["--attn-dp 5", "--attn-tp 5", "--attn-dp 5 --ep 5"])
def test_ranks_are_lost_for_good_from_five_to_two(tmp_path: Path, layout: str) -> None:
    found = losses(tmp_path / "report.json", layout, 3)
    assert [loss["of"] for loss in found["losses"]] == [5, 4, 3]


@pytest.mark.parametrize(
    "options, why",
    [
        ("--lose-for-good 2 --attn-tp 2", "--lose-for-good 2 leaves none of 2 ranks"),
        ("--lose-for-good -1", "--lose-for-good must be 0 or more"),
    ],
)
def test_losses_that_cannot_be_are_refused(options: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options.split()) == 2 and capsys.readouterr().err == f"weft: {why}\n"


def test_the_server_gets_the_options_that_chaos_was_given() -> None:
    """Cover every option of the engine, also those that are still to come."""
    kinds = get_type_hints(EngineArguments)
    given = [each for each in fields(EngineArguments) if each.name != "revision"]  # of the hub, which has no preset
    engine = EngineArguments(**{each.name: another(each.name, kinds[each.name], each.default) for each in given})
    values, defaults = engine.values(), EngineArguments().values()
    assert values.keys() == defaults.keys() and not any(values[name] == defaults[name] for name in values)
    assert parse(cmd_serve.Command, "serve", engine.arguments()).engine == engine
    assert EngineArguments().arguments() == []
    assert EngineArguments(revision="v1").arguments() == ["--revision", "v1"]


NAMES = {"plugins": ("weft_bench.nccl_window",), "transport": "shm", "preset": "qwen3-30b-a3b"}
NAMES |= {"attention_backend": "torch", "speculative": "draft"}
"""Values of options that are looked up as they are read."""


def another(name: str, kind: Any, default: Any) -> Any:
    """Return a value of an option's type that is not its default."""
    if name in NAMES:
        return NAMES[name]
    if get_origin(kind) is Literal:
        return next(value for value in get_args(kind) if value != default)
    if get_origin(kind) is tuple:
        return ("a", "b")
    inside = [k for k in get_args(kind) if k is not type(None)] or [kind]
    if inside[0] is Path:
        return Path("x")
    if inside[0] is float:
        return 0.5 if default is None else default / 2
    return not default if inside[0] is bool else (5 if default == 4 else 4) if inside[0] is int else "x"


class Response:
    """Response of a server, line by line."""

    status = 200

    def __init__(self, *lines: str):
        self.lines = [f"data: {line}\n".encode() for line in lines]

    def __iter__(self) -> Any:
        return iter(self.lines)


@pytest.mark.parametrize(
    "lines, wrong",
    [
        (['{"choices": [{"text": "a", "finish_reason": null}]}'], "without \\[DONE\\]"),
        (['{"choices": [{"text": "a", "finish_reason": "abort"}]}', "[DONE]"], "'abort'"),
        (['{"error": {"message": "gone"}}', "[DONE]"], "gone"),
    ],
)
def test_a_lost_output_is_seen(monkeypatch: pytest.MonkeyPatch, lines: list[str], wrong: str) -> None:
    class Connection:
        def __init__(self, *arguments: Any, **options: Any):
            self.request = self.close = lambda *arguments, **options: None

        def getresponse(self) -> Response:
            return Response(*lines)

    monkeypatch.setattr("chaos.clients.http.client.HTTPConnection", Connection)
    with pytest.raises(LoadError, match=wrong):
        ask(1, "model", questions(1, 4, 0)[0])
