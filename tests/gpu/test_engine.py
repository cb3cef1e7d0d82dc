"""The engine on GPUs: the embedded model's greedy answers on every layout that fits, by graphs and eagerly."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_model

from engine.conftest import byte_tokenizer
from engine.test_engine import prompts
from engine.test_families import PLUGIN, small_hybrid
from engine.test_hybrids import SIZES
from models.oss import small_gpt_oss
from models.qwen35 import small_qwen35
from models.stepfun import small_step
from speculation.eagle3 import make_head
from speculation.toy import FixedPrices, Toy
from weft.engine.assets import embedded_model_dir
from weft.engine.attention.backend_registry import fa3_library
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.controller.startup import resolve_defaults
from weft.engine.kv.tokens import token_array
from weft.engine.messages.rank_messages import GroupRows, Step
from weft.engine.messages.request import SamplingParams, Sequence
from weft.engine.scheduler.draft_rows import make_speculation
from weft.engine.scheduler.scheduled import Scheduled
from weft.engine.scheduler.scheduler import drafts_asked, make_schedulers
from weft.engine.speculation import drafting
from weft.engine.speculation.draft_prices import Price
from weft.engine.speculation.drafting import Speculation
from weft.engine.worker.draft_chain import DraftChain
from weft.engine.worker.graph_inputs import Shape
from weft.engine.worker.open_transports import cost_model, lacks_cost_table, open_transports
from weft.engine.worker.step_graphs import StepGraphs
from weft.engine.worker.worker import Finish, Worker
from weft.planner.chain import Counts
from weft.planner.spec import LayoutError
from weft_bench import word_problems

GPUS = torch.cuda.device_count()
LAYOUTS: dict[str, dict[str, Any]] = {
    "1x1": dict(),
    "1x2": dict(attn_tp=2, ep=2),
    "1x2 split": dict(attn_tp=2, ep=2, split_vocabulary="on"),
    "2x1": dict(attn_dp=2, ep=2),
    "1x2 nccl": dict(attn_tp=2, ep=2, transport="nccl"),
    "2x1 nccl": dict(attn_dp=2, ep=2, transport="nccl"),
    "2x1 dispatch": dict(attn_dp=2, ep=2, moe_exchange="dispatch", transport="peer"),
    "2x2": dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2),
    "2x2 ep": dict(attn_dp=2, attn_tp=2, ep=4),
    "2x2 nccl": dict(attn_dp=2, attn_tp=2, ep=4, transport="nccl"),
}
PROBLEMS = word_problems.generate("heldout", 12, seed=7)
GREEDY = SamplingParams(max_tokens=60, temperature=0.0)


def outputs(device: str, **options: Any) -> list[tuple[int, ...]]:
    """The tokens of every problem: all at once, of prompts of several lengths, with ends at several steps."""
    values = dict(max_running=8, kv_tokens=4096, max_model_len=256, max_batch_tokens=512)  # few graphs, to save time
    config = EngineConfig(dtype="float32", device=device, **values | options)
    with Engine(config) as engine:
        found = [result.token_ids for result in engine.generate(prompts_of(engine), GREEDY)]
        engine.check_idle()
    return found


def prompts_of(engine: Engine) -> list[list[int]]:
    """The prompts of all problems."""
    template = engine.tokenizer.apply_chat_template
    asked = (word_problems.prompt(problem.question) for problem in PROBLEMS)
    return [template(each, add_generation_prompt=True, return_dict=False) for each in asked]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    return outputs("cpu")


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_outputs_are_those_of_a_cpu(name: str, graphs: bool, expected: list[tuple[int, ...]]) -> None:
    layout = LAYOUTS[name]
    world = layout.get("attn_dp", 1) * layout.get("attn_tp", 1)
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs; this machine has {GPUS}")
    if not graphs and name not in ("1x1", "2x1", "1x2 split"):
        pytest.skip("eager steps run in three layouts, to save time")
    if layout.get("moe_exchange") == "dispatch" and lacks_cost_table(EngineConfig(device="cuda", **layout)):
        pytest.skip("what dispatch takes must be measured first: weft tune --device cuda")
    assert outputs("cuda", cuda_graphs=graphs, **layout) == expected


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["1x1", "1x2", "1x2 split", "2x1"])
def test_drafts_change_no_token(name: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafts in three are right, with every kind of parameters, next to prompts and with preemption."""
    layout = LAYOUTS[name]
    if layout.get("attn_dp", 1) * layout.get("attn_tp", 1) > GPUS or (not graphs and name != "1x1"):
        pytest.skip(f"needs two of {GPUS} GPUs, or runs in one layout, to save time")
    seeded = SamplingParams(max_tokens=40, temperature=2.0, min_p=0.02, seed=5, ignore_eos=True)
    hows = [GREEDY, seeded, replace(seeded, top_p=0.9, top_k=30), replace(GREEDY, repetition_penalty=1.2)]
    samples = random.Random(2)
    asked = [[samples.randrange(5, 900) for _ in range(samples.randrange(1, 40))] for _ in range(9)]
    sizes = dict(page_size=4, max_model_len=128, kv_tokens=200, max_running=4, max_batch_tokens=64, cuda_graphs=graphs)
    values = dict(dtype="float32", device="cuda", **sizes, **layout)
    with Engine(EngineConfig(**values)) as engine:
        plain = [[r.token_ids for r in engine.generate(asked, params)] for params in hows]
    recorded = [[*prompt, *tokens] for each in plain for prompt, tokens in zip(asked, each, strict=True)]
    Toy(recorded, 0.67).use(monkeypatch)
    with Engine(EngineConfig(speculative="ngram", **values)) as engine:
        for params, tokens in zip(hows, plain, strict=True):
            assert [r.token_ids for r in engine.generate(asked, params)] == tokens
        stats = engine.stats()
        assert stats.failures == 0 and stats.preemptions and 0 < sum(stats.accepted) < sum(stats.drafted)
        engine.check_idle()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("source", ["mtp", "eagle3", "draft"])
@pytest.mark.parametrize("name", ["1x1", "1x2", "2x1"])
def test_drafts_of_ranks(
    name: str,
    source: str,
    graphs: bool,
    expected: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are accepted as often at each position as on a CPU, and outputs stay the same; with pauses too."""
    layout = LAYOUTS[name]
    if layout.get("attn_dp", 1) * layout.get("attn_tp", 1) > GPUS or (not graphs and name != "1x1"):
        pytest.skip(f"needs two of {GPUS} GPUs, or runs in one layout, to save time")
    options: dict[str, Any] = dict(speculative=source)
    if source == "eagle3":
        options["draft_model"] = make_head(tmp_path / "head", embedded_model_dir())
    elif source == "draft":
        options["draft_model"] = embedded_model_dir()
    monkeypatch.setattr(drafting, "StepPrices", FixedPrices)
    monkeypatch.setattr(drafting, "MIN_PAUSE", 8)
    monkeypatch.setattr(drafting, "PROBED", 1e9)  # however much drafts cost
    values = dict(max_running=8, kv_tokens=4096, max_model_len=256, max_batch_tokens=512, dtype="float32")
    found = []
    for device in ("cpu", "cuda"):
        more = layout | dict(cuda_graphs=graphs) if device == "cuda" else dict[str, Any]()
        with Engine(EngineConfig(device=device, **values | options | more)) as engine:
            asked = prompts_of(engine)
            for value, params in ((-1e-3, GREEDY), (50.0, replace(GREEDY, max_tokens=30))):
                monkeypatch.setattr(FixedPrices, "value", Price(max(0.0, value), value))
                one_by_one = [engine.generate([prompt], params)[0].token_ids for prompt in asked[:4]]
                found.append((one_by_one, engine.stats().drafted, engine.stats().accepted))
            if device == "cuda":
                assert [result.token_ids for result in engine.generate(asked, GREEDY)] == expected
            assert engine.stats().failures == 0
            engine.check_idle()
    assert found[:2] == found[2:] and found[0][0] == expected[:4] and 0 < sum(found[0][1]) < sum(found[1][1])


@pytest.mark.parametrize("name", ["1x1", "1x2", "1x2 split", "2x1"])
def test_tokens_are_those_of_steps_one_by_one(name: str) -> None:
    """Greedy, drawn at random, cut to the likeliest, with penalties; alone, in company, and where pages run out."""
    layout = LAYOUTS[name]
    if layout.get("attn_dp", 1) * layout.get("attn_tp", 1) > GPUS:
        pytest.skip(f"this machine has {GPUS} GPUs")
    seeded = SamplingParams(max_tokens=40, temperature=2.0, min_p=0.02, seed=5, ignore_eos=True)
    hows = [GREEDY, seeded, replace(seeded, top_p=0.9, top_k=30), replace(GREEDY, repetition_penalty=1.2)]
    samples = random.Random(1)
    asked = [[samples.randrange(5, 900) for _ in range(samples.randrange(1, 40))] for _ in range(9)]
    values = dict(dtype="float32", device="cuda", page_size=4, max_model_len=128, **layout)
    found = []
    for changes in (dict(overlap=False), dict(), dict(max_running=3, kv_tokens=160, max_batch_tokens=16)):
        with Engine(
            EngineConfig(**values | dict(kv_tokens=4096, max_running=16, max_batch_tokens=256) | changes)
        ) as engine:
            got = [[r.token_ids for r in engine.generate(asked, params)] for params in hows]
            alone = [engine.generate(asked[3:4], params)[0].token_ids for params in hows]
            assert alone == [each[3] for each in got] and engine.stats().failures == 0
            found.append(got)
            engine.check_idle()
    assert found[1] == found[0]
    assert found[2] == found[0]


def solved(backend: str, **options: Any) -> int:
    """Return the number of 40 word problems that the embedded model solves in bfloat16."""
    problems = word_problems.generate("heldout", 40, seed=9)
    values = dict(dtype="bfloat16", device="cuda", kv_tokens=8192, max_model_len=256, max_running=16)
    with Engine(EngineConfig(attention_backend=backend, **values | options)) as engine:
        asked = [
            engine.tokenizer.apply_chat_template(
                word_problems.prompt(p.question), add_generation_prompt=True, return_dict=False
            )
            for p in problems
        ]
        texts = [result.text for result in engine.generate(asked, GREEDY)]
        assert engine.config.attention_backend == backend and engine.stats().failures == 0
    return sum(word_problems.extract(text) == p.answer for text, p in zip(texts, problems, strict=True))


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize(
    ("backend", "graphs"), [("fa3", True), ("fa3", False), ("fa3+triton", True)], ids=["graphs", "eager", "mixed"]
)
def test_word_problems_by_flash_attention_3(backend: str, graphs: bool) -> None:
    """The number solved differs from Triton's by at most one: in bfloat16 bits differ, and seldom a token."""
    if fa3_library() is None or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("takes a Hopper GPU, and vLLM or sglang-kernel")
    assert abs(solved(backend, cuda_graphs=graphs) - solved("triton", cuda_graphs=graphs)) <= 1


def long_outputs(**options: Any) -> list[tuple[int, ...]]:
    """Return the outputs of prompts of many lengths, cut into chunks or several in a step, next to answers."""
    samples = random.Random(2)
    lengths = [1, 2, 63, 64, 65, 130, 300, 511, 700, 900, 33, 500, 1, 250]
    asked = [[samples.randrange(5, 900) for _ in range(n)] for n in lengths]
    values = dict(dtype="float32", device="cuda", max_running=6, max_batch_tokens=600)
    with Engine(EngineConfig(**values | options)) as engine:
        found = [result.token_ids for result in engine.generate(asked, replace(GREEDY, max_tokens=20))]
        engine.check_idle()
    return found


@pytest.fixture(scope="module")
def long_expected() -> list[tuple[int, ...]]:
    return long_outputs(cuda_graphs=False)


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("name", ["1x1", "1x2", "2x1"])
def test_long_prompts_in_graphs(name: str, long_expected: list[tuple[int, ...]]) -> None:
    layout = LAYOUTS[name]
    if layout.get("attn_dp", 1) * layout.get("attn_tp", 1) > GPUS:
        pytest.skip(f"this machine has {GPUS} GPUs")
    assert long_outputs(**layout) == long_expected


def small_latent(directory: Path) -> None:
    small_model("deepseek_v2", 4, directory, seed=3, vocab_size=257, max_position_embeddings=256, num_hidden_layers=2)


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("latent")
    small_latent(directory)
    byte_tokenizer(directory)
    return directory


def greedy_of(model: Path, device: str, **options: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    values = dict(model=model, dtype="float32", kv_tokens=1024, max_running=8, max_batch_tokens=32)
    with Engine(EngineConfig(device=device, **values | options)) as engine:
        found = [result.token_ids for result in engine.generate(prompts(), params)]
        engine.check_idle()
    return found


@pytest.fixture(scope="module")
def latent_expected(latent_model: Path) -> list[tuple[int, ...]]:
    return greedy_of(latent_model, "cpu")


SCATTERED = {
    "graphs": dict(),
    "eager": dict(cuda_graphs=False, dcp_interleave=1, dcp_exchange="ag_rs"),
    "nccl": dict(transport="nccl", dcp_interleave=4),
    "a2a": dict(transport="peer", page_size=4, dcp_exchange="a2a"),
    "merged prompts": dict(dcp_prefill="merge"),
    "four ranks": dict(attn_tp=4, ep=4, dcp=4),
    "four ranks, merged prompts": dict(attn_tp=4, ep=2, moe_tp=2, dcp=4, dcp_prefill="merge"),
    "four ranks, two of them share tokens": dict(attn_tp=4, ep=4, dcp=2, dcp_interleave=4),
    "merged prompts, eager": dict(dcp_prefill="merge", cuda_graphs=False, dcp_interleave=1, dcp_query="replicate"),
}


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("options", SCATTERED.values(), ids=SCATTERED)
def test_sharded_tokens_give_the_same_outputs(
    options: dict[str, Any], latent_model: Path, latent_expected: list[tuple[int, ...]]
) -> None:
    """Decode context parallelism over a latent cache: prompts and their chunks are gathered or merged."""
    options = dict(attn_tp=2, ep=2, dcp=2) | options
    if options["attn_tp"] > GPUS:
        pytest.skip(f"takes {options['attn_tp']} GPUs; this machine has {GPUS}")
    assert greedy_of(latent_model, "cuda", **options) == latent_expected


FAMILIES: dict[str, Callable[[Path], Any]] = {
    "latents, windows, states": small_hybrid,
    "latent keys": small_latent,
    "windows": lambda directory: small_step(directory, seed=3, **SIZES),
    "windows and sinks": lambda directory: small_gpt_oss(directory, seed=3, **SIZES),
    "gated delta rule": lambda directory: small_qwen35(directory, seed=3, **SIZES),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """A model, and a CPU's answers."""
    directory = tmp_path_factory.mktemp("family")
    FAMILIES[request.param](directory)
    byte_tokenizer(directory)
    return directory, greedy_of(directory, "cpu", plugins=(PLUGIN,))


@pytest.mark.parametrize("name", ["1x1", "1x2"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_caches_of_every_kind(family: tuple[Path, list[tuple[int, ...]]], name: str, graphs: bool) -> None:
    """Windows, sinks and recurrent states, by graphs and without."""
    if LAYOUTS[name].get("attn_tp", 1) > GPUS:
        pytest.skip(f"this machine has {GPUS} GPUs")
    directory, wanted = family
    options = dict(plugins=(PLUGIN,), cuda_graphs=graphs, page_size=4, **LAYOUTS[name])
    assert greedy_of(directory, "cuda", **options) == wanted


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_steps_wait_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's steps, begun one ahead of their tokens, with prompts among them, one of which is cut into chunks: torch
    raises where the host would wait for the device. All are graphs."""
    sizes = dict(max_running=6, page_size=4, kv_tokens=1024, max_model_len=256, max_batch_tokens=100)
    config = resolve_defaults(EngineConfig(device="cuda", **sizes))
    worker = Worker(config, open_transports(config, 0, tmp_path), cost_model(config), lambda message: None)
    [scheduler] = make_schedulers(config, worker.groups)
    hows = [GREEDY, SamplingParams(temperature=2.0, min_p=0.1), SamplingParams(temperature=2.0, top_p=0.9, top_k=40)]
    in_flight: deque[tuple[Scheduled, Finish]] = deque()
    shapes: list[Shape] = []
    replay = StepGraphs.replay

    def seen(graphs: StepGraphs, shape: Shape, news: GroupRows, counts: Counts) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(shape)
        return replay(graphs, shape, news, counts)

    monkeypatch.setattr(StepGraphs, "replay", seen)

    def add(request: int, length: int) -> None:
        prompt, params = [5 + request] * length, hows[request % 3]
        scheduler.add(Sequence(request, token_array(prompt), length, params, 3, 60, frozenset()))

    @torch.inference_mode()
    def step(number: int) -> None:
        scheduled = scheduler.schedule()
        in_flight.append((scheduled, worker.step(Step(number, (scheduled.rows,)))))
        if len(in_flight) > 1:
            before, finish = in_flight.popleft()
            for sequence, token, _ in before.take_tokens(finish()):
                sequence.tokens.append(token)

    for request in range(3):
        add(request, 7 + request)
    for number in range(4):  # the first of every kernel that is loaded when it is first used
        step(number)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(4, 44):
            for request, length in {7: ((3, 180),), 20: ((4, 1), (5, 40))}.get(number, ()):
                add(request, length)
            step(number)
            assert len(in_flight[0][0].rows.decode_rows) >= 3
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(shapes) == 44 and {100, 64, 6, 4} <= {shape.rows for shape in shapes}
    assert sum(shape.prompts for shape in shapes) == 4, "the first, two chunks, and two at once"
    assert [len(s.tokens) - s.prompt_tokens for s in scheduler.running] == [43, 43, 43, 35, 23, 23]
    assert all(min(s.tokens) >= 0 for s in scheduler.running)


SERVED: dict[str, Callable[[Path], Any]] = {"weft": lambda directory: None} | FAMILIES


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SERVED)
@torch.inference_mode()
def test_no_kernel_is_compiled_while_requests_are_served(
    name: str, dtype: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of ragged lengths come one after the other and many at once, with answers among them."""
    if not graphs and name != "weft":
        pytest.skip("eager steps of one model, to save time")
    if "latents" in name and dtype != "float32":
        pytest.skip("the plugin's model is of float32 alone")
    from triton import knobs  # a CPU need not have it

    shape = dict(max_running=40, page_size=4, kv_tokens=8192, max_batch_tokens=1100, dtype=dtype, cuda_graphs=graphs)
    shape |= dict(plugins=(PLUGIN,))
    if name != "weft":
        SERVED[name](tmp_path)
        byte_tokenizer(tmp_path)
        shape |= dict(model=tmp_path)
    config = resolve_defaults(EngineConfig(device="cuda", **shape))
    worker = Worker(config, open_transports(config, 0, tmp_path), cost_model(config), lambda message: None)
    [scheduler] = make_schedulers(config, worker.groups)
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))
    samples = random.Random(3)
    lengths = [samples.choice([1, 2, 3, 5, 9, 17, 40, 90, 200]) + samples.randrange(8) for _ in range(120)]
    arrivals = [1, 1, 1, 2, 5, 1, 40, 1, 1, 3, 12, 1, 30, 1, 1, 19]
    for number in range(2000):
        for _ in range(arrivals[number // 4] if number % 4 == 0 and number // 4 < len(arrivals) else 0):
            params = SamplingParams(temperature=2.0, min_p=samples.choice([0.0, 0.1]), top_k=samples.choice([0, 0, 9]))
            prompt = [samples.randrange(1, 250) for _ in range(lengths.pop())]
            count = samples.randrange(1, 30)
            scheduler.add(Sequence(len(lengths), token_array(prompt), len(prompt), params, 3, count, frozenset()))
        scheduled = scheduler.schedule()
        if not scheduled.rows.count:
            if not lengths:
                break
            continue
        for sequence, token, _ in scheduled.take_tokens(worker.step(Step(number, (scheduled.rows,)))()):
            sequence.tokens.append(token)
            if len(sequence.tokens) == sequence.prompt_tokens + sequence.max_tokens:
                scheduler.finish(sequence)
    assert not lengths and number < 1999, "all were served"
    scheduler.check_idle()
    assert not compiled, "\n".join(compiled)


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@torch.inference_mode()
def test_no_kernel_is_compiled_while_drafts_pause(
    graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a pause has delayed run at once, and are more than a step has sequences."""
    from triton import knobs

    shape = dict(max_running=16, page_size=4, kv_tokens=8192, max_batch_tokens=1100, cuda_graphs=graphs)
    config = resolve_defaults(EngineConfig(device="cuda", dtype="bfloat16", speculative="mtp", **shape))
    worker = Worker(config, open_transports(config, 0, tmp_path), cost_model(config), lambda message: None)

    def planned(speculation: Speculation, running: list[Sequence], step: int) -> int:
        for sequence in running:
            assert sequence.drafting
            sequence.drafting.count = 3 * (step % 50 > 40)
        return 3 * (step % 50 > 40)

    monkeypatch.setattr("weft.engine.scheduler.scheduler.plan_drafts", planned)
    [scheduler] = make_schedulers(config, worker.groups, drafts=make_speculation(config))
    passes, compiled, run = set[Counts](), list[str](), DraftChain._pass
    noting = lambda chain, counts, *rest: (passes.add(counts), run(chain, counts, *rest))[1]  # noqa: E731
    monkeypatch.setattr(DraftChain, "_pass", noting)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(what["repr"]))
    for number in range(16):
        params = SamplingParams(temperature=2.0, min_p=0.1 * (number % 2))
        scheduler.add(Sequence(number, token_array([9] * (9 + number)), 9 + number, params, 3, 200, frozenset()))
    for number in range(1, 400):
        scheduled = scheduler.schedule()
        if not scheduled.rows.count:
            break
        step = Step(number, (scheduled.rows,), *drafts_asked([scheduler]))
        for sequence, token, _ in scheduled.take_tokens(worker.step(step)()):
            sequence.tokens.append(token)
            if len(sequence.tokens) == sequence.prompt_tokens + sequence.max_tokens:
                scheduler.finish(sequence)
    assert number < 399 and scheduler.speculation and sum(scheduler.speculation.drafted) > 500
    assert max(max(counts) for counts in passes) > 500
    assert not compiled, "\n".join(compiled)


def test_more_ranks_than_gpus_are_refused_in_one_line() -> None:
    ranks = 8 if GPUS < 8 else 16
    few = f"the layout has {ranks} ranks, a GPU each, and this machine has {GPUS}"
    with pytest.raises(LayoutError, match=few if GPUS else "ranks are to run on GPUs, but "):
        Engine(EngineConfig(device="cuda", attn_dp=ranks, ep=ranks))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(device="cpu", transport="peer"), "transport peer runs on GPUs only"),
        (dict(device="cpu", transport="nccl"), "transport nccl runs on GPUs only"),
    ],
)
def test_a_transport_of_the_other_kind_of_device_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        Engine(EngineConfig(**options))
