"""`weft advise`."""

from __future__ import annotations

import gc
import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

import tyro

from weft.planner.cost import cache_folder
from weft.serve.cli.command import (
    EngineArguments,
    ModelDir,
    SourceOptions,
    UserError,
    engine_config,
    stop_on_sigterm,
    user_errors,
)
from weft.serve.cli.other_engines import command_of
from weft.serve.cli.progress import shown_progress


@dataclass(frozen=True)
class Command:
    """Choose a layout for a model on this host under a load, and say how sure the choice is.

    Every layout that starts runs made-up steps of the load for some seconds; its times are kept. The load is then
    simulated by the engine's own scheduler on these times, and on the HTTP server's. The time of clients is not in it.
    For a layout that exceeds a limit, shorter steps are tried too (--mixed-batch-tokens of weft serve).

    Examples:
      weft advise                                       the embedded model on all GPUs, or all cores
      weft advise DIR --ranks 2 --input-len 512 --output-len 128 --concurrency 16
      weft advise DIR --gpus 4 --input-len 4000 --output-len 1500 --concurrency 64 --ttft-ms 500 --itl-ms 20
      weft advise --preset gpt-oss-120b --what-if h200x8         published GPUs instead of this host
      weft advise DIR --ranks 2 --for vllm              the same layout in vLLM
    """

    model: ModelDir = None
    source: SourceOptions = field(default_factory=SourceOptions)
    ranks: int | None = None
    """Number of ranks of all servers; omitted: a rank per GPU, or per core."""
    gpus: int | None = None
    """Number of ranks on GPUs: --ranks N --device cuda."""
    what_if: str | None = None
    """Published GPUs instead of this host, such as h200x8: steps are priced by data sheets, and nothing is measured."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks; auto: GPUs, if there are any."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: made-up weights, as for weft serve; a preset has no others."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and activations, as for weft serve."""
    host_memory_gib: float | None = None
    """GiB of this host that all servers may use; omitted: all that is available."""
    kv_dtypes: tuple[Literal["auto", "fp8_e4m3"], ...] = ("auto",)
    """Data types of the cache to consider; fp8_e4m3 holds more tokens, less exactly."""
    input_len: int = 256
    """Tokens of a prompt."""
    output_len: int = 128
    """Tokens of an output."""
    concurrency: int = 8
    """Number of clients; each waits for its output, then sends its next request."""
    shared_prefix: float = 0.0
    """Fraction of a prompt that all prompts share."""
    trace: Path | None = None
    """File of recorded requests instead of clients: JSON lines with timestamp, in s, input_length and output_length."""
    ttft_ms: float | None = None
    """Limit of the median time to the first token."""
    ttft_p99_ms: float | None = None
    """Limit of the 99th percentile of the time to the first token."""
    itl_ms: float | None = None
    """Limit of the median time between two tokens."""
    itl_p99_ms: float | None = None
    """Limit of the 99th percentile of the time between two tokens."""
    measure: bool = True
    """Measure layouts without kept times; otherwise their figures are not known."""
    measure_load: float | None = None
    """Run the load on the best two layouts for these seconds each, without HTTP; keep the factor to their figures."""
    http: bool = True
    """Add the time of the HTTP server; the controller's always counts."""
    again: bool = False
    """Measure all layouts again."""
    json: bool = False
    """Print one JSON object with all layouts instead of the best three."""
    engine: Annotated[Literal["weft", "vllm", "sglang"], tyro.conf.arg(name="for")] = "weft"
    """Engine of the printed command line."""

    def run(self) -> int:
        """Print the advice; return 1 if nothing is known, else 0. Raises UserError, LayoutError, ModelError."""
        from weft.engine.advise.advice import Limits, advise
        from weft.engine.advise.candidates import choose_ranks, no_layout
        from weft.engine.advise.measured_load import correct
        from weft.engine.advise.simulate import NO_API
        from weft.engine.controller.startup import read_model

        gc.freeze()  # a collection would scan all that is imported
        if self.gpus is not None and (self.ranks is not None or self.device == "cpu"):
            raise UserError("--gpus N is --ranks N --device cuda: give one of them")
        if not self.kv_dtypes:
            raise UserError("--kv-dtypes needs one or more of auto and fp8_e4m3")
        if self.measure_load is not None and (self.what_if or self.trace or not 0 <= self.measure_load < math.inf):
            raise UserError("--measure-load S runs clients here: drop --what-if and --trace, with S of 0 or more")
        load, (gpu, count) = self._load(), self._published()
        with user_errors():
            limits = Limits(self.ttft_ms, self.ttft_p99_ms, self.itl_ms, self.itl_p99_ms)
        if self.measure and gpu is None:
            _check_cache(cache_folder())
        ranks, device = count, self.device
        if gpu is None:
            ranks, device = choose_ranks(self.gpus or self.ranks, "cuda" if self.gpus is not None else self.device)
        dummy = self.load_format if self.source.preset is None and gpu is None else "dummy"
        given: Any = dict(load_format=dummy, device=device, dtype=self.dtype, host_memory_gib=self.host_memory_gib)
        options = EngineArguments(preset=self.source.preset, revision=self.source.revision, **given)
        base = replace(engine_config(self.model, options), nnodes=None)
        read_model(base)  # its errors come before anything is measured
        stop_on_sigterm()
        with shown_progress("finding layouts") as progress:
            show, api = progress if self.measure or gpu is not None else None, NO_API
            if gpu is None:
                from weft.serve.cli.api_times import api_times

                api = api_times(show, self.again, self.http)
            ask = partial(advise, base, ranks, load, limits, kv_dtypes=self.kv_dtypes, api=api, gpu=gpu)
            advice, measured = ask(show, self.again), []
            if self.measure_load is not None:
                alone = api_times(show, http=False)
                for number, best in enumerate(advice.predictions[:2]):
                    progress(f"running the load on {best.candidate}", number / 2)
                    measured.append(correct(best, load, self.measure_load, alone))
                advice = ask()
        if not (advice.predictions or advice.not_known):
            raise no_layout(ranks, advice.refused)
        commands = [self._commands(each) for each in advice.predictions]
        if self.json:
            found = advice.as_dict()
            found["layouts"] = [a | {"commands": b} for a, b in zip(found["layouts"], commands, strict=True)]
            recorded = {"trace": str(self.trace), "arrivals": len(load.arrivals)} if self.trace else {}
            about: dict[str, Any] = {"what_if": self.what_if, "load": asdict(load) | recorded, "ranks": ranks}
            about |= {"device": device, "api": asdict(api)} | ({"measured": measured} if measured else {})
            print(json.dumps(about | found, indent=1))
        else:
            if gpu is not None:
                print(f"what if {self.what_if}: predicted from published figures of this GPU, not measured here")
            for each in measured:
                pairs = ((name, each[name]) for name in ("tokens_s", "ttft_ms", "itl_ms"))
                text = ", ".join(f"{name} {pair['predicted']:,.1f} / {pair['measured']:,.1f}" for name, pair in pairs)
                print(f"predicted / measured without HTTP: {each['layout']}: {text}")
            print("\n".join(advice.lines(commands)))
        return 0 if advice.predictions else 1

    def _published(self) -> tuple[Any, int]:
        """Return the GPU and the number of GPUs of --what-if; (None, 0) without. Raises UserError."""
        from weft.engine.advise.step_prices import GPUS

        if self.what_if is None:
            return None, 0
        name, _, count = self.what_if.partition("x")
        if name not in GPUS or not count.isdecimal() or int(count) < 1:
            raise UserError(f"--what-if {self.what_if} is no published host; known: {', '.join(GPUS)}, such as h200x8")
        if self.gpus is not None or self.ranks is not None or self.device != "auto":
            raise UserError(f"--what-if {self.what_if} names the GPUs: drop --ranks, --gpus and --device")
        return GPUS[name], int(count)

    def _load(self) -> Any:
        """Return the load of the options, or of a file. Raises UserError."""
        from weft.engine.advise.candidates import Arrival, ClientLoad

        with user_errors():
            if self.trace is None:
                return ClientLoad(self.input_len, self.output_len, self.concurrency, self.shared_prefix)
            arrivals = [Arrival(*row) for row in _recorded(self.trace)]
            return replace(ClientLoad.recorded(arrivals), shared_prefix=self.shared_prefix)

    def _commands(self, prediction: Any) -> list[str]:
        """Return the command line of each server of a layout."""
        given, mesh = prediction.candidate.given, prediction.candidate.config.mesh
        model = [str(self.model)] if self.model is not None else []
        if self.engine != "weft":
            name = " ".join(model) or str(given.model)
            return [command_of(self.engine, name, mesh, given.kv_dtype, given.mixed_batch_tokens)]
        values = {name: getattr(given, name) for name in EngineArguments().values()}
        options = EngineArguments(preset=self.source.preset, revision=self.source.revision, **values).arguments()
        lines = []
        for number, cores in enumerate(prediction.candidate.cores):
            own = [] if cores == "auto" else ["--cpu-bind", cores]
            port = ["--port", str(8000 + number)] if prediction.candidate.replicas > 1 else []
            gpus = ",".join(str(number * mesh.world + rank) for rank in range(mesh.world))
            alone = f"CUDA_VISIBLE_DEVICES={gpus} " * (given.device == "cuda" and prediction.candidate.replicas > 1)
            lines.append(alone + shlex.join(["weft", "serve", *model, *options, *own, *port]))
        return lines


def _check_cache(folder: Path) -> None:
    """Raise UserError unless times can be kept in a folder, before minutes are spent on them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()  # only an attempt shows a read-only file system, for root too
    except OSError as error:
        instead = "set XDG_CACHE_HOME, or use kept times only by --no-measure"
        raise UserError(f"cannot keep times in {folder}: {error.strerror}; {instead}") from error


def _recorded(file: Path) -> Iterator[tuple[float, int, int]]:
    """Yield seconds, input tokens and output tokens of each line of a --trace. Raises UserError."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                each = json.loads(line)
                yield float(each["timestamp"]), int(each["input_length"]), int(each["output_length"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            need = 'a JSON object a line, such as {"timestamp": 0.5, "input_length": 200, "output_length": 50}'
            found = f"{type(error).__name__}: {error}"
            raise UserError(f"--trace {file} is {need}; found in line {number}: {found}") from error
