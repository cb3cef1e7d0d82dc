"""One rank: the model, its part of the cache, and the loop that answers the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple

import torch

from weft.attention.caches import cached_layers
from weft.comm.transport import Transport
from weft.engine.batch import SeqRows
from weft.engine.config import EngineConfig
from weft.engine.device import device_of, dtype_of
from weft.engine.memory import check_weights, groups_of, least_of, measure, sized
from weft.engine.messages import (
    AskPlan,
    AskReport,
    FromRank,
    PlanText,
    Progress,
    Ran,
    Ready,
    Report,
    Result,
    Scored,
    StartProfile,
    Stat,
    Step,
    Stop,
    StopProfile,
    ToRank,
)
from weft.engine.profiling import RankProfile
from weft.engine.runner import ModelRunner
from weft.engine.sampler import sample, score
from weft.kv.spec import CacheGroup
from weft.models.load import dummy_model, load_model
from weft.place.cost import Costs

Send = Callable[[FromRank], None]


class Worker:
    """Loads a rank's shard, then runs steps. Of a sequence ranks keep only what lies in the caches, where steps say."""

    def __init__(self, config: EngineConfig, transports: Sequence[Transport], costs: Costs, send: Send):
        self.config, self.mesh, self.rank = config, config.mesh, transports[0].rank
        shown = -1

        def progress(done: int, total: int) -> None:
            nonlocal shown
            if (percent := 20 * done // total) > shown:  # a message for each twentieth, not for each tensor
                shown = percent
                send(Progress(self.rank, done, total))

        model_config, dtype, empty = config.read_model(), dtype_of(config), transports[0].empty
        device = device_of(config, self.rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            check_weights(model_config, config, self.rank, dtype, torch.cuda.mem_get_info()[0])
        if config.load_format == "dummy":
            model = dummy_model(model_config, self.mesh, self.rank, dtype, device, progress, empty)
        else:
            model = load_model(config.model, model_config, self.mesh, self.rank, dtype, device, progress, empty)
        specs = cached_layers(model)

        def make(groups: Sequence[CacheGroup]) -> ModelRunner:
            return ModelRunner(
                model,
                self.mesh,
                self.rank,
                transports,
                groups,
                config.page_size,
                costs,
                interleave=config.dcp_interleave,
                dcp_exchange=config.dcp_exchange,
                plan=config.plan,
            )

        if device.type == "cuda" and config.kv_tokens is None:
            send(Progress(self.rank, 0, 1, "measuring memory"))
            memory, agree = measure(make, specs, config, model_config), least_of(transports[0], self.mesh.world, device)
            config = self.config = sized(config, specs, memory, dtype.itemsize, agree)
        self.groups = groups_of(specs, config)
        self.runner = make(self.groups)
        self.profile = RankProfile(self.runner)
        if device.type == "cuda" and config.cuda_graphs:
            tokens = min(config.max_model_len or model_config.max_position, config.cached_tokens)
            self.runner.capture(
                config.max_running,
                -(-tokens // config.deal.span),
                lambda done, total: send(Progress(self.rank, done, total, "capturing graphs")),
            )

    def step(self, step: Step) -> Result:
        """Runs a step; the leader of each DP group draws the tokens."""
        group = self.mesh.group_of(self.rank)
        rows, counts = step.groups[group], tuple(len(g.tokens) for g in step.groups)
        self.profile.begin(step.number, counts)
        # A prompt that is scored has logits in every row, another part in its last at most.
        wanted = [p.rows if p.score else int(p.sampling is not None) for p in rows.parts]
        seqs = [SeqRows(p.rows, p.context, p.tables, n) for p, n in zip(rows.parts, wanted, strict=True)]
        parts = [part for g in step.groups for part in g.parts]
        decodes = all(p.rows == 1 and p.sampling is not None and not p.score for p in parts)
        logits = self.runner.step(rows.tokens, seqs, counts, decodes)
        ran = Ran(step.number, counts, self.runner.plan_checksum(counts))
        if self.rank != self.mesh.leader(group):
            return Result(self.rank, ran)
        scored, sampled, last = [], [], []
        for part, own in zip(rows.parts, logits.split(wanted), strict=True):
            if part.score:
                logprobs = score(own[: len(part.score.tokens)], part.score)
                scored.append(Scored(part.request, part.context + 1, logprobs))
            if part.sampling is not None:
                sampled.append((part.request, part.sampling))
                last.append(own[-1])
        drawn = sample(
            logits if len(last) == len(logits) else torch.stack(last) if last else logits[:0],
            [request for request, _ in sampled],
            [how for _, how in sampled],
        )
        return Result(self.rank, ran, drawn, tuple(scored))

    def serve(self, receive: Callable[[], ToRank], send: Send) -> None:
        """Answers the controller until it says Stop."""
        send(Ready(self.rank, self.groups))
        while True:
            message = receive()
            if isinstance(message, Step):
                send(self.step(message))
            elif isinstance(message, AskReport):
                ran, naive = self.runner.report(), self.runner.naive_report()
                send(Report(tuple(Stat(*astuple(s)) for s in ran), tuple(Stat(*astuple(s)) for s in naive)))
            elif isinstance(message, AskPlan):
                send(PlanText(self.runner.plan_text(message.tokens)))
            elif isinstance(message, StartProfile):
                send(self.profile.start(message))
            elif isinstance(message, StopProfile):
                send(self.profile.stop())
            elif isinstance(message, Stop):
                return
