"""Names in the pages, the README and the sources' own texts exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from test_layout import ORDER
from weft.serve.cli.cmd_serve import Command
from weft.serve.cli.command import parse

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "weft"
FOLDERS = (".", "docs/guide", "docs/design", "docs/log", "docs/api", "bench", "tests")
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the documentation site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        to = page.parent / file if file else page
        assert to.exists(), target
        assert not anchor or anchor in anchors(to), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`((?:src|tests|bench|examples)/[^`\s:]+)`", page.read_text()):
        assert list(ROOT.glob(name.removesuffix("/"))), name


def sources() -> list[Path]:
    return [path for suffix in ("py", "h", "cc", "cu", "cuh") for path in SOURCE.rglob(f"*.{suffix}")]


def resolves(name: str) -> bool:
    """Return whether `weft.a.b.C.d` names a module, or a name in the text of the module of its beginning."""
    parts = name.split(".")[1:]
    for length in range(len(parts), -1, -1):
        stem = SOURCE.joinpath(*parts[:length])
        for module in (stem.with_suffix(".py"), stem / "__init__.py"):
            if module.exists():
                return all(re.search(rf"\b{part}\b", module.read_text()) for part in parts[length:])
    return False


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("weft.planner.cost", True),
        ("weft.serve.http.errors.ApiError.response", True),
        ("weft.CommError", True),
        ("weft.Nothing", False),
        ("weft.serve.nothing", False),
        ("weft.engine.kv.cache.Nothing", False),
    ],
)
def test_names_that_resolve(name: str, known: bool) -> None:
    assert resolves(name) is known


def test_modules_that_are_named_exist() -> None:
    """`weft.x.y` in comments, docstrings and pages, and `folder/file.py` of the package, or of its tests."""
    folders = "|".join(sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
    wrong = []
    for path in (*PAGES, *sources()):
        text = path.read_text()
        wrong += [(path.name, n) for n in re.findall(r"(?<=`)weft(?:\.\w+)+(?=`)", text) if not resolves(n)]
        for name in re.findall(rf"(?<![\w./])(?:{folders})/\w+\.(?:py|h|cc|cu|cuh)\b", text):
            if not any((folder / name).exists() for folder in (SOURCE, SOURCE / "kernels", ROOT / "tests")):
                wrong.append((path.name, name))
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text()):
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def test_the_design_page_has_the_order_of_imports() -> None:
    assert f"`{' → '.join(ORDER)}`" in (ROOT / "docs" / "design" / "overview.md").read_text()


def test_the_site_has_every_page_in_its_navigation() -> None:
    listed = re.findall(r": ((?:guide|design|log|api)/\S+)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_results_that_are_kept_are_cited() -> None:
    """Raw figures that no page cites are deleted; those that pages cite are there, as links and named files resolve."""
    pages = " ".join(page.read_text() for page in PAGES)
    kept = [path.name for path in (ROOT / "bench" / "results").iterdir()]
    assert not [name for name in kept if name not in pages]


def test_every_benchmark_is_in_the_list_of_them() -> None:
    listed = (ROOT / "bench" / "README.md").read_text().partition("## Results")[0]
    folder = ROOT / "bench" / "scripts"
    scripts = {path for path in folder.glob("*.*") if path.suffix != ".md"}
    scripts |= {path for path in folder.glob("*/*.py") if "__main__" in path.read_text()} | {*folder.glob("*/*.sh")}
    assert {f"`{path.relative_to(folder)}`" for path in scripts} == set(re.findall(r"^\| (`[^`]+`)", listed, re.M))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs" / "guide" / page).read_text(), re.M | re.S)


def test_options_that_deployments_give_exist(tmp_path: Path) -> None:
    """Options are in containers, in a file, and in commands; a wrong command line ends in SystemExit."""
    [manifests] = blocks("deploy.md", "yaml")
    deployment, service = yaml.safe_load_all(manifests)
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    ports = {container["ports"][0]["containerPort"], *(port["port"] for port in service["spec"]["ports"])}
    assert ports == {8000, container["readinessProbe"]["httpGet"]["port"]}
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == pod["metadata"]["labels"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    [_, *options] = container["args"]
    commands = re.findall(r"^(?:weft serve|docker run .* weft /\S+)(.*)$", "".join(blocks("deploy.md", "sh")), re.M)
    assert len(commands) == 2
    for arguments in (options, *map(shlex.split, commands)):
        assert parse(Command, "serve", arguments)
    [text] = blocks("serve.md", "yaml")
    text = text.replace("/models/Qwen3-30B-A3B", str(ROOT / "examples/tiny_model"))
    (file := tmp_path / "serve.yaml").write_text(text)
    assert parse(Command, "serve", ["--config", str(file)]).http.served_model_name == ("qwen3", "default")


def test_the_unit_of_systemd_is_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    [unit] = blocks("deploy.md", "ini")
    assert "/opt/weft/bin/weft" in unit
    (file := tmp_path / "weft.service").write_text(unit.replace("/opt/weft/bin/weft", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
    assert done.returncode == 0 and str(file) not in done.stderr, done.stderr
