"""The rules of the source tree: imports run one way and never in a circle, model files hold no communication, a file
has a name of its own, and files, functions and classes stay small.

Each list of known exceptions can only shrink: an entry that is not found any more must be removed.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE, BENCH = ROOT / "src" / "weft", ROOT / "bench" / "src" / "weft_bench"
ORDER = (
    "planner",
    "plugins",
    "kernels",
    "comm",
    "stream",
    "library",
    "tune",
    "engine/kv",
    "engine/kernels",
    "engine/attention",
    "engine/assets",
    "engine/models",
    "engine/grammar",
    "engine/speculation",
    "engine/messages",
    "engine/config",
    "engine/scheduler",
    "engine/output",
    "engine/worker",
    "engine/processes",
    "engine/hosts",
    "engine/controller",
    "engine/advise",
    "serve/http",
    "serve/chat",
    "serve/dialects",
    "serve/app",
    "serve/api_process",
    "serve/cli",
)
FILES = sorted([*SOURCE.rglob("*.py"), *BENCH.rglob("*.py")])


def name_of(path: Path) -> str:
    """Return a file's name below src/weft, or weft_bench/ and its name in that package."""
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else BENCH.parent))


MODULES = {
    ("" if path.is_relative_to(BENCH) else "weft.") + name_of(path)[:-3].replace("/", "."): path for path in FILES
}
MODULES = {name.removesuffix(".__init__"): path for name, path in MODULES.items()}

KNOWN_CIRCLES: set[frozenset[str]] = set()
MAX_LINES, MAX_FIELDS = 80, 25
KNOWN_LONG_FUNCTIONS: set[str] = set()
KNOWN_LARGE_CLASSES: set[str] = set()

WORDS = {
    "answers?|answered": "completion, output or decode row; a rank's reply",
    "draws?|drawn|drew": "sample, sampled",
    "deals?|dealt": "shard, sharded, interleave",
    "rooms?": "capacity",
    "told": "the thing that is known, and from whom",
    "listeners?": "callback",
    "carriers?": "transport",
    "whose": "a sentence of its own",
    "hollow": "meta (weights)",
}
"""Private words and what to say instead, in the source and the docs."""
NAMES = WORDS | {
    "most": "max, or what is largest",
    "least": "min, or a threshold",
    "every": "what is counted",
    "took|together": "what is meant",
    "turns?|turned": "round, index, rotated",
    "ways?": "recipe, path, in_flight",
    "holding": "allocation",
}
"""Words replaced in names, among them some that a sentence may have."""
KEPT = {
    "weft_bench/word_problems.py": "answer",  # of a word problem, which has one
    "weft_bench/phrases.py": "draws room",
    "weft_bench/commands/cmd_demo.py": "answer answers",
    "weft_bench/commands/cmd_eval.py": "answer",
    "weft_bench/chart.py": "draw",  # a picture
    "weft_bench/commands/cmd_profile.py": "draw",
    "serve/http/loading.py": "listener",  # a listening socket
    "serve/http/run.py": "listener",
    "serve/cli/cmd_serve.py": "listener",
    "serve/http/api_processes.py": "listener",
    "serve/api_process.py": "listener",
}
"""Files in which such a word is the field's own."""
PAGES = "docs/*/*.md", "README.md", "CONTRIBUTING.md"
TEXTS = {
    str(path.relative_to(folder)): path
    for folder, pattern in [(SOURCE, "**/*"), (BENCH.parent, "weft_bench/**/*"), *((ROOT, name) for name in PAGES)]
    for path in sorted(folder.glob(pattern))
    if path.suffix in {".py", ".md", ".h", ".cc", ".inl", ".cu", ".cuh"} and "assets" not in path.parts
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def part_of(path: Path) -> str | None:
    """Return the folder of ORDER that a file is in; None for weft-bench and the first modules of packages."""
    name = name_of(path).removesuffix(".py")
    return next((part for part in ORDER if name == part or name.startswith(f"{part}/")), None)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.name}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_run_one_way() -> None:
    for path in (path for path in FILES if not path.is_relative_to(BENCH)):
        assert not any(name.startswith("weft_bench") for name in imports(path)), f"{path}: it may not be installed"
        part = part_of(path)
        for name in imports(path) & MODULES.keys() if part else ():
            if (other := part_of(MODULES[name])) is not None:
                assert ORDER.index(other) <= ORDER.index(part), f"{path}: {part} imports {name}"


@pytest.mark.parametrize("path", sorted((SOURCE / "planner").glob("*.py")), ids=lambda p: p.name)
def test_the_planner_imports_only_the_standard_library(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or name.startswith("weft.planner"), name


@pytest.mark.parametrize("path", sorted((SOURCE / "engine" / "models").rglob("*.py")), ids=name_of)
def test_models_hold_no_communication(path: Path) -> None:
    names = imports(path)
    assert not any(n.startswith(("torch.distributed", "weft.comm")) for n in names)


@pytest.mark.parametrize(
    "name", ["planner/plan", "planner/search", "planner/op", "planner/edges", "planner/chain", "stream/stream"]
)
def test_the_plan_knows_no_block(name: str) -> None:
    """Settlements of a block are rows of the table of recipes: plan and stream name no experts, attention or head."""
    blocks = {f"weft.planner.{each}" for each in ("experts", "dcp", "vocabulary")}
    blocks |= {"weft.stream.dispatch", "weft.stream.group"}
    assert not imports(SOURCE / f"{name}.py") & blocks
    assert not {"experts", "dispatch", "prompts"} & set(re.findall(r"[a-z]+", (SOURCE / f"{name}.py").read_text()))


def test_files_stay_small() -> None:
    assert not [name_of(path) for path in FILES if len(path.read_text().splitlines()) > 400]


def test_the_wheel_holds_what_is_no_module() -> None:
    """Configs, weights, sources of kernels, cost tables, and the mark that the package has types."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["weft"]
    held = {path for pattern in patterns for path in SOURCE.glob(pattern) if path.is_file()}
    assert SOURCE / "py.typed" in held
    others = {p for p in SOURCE.rglob("*") if p.is_file() and p.suffix != ".py" and "__pycache__" not in p.parts}
    assert not others - held


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components of more than one node: each node of one reaches every other."""

    def reached(start: str) -> set[str]:
        found, waiting = set[str](), [start]
        while waiting:
            for target in graph[waiting.pop()] - found:
                found.add(target)
                waiting.append(target)
        return found

    reach = {name: reached(name) for name in graph}
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]}


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str]()}
    assert circles(graph) == {frozenset({"b", "c"})}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count, and so do those for type checkers."""
    graph = {name: imports(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    assert circles(graph) == KNOWN_CIRCLES


def test_no_two_modules_have_one_name() -> None:
    counts = Counter(path.name for path in FILES)
    assert {name for name, count in counts.items() if count > 1} == {"__init__.py"}


def definitions() -> Iterator[tuple[str, ast.AST]]:
    """Every function and class, by its file and name."""
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield f"{name_of(path)}:{node.name}", node


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def fields_of(node: ast.ClassDef) -> int:
    """Fields that the class itself declares; class variables are none."""
    declared = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    return sum("ClassVar" not in ast.unparse(part.annotation) for part in declared)


def test_functions_stay_short() -> None:
    functions = [(n, f) for n, f in definitions() if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert {name for name, node in functions if lines_of(node) > MAX_LINES} == KNOWN_LONG_FUNCTIONS


def test_classes_stay_small() -> None:
    classes = [(name, node) for name, node in definitions() if isinstance(node, ast.ClassDef)]
    assert {name for name, node in classes if fields_of(node) > MAX_FIELDS} == KNOWN_LARGE_CLASSES


def found_words(text: str, words: Iterable[str]) -> set[str]:
    """Return the words that a text has, also as parts of its names."""
    split = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", text).lower()
    return set(re.findall(rf"\b(?:{'|'.join(words)})\b", split))


def names_of(path: Path) -> str:
    """The names in a file's code: no strings and no comments."""
    if path.suffix == ".py":
        with path.open("rb") as file:
            return " ".join(token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME)
    return "" if path.suffix == ".md" else re.sub(r'//.*|"(\\.|[^"])*"', "", path.read_text())


def test_private_words_are_found() -> None:
    text = "def most_of(maxRooms): ...  # told at most once; adrawn"
    assert found_words(text, WORDS) == {"rooms", "told"} and found_words(text, NAMES) == {"most", "rooms", "told"}


@pytest.mark.parametrize("name", TEXTS)
def test_words_are_the_fields(name: str) -> None:
    """Page by page: words that a reader from vLLM, Megatron or NCCL knows, in texts and in names."""
    found = found_words(TEXTS[name].read_text(), WORDS) | found_words(names_of(TEXTS[name]), NAMES)
    instead = {word: next(say for words, say in NAMES.items() if re.fullmatch(words, word)) for word in found}
    assert found == set(KEPT.get(name, "").split()), f"say instead: {instead}; where it is the field's word: KEPT"
