"""The plug-ins on two ranks over shared memory, under a stand-in for each engine's interfaces (engines/)."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from plugins.contracts import ENGINES, NEEDS, PLUGINS, versions

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"


def engine_path(engine: str, version: str, folder: Path) -> list[str]:
    """The stand-in with the metadata of an installed version, and the plug-in."""
    metadata = folder / f"{engine}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")
    return [str(folder), str(HERE / "engines"), str(PLUGINS / f"weft-{engine}/src"), str(SOURCES)]


def run_ranks(engine: str, version: str, folder: Path) -> None:
    path = ":".join([*engine_path(engine, version, folder), str(HERE.parent)])
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / f"{engine}_rank.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)


@pytest.mark.parametrize("engine", ENGINES)
def test_collectives_equal_gloos(engine: str, tmp_path: Path) -> None:
    run_ranks(engine, versions(engine)[-1], tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_unknown_versions_are_off_and_say_so_in_a_line(
    engine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Nothing of the engine is imported then: a None in sys.modules makes that an error."""
    for place in engine_path(engine, "99.0.1", tmp_path):
        monkeypatch.syspath_prepend(place)
    monkeypatch.setitem(sys.modules, engine, None)
    import_module(f"weft_{engine}").register()
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "99.0.1" in message and all(version in message for version in versions(engine)) and "\n" not in message


@pytest.mark.parametrize("engine", ENGINES)
def test_the_distribution_has_the_engines_entry_point(engine: str) -> None:
    project = tomllib.loads((PLUGINS / f"weft-{engine}/pyproject.toml").read_text())["project"]
    group = next(each.value for each in NEEDS[engine] if "PLUGINS_GROUP" in each.names[0]).strip("'")
    assert project["entry-points"] == {group: {"weft": f"weft_{engine}:register"}}
    assert project["name"] == f"weft-{engine}" and not any(engine in each for each in project["dependencies"])
