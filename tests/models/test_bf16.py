"""Models in bfloat16: as near to the float32 truth as transformers' own bfloat16, and routers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import FAMILIES, MODELS, converted, run_world, small_model
from torch.nn import functional as F

from weft.comm.transport import Transport
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.caches import cached_layers
from weft.engine.kv.cache_spec import CacheGroup, rule
from weft.engine.models.layers.basic import Builder
from weft.engine.models.layers.routing import Router, Routing
from weft.engine.models.load import load_model
from weft.engine.models.registry import load_config
from weft.engine.worker.model_runner import ModelRunner
from weft.planner.spec import Mesh, Rows
from weft.stream.hidden import Hidden

LENGTH, PROMPTS, PAGES = 24, 48, 6
MESHES = (Mesh(), Mesh(2, 2, 2, 2), Mesh(1, 4, 1, 4), Mesh(1, 3, 1, 3))


def forward(transport: Transport, mesh: Mesh, directory: Path, prompts: torch.Tensor) -> torch.Tensor:
    """The last rows' logits of each prompt; every DP group runs all prompts, in two chunks."""
    torch.set_num_threads(1)
    model = load_model(directory, load_config(directory), mesh, transport.rank, torch.bfloat16)
    [paged] = dict.fromkeys(map(rule, cached_layers(model).values()))
    groups, page = [CacheGroup(paged, PROMPTS * PAGES)], LENGTH // PAGES
    runner = ModelRunner(model, mesh, transport.rank, [transport], groups, page)
    for begin, end in ((0, LENGTH - 3), (LENGTH - 3, LENGTH)):
        seqs = [SeqRows(end - begin, begin, [range(i * PAGES, (i + 1) * PAGES)], True) for i in range(PROMPTS)]
        batch = build_batch(prompts[:, begin:end].flatten().tolist(), seqs, page, [paged])
        logits = runner.forward(batch, (PROMPTS * (end - begin),) * mesh.attn_dp)
    return logits


BY_DAY = *FAMILIES, "minimax_m2"
"""The arithmetic of the others is in these."""


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.nightly] * (family not in BY_DAY)) for family in MODELS]
)
def test_as_near_to_the_truth_as_transformers(family: str, tmp_path: Path) -> None:
    model = converted(small_model(family, 4, tmp_path), torch.bfloat16)
    model.save_pretrained(tmp_path)
    prompts = torch.randint(1, 61, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        theirs = model(prompts).logits[:, -1].double()
        truth = converted(model, torch.float32)(prompts).logits[:, -1].double()
    # A median over prompts: where rounding makes a router choose another expert, on either side, one prompt is far off.
    allowed = 1.4 * (theirs - truth).norm(dim=-1).median()
    for mesh in MESHES:
        for ours in run_world(mesh.world, lambda t, mesh=mesh: forward(t, mesh, tmp_path, prompts)):
            error = (ours.double() - truth).norm(dim=-1).median()
            assert error <= allowed, f"{mesh}: {error:.2e} from the truth, allowed {allowed:.2e}"


def test_a_router_is_exact_for_its_logits() -> None:
    """Among 128 experts a softmax in bfloat16 has ties, and takes the wrong ones; its probabilities are 0.4 % off."""
    b = Builder(Mesh(), 0, torch.bfloat16, torch.device("cpu"))
    torch.manual_seed(1)
    router = Router(b, "gate", 64, 128, Routing(8, renormalise=True))
    router.weight.data.normal_(0, 0.1)
    x = torch.randn(200, 64).bfloat16()
    weight, expert = router.choose(Hidden(x, b.mesh.placement(Rows.WORLD), b.mesh, "x"))
    probability = weight.to(x.dtype)  # as experts take it
    logits = F.linear(x, router.weight).double()
    order = logits.sort(dim=-1, descending=True, stable=True)
    # Equal logits are equal probabilities: whichever expert is taken, the probabilities are these.
    wanted = (order.values[:, :8] - order.values[:, :1]).exp()
    assert torch.equal(logits.gather(1, expert).sort(dim=-1, descending=True).values, order.values[:, :8])
    wanted = (wanted / wanted.sum(-1, keepdim=True)).to(probability.dtype)
    assert (probability.double() - wanted.double()).abs().max() <= 2**-9  # a unit in the last place, at most
    assert (probability != wanted).double().mean() < 0.01
