"""What commands share: the list of them, the layout's options, and how a dataclass becomes a command."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from weft.assets import embedded_model_dir, preset_dir
from weft.cli.other_engines import hint, renamed
from weft.comm.transport_registry import AUTO, REFERENCE, TRANSPORTS, transports
from weft.models.directory import no_model
from weft.place.spec import LayoutError, Mesh
from weft.plugins import PluginError

T = TypeVar("T")

COMMANDS = {
    "serve": "serve a model over HTTP, OpenAI-compatible",
    "generate": "complete prompts on the terminal",
    "eval": "score a model on held-out word problems",
    "plan": "print the collectives that a layout needs, and what they cost",
    "tune": "measure this host: the table by which the planner chooses",
    "bench collectives": "time every edge of Weft's own transport beside others, and the floor",
    "bench dcp": "time the merge of attention over shards of the keys, by each algorithm",
    "bench latency": "time first and next tokens of a request, transport by transport",
    "bench serving": "load an OpenAI-compatible server: throughput and latencies",
    "profile": "watch decode steps on every rank: collectives, kernels, idle",
    "chaos": "inject faults into a server under load: nothing may be lost, hang or stay behind",
    "doctor": "look at this host: what will be slow, and why",
    "demo": "serve the embedded model on 4 ranks and ask it word problems",
}

EXTRAS = {"serve": "serve", "bench serving": "bench", "profile": "bench"}
"""The extra with the packages that a command imports beside those that Weft always brings."""

ModelDir = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL_DIR]")]


class TransportName(str):
    """An option of the table of transports: its values follow from that, plugins' transports included."""


class TransportChoice(TransportName):
    """The same, or AUTO."""


ANY_TRANSPORT = TransportChoice(AUTO)

BETWEEN_RANKS = (
    f"Between the ranks: on CPUs {' or '.join(e.option for e in TRANSPORTS if e.runs_on('cpu'))}, on GPUs "
    f"{' or '.join(e.option for e in TRANSPORTS if e.runs_on('cuda'))}, or a plugin's; auto: whichever costs less, "
    "step by step."
)


class UserError(Exception):
    """Bad input: one line that says what to do."""


@dataclass(frozen=True)
class Layout:
    """How the ranks are laid out (attn-dp × attn-tp = ep × moe-tp = the number of ranks), and what model they run."""

    attn_dp: int = 1
    """Data-parallel groups of the attention, each with requests of its own."""
    attn_tp: int = 1
    """Ranks that share a group's attention heads."""
    ep: int | None = None
    """Parts that the experts are split into; left out, the same as --attn-dp."""
    moe_tp: int | None = None
    """Ranks that share each expert; left out, the same as --attn-tp."""
    dcp: int = 1
    """Ranks of --attn-tp that shard a group's cached tokens, so that it holds so many times as many."""
    dcp_interleave: int | None = None
    """Tokens in a row that one of them holds; left out, a page."""
    dcp_exchange: Literal["auto", "ag_rs", "a2a", "fused"] = "auto"
    """How their attention is merged; auto: whichever costs least."""
    dcp_prefill: Literal["auto", "gather", "merge"] = "auto"
    """Whether prompts gather the tokens that they see, or are merged as decode rows are; auto: whichever costs less."""
    dcp_query: Literal["gather", "replicate"] = "gather"
    """replicate: each of them makes the queries of all, from more weights, where they would gather them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda: a GPU a rank; auto: GPUs where there are as many as ranks."""
    transport: Annotated[TransportChoice, tyro.conf.arg(help=BETWEEN_RANKS)] = ANY_TRANSPORT
    cost: str = "auto"
    """Cost model of the planner: auto (this host's table, once weft tune wrote one), a preset, or FILE.json."""
    plugins: tuple[str, ...] = ()
    """Python modules or .py files that add model families or transports; they run, so name only what you trust."""
    preset: str | None = None
    """A published config in place of MODEL_DIR, such as qwen3-30b-a3b, to be run with --load-format dummy."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy makes weights up, to measure a shape; auto reads the directory's safetensors."""
    num_layers: int | None = None
    """Only the model's first so many layers."""
    split_vocabulary: Literal["off", "on", "auto"] = "auto"
    """on: embedding and head are split over --attn-tp too; auto: on GPUs, where decode steps are quicker by it."""
    moe_exchange: Literal["auto", "gather", "dispatch"] = "auto"
    """gather: every rank takes all rows; dispatch: rows go to the ranks of their experts and back (on GPUs with
    --transport peer); auto: on CPUs whichever costs less. Where a step dispatches, shared experts are whole on all."""
    float8: Literal["auto", "on", "off"] = "auto"
    """Whether weights that a checkpoint has in FP8 stay so, and their products are in FP8; auto: on GPUs."""
    cuda_graphs: bool = True
    """Whether steps on GPUs are captured."""
    cpu_bind: str | None = None
    """Cores of each rank, such as 0-3|4-7, or auto to divide them evenly; left out, ranks are not bound."""

    def check(self, model: Path | None) -> None:
        """What can be checked without torch, of the layout and the model directory beside it. Raises UserError."""
        if self.preset is not None and self.load_format != "dummy":
            add = "add --load-format dummy to make some up"
            raise UserError(f"--preset {self.preset} is a shape without weights; {add}")
        model_dir(model, self.preset)
        values = self.values()
        try:
            Mesh(*(values[name] for name in ("attn_dp", "attn_tp", "ep", "moe_tp", "dcp")))
        except LayoutError as error:
            raise UserError(str(error)) from error

    def values(self) -> dict[str, Any]:
        """As EngineConfig takes them."""
        ep = self.attn_dp if self.ep is None else self.ep
        moe_tp = self.attn_tp if self.moe_tp is None else self.moe_tp
        return {
            "attn_dp": self.attn_dp,
            "attn_tp": self.attn_tp,
            "ep": ep,
            "moe_tp": moe_tp,
            "experts": self.moe_exchange,
        } | {
            name: getattr(self, name)
            for name in (
                "dcp",
                "dcp_interleave",
                "dcp_exchange",
                "dcp_prefill",
                "dcp_query",
                "device",
                "transport",
                "cost",
                "plugins",
                "load_format",
                "num_layers",
                "split_vocabulary",
                "float8",
                "cuda_graphs",
                "cpu_bind",
            )
        }


def parse(command: type[T], name: str, arguments: list[str]) -> T:
    """The command from its arguments; its docstring, as written, is the help. Raises UserError for what can be
    checked before its `run` imports torch: options of other engines, and a model or a layout that cannot be."""
    arguments, old_names = renamed(arguments)
    for line in old_names:
        print(f"weft: {line}", file=sys.stderr)
    starts_engine = get_type_hints(command).get("layout") is Layout
    if starts_engine and (advice := hint(arguments)) is not None:
        raise UserError(advice)
    parsed: Any = tyro.cli(
        command,
        prog=f"weft {name}",
        args=arguments,
        description=inspect.getdoc(command),
        registry=_with_transports(arguments),
    )
    if starts_engine:
        parsed.layout.check(parsed.model)
    return parsed


def _with_transports(arguments: Sequence[str]) -> ConstructorRegistry:
    """What tyro must know of transports: their names, those of plugins in the arguments too. Raises UserError."""
    plugins = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    plugins.add_argument("--plugins", nargs="*", default=[])
    try:
        known = tuple(transports(plugins.parse_known_args(arguments)[0].plugins))
    except PluginError as error:
        raise UserError(str(error)) from error
    names = {TransportName: (*known, REFERENCE.option), TransportChoice: (AUTO, *known)}
    found = ConstructorRegistry()

    @found.primitive_rule
    def choose(asked: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if asked.type not in names:
            return None
        literal: Any = Literal.__getitem__(names[asked.type])
        as_literal = PrimitiveTypeInfo.make(literal, asked.markers)
        return ConstructorRegistry.get_primitive_spec(as_literal)  # type: ignore[return-value]

    return found


def arguments_of(options: Any) -> list[str]:
    """The arguments by which a command gets such options: a dataclass, what it has by default left out."""
    found: list[str] = []
    for field in dataclasses.fields(options):
        value, name = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            found += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return found


def check_writable(path: Path, option: str) -> None:
    """Before anything is measured for it. Raises UserError, and leaves no file behind."""
    new = not path.exists()
    try:
        path.open("a").close()  # a folder, a file or a system that is read-only: only trying shows it, for root too
        if new:
            path.unlink()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file with {option}") from error


def model_dir(model: Path | None, preset: str | None) -> Path:
    """The directory that a command names, by path or preset; the embedded model's for neither. Raises UserError."""
    if preset is None:
        if model is not None and (why := no_model(model)) is not None:
            raise UserError(why)
        return model or embedded_model_dir()
    if model is not None:
        raise UserError(f"give {model} or --preset {preset}, not both")
    try:
        return preset_dir(preset)
    except ValueError as error:
        raise UserError(str(error)) from error


def engine_config(model: Path | None, layout: Layout, **options: Any) -> Any:
    """The EngineConfig of a command's options; None means the default. Raises UserError, LayoutError."""
    from weft.engine.config import EngineConfig

    values: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    try:
        values["model"] = model_dir(model, layout.preset)
        return EngineConfig(**(values | layout.values()))
    except ValueError as error:
        raise UserError(str(error)) from error


def stop_on_sigterm() -> None:
    """SIGTERM ends the command as Ctrl-C does: what it has started is stopped first."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
