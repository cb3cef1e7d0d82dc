"""Checks of the model, the layout and the cost table before any rank is started."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from weft.comm.transport import offer_of
from weft.comm.transport_registry import transports
from weft.engine.attention.backend_registry import BackendChoice
from weft.engine.attention.caches import cached_layers
from weft.engine.config.config import EngineConfig
from weft.engine.config.cpu_shares import with_cpu_shares
from weft.engine.config.device import attention_backend, dtype_of, enabled_transports, gpus_of, on_gpus
from weft.engine.config.engine_options import LayoutOptions
from weft.engine.kv.cache_spec import Recurrent, Spec
from weft.engine.models.config_json.directory import config_file
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.models.load import model_shape
from weft.engine.models.weights.checkpoint import weight_files
from weft.engine.output.tokenizer_files import read_tokenizer
from weft.engine.worker.batch_limits import with_batch_limits
from weft.engine.worker.open_transports import cost_model
from weft.engine.worker.planning import may_split, plan_model, split_steps
from weft.planner.cost import Offer
from weft.planner.experts import Dispatch
from weft.planner.plan import Planner
from weft.planner.prices import Recipes
from weft.planner.recipes import Merge, Prompt
from weft.planner.spec import LayoutError

log = logging.getLogger(__name__)
MIN_LAYERS_OF_DRAFT = 10
"""Minimum layers of a model for which `--speculative auto` runs a draft layer."""


def read_model(config: EngineConfig) -> ModelConfig:
    """Read the model's config.json. Raises ModelError, also if weights are missing."""
    model = config.read_model()
    if config.load_format != "dummy":
        weight_files(config.model)
    return model


def context_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Return the maximum tokens of a prompt and its completion. Raises ModelError for more than the model supports."""
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ModelError(
            f"max_model_len={config.max_model_len} is beyond the model's {model.max_position} positions; ask for fewer"
        )
    return config.max_model_len or model.max_position


def check_packages(config: EngineConfig) -> None:
    """Raise LayoutError if the ranks would lack a package."""
    if on_gpus(config) and find_spec("triton") is None:
        raise LayoutError("ranks on GPUs require Triton, which is missing: pip install 'weft[gpu]', or --device cpu")


def resolve_defaults(config: EngineConfig) -> EngineConfig:
    """Return the configuration with values for `auto`: the attention backend, FP8 matmuls, the split of the vocabulary,
    threads and cores of this host's ranks, and on GPUs the sequences and rows of a step, and with --shrink the GPUs.

    Experts gather on GPUs; on CPUs `check_plans` decides. Raises ModelError, LayoutError.
    """
    if config.shrink and not config.gpus:
        config = replace(config, gpus=gpus_of(config))
    backend = attention_backend(config, lambda: declared_caches(config, read_model(config)))
    config = replace(config, attention_backend=BackendChoice(backend.option))
    if config.float8 == "auto":
        config = replace(config, float8="on" if on_gpus(config) and read_model(config).storage.automatic else "off")
    if config.moe_exchange == "auto" and on_gpus(config):
        config = replace(config, moe_exchange="gather")
    if config.speculative == "auto":
        config = _choose_drafts(config)
    if config.split_vocabulary == "auto":
        pays = not config.drafts_on_ranks and _split_pays(config)
        config = replace(config, split_vocabulary="on" if pays else "off")
    return with_batch_limits(with_cpu_shares(config))


def _choose_drafts(config: EngineConfig) -> EngineConfig:
    """Return the configuration with a source for `auto`: a draft layer, which must be small, or else prompt lookup."""
    model, sources = read_model(config), [replace(config, speculative="mtp"), replace(config, speculative="ngram")]
    for chosen in sources[model.num_layers < MIN_LAYERS_OF_DRAFT :]:
        try:
            check_speculation(chosen, model)
            return chosen
        except LayoutError as error:
            refusal = error
    log.warning("--speculative auto is off: %s", refusal)
    return replace(config, speculative="off")


def _split_pays(config: EngineConfig) -> bool:
    """Tell whether a split vocabulary is predicted to be quicker for decode steps of one and of many sequences."""
    model, dtype = read_model(config), dtype_of(config)
    rows = [1, config.batch_sequences] if may_split(model, dtype, on_gpus(config)) else []
    steps = split_steps(model, config.mesh, dtype, _offers(config), rows)
    return bool(steps) and all(step.saved_us > 0 for step in steps)


def check_plans(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Build the model without weights and plan every possible step. Returns the configuration for the ranks: experts
    may dispatch only if that is quicker for some step.

    Raises ModelError for impossible sizes, LayoutError if the layout has too many ranks for the model, or if the cost
    table lacks a required edge.
    """
    check_packages(config)
    counting = [option for option, entry in transports(config.plugins).items() if entry.takes_live_sizes]
    if config.moe_exchange == "dispatch" and on_gpus(config) and config.mesh.hosts > 1:
        raise LayoutError("--moe-exchange dispatch on GPUs supports one host only: drop the option")
    if config.moe_exchange == "dispatch" and on_gpus(config) and config.transport not in counting:
        raise LayoutError(
            "--moe-exchange dispatch on GPUs counts rows on the device: "
            f"add --transport {' or '.join(counting)}, or drop the option"
        )
    if config.moe_exchange == "dispatch" and config.plan == "naive":
        raise LayoutError("the naive plan uses all-reduces, by which experts gather: drop --moe-exchange or --plan")
    planner = planner_of(config, model)
    attention_backend(config, lambda: declared_caches(config, model))  # ranks check properties of their GPUs later
    check_speculation(config, model)
    rows, dispatches = 1, False
    drafts = [planner_of(config, model, draft=True)] if model.drafts or model.draft_model else []
    while True:
        counts = (min(rows, config.batch_tokens),) * config.mesh.attn_dp
        inside = (op for read in planner.plan(counts).reads for op in read.inside)
        dispatches |= any(isinstance(op.value, Dispatch) for op in inside)
        planner.naive(counts)
        for of_drafts in drafts:
            of_drafts.plan(counts)
        if rows >= config.batch_tokens:
            return config if dispatches or config.moe_exchange != "auto" else replace(config, moe_exchange="gather")
        rows *= 2


def planner_of(config: EngineConfig, model: ModelConfig, draft: bool = False) -> Planner:
    """Return the planner of the ranks' eager steps, for tensors of any size. Raises errors as `check_plans`. draft: of
    the draft layer's passes."""
    recipes: Recipes = {Merge: config.dcp_exchange, Prompt: config.dcp_prefill}
    try:
        return plan_model(model, config.mesh, dtype_of(config), _offers(config), config.plan, False, recipes, draft)
    except ModelError as error:
        raise ModelError(f"{config_file(config.model)}: {error}") from error


def check_speculation(config: EngineConfig, model: ModelConfig) -> None:
    """Raise LayoutError if ranks cannot run drafts."""
    if config.speculative == "off":
        return
    option = f"--speculative {config.speculative}"
    if config.drafts_on_ranks:
        check_draft_source(config, model, config.draft_model, config.model)
    if config.num_layers is not None and config.speculative in ("mtp", "eagle3"):
        raise LayoutError(f"{option} needs all layers of the model: drop --num-layers, or the option")
    if any(isinstance(spec, Recurrent) for spec in declared_caches(config, model)):
        raise LayoutError(
            f"{option} does not support models with recurrent states, which cannot be undone: drop the option"
        )


def check_draft_source(layout: LayoutOptions, model: ModelConfig, draft_path: Path | None, path: Path) -> None:
    """Raise LayoutError if ranks cannot run a model's draft layer, or if its draft model or head is another model's or
    cannot run. draft_path: of the draft model or head; None: the draft layer. path: of the model."""
    option, draft = f"--draft-model {draft_path}" if draft_path else "--speculative mtp", model.draft_model
    if draft is None and not model.draft_layers:
        raise LayoutError(f"{option} runs the checkpoint's draft layer, and config.json names none: drop the option")
    if draft is not None and draft.vocab_size != model.vocab_size:
        raise LayoutError(
            f"{option} has {draft.vocab_size} tokens in its vocabulary, and the model {model.vocab_size}: choose a "
            "draft model with the same vocabulary"
        )
    if layout.split_vocabulary == "on":
        raise LayoutError(f"{option} supports no split vocabulary so far: drop --split-vocabulary, or the option")
    if draft_path is None:
        return
    if layout.mesh.hosts > 1:
        raise LayoutError(f"{option} runs on one host only so far: drop the option")
    folders = [each for each in (draft_path, path) if (each / "tokenizer.json").is_file()]
    vocabularies = [read_tokenizer(each).get_vocab() for each in folders]
    if vocabularies[1:] and vocabularies[0] != vocabularies[1]:
        raise LayoutError(f"{option} has other tokens than the model: choose a draft model with the same tokenizer")


def declared_caches(config: EngineConfig, model: ModelConfig) -> list[Spec]:
    """Return the distinct caches of rank 0's layers, from the model's shape."""
    return list(dict.fromkeys(cached_layers(model_shape(model, config.mesh, dtype_of(config))).values()))


def _offers(config: EngineConfig) -> list[Offer]:
    """Return offers of the ranks' transports, for tensors of any size."""
    mesh, table = config.mesh, cost_model(config)
    return [offer_of(entry, mesh, table.of(entry.name, mesh.world)) for entry in enabled_transports(config)]
