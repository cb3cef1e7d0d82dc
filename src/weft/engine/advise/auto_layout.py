"""Layout of a server that names none: the best by kept times of steps, else the cheapest by the cost table."""

from __future__ import annotations

from weft.engine.advise.advice import advise
from weft.engine.advise.candidates import Candidate, ClientLoad, choose_ranks, find_candidates, no_layout
from weft.engine.advise.measure import kept_loads
from weft.engine.advise.step_prices import decode_price
from weft.engine.config.config import EngineConfig
from weft.engine.controller.startup import context_tokens, read_model
from weft.planner.spec import LayoutError
from weft.tune.step_table import StepShape


def choose_layout(config: EngineConfig) -> tuple[EngineConfig, str]:
    """Return a server's configuration with a layout for this host, and the layout and the reason in one line.

    Everything else stays, and so do sizes of a layout that are not the defaults. The load is the one of the kept times,
    else `ClientLoad`'s defaults. Raises ModelError, and LayoutError if no layout starts.
    """
    if config.mesh.hosts > 1:
        raise LayoutError("--layout auto chooses for one host; name a layout of several: --attn-tp, --attn-dp")
    ranks, _ = choose_ranks(None, config.device)
    half = context_tokens(config, read_model(config)) // 2
    load = ClientLoad(min(ClientLoad.input_len, half), min(ClientLoad.output_len, half))
    candidates, refused = find_candidates(config, ranks, load, kv_dtypes=(config.kv_dtype,), one_server=True)
    if not candidates:
        raise no_layout(ranks, refused)
    loads, stale = kept_loads(candidates)
    for load in (each for each in loads if each.tokens <= 2 * half):
        found = advise(config, ranks, load, kv_dtypes=(config.kv_dtype,), one_server=True).predictions
        if found:
            best = found[0]
            return best.candidate.given, f"layout {best.candidate}, for {load.text}: {best.text} (measured steps)"
    best_us, chosen = min(((_price(each, load), each) for each in candidates), key=lambda pair: pair[0])
    why = f"the least of {len(candidates)} layouts; {stale or 'no steps are measured here'}: run weft advise once"
    return chosen.given, f"layout {chosen}, for {load.text}: a decode step is priced {best_us / 1e3:.2f} ms, {why}"


def _price(candidate: Candidate, load: ClientLoad) -> float:
    rows, threads = -(-load.concurrency // candidate.config.attn_dp), candidate.config.threads
    shape = StepShape(rows, load.input_len + load.output_len / 2)
    return decode_price(candidate.footprint, candidate.planner, shape, 1 if threads == "auto" else threads)
