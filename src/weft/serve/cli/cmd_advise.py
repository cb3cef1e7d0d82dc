"""`weft advise`."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import tyro

from weft.serve.cli.command import EngineArguments, ModelDir, SourceOptions, UserError, engine_config, stop_on_sigterm
from weft.serve.cli.other_engines import command_of
from weft.serve.cli.progress import progress_bar


@dataclass(frozen=True)
class Command:
    """Choose a layout for a model on this host under a load, and say how sure the choice is.

    Every layout that starts runs made-up steps of the load for some seconds; its times are kept. The load is then
    simulated by the engine's own scheduler on these times. The time of the HTTP server and of clients is not in it.

    Examples:
      weft advise                                       the embedded model on all GPUs, or all cores
      weft advise DIR --ranks 2 --input-len 512 --output-len 128 --concurrency 16
      weft advise DIR --gpus 4 --input-len 4000 --output-len 1500 --concurrency 64 --ttft-ms 500 --itl-ms 20
      weft advise DIR --ranks 2 --for vllm              the same layout in vLLM
    """

    model: ModelDir = None
    source: SourceOptions = field(default_factory=SourceOptions)
    ranks: int | None = None
    """Number of ranks of all servers; omitted: a rank per GPU, or per core."""
    gpus: int | None = None
    """Number of ranks on GPUs: --ranks N --device cuda."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks; auto: GPUs, if there are any."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: made-up weights, as for weft serve; a preset has no others."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and activations, as for weft serve."""
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
    ttft_ms: float | None = None
    """Limit of the median time to the first token."""
    itl_ms: float | None = None
    """Limit of the median time between two tokens."""
    measure: bool = True
    """Measure layouts without kept times; otherwise their figures are not known."""
    again: bool = False
    """Measure all layouts again."""
    json: bool = False
    """Print one JSON object with all layouts instead of the best three."""
    engine: Annotated[Literal["weft", "vllm", "sglang"], tyro.conf.arg(name="for")] = "weft"
    """Engine of the printed command line."""

    def run(self) -> int:
        """Print the advice; return 1 if nothing is known, else 0. Raises UserError, LayoutError, ModelError."""
        from weft.engine.advise.advice import Limits, advise
        from weft.engine.advise.candidates import ClientLoad, choose_ranks

        if self.gpus is not None and (self.ranks is not None or self.device == "cpu"):
            raise UserError("--gpus N is --ranks N --device cuda: give one of them")
        try:
            load = ClientLoad(self.input_len, self.output_len, self.concurrency, self.shared_prefix)
        except ValueError as error:
            raise UserError(str(error)) from error
        ranks, device = choose_ranks(self.gpus or self.ranks, "cuda" if self.gpus is not None else self.device)
        preset, revision = self.source.preset, self.source.revision
        dummy: Any = self.load_format if preset is None else "dummy"
        options = EngineArguments(preset=preset, revision=revision, load_format=dummy, device=device, dtype=self.dtype)
        base = replace(engine_config(self.model, options), nnodes=None)
        stop_on_sigterm()
        with progress_bar() as bar:
            task = bar.add_task("layouts", total=1.0)

            def progress(what: str, part: float) -> None:
                bar.update(task, description=what, completed=part)

            limits, show = Limits(self.ttft_ms, self.itl_ms), progress if self.measure else None
            advice = advise(base, ranks, load, limits, show, self.again, self.kv_dtypes)
        commands = [self._commands(each) for each in advice.predictions]
        if self.json:
            found = advice.as_dict()
            for layout, lines in zip(found["layouts"], commands, strict=True):
                layout["commands"] = lines
            print(json.dumps({"load": vars(load), "ranks": ranks, "device": device} | found, indent=1))
        else:
            print("\n".join(advice.lines(commands)))
        return 0 if advice.predictions else 1

    def _commands(self, prediction: Any) -> list[str]:
        """Return the command line of each server of a layout."""
        given, mesh = prediction.candidate.given, prediction.candidate.config.mesh
        model = [str(self.model)] if self.model is not None else []
        if self.engine != "weft":
            return [command_of(self.engine, " ".join(model) or str(given.model), mesh, given.kv_dtype)]
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
