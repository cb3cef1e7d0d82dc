"""Routing and the routed experts against their twins, with rows that are not live full of NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from gpu import definitions
from gpu.triton_checks.worker import INTERPRETED
from weft.engine.kernels import mxfp4, ops
from weft.engine.kernels.model_reference import choose
from weft.engine.kernels.side_stream import on_side_stream
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kernels.triton import fused_experts, mxfp4_tiles, prompt_experts
from weft.engine.kernels.triton import route as kernels
from weft.engine.kernels.triton.experts_tiles import ExpertsTile, tile_rows_of
from weft.engine.models.layers import moe
from weft.engine.models.layers.basic import Builder
from weft.engine.models.layers.moe import MoEConfig, SparseMoE
from weft.engine.models.layers.routing import Router, Routing
from weft.kernels import stream_ops
from weft.planner.spec import Mesh, Placement, PlacementError, Rows
from weft.stream.hidden import Hidden, ReadInfo

NAN = float("nan")


def routed(
    rows: int, live: int, experts: int, k: int, first: int, held: int, device: torch.device, tile_rows: int = 16
) -> tuple[kernels.Routing, Tensor, Tensor]:
    """(the kernel's routing, the twin's weights and experts) of skewed logits."""
    logits = torch.randn(rows, experts, device=device) + 2 * torch.randn(experts, device=device)
    logits[live:] = NAN
    count = torch.tensor([live], dtype=torch.int32, device=device)
    rule = Routing(k, renormalise=True)
    found = kernels.route(logits, rule, count, tile_rows, first, held)
    return found, *definitions.route(logits, rule, live, first, held)


def assert_order(routing: kernels.Routing) -> None:
    """Every pair that is here is in one tile of its expert, in order, and nothing else is in any tile."""
    assert routing.order is not None and routing.tile_expert is not None
    expert, pairs = routing.expert.flatten().tolist(), routing.expert.numel()
    order, seen = routing.order.view(-1, routing.tile_rows).tolist(), []
    for tile, owner in zip(order, routing.tile_expert.tolist(), strict=True):
        if owner >= 0:
            real = [pair for pair in tile if pair != pairs]
            assert real and all(expert[pair] == owner for pair in real)
            assert tile == real + [pairs] * (len(tile) - len(real))
            seen += real
    assert routing.used is not None and routing.used.item() == sum(owner >= 0 for owner in routing.tile_expert.tolist())
    assert seen == sorted((pair for pair in range(pairs) if expert[pair] >= 0), key=lambda pair: (expert[pair], pair))


CASES = {
    "few pairs": (2, 2, 16, 2, 0, 16),
    "one row": (1, 1, 8, 3, 0, 8),
    "one kernel": (24, 21, 6, 3, 0, 6),
    "two kernels": (66, 60, 7, 2, 3, 3),
    "experts elsewhere": (9, 9, 12, 4, 8, 4),
    "no row is live": (9, 0, 4, 2, 0, 4),
    "no expert chosen is here": (1, 1, 64, 1, 63, 1),
    "one expert": (20, 20, 1, 1, 0, 1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_routes(case: tuple[int, ...], seed: int, device: torch.device) -> None:
    found, weight, expert = routed(*case, device)
    live = case[1]
    assert torch.equal(found.expert, expert)
    assert torch.allclose(found.weight[:live], weight[:live], rtol=1e-5, atol=1e-6)
    assert found.weight.isfinite().all()
    assert (found.order is None) == (case[0] * case[3] * 4 <= case[2])
    if found.order is not None:
        assert_order(found)


@pytest.mark.parametrize("pairs", [1, 33, 200, 2048, 2049, 6000])
@pytest.mark.parametrize("held, tile_rows, places", [(1, 16, False), (5, 16, False), (5, 128, True), (130, 16, True)])
def test_sorts_pairs(
    pairs: int, held: int, tile_rows: int, places: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """places: as many pairs are sorted."""
    monkeypatch.setattr(kernels, "MIN_PLACED", 0 if places else 1 << 30)
    expert = torch.randint(-1, held, (pairs, 1), device=device).int()
    assert_order(kernels.sort_pairs(torch.ones(pairs, 1, device=device), expert, held, tile_rows))


def test_no_pairs_are_not_sorted(device: torch.device) -> None:
    found = kernels.sort_pairs(torch.ones(0, 2, device=device), torch.ones(0, 2, device=device).int(), 5, 16)
    assert found.order is not None and not found.order.numel()


RULES = {
    "softmax": Routing(3),
    "scaled": Routing(4, renormalise=True, scale=2.5),
    "sigmoid": Routing(3, "sigmoid", bias=True, renormalise=True, scale=3.0),
    "groups by their best": Routing(3, groups=3, top_groups=2, scale=2.0),
    "groups by their two best": Routing(5, "sigmoid", 3, 2, 2, bias=True, renormalise=True, scale=2.5),
    "every group": Routing(5, groups=3, top_groups=3),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_rules(rule: Routing, seed: int, device: torch.device) -> None:
    """Groups of 5 experts, no power of two; experts 4 … 11 are here; the last two rows are padding."""
    logits = torch.randn(9, 15, device=device) * 3
    bias = torch.randn(15, device=device) if rule.bias else None
    wanted_weight, wanted_expert = choose(logits[:7], rule, bias=bias)
    logits[7:] = NAN
    live = torch.tensor([7], dtype=torch.int32, device=device)
    whole, expert = kernels.choose(logits, rule, live, bias=bias)

    def dense(weight: Tensor, expert: Tensor) -> Tensor:
        return torch.zeros(7, 15, device=device).scatter_(1, expert.long(), weight)

    assert torch.allclose(dense(whole[:7], expert[:7]), dense(wanted_weight, wanted_expert), rtol=1e-5, atol=1e-6)
    assert torch.equal(expert[:7].sort().values, wanted_expert.sort().values.int()) and (expert[7:] == -1).all()
    weight, local = kernels.choose(logits, rule, live, 4, 8, bias)
    twin = definitions.route(logits.nan_to_num(), rule, 7, 4, 8, bias)
    assert torch.equal(local, twin[1]) and torch.allclose(weight[:7], twin[0][:7], rtol=1e-5, atol=1e-6)
    assert weight.isfinite().all()


@pytest.mark.parametrize("count, dtype, rule", [
    (1, torch.float32, RULES["softmax"]),
    (5, torch.float16 if INTERPRETED else torch.bfloat16, RULES["softmax"]),  # which interpreted is cut off
    (3, torch.float16, RULES["groups by their two best"]),
])  # fmt: skip
def test_logits_that_come_as_parts(count: int, dtype: torch.dtype, rule: Routing, device: torch.device) -> None:
    """Added in their order, then to a bias of 100, which rounds them away but for their last bits; then rounded."""
    torch.manual_seed(count)
    values, offset = 3 * torch.randn(count, 7, 15, device=device), 100 + torch.randn(15, device=device).to(dtype)
    total = values[0].clone()
    for part in values[1:]:
        total += part
    bias, live = torch.randn(15, device=device) if rule.bias else None, torch.tensor([6], device=device).int()
    values[:, 6:] = NAN
    wanted = kernels.choose((total + offset.float()).to(dtype), rule, live, bias=bias)
    found = kernels.choose(SplitKPartials(values, offset, dtype), rule, live, bias=bias)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine[:6], theirs[:6])
    assert (found[1][6:] == -1).all() and found[0].isfinite().all()
    with pytest.raises(ValueError, match="bias"):
        kernels.choose(SplitKPartials(values, offset[:4], dtype), rule, live)


@pytest.mark.parametrize("wide, offset", [(False, True), (True, False)])
def test_a_router_leaves_its_parts_to_the_rule(
    wide: bool, offset: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, dtype = Mesh(), torch.float16  # the interpreter multiplies no bfloat16
    router = Router(Builder(mesh, 0, dtype, device), "gate", 600, 15, Routing(3, wide=wide, offset=offset))
    for weight in router.parameters():
        torch.nn.init.normal_(weight)
    x = Hidden(torch.randn(5, 600, device=device).to(dtype), mesh.placement(Rows.WORLD), mesh, "x")
    with monkeypatch.context() as in_torch:
        in_torch.setattr(stream_ops, "on_gpu", lambda x: False)
        wanted = router.logits(x)
    monkeypatch.setattr(stream_ops, "on_gpu", lambda x: True)
    found = router.logits(x)
    assert isinstance(wanted, Tensor)
    assert isinstance(found, SplitKPartials) and found.dtype == wanted.dtype and (found.bias is router.offset)
    total = found.values.sum(0) + (0 if found.bias is None else found.bias.float())
    torch.testing.assert_close(total.to(found.dtype), wanted, rtol=2e-3, atol=2e-3)
    if device.type == "cuda" or not wide:  # of many rows a product of torch's, which CPUs do not have
        many = Hidden(x.value.repeat(13, 1), x.placement, mesh, "x")
        assert isinstance(router.logits(many), Tensor)


def test_equal_scores_go_to_the_lower_expert(device: torch.device) -> None:
    live, logits = torch.tensor([3], dtype=torch.int32, device=device), torch.zeros(3, 8, device=device)
    found = kernels.route(logits, Routing(3), live, 16)
    assert found.expert.tolist() == [[0, 1, 2]] * 3
    assert torch.allclose(found.weight, torch.tensor(1 / 8, device=device))
    assert kernels.choose(logits, Routing(3, groups=4, top_groups=2), live)[1].tolist() == [[0, 1, 2]] * 3


HALF = ("few pairs", "one kernel")
DEQUANTISED_FIRST = {"many pairs of an expert": (130, 125, 3, 2, 1, 1)}
"""Cases in which a kernel dequantises weights in MXFP4 before the experts' kernels; none of CASES is one."""


@pytest.mark.parametrize(
    "case, dtype",
    [
        *(pytest.param(case, torch.float32, id=name) for name, case in CASES.items()),
        *(pytest.param(CASES[name], torch.float16, id=f"{name}, float16") for name in HALF),
    ],
)
def test_experts(case: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    rows, live, held = case[0], case[1], case[5]
    found, weight, expert = routed(*case, device)
    width, inner = 40, 24  # no multiples of a tile's sides
    x = torch.randn(rows, width, device=device).to(dtype)
    x[live:] = NAN
    gate_up = (torch.randn(held, 2 * inner, width, device=device) / 4).to(dtype)
    down = (torch.randn(held, width, inner, device=device) / 4).to(dtype)
    gate_up[[e for e in range(held) if e not in expert.flatten().tolist()]] = NAN  # unchosen weights are not read
    out = torch.full((rows, width), NAN, dtype=dtype, device=device)
    tile = ExpertsTile(32, 32, 4, 2)
    fused_experts.experts(x, found, gate_up, down, out, tile, tile)
    wanted = definitions.experts(x.double(), weight, expert, gate_up.double(), down.double())
    assert (out.double() - wanted).norm() <= (2e-6 if dtype == torch.float32 else 3e-3) * wanted.norm()
    assert (out[(expert < 0).all(-1)] == 0).all()


@pytest.mark.parametrize(
    "case, dtype",
    [
        *(pytest.param(case, torch.float32, id=name) for name, case in CASES.items()),
        *(pytest.param(CASES[name], torch.float16, id=f"{name}, float16") for name in HALF),
        *(pytest.param(each, torch.float32, id=name) for name, each in DEQUANTISED_FIRST.items()),
    ],
)
@pytest.mark.parametrize("tile", [ExpertsTile(32, 32, 4, 2), ExpertsTile(16, 64, 4, 2)])
def test_experts_in_mxfp4(
    case: tuple[int, ...],
    dtype: torch.dtype,
    tile: ExpertsTile,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random bytes, powers of two from −6 to 1, and biases. Weights that are not chosen are huge."""
    rows, live, held = case[0], case[1], case[5]
    found, weight, expert = routed(*case, device)
    width, inner = 96, 160  # multiples of 32, and not of a tile's sides
    x = torch.randn(rows, width, device=device).to(dtype)
    x[live:] = NAN
    unchosen = [e for e in range(held) if e not in expert.flatten().tolist()]

    def weights(outputs: int, inputs: int) -> mxfp4.Mxfp4:
        values = torch.randint(256, (held, outputs, inputs // 2), device=device).byte()
        scales = torch.randint(121, 129, (held, outputs, inputs // 32), device=device).byte()
        scales[unchosen] = 240
        return mxfp4.Mxfp4(values, scales)

    gate_up, down = weights(2 * inner, width), weights(width, inner)
    biases = [torch.randn(held, n, device=device).to(dtype) for n in (2 * inner, width)]
    out, whole = torch.full((rows, width), NAN, dtype=dtype, device=device), Mock(wraps=mxfp4_tiles.dequantise)
    monkeypatch.setattr(mxfp4_tiles, "dequantise", whole)
    fused_experts.experts(x, found, gate_up, down, out, tile, tile, 7.0, 1.7, *biases)
    assert whole.call_count == 2 * (case in DEQUANTISED_FIRST.values())
    wide = [mxfp4.dequantise(part, torch.float64) for part in (gate_up, down)]
    wanted = definitions.experts(x.double(), weight, expert, *wide, 7.0, 1.7, *(each.double() for each in biases))
    assert (out.double() - wanted).norm() <= (2e-6 if dtype == torch.float32 else 3e-3) * wanted.norm()
    plain = torch.full_like(out, NAN)
    fused_experts.experts(
        x, found, *(mxfp4.dequantise(part, dtype) for part in (gate_up, down)), plain, tile, tile, 7.0, 1.7, *biases
    )
    assert torch.equal(out, plain), "the bits of dequantised weights"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantises_every_code_with_every_scale(dtype: torch.dtype, device: torch.device) -> None:
    """Bytes of two codes in each place of a block. Scales below 2 give subnormal numbers, which Triton's interpreter
    rounds to zero in bfloat16."""
    scales = (
        torch.arange(2 * (dtype == torch.bfloat16), mxfp4.GREATEST_SCALE + 1, device=device)
        .byte()[:, None, None]
        .expand(-1, 17, 16)
        .contiguous()
    )
    values = torch.arange(256, device=device).byte().repeat(len(scales), 17, 1)
    for at in range(17):
        values[:, at] = values[:, at].roll(at, -1)
    given = mxfp4.Mxfp4(values, scales)
    found = mxfp4_tiles.dequantise(given, dtype)
    assert torch.equal(found, mxfp4.dequantise(given, dtype)) and found.unique().numel() > 15


@pytest.mark.parametrize("limit, alpha, biased", [(0.5, None, False), (0.5, 1.7, True), (None, None, True)])
@pytest.mark.parametrize("case", ["few pairs", "one kernel"])
def test_experts_with_limits_and_biases_and_a_shared_one(
    case: str, limit: float | None, alpha: float | None, biased: bool, device: torch.device
) -> None:
    rows, _, held = CASES[case][0], CASES[case][1], CASES[case][5]
    found, weight, expert = routed(*CASES[case], device)
    width, inner = 40, 24
    x = torch.randn(rows, width, device=device)
    gate_up, down = (
        torch.randn(held, 2 * inner, width, device=device) / 4,
        torch.randn(held, width, inner, device=device),
    )
    biases = [torch.randn(held, n, device=device) if biased else None for n in (2 * inner, width)]
    tile = ExpertsTile(32, 32, 4, 2)
    shared = torch.randn_like(x)
    out = fused_experts.experts(x, found, gate_up, down, shared.clone(), tile, tile, limit, alpha, *biases, add=True)
    wide = [None if b is None else b.double() for b in biases]
    wanted = (
        definitions.experts(x.double(), weight, expert, gate_up.double(), down.double(), limit, alpha, *wide) + shared
    )
    assert (out.double() - wanted).norm() <= 2e-6 * wanted.norm()


def test_a_tile_has_twice_the_rows_that_an_expert_has() -> None:
    """Tiles of Qwen3-30B-A3B, DeepSeek-V2-Lite, Qwen3.5-35B-A3B and GPT-OSS-20B are the fastest ones on an H200."""
    for k, experts, wanted in (
        (8, 128, [16, 16, 16, 32, 64, 128]),
        (6, 64, [16, 16, 32, 64, 64, 128]),
        (8, 256, [16, 16, 16, 16, 32, 128]),
        (4, 32, [16, 16, 32, 64, 64, 128]),
    ):
        rows = (1, 64, 128, 256, 512, 1024)
        assert [tile_rows_of(n, n * k, experts) for n in rows] == wanted


RAGGED = {
    "counts about a half and a whole tile": ([1, 64, 65, 0, 127, 129, 0], 3, "plain"),
    "one expert has all rows, and a shared one": ([0, 0, 200, 0], 1, "shared"),
    "no expert has a row": ([0, 0], 2, "plain"),
}
"""(pairs of each expert, experts of a token, form)."""


def routed_to(counts: list[int], k: int, elsewhere: int, device: torch.device) -> kernels.Routing:
    """So many pairs for each expert, `elsewhere` for others, in any order, in the tiles of many rows; the last rows
    are padding."""
    expert = torch.tensor([e for e, n in enumerate(counts) for _ in range(n)] + [-1] * elsewhere)
    expert = expert[torch.randperm(len(expert))]
    expert = torch.cat((expert, torch.full((3 * k - len(expert) % k,), -1))).view(-1, k).int().to(device)
    return kernels.sort_pairs(torch.rand(expert.shape, device=device), expert, len(counts), 128)


@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED.keys())
def test_experts_of_prompts(case: tuple[list[int], int, str], device: torch.device) -> None:
    """Loads by descriptors give the bits of the kernels that load by pointers. No row without a pair is read."""
    counts, k, form = case
    found = routed_to(counts, k, 50, device)
    assert_order(found)
    rows, held, width, inner, dtype = len(found.expert), len(counts), 40, 136, torch.float16
    x = torch.randn(rows, width, device=device).to(dtype)
    x[(found.expert < 0).all(-1)] = NAN
    gate_up = (torch.randn(held, 2 * inner, width, device=device) / 4).to(dtype)
    down = (torch.randn(held, width, inner, device=device) / 4).to(dtype)
    gate_up[[not n for n in counts]] = NAN
    shared = torch.randn(rows, width, device=device).to(dtype) if form == "shared" else None
    assert prompt_experts.takes(x, found, gate_up, down)

    def run(*tiles: ExpertsTile) -> Tensor:
        out = torch.full_like(x, NAN) if shared is None else shared.clone()
        return fused_experts.experts(x, found, gate_up, down, out, *tiles, add=shared is not None)

    out = run()
    wanted = definitions.experts(x.double(), found.weight, found.expert, gate_up.double(), down.double())
    wanted = wanted if shared is None else wanted + shared
    assert (out.double() - wanted).norm() <= 3e-3 * wanted.norm()
    assert torch.equal(out, run(prompt_experts.UP_TILE, prompt_experts.DOWN_TILE))


@pytest.mark.parametrize("more", ["biases", "limit"])
def test_experts_with_biases_or_limits_keep_their_kernels(
    more: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in prompts: by descriptors their last bits would depend on the size of the step."""
    monkeypatch.setattr(prompt_experts, "pairs_outputs", lambda *args: pytest.fail("loaded by descriptors"))
    found, dtype = routed_to([64, 0, 65], 1, 50, device), torch.float16
    x, gate_up = torch.randn(len(found.expert), 40, device=device), torch.randn(3, 2 * 24, 40, device=device)
    down = torch.randn(3, 40, 24, device=device)
    biases = [torch.zeros(3, n, dtype=dtype, device=device) if more == "biases" else None for n in (48, 40)]
    limit, out = 0.5 if more == "limit" else None, torch.empty_like(x, dtype=dtype)
    fused_experts.experts(x.to(dtype), found, gate_up.to(dtype), down.to(dtype), out, None, None, limit, None, *biases)


def test_a_token_has_the_same_bits_in_any_company(device: torch.device) -> None:
    live = torch.tensor([12], dtype=torch.int32, device=device)
    logits, x = torch.randn(12, 4, device=device), torch.randn(12, 32, device=device)
    gate_up, down = torch.randn(4, 64, 32, device=device), torch.randn(4, 32, 32, device=device)
    moved = torch.randperm(12, device=device)

    def run(logits: Tensor, x: Tensor) -> Tensor:
        chosen = kernels.route(logits, Routing(2, renormalise=True), live, 16)
        return fused_experts.experts(x, chosen, gate_up, down, torch.empty_like(x))

    assert torch.equal(run(logits[moved], x[moved]), run(logits, x)[moved])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    found, _, _ = routed(2, 2, 8, 2, 0, 8, device)
    x, out = torch.randn(2, 32, device=device), torch.empty(2, 32, device=device)
    gate_up, down = torch.randn(8, 64, 32, device=device), torch.randn(8, 32, 32, device=device)
    with pytest.raises(ValueError, match="gate_up"):
        fused_experts.experts(x, found, gate_up[:, :32], down, out)
    with pytest.raises(ValueError, match="must be alike"):
        fused_experts.experts(x, found, gate_up.half(), down, out)
    with pytest.raises(ValueError, match="contiguous"):
        fused_experts.experts(x, found, gate_up.transpose(1, 2).contiguous().transpose(1, 2), down, out)


def test_a_block_of_experts_is_that_of_a_cpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Router, routed experts and a shared one behind a gate, as models call them on GPUs."""
    b = Builder(mesh := Mesh(), 0, torch.float32, torch.device("cpu"))
    block = SparseMoE(b, "mlp", 32, MoEConfig(15, 16, RULES["sigmoid"], shared=24))
    torch.manual_seed(1)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    x = Hidden(torch.randn(3, 32), mesh.placement(Rows.WORLD), mesh, "x")
    wanted = block(x)
    block, x = block.to(device), replace(x, value=x.value.to(device))
    monkeypatch.setattr(stream_ops, "on_gpu", lambda x: True)
    found = block(x)
    assert found.placement == wanted.placement
    assert torch.allclose(found.value.cpu(), wanted.value, rtol=1e-4, atol=1e-5)
    with pytest.raises(PlacementError, match=r"cannot add .* to mlp\.experts"):
        block.experts(x, block.router, lambda: replace(found, placement=Placement(Rows.WORLD, owes="ep")))


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("by_kernels", [True, False])
def test_a_shared_experts_result_is_not_touched_before_the_wait(
    rows: int, by_kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = Builder(mesh := Mesh(), 0, torch.float32, torch.device("cpu"))
    block = SparseMoE(b, "mlp", 32, MoEConfig(15, 16, RULES["sigmoid"], shared=24, shared_gate=False)).to(device)
    torch.manual_seed(1)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    x = Hidden(torch.randn(rows, 32, device=device), mesh.placement(Rows.WORLD), mesh, "x")
    monkeypatch.setattr(stream_ops, "on_gpu", lambda x: by_kernels)
    wanted, waits = block(x).value, []

    def late(function: Callable[[], Hidden], like: Tensor) -> tuple[Hidden, Callable[[], None]]:
        made = function()
        value = made.value.clone()
        made.value.fill_(NAN)

        def wait() -> None:
            waits.append(made.value.copy_(value))

        return made, wait

    monkeypatch.setattr(moe, "on_side_stream", late)
    assert torch.equal(block(x).value, wanted) and len(waits) == 1


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_what_runs_beside_is_captured(device: torch.device) -> None:
    """A branch of a graph is over where its result is read, also when the graph is replayed again and again."""
    weights = torch.randn(3, 2048, 2048, device=device, dtype=torch.bfloat16) / 45
    x = torch.randn(4, 2048, device=device, dtype=torch.bfloat16)

    def step(apart: bool) -> Tensor:
        left = x
        for _ in range(20):
            here = left

            def branch(here: Tensor = here) -> Tensor:
                return ops.linear(ops.linear(here, weights[0]), weights[1])

            right, wait = on_side_stream(branch, here) if apart else (branch(), lambda: None)
            left = ops.linear(here, weights[2])
            wait()
            left = (left + right) / 2
        return left

    wanted, graph = step(False), torch.cuda.CUDAGraph()
    assert torch.equal(step(True), wanted)
    with torch.cuda.graph(graph):
        found = step(True)
    for _ in range(50):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(found, step(False))


def test_what_a_router_chose_before_rows_travelled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits equal a choice where the rows arrive. Rows behind the live ones hold anything."""
    b = Builder(mesh := Mesh(), 0, torch.float32, torch.device("cpu"))
    block = SparseMoE(b, "mlp", 32, MoEConfig(15, 16, RULES["sigmoid"])).to(device)
    torch.manual_seed(1)
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    live = torch.tensor([3], dtype=torch.int32, device=device)
    x = Hidden(torch.randn(5, 32, device=device), mesh.placement(Rows.WORLD), mesh, "x", ReadInfo(None, live))
    monkeypatch.setattr(stream_ops, "on_gpu", lambda x: True)
    wanted = block(x)
    weight, expert = block.router.choose(x)
    weight[3:], expert[3:] = float("nan"), torch.randint_like(expert[3:], -(1 << 20), 1 << 20)
    expert[3, 0] = 1
    extra = torch.cat((weight.view(torch.int32), expert), dim=1)
    found = block(replace(x, given=ReadInfo(None, live, extra)))
    assert found.placement == wanted.placement and torch.equal(found.value[:3], wanted.value[:3])
    assert not found.value[3:].any(), "padding goes to no expert"
