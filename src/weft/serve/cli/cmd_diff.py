"""`weft diff`."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import tyro

from weft.serve.cli.command import EngineArguments, ModelDir, UserError, engine_config, parse, stop_on_sigterm
from weft.serve.cli.other_engines import layout_arguments
from weft.serve.cli.progress import shown_progress


@dataclass(frozen=True)
class Command:
    """Find where two layouts differ: run both, and compare all rows of each read of the residual stream.

    The first layout chooses tokens greedily, and the other layouts get the same tokens. The command prints the first
    read that differs from the first layout by more than the tolerance, the row that differs most, the exchanges before
    the read, and the first output token that differs. The exit code is 0 if every row is equal within the tolerance,
    else 1. All rows of all reads are held in memory, so use short prompts.

    Examples:
      weft diff                                                     the embedded model on 1x1 and 2x2
      weft diff DIR --layouts 1x1 1x4 4x1,2x2 --prompt "Once upon a time" --max-tokens 16
      weft diff DIR --layouts "1x4" "1x4 --dcp 2 --dcp-exchange a2a" --dtype float32
      weft diff DIR --layouts "1x2 --executor thread" "1x2 --transport shm"     the reference and a real transport
      weft diff DIR --layouts "1x1" "1x1 --kv-dtype fp8_e4m3" --device cuda
      weft diff DIR --layouts "1x1 --attention-backend triton" "1x1 --attention-backend fa3" --device cuda
      weft diff DIR --layouts 2x2 --against transformers
    """

    model: ModelDir = None
    engine: EngineArguments = field(default_factory=EngineArguments)
    layouts: tuple[str, ...] = ("1x1", "2x2")
    """Layouts to compare with the first one, each ATTN_DPxATTN_TP or ATTN_DPxATTN_TP,EPxMOE_TP. A layout in quotes may
    add engine options, such as "1x4 --dcp 2"."""
    against: Literal["transformers"] | None = None
    """Compare also with the model of transformers, at the norms of the same names and at the logits."""
    prompt: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT...")] = (
        "Tom has 3 apples and buys 4 more. How many apples does Tom have?",
        "Once upon a time",
    )
    """One or more prompts, assigned to the DP groups in turn."""
    max_tokens: int = 8
    """Tokens of each output. The prefill step gives the first one."""
    tolerance: float | None = None
    """Largest relative difference of equal rows; omitted: 1e-4 for float32, 0.1 for bfloat16, 0.25 for FP8. In bfloat16
    and FP8 a router may choose other experts for a few rows: --dtype float32 tells a fault from rounding."""
    json: bool = False
    """Print one JSON object with the largest difference of each read instead of text."""

    def run(self) -> int:
        """Print the differences and return the exit code. Raises UserError, LayoutError, ModelError, CommError."""
        from transformers.utils import logging as transformers_logging

        from weft.engine.output.tokenizer_files import load_tokenizer

        self._check()
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        configs = [self._config(layout) for layout in self.layouts]
        tokenizer = load_tokenizer(configs[0])
        prompts = [list(tokenizer.encode(text)) for text in self.prompt]
        limit = configs[0].read_model().max_position
        if not all(prompts) or max(map(len, prompts)) + self.max_tokens > limit:
            raise UserError(f"a prompt has one token or more, and with its output at most the model's {limit}")
        stop_on_sigterm()
        outputs, reports = self._compare(configs, prompts)
        equal = all(report["departure"] is None for report in reports)
        if self.json:
            head = {"first": self.layouts[0], "equal": equal, "prompts": prompts, "outputs": outputs}
            print(json.dumps(head | {"compared": reports}, indent=1))
        else:
            texts = [list(map(repr, map(tokenizer.decode, p + o))) for p, o in zip(prompts, outputs, strict=True)]
            print("\n\n".join(_text(self.layouts[0], report, texts, tokenizer.decode) for report in reports))
        return 0 if equal else 1

    def _check(self) -> None:
        if self.max_tokens < 1 or not (self.tolerance is None or self.tolerance > 0):
            raise UserError("--max-tokens must be 1 or more, --tolerance above 0")
        if not self.layouts or (len(self.layouts) == 1 and self.against is None):
            raise UserError("give two layouts or more, such as --layouts 1x1 2x2, or one and --against transformers")
        if self.engine.mesh.world > 1 or self.engine.mesh.hosts > 1:
            raise UserError("give layouts by --layouts, without --attn-dp, --attn-tp or --nnodes; they run on one host")
        if self.against and (self.engine.load_format == "dummy" or self.engine.num_layers):
            raise UserError("transformers reads whole checkpoints: drop --load-format dummy and --num-layers")

    def _config(self, text: str) -> Any:
        """Return the EngineConfig of a layout with its options. Raises UserError, LayoutError."""
        try:
            layout, *options = shlex.split(text) or [""]
        except ValueError as error:
            raise UserError(f"--layouts {text!r} has an unclosed quotation mark: {error}") from error
        arguments = [*layout_arguments(layout), *options]
        engine = parse(EngineArguments, f"diff --layouts {layout}", arguments, self.engine)
        engine.check_with(self.model)
        return engine_config(self.model, engine)

    def _compare(self, configs: list[Any], prompts: list[list[int]]) -> tuple[list[list[int]], list[dict[str, Any]]]:
        """Return the first layout's outputs and a report per other run, plus one on its own ranks if it has several."""
        from weft.engine.controller.layout_diff import compare, record, record_transformers, tolerance_of

        with shown_progress("starting") as progress:

            def say(name: str, what: str, part: float) -> None:
                progress(f"{name}: {what}", part)

            def report(name: str, run: Any, config: Any) -> dict[str, Any]:
                tolerance = self.tolerance or tolerance_of(configs[0], config)
                return {"layout": name, "tolerance": tolerance} | compare(first, run, prompts, tolerance)

            first = record(configs[0], prompts, self.max_tokens, None, partial(say, self.layouts[0]))
            outputs = first.outputs(prompts)
            reports = [report(self.layouts[0], first, configs[0])] if configs[0].mesh.world > 1 else []
            for name, config in zip(self.layouts[1:], configs[1:], strict=True):
                run = record(config, prompts, self.max_tokens, outputs, partial(say, name))
                reports.append(report(name, run, config))
            if self.against is not None:
                say(self.against, "running", 0.0)
                run = record_transformers(configs[0], prompts, outputs, list(first.steps[0]))
                reports.append(report(self.against, run, configs[0]))
        return outputs, reports


def _text(first: str, report: dict[str, Any], texts: list[list[str]], decode: Any) -> str:
    """Return the lines of a report. texts: the text of each token, per prompt with its output."""
    name, departure = report["layout"], report["departure"]
    other = "its other ranks" if name == first else first
    if departure is None:
        largest, limit = _figure(report["largest"]), f"{report['tolerance']:g}"
        lines = [f"{name} equals {other} at {len(report['reads'])} reads: by {largest} or less (tolerance {limit})"]
    else:
        step = f"decode step {departure['step']}" if departure["step"] else "the step of the prompts"
        token = texts[departure["prompt"]][departure["position"]]
        differ, copies = departure["rows"]
        lines = [
            f"{name} departs from {other} at {departure['site']}, in {step}",
            f"  difference    {_figure(departure['relative'])} relative, {_figure(departure['max_abs'])} absolute "
            f"(tolerance {report['tolerance']:g}; before: {_figure(departure['largest_before'])})",
            f"  row           token {departure['position']} of prompt {departure['prompt']}, {token}, on rank "
            f"{departure['rank']}; {differ} of {copies} copies differ",
            f"  equal before  {departure['before'] or 'nothing'}",
            f"  since then    {', '.join(departure['exchanges']) or 'no exchange: a weight, kernel or cache differs'}",
        ]
    for part in report["partings"]:
        ours, theirs = (repr(decode(part[which])) for which in ("first", "other"))
        where, apart = f"token {part['token']} of prompt {part['prompt']}", _figure(part["margin"])
        lines.append(f"  outputs part  at {where}: {ours} in {first}, {theirs} in {name} (logits {apart} apart)")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.2g}"
