"""Plain English that can be checked: docstrings and their parameters, turns of phrase that hide their noun, help texts
of scripts, and commit subjects.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_layout import FILES, ROOT, SOURCE, parsed

OPENINGS = re.compile(r"(?:Of|What|As|Those|The same|By|For|In|Whether|How|Where|With|That|Which)\b")
TURNS = re.compile(r"\b(?:so\s+many|[b]eside|those\s+of)\b")  # written so that this file has none
READ = [
    *FILES,
    *(path for folder in ("bench/scripts", "plugins", "examples", "tests") for path in (ROOT / folder).rglob("*.py")),
]
MAX_UNSTATED = 50
"""Public functions with parameters that their docstrings omit, today; it may only fall."""
COMMON = {"rank", "world", "group", "directory", "b", "path"}
"""Parameters with one meaning in the whole code."""


def docstrings(path: Path) -> Iterator[str]:
    """Docstrings of modules, classes and functions, and the strings behind attributes."""
    for node in ast.walk(parsed(path)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield text.strip()


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    bad = [f"{path.name}: {text[:60]}" for path in READ for text in docstrings(path) if OPENINGS.match(text)]
    assert not bad


def test_turns_of_phrase_have_their_noun() -> None:
    found = [f"{path.name}: {turn}" for path in READ for turn in TURNS.findall(path.read_text())]
    assert not found


def test_bad_openings_are_found() -> None:
    assert (
        OPENINGS.match("Of a step.") and not OPENINGS.match("Officer of a step.") and not OPENINGS.match("Return it.")
    )


def public_functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Yield the public functions and methods of a module, and constructors, but for kernels, with their docstrings."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for owner in (tree, *classes):
        for node in owner.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or any(
                ast.unparse(each) == "triton.jit" for each in node.decorator_list
            ):
                continue
            if node.name == "__init__":
                yield node, "\n".join(filter(None, map(ast.get_docstring, (owner, node))))
            elif not node.name.startswith("_"):
                yield node, ast.get_docstring(node) or ""


def named_after_its_type(argument: ast.arg) -> bool:
    """Return whether a parameter's name says no more than its type: `config: EngineConfig`."""
    types = re.findall(r"\w+", ast.unparse(argument.annotation)) if argument.annotation else []
    name = argument.arg.replace("_", "").lower()
    return any(each.lower().endswith(name) for each in types)


def unstated(node: ast.FunctionDef | ast.AsyncFunctionDef, docstring: str) -> list[str]:
    """Return the parameters that a docstring omits, if three or more need words.

    A docstring states them in a list (`Args:`), as `name: …`, or in a sentence, in backticks or with a shape. One that
    is omitted, or refers to another definition, is not asked for them.
    """
    args = node.args
    known = [a for a in (*args.posonlyargs, *args.args, *args.kwonlyargs) if a.arg not in COMMON | {"self", "cls"}]
    names = [a.arg for a in known if not named_after_its_type(a)]
    refers = re.search(r"(?:[Rr]un|[Cc]ompute|[Ll]ike|[Ss]ee|[Aa]s|^Return) `[\w.]+`", docstring)
    if len(names) < 3 or not docstring or refers:
        return []
    stated = r"(?<![\w.]){0}(?:, [\w, ]+)?:|`[^`]*\b{0}\b[^`]*`|\b{0} `\["
    return [name for name in names if not re.search(stated.format(name), docstring)]


def test_docstrings_state_three_parameters_or_more() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {node.name}: {', '.join(names)}"
        for path in FILES
        if path.is_relative_to(SOURCE)
        for node, docstring in public_functions(parsed(path))
        if (names := unstated(node, docstring))
    ]
    assert len(found) <= MAX_UNSTATED, "\n".join(found)


def test_parameters_are_found_where_they_are_stated() -> None:
    source = "def f(rank: int, x: int, y: int, z: int, config: EngineConfig) -> None:\n    "
    for docstring, missing in {
        "Add.": ["x", "y", "z"],
        "Add.\n\nArgs:\n    x: µs.\n    y, z: rows.": [],
        "Add x `[n]`, `y` and z. z: µs.": [],
        "Run `other`.": [],
    }.items():
        [(node, found)] = public_functions(ast.parse(source + repr(docstring)))
        assert unstated(node, found) == missing, docstring


def help_texts(path: Path) -> Iterator[str]:
    """Yield the help texts of a script's options."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            yield from (
                ast.unparse(each.value).lstrip("f").strip("'\"") for each in node.keywords if each.arg == "help"
            )


def test_help_texts_of_scripts_open_with_a_verb_or_a_noun() -> None:
    texts = [text for path in READ if path not in FILES for text in help_texts(path)]
    assert len(texts) > 50 and not [text for text in texts if OPENINGS.match(text.capitalize()) or TURNS.search(text)]


@pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        ("Send rows by one call", 0),
        ("Embed the table of recipes", 0),
        ("Pass rows on", 0),
        ("Docs: no time is named that was not measured", 1),
        ("Adds a call; moves another", 2),
        ("x", 1),
        ("Measure " + "x" * 60, 1),
        ("Merge a branch; whatever", 0),
    ],
)
def test_commit_subjects(subject: str, wrong: int) -> None:
    problems = runpy.run_path(str(ROOT / ".ci" / "commit_subject.py"))["problems"]
    assert len(problems(subject)) == wrong, problems(subject)
