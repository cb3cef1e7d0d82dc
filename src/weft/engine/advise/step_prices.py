"""Prices of steps that no rank has run: the plan's exchanges, and the bytes and products of a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from weft.comm.transport import offer_of
from weft.comm.transport_registry import automatic, transports
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import dtype_of
from weft.engine.models.layers.model_config import LanguageModel, ModelConfig
from weft.engine.models.load import model_shape
from weft.engine.worker.footprint import Footprint
from weft.engine.worker.planning import trace_layers
from weft.planner.cost import INFINIBAND, costs, over_network
from weft.planner.plan import Planner
from weft.tune.step_table import StepShape


def decode_price(footprint: Footprint, planner: Planner, shape: StepShape, threads: int) -> float:
    """Return the µs of a decode step by the cost table: all ops of its plan, and a pass over the bytes that it reads.

    threads: threads of a rank, which share the pass.
    """
    mesh = planner.mesh
    read = footprint.bytes_read(shape, shape.decode * mesh.attn_dp)
    return planner.plan((shape.decode,) * mesh.attn_dp).us + planner.local_us(read) / threads


def draft_prices(
    model: ModelConfig, planner: Planner, drafts: Planner | None, sequences: Iterable[int]
) -> dict[int, list[float]]:
    """Return the µs of a decode step of a `model` with 0 to 4 drafts of each of its `sequences` per DP group. drafts:
    planner of what drafts on the ranks: a pass for each draft, and of a draft model one more."""
    groups, found = planner.mesh.attn_dp, dict[int, list[float]]()

    def footprint(of: ModelConfig) -> Footprint:
        return Footprint.of(model_shape(of, planner.mesh, of.dtype), of, planner.mesh, of.dtype)

    held = footprint(replace(model, drafts=False, draft_model=None))
    own = None if model.draft_model is None else footprint(model.draft_model)
    for n in sequences:
        read = (own or held).bytes_read(StepShape(n), n * groups) / (1 if own else held.layers)
        each = drafts.plan((n,) * groups).us + planner.local_us(read) if drafts else 0.0
        more = own is not None and not model.tapped_layers
        steps = [decode_price(held, planner, StepShape(n * (1 + k)), 1) for k in range(5)]
        found[n] = [us + (k + (more and k > 0)) * each for k, us in enumerate(steps)]
    return found


@dataclass(frozen=True)
class PublishedGpu:
    """Figures of a GPU from its data sheet, and constants that fit published figures of serving.

    Attributes:
        memory: bytes.
        gb_s, tflops: peaks of memory, and of bfloat16 products.
        read, computed: fractions of both that steps reach.
        layer_us: µs of a layer's kernels and launches that depend on no size.
        error: relative error that these figures do not exceed.
        cost: cost model of exchanges.
        per_host: GPUs of a host.
    """

    memory: int
    gb_s: float
    tflops: float
    read: float
    computed: float
    layer_us: float
    error: float
    cost: str
    per_host: int = 8

    def planner(self, config: EngineConfig, layers: LanguageModel) -> Planner:
        """Return the planner of ranks on these GPUs. layers: shape of a model. Raises LayoutError, PlacementError."""
        mesh, table = config.mesh, over_network(costs(self.cost), INFINIBAND)
        entries = automatic(transports(), "cuda", config.ranks_of_host)
        offers = [offer_of(entry, mesh, table.of(entry.name, mesh.world)) for entry in entries]
        return Planner(mesh, trace_layers(layers, mesh, dtype_of(config)), offers, slices_copy=True)


GPUS = {"h200": PublishedGpu(int(141e9), 4800.0, 989.0, 0.82, 0.5, 21.0, 0.35, "h200x4")}
"""Published GPUs by name. H200: the constants give Weft's four ITLs of Qwen3-30B-A3B (docs/log/rivals.md) with errors
of 7 %, 39 measured TTFTs on one and two H200s (docs/log/advisor.md) with a median error of 5 % and at most 23 %, and
with 0.62 of the bytes and 75 µs the nine ITLs of GPT-OSS-120B by another engine (docs/guide/advise.md) with errors of
11 %. One set of constants for all of them errs by up to 34 %, which is the interval."""


@dataclass(frozen=True)
class PricedSteps:
    """Prices of a layout's steps on a GPU that is not here, instead of measured times.

    spread: as in `StepTable`; a price has none.
    """

    gpu: PublishedGpu
    footprint: Footprint
    planner: Planner
    spread: tuple[float, ...] = (1.0,)

    @property
    def error(self) -> float:
        """Relative error of the prices."""
        return self.gpu.error

    def us(self, shape: StepShape, rows: int | None = None) -> float:
        """Return the µs of a step with these rows of a DP group. rows: of all groups; None: each has as many."""
        groups, held, own = self.planner.mesh.attn_dp, self.footprint, shape.decode + shape.prompt
        rows = own * groups if rows is None else rows
        # Both are added, as experts' bytes and products hardly overlap.
        us = held.bytes_read(shape, rows) / (self.gpu.gb_s * self.gpu.read * 1e3)
        us += held.operations(shape, rows) / (self.gpu.tflops * self.gpu.computed * 1e6)
        return held.layers * self.gpu.layer_us + us + self.planner.plan((own,) * groups).exchanges_us
