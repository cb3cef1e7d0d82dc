"""`weft plan`: print the exchanges of a layout and their costs, without weights or ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import fill
from typing import Annotated, Literal

import tyro
from transformers.utils import logging as transformers_logging

from weft.comm.transport import offer_of
from weft.comm.transport_registry import PEER, REFERENCE, TransportName, automatic, check_serves, transports
from weft.engine.advise.step_prices import draft_prices
from weft.engine.config.engine_options import LayoutOptions, SpeculationOptions
from weft.engine.controller.startup import check_draft_source
from weft.engine.models.load import describe_products
from weft.engine.models.registry import load_config, registry, with_draft
from weft.engine.worker.open_transports import preset_of
from weft.engine.worker.planning import may_split, plan_model, sharded_context, split_steps
from weft.planner.cost import costs
from weft.planner.dcp import dcp_dict, dcp_text
from weft.planner.experts import Forms
from weft.planner.forms import forms_dict, forms_of, forms_text
from weft.planner.prices import Recipes
from weft.planner.recipes import Merge, Prompt
from weft.planner.show import columns, plan_dict, plan_text
from weft.planner.spec import LayoutError
from weft.planner.vocabulary import vocabulary_dict, vocabulary_text
from weft.serve.cli.command import ModelDir, SourceOptions, UserError, model_dir, user_errors

AUTOMATIC = " and ".join(
    e.option + (f" (to {e.max_ranks} ranks of a host)" if e.max_ranks else "")
    for e in automatic(transports(), "cuda", ranks=1)
)


@dataclass(frozen=True)
class Command:
    """Print a layout's collectives with their bytes and predicted times, compared with the naive plan.

    The naive plan is the default of other engines: all-reduce every partial sum, add, norm, gather. The same cost table
    prices both plans. Only config.json is read, also for a model on the hub, and no rank is started.

    Examples:
      weft plan                                         the embedded model on four ranks, priced for four H200s
      weft plan --preset qwen3-30b-a3b --attn-dp 4
      weft plan DIR --attn-dp 2 --attn-tp 2 --ep 4 --moe-tp 1 --tokens 1,64,4096
      weft plan DIR --attn-tp 2 --transport shm gloo
      weft plan DIR --attn-dp 4 --attn-tp 4 --transport nccl --cost h100-nvlink
      weft plan --preset deepseek-v2-lite --attn-tp 4 --ep 4 --dcp 4     the context length from which dcp pays
      weft plan --preset deepseek-v3 --attn-dp 16 --nnodes 2   peer inside a host, nccl across hosts
      weft plan --attn-dp 4 --transport shm --tokens 1,256     the cheaper of gather and dispatch for experts
      weft plan --preset qwen3-235b-a22b --attn-tp 4 --ep 4 --split-vocabulary on    the time saved per decode step
      weft plan DIR --attn-dp 2 --attn-tp 4 --ep 8 --transport reference --json
      weft plan DIR --attn-tp 4 --cost TABLE.json       a cost table written by weft tune
      weft plan --preset deepseek-v3 --attn-dp 8 --speculative mtp    the draft layer's exchanges too
    """

    model: ModelDir = None
    source: SourceOptions = field(default_factory=SourceOptions)
    layout: LayoutOptions = field(default_factory=LayoutOptions)
    """Split of the model over the ranks, with the options of weft serve; omitted: --attn-dp 2 --attn-tp 2."""
    plugins: tuple[str, ...] = ()
    """Python modules or .py files that add model families or transports; they run, so name only what you trust."""
    speculative: Literal["off", "ngram", "mtp", "eagle3", "draft"] = "off"
    """Print the predicted price of 0 to 4 drafts, and for mtp, eagle3 and draft the plans of what drafts."""
    draft_model: Path | None = None
    """Model or EAGLE-3 head that drafts, as of weft serve."""
    tokens: str = "1,64,4096"
    """Comma-separated numbers of tokens per DP group; each number gets a plan."""
    transport: Annotated[
        tuple[TransportName, ...], tyro.conf.arg(help=f"Transports to plan with, one or more; omitted: {AUTOMATIC}.")
    ] = ()
    cost: str = "auto"
    """Cost table: FILE.json of weft tune, h200x4 (measured on four H200s), cpu, cpu-gloo, cpu-shm, h100-nvlink,
    h200-nvlink, gb200-nvl72 or pcie-gen5; auto: cpu for shm and gloo, h200x4 up to 8 GPUs, else h200-nvlink."""
    max_bytes: int | None = None
    """Maximum bytes of an input or output of a peer collective; omitted: unlimited, as the engine allocates buffers for
    its largest step."""
    json: bool = False
    """Print one JSON list with a plan per number of tokens and every layer, instead of text."""

    def run(self) -> int:
        """Print the plans and return the exit code. Raises LayoutError, ModelError, PlacementError."""
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        layout, tokens = self.layout, parse_tokens(self.tokens)
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UserError(f"--max-bytes {self.max_bytes} must be 1 or more")
        if (layout.attn_dp, layout.attn_tp, layout.ep, layout.moe_tp) == (1, 1, None, None):
            layout = replace(layout, attn_dp=2, attn_tp=2)
        mesh = layout.mesh
        on_host = mesh.world // mesh.hosts
        known = transports(self.plugins)
        named = {**known, REFERENCE.option: REFERENCE}
        entries = tuple(named[option] for option in self.transport) or automatic(known, "cuda", on_host)
        check_serves(entries, mesh)
        model = costs(preset_of(entries, on_host) if self.cost == "auto" else self.cost)
        entries = tuple(replace(e, max_bytes=self.max_bytes) if e is PEER else e for e in entries)
        offers = [offer_of(entry, mesh, model.of(entry.name, mesh.world)) for entry in entries]
        where = model_dir(self.model, self.source.preset, self.source.revision, weights=False)
        config = load_config(where, registry(self.plugins))
        gpus = any(entry.device == "cuda" for entry in entries)
        forms: Forms = "gather" if gpus and layout.moe_exchange == "auto" else layout.moe_exchange
        config = replace(
            config,
            replicate_queries=layout.dcp_query == "replicate",
            experts=forms,
            float8=gpus and config.storage.automatic,
        )
        with user_errors():
            SpeculationOptions(speculative=self.speculative, draft_model=self.draft_model).check()
        drafts = self.speculative not in ("off", "ngram")
        if self.draft_model is not None:
            draft = model_dir(self.draft_model, weights=False)
            config = with_draft(config, draft, self.speculative == "eagle3", self.plugins)
            check_draft_source(layout, config, draft, where)
        elif drafts:
            check_draft_source(layout, config, None, where)
            config = replace(config, drafts=True)
        may = not drafts and may_split(config, config.dtype, gpus)
        splits = layout.split_vocabulary in ("on", "auto" if may else "on")
        steps = split_steps(config, mesh, config.dtype, offers, [n for n in tokens if n and splits])
        split = layout.split_vocabulary == "on" or (bool(steps) and all(step.saved_us > 0 for step in steps))
        config = replace(config, split_vocabulary=split)
        # Slices copy where steps are captured.
        recipes: Recipes = {Merge: layout.dcp_exchange, Prompt: layout.dcp_prefill}
        planner = plan_model(config, mesh, config.dtype, offers, slices_copy=gpus, recipes=recipes)
        of_drafts = plan_model(config, mesh, config.dtype, offers, "cheapest", gpus, recipes, True) if drafts else None
        counts_of = [(n,) * mesh.attn_dp for n in tokens]
        shared = sharded_context(config, mesh, config.dtype, planner.chain)
        both = forms_of(planner)
        prices = {} if self.speculative == "off" else draft_prices(config, planner, of_drafts, filter(None, tokens))
        steps = steps if split else []
        if self.json:
            found, vocabulary = [plan_dict(planner, n) for n in counts_of], {step.rows: step for step in steps}
            for each, n in zip(found, tokens, strict=True):
                each |= {} if shared is None else {"dcp": dcp_dict(shared, n, planner.blocks)}
                each |= {} if of_drafts is None else {"draft_layer": plan_dict(of_drafts, (n,) * mesh.attn_dp)}
                each |= {} if both is None else {"experts": forms_dict(both, n)}
                each |= {"drafts": [round(us, 2) for us in prices[n]]} if n in prices else {}
                each |= {"vocabulary": vocabulary_dict(vocabulary[n]) if n in vocabulary else None} if steps else {}
            print(json.dumps(found, indent=1))
        else:
            texts = [plan_text(planner, counts) for counts in counts_of]
            texts += [f"draft layer: {plan_text(of_drafts, counts)}" for counts in counts_of if of_drafts]
            rows: list[tuple[str, ...]] = [("  sequences in each DP group", "no drafts", "k=1", "k=2", "k=3", "k=4")]
            for n, us in prices.items():
                rows += [(f"  {n:,}", f"{us[0]:,.0f} µs", *(f"× {x / us[0]:.2f}" for x in us[1:]))]
            title = "drafts: predicted time of a decode step with k drafts of each sequence"
            texts += ["\n".join([title, *columns(rows)])] if prices else []
            texts += [] if both is None else [forms_text(both, tokens)]
            texts += [] if shared is None else [dcp_text(shared, tokens, planner.blocks)]
            texts += [vocabulary_text(config.vocab_size, mesh.attn_tp, steps)] if steps else []
            texts += [fill(note, 120)] if (note := describe_products(config, mesh, config.dtype)) else []
            print("\n\n".join(texts))
        return 0


def parse_tokens(text: str) -> list[int]:
    """Return the numbers of a list such as `1,64`. Raises LayoutError."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise LayoutError(f"tokens {text!r} are not whole numbers with commas between them, such as 1,64,4096")
    return numbers
