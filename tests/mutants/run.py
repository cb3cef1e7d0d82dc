"""Plants each fault of `faults.py` in a copy of the sources and runs its tests: they must fail.

    python tests/mutants/run.py [WORDS …] [--jobs N]

A fault is caught where a test fails that passes without it, missed where all pass, stale where its text does not stand
once in its file, and broken where the tests do not run. WORDS: of faults whose names or files have one of them. Ends
with 1 unless every fault was caught.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue

import pytest
from faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
COPIES = ROOT / "build" / "mutants"
"""The copies of the sources. They stay where they are, as compiled kernels are kept by their place."""
LIMIT_S = 300
"""Time limit of one test: a test that hangs has failed."""
LIBRARIES = ("torch", "transformers", "hypothesis.strategies", "fastapi", "uvicorn", "httpx", "openai", "llguidance.hf")
"""Imports of most tests. Each run is forked from a process that has them: importing takes longer than most tests."""


def planted(free: Queue[Path], fault: Fault) -> str:
    """Return the outcome of the fault's tests. free: copies of the sources that nobody uses."""
    began, sources = time.monotonic(), free.get()
    path = sources / fault.path
    text = path.read_text()
    outcome = "stale"
    if text.count(fault.old) == 1:
        path.write_text(text.replace(fault.old, fault.new))
        status, failed = tested(fault.tests, sources)
        path.write_text(text)
        found = status == 1 and failed and tested(failed, sources)[0] == 0  # without the fault it passes
        outcome = "caught" if found else "missed" if status == 0 else "broken"
    free.put(sources)
    print(f"{outcome:7} {time.monotonic() - began:5.0f} s  {fault.file}: {fault.name}", flush=True)
    return outcome


def tested(tests: Sequence[str], sources: Path) -> tuple[int, list[str]]:
    """pytest's exit status, 0 where all passed, 1 where one failed; and that one, with which it ends."""
    options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "timeout", f"--timeout={LIMIT_S}"]
    with tempfile.TemporaryFile("w+") as said:
        if (child := os.fork()) == 0:
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            sys.path.insert(0, str(sources))
            os.environ["PYTHONPATH"] = f"{sources}{os.pathsep}{ROOT / 'tests'}"  # of processes that tests start
            status = 3
            try:
                status = int(pytest.main([*options, *tests]))
            finally:
                sys.stdout.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        text = said.read()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", text, re.MULTILINE)
    if status and not failed:
        print(text[-3000:])
    return status, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="words of names or files of faults; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="faults planted at a time")
    given = parser.parse_args()
    chosen = [f for f in FAULTS if not given.words or any(w in f"{f.name} {f.file}" for w in given.words)]
    # A file that is changed twice in a second would be taken for what was compiled of it before.
    os.environ |= dict(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    os.chdir(ROOT)
    for name in LIBRARIES:
        importlib.import_module(name)
    shutil.rmtree(COPIES, ignore_errors=True)
    fork = multiprocessing.get_context("fork")
    with fork.Manager() as manager, ProcessPoolExecutor(given.jobs, fork) as pool:
        free = manager.Queue()
        for job in range(given.jobs):
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            for folder in (ROOT / "src", ROOT / "bench" / "src"):
                shutil.copytree(folder, COPIES / str(job), ignore=ignored, dirs_exist_ok=True)
            free.put(COPIES / str(job))
        outcomes = Counter(pool.map(partial(planted, free), chosen))
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return int(outcomes["caught"] < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
