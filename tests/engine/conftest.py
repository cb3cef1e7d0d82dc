"""Fixtures of the engine's tests: a small random Qwen2-MoE with a real tokenizer, and ways to prompt and disturb it."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from weft.engine.controller.engine import Engine, Request
from weft.engine.hosts import agents
from weft.engine.messages.rank_messages import Step
from weft.engine.messages.request import Output, SamplingParams
from weft.engine.output.request_output import OutputCallback, RequestOutput
from weft.engine.output.results import gather
from weft.engine.worker.row_table import NO_TOKEN
from weft.engine.worker.worker import Worker

WAIT_S = 240.0
"""Seconds to wait for what comes soon unless something is wrong; a busy machine may need long."""


@pytest.fixture(autouse=True)
def agents_may_leave_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let node 0 wait for its agents as long as a busy machine needs: they are threads of the test's process."""
    monkeypatch.setattr(agents, "LEAVE_S", WAIT_S)


@contextmanager
def sleeping_fork() -> Iterator[None]:
    """Keep a forked process asleep inside the context, with copies of this one's descriptors."""
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def byte_tokenizer(directory: Path) -> None:
    """Return a tokenizer with one token for each byte, so that characters and stop strings span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)


def byte_model(directory: Path) -> Path:
    """Save a small Qwen2-MoE of bytes there."""
    small_model("qwen2_moe", 4, directory, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("engine-model"))


def greedy_outputs(
    logits: Callable[[torch.Tensor], torch.Tensor], prompts: Sequence[Sequence[int]], count: int
) -> list[tuple[int, ...]]:
    """Return the likeliest `count` tokens after each prompt.

    logits: `[sequences, n, vocabulary]` after each of the tokens `[sequences, n]`; those behind a sequence's end are 0.
    """
    sequences = [list(prompt) for prompt in prompts]
    for _ in range(count):
        ends = [len(tokens) - 1 for tokens in sequences]
        with torch.no_grad():
            found = logits(pad_sequence([torch.tensor(tokens) for tokens in sequences], batch_first=True))
        for tokens, end, row in zip(sequences, ends, found, strict=True):
            tokens.append(int(row[end].argmax()))
    return [tuple(tokens[len(prompt) :]) for tokens, prompt in zip(sequences, prompts, strict=True)]


def generate_together(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Output]:
    """Generate as `Engine.generate`, with parameters per prompt if given; all prompts arrive between the same two
    steps, whatever turns the threads take. For tests of many sequences that share the cache."""
    asked: list[Request] = []
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params

    def submit(prompt: Sequence[int], callback_for: OutputCallback) -> None:
        asked.append((prompt, each[len(asked)], callback_for))
        if len(asked) == len(prompts):
            engine.submit_all(asked)

    return gather(prompts, submit, wait=lambda: None)


def outputs_of_some(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, cut: Mapping[int, int]
) -> tuple[list[str], list[tuple[int, ...]]]:
    """Return why each prompt's output ended, and its tokens. cut: outputs of some that grow longer than this are
    cancelled."""
    outputs: list[list[int]] = [[] for _ in prompts]
    ended: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    ids: list[int] = []
    known = threading.Event()  # a callback may be called for a request before its submitter knows the number

    def callback_for(at: int) -> OutputCallback:
        def callback(output: RequestOutput) -> None:
            increment = output.take()
            outputs[at].extend(increment.token_ids)
            if increment.finish_reason:
                ended.put((at, increment.finish_reason))
            elif at in cut and len(outputs[at]) > cut[at]:
                known.wait()
                engine.cancel(ids[at])

        return callback

    ids += engine.submit_all([(prompt, params, callback_for(at)) for at, prompt in enumerate(prompts)])
    known.set()
    reasons = dict(ended.get(timeout=WAIT_S) for _ in prompts)
    return [reasons[at] for at in range(len(prompts))], [tuple(tokens) for tokens in outputs]


def lose_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every rank forget its rows' last tokens before the fourth step, as if they had never been sampled."""
    step = Worker.step

    def poisoned(worker: Worker, message: Step) -> Any:
        if message.number == 4:
            worker.table.last_token.fill_(NO_TOKEN)
        return step(worker, message)

    monkeypatch.setattr(Worker, "step", poisoned)
