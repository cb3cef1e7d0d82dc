"""Models of the Hugging Face hub, by name: the files that a command needs, in huggingface_hub's cache."""

from __future__ import annotations

import json
import os
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

CONFIG = ("config.json",)
TEXT = ("generation_config.json", "tokenizer*", "vocab*", "merges.txt", "*_tokens*.json", "chat_template*")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FOLDERS = "*/*"
"""Folders of a repository, which hold its weights in other formats."""


def snapshot(name: str, revision: str | None, *, weights: bool = True) -> Path:
    """Download a model, unless the cache has it, and return its directory. Raises ValueError in one line with a remedy.
    huggingface_hub shows the progress, and reads HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.

    Args:
        name: ORG/NAME.
        revision: branch, tag or commit; None: the main branch.
        weights: download safetensors and tokenizer too, not only config.json.
    """
    forks = get_context("fork")
    found, sender = forks.Pipe(duplex=False)
    child = forks.Process(target=_send_snapshot, args=(sender, name, revision, weights), daemon=True)
    child.start()
    sender.close()
    try:
        directory, line = found.recv()
    except EOFError as error:
        raise ValueError(f"the download of {name} was ended from outside; start it again") from error
    finally:  # by a signal, too, which threads that wait for the hub do not see
        child.kill()
        child.join()
    if line is not None:
        raise ValueError(line)
    assert isinstance(directory, Path)
    return directory


def _send_snapshot(sender: Connection, name: str, revision: str | None, weights: bool) -> None:
    """Send the directory and None, or None and one line about an error. Runs in a process of its own."""
    signal(SIGINT, SIG_IGN)  # Ctrl-C in a terminal reaches the parent too
    if not sys.stderr.isatty():  # no thread writes a log here, and bars are for terminals
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    wanted = [*CONFIG, *TEXT, INDEX] if weights else [*CONFIG]
    try:
        directory = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=FOLDERS))
        if weights and (files := _weights(directory)):
            snapshot_download(name, revision=directory.name, allow_patterns=files)  # the same commit
    except Exception as error:  # errors of its HTTP client and of Xet share no base
        return sender.send((None, _line(name, revision, error)))
    if not (directory / "config.json").is_file():
        advice = f"for a GGUF file of it, run `hf download {name} FILE.gguf`, and name the file that it prints"
        return sender.send((None, f"{name} on the hub has no config.json; {advice}"))
    sender.send((directory, None))


def _weights(directory: Path) -> list[str]:
    """Return the files of the weights in their index. None if the index is broken: its reader reports the fault."""
    if not (directory / INDEX).is_file():
        return [WEIGHTS]
    try:
        return sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _line(name: str, revision: str | None, error: Exception) -> str:
    """Return one line about an error of huggingface_hub. Subclasses come before their base."""
    hub, login = constants.ENDPOINT, "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, HfHubHTTPError):
        error = error.__cause__
    if isinstance(error, GatedRepoError):
        return f"{name} is gated: ask for access on {hub}/{name}, then {login}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no directory {name}, and no such model on {hub}; if it is private, {login}"
    if isinstance(error, RevisionNotFoundError):
        return f"{name} on {hub} has no revision {revision!r}; give a branch, a tag or a commit with --revision"
    if isinstance(error, HFValidationError):
        return f"there is no directory {name}, and it cannot be the name of a model on the hub (ORG/NAME)"
    if isinstance(error, LocalEntryNotFoundError):
        offline = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else f"{hub} cannot be reached ({type(error.__cause__).__name__})"
        what = f"{name}, revision {revision or 'main'},"
        return f"there is no directory {name}; {what} is not whole in {constants.HF_HUB_CACHE}, and {why}"
    if isinstance(error, HfHubHTTPError):
        return f"{name}: {hub} gives status {error.response.status_code}; try again later"
    if isinstance(error, OSError) and error.strerror:
        cache = constants.HF_HUB_CACHE
        return f"{name} cannot be stored in {cache}: {error.strerror}; name another folder with HF_HOME"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{name} cannot be downloaded from {hub}: {type(error).__name__}: {first}"
