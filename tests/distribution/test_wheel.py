"""The wheels, built as `make wheel` does it and installed into an empty environment, with no compiler on the PATH."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from weft.comm.peer import layout
from weft.kernels.build import BUILT, CUDA_KERNELS, build_ahead, check_built, module, nvcc, source_hash

REPOSITORY = Path(__file__).parents[2]
ON_RANKS = f"""
import runpy, torch, torch.distributed as dist, weft
dist.init_process_group("gloo")
with weft.Communicator(device="cpu") as comm:
    total = comm.all_reduce(torch.full((2, 8), 1.0 + comm.rank))
assert weft.__version__ == "7.8.9" and (total == 3).all()
dist.init_process_group = lambda: None  # the example is to use the one that there is
runpy.run_path({str(REPOSITORY / "examples" / "planned_model.py")!r}, run_name="__main__")
"""
pytest.importorskip("setuptools_scm", reason="needs what builds the wheel: make setup")
pytest.importorskip("build", reason="needs what builds the wheel: make setup")


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done


def build(source: Path, environment: dict[str, str]) -> tuple[list[Path], str]:
    """Return the wheels of weft and weft-bench from a copy of the tree, tagged v7.8.9, and what was printed for weft's,
    which is built by way of the source distribution.
    """
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("src", "bench/src"):
        shutil.copytree(REPOSITORY / folder, source / folder, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "bench/pyproject.toml", "bench/README.md"):
        shutil.copy(REPOSITORY / name, source / name)
    git = "git", "-c", "user.name=tests", "-c", "user.email=tests@localhost"
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "All"), ("tag", "v7.8.9")):
        run(*git, *words, cwd=source)
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist")
    printed = run(*command, source, env=environment).stdout
    run(*command, "--wheel", source / "bench", env=environment)
    return sorted((source / "dist").glob("*.whl")), printed


def required(names: Iterable[str]) -> Iterator[importlib.metadata.Distribution]:
    """Distributions of these names and of what they require in turn, as this environment has them."""
    todo, known = [(name, "") for name in names], set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in known:
            continue
        known.add((name, extra))
        found = importlib.metadata.distribution(name)
        yield found
        for each in map(Requirement, found.requires or ()):
            if not each.marker or each.marker.evaluate({"extra": extra}):
                todo += [(each.name, of) for of in (each.extras or {""})]


def link(names: Iterable[str], site: Path) -> None:
    """Put installed distributions, and what they require, into an environment."""
    for distribution in required(names):
        if distribution.name.startswith("weft"):
            continue
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))


class Environment:
    """An environment with the two wheels alone. Nothing but Python is on its PATH."""

    def __init__(self, folder: Path, wheels: Iterable[Path]):
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        (self.site,) = folder.glob("lib/python*/site-packages")
        run(sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "-q", "--no-deps", *wheels)
        (self.metadata,) = importlib.metadata.distributions(name="weft", path=[str(self.site)])
        self.cache = folder / "cache"
        self.variables = {"PATH": str(self.bin), "HOME": str(folder), "XDG_CACHE_HOME": str(self.cache)}
        self.variables |= {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}

    def add(self, extra: str) -> None:
        """Return the wheel's requirements of an extra; with none, of the core."""
        names = [r.name for r in map(Requirement, self.metadata.requires or ()) if self._wanted(r, extra)]
        link([name for name in names if name != "weft"], self.site)

    def _wanted(self, requirement: Requirement, extra: str) -> bool:
        return not requirement.marker if not extra else f'extra == "{extra}"' in str(requirement.marker)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return run(*command, env=self.variables, cwd=self.bin.parent)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], str]:
    """Without CUDA kernels, which take minutes."""
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not Path(p, "nvcc").exists())
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return build(tmp_path_factory.mktemp("source"), others | {"PATH": path, "CUDA_HOME": "/nowhere"})


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheels: tuple[list[Path], str]) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment"), wheels[0])


def test_it_has_kernels_and_the_tags_version(wheels: tuple[list[Path], str]) -> None:
    (path, bench), printed = wheels
    assert re.fullmatch(r"weft-7\.8\.9-py3-none-linux_\w+\.whl", path.name)
    assert bench.name == "weft_bench-7.8.9-py3-none-any.whl"
    assert len(re.findall(r"^weft: no nvcc here: .*$", printed, re.M)) == 1
    files = zipfile.ZipFile(path).namelist()
    assert [f for f in files if "/built/" in f] == [
        "weft/kernels/built/weft_cpu.json",
        "weft/kernels/built/weft_cpu.so",
        "weft/kernels/built/weft_model.json",
        "weft/kernels/built/weft_model.so",
    ]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which(nvcc()) is None, reason="needs nvcc, of CUDA 12.8 or later")
def test_cuda_kernels_are_built_where_there_is_nvcc(tmp_path: Path) -> None:
    """Kernels are built for every architecture, which takes minutes; a machine without a GPU loads them too."""
    build_ahead(tmp_path)
    name, source = CUDA_KERNELS
    check_built(tmp_path / f"{name}.json", source_hash(source), [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
    assert module(tmp_path / f"{name}.so").layout() == layout()


def test_the_core_alone_has_communicator_and_planner(environment: Environment) -> None:
    environment.add("")
    script = environment.bin.parent / "on_ranks.py"
    script.write_text(ON_RANKS)
    environment.run(environment.bin / "python", "-m", "torch.distributed.run", "--nproc-per-node", "2", script)
    assert not (environment.cache / "weft" / "kernels").exists()  # nothing was compiled
    said = subprocess.run([environment.bin / "weft", "plan"], capture_output=True, text=True, env=environment.variables)
    assert (said.returncode, said.stderr) == (2, "weft: commands need the package tyro; pip install 'weft[engine]'\n")


@pytest.mark.parametrize(
    ("options", "said"), [(["--collect-only"], "collected"), pytest.param([], "passed", marks=pytest.mark.nightly)]
)
def test_the_librarys_tests_need_the_library_alone(environment: Environment, options: list[str], said: str) -> None:
    """The two plug-ins' tests and script too. Without tests/conftest.py, which is of the engine, and with a compiler,
    for kernels that are emulated. By day tests are only imported."""
    environment.add("")
    link(["pytest", "numpy"], environment.site)
    tests = ("-m", "not nightly", "tests/library", "tests/plugins/test_under_engines.py")
    command = (environment.bin / "python", "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider")
    variables = environment.variables | {"PATH": f"{environment.bin}{os.pathsep}{os.environ['PATH']}"}
    done = run(*command, *options, *tests, env=variables, cwd=REPOSITORY)
    assert re.search(rf"\d+ (tests )?{said}", done.stdout)
    run(environment.bin / "python", REPOSITORY / "plugins" / "with_and_without.py", "--help", env=environment.variables)
    found = run(environment.bin / "python", "-c", "import weft; print(weft.__file__)", env=environment.variables)
    assert found.stdout.startswith(str(environment.site))


@pytest.mark.nightly
def test_the_demo_runs(environment: Environment) -> None:
    for extra in ("", "engine", "serve", "bench", "demo"):
        environment.add(extra)
    done = environment.run(environment.bin / "weft", "demo", "--questions", "1")
    assert "all_reduce" in done.stdout
    assert not (environment.cache / "weft" / "kernels").exists()


def test_kernels_of_other_sources_are_not_used(environment: Environment) -> None:
    """One line says so; here there is no compiler either, which a second one says."""
    environment.add("")
    built = environment.site / "weft" / "kernels" / BUILT.name / "weft_cpu.json"
    before = built.read_text()
    built.write_text(json.dumps(json.loads(before) | {"sources": "other"}))
    try:
        code = "from weft.kernels.build import cpu_kernels; cpu_kernels()"
        done = subprocess.run(
            [environment.bin / "python", "-c", code], capture_output=True, text=True, env=environment.variables
        )
    finally:
        built.write_text(before)
    lines = done.stderr.splitlines()
    assert lines[0].startswith(
        "weft: the installed kernels weft_cpu are not used, others are compiled: they were built"
    )
    assert "shm.cc does not compile" in lines[-1] and "it needs a C++17 compiler" in lines[-1]
