"""Contracts of the plug-ins with the engines, and of vLLM's decoder with KV events, read from the engines' sources;
nothing of an engine is imported, but for vLLM's module of events, which is run alone.

`make plugin-contracts` fetches the sources out of the wheels, of which it reads only the files in question, compares
them with the plug-ins, and writes what it found to contracts/ENGINE-VERSION.json, which `make test` compares.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PLUGINS = HERE.parents[1] / "plugins"
ENGINES = ("vllm", "sglang")
Found = Mapping[str, Mapping[str, Any]]
"""Description of each symbol, `module:Class.method`: its signature, bases, value or names; see `describe`."""


@dataclass(frozen=True)
class Need:
    """A symbol that a plug-in uses.

    names: `module:symbol`, of which there is one at least, and each that there is fits.
    takes: its parameters begin with these.
    same_as: `file:symbol` of the plug-in, which has the same parameters, or more behind them.
    mentions: names in its body.
    value: of a constant, or what a function returns.
    bases: of a class.
    since: the first version that has it.
    """

    names: tuple[str, ...]
    takes: tuple[str, ...] = ()
    same_as: str = ""
    mentions: tuple[str, ...] = ()
    value: str = ""
    bases: tuple[str, ...] = ()
    since: str = ""


def need(*names: str, takes: str = "", same_as: str = "", mentions: str = "", **rest: str) -> Need:
    """A need from texts with spaces between names."""
    return Need(names, tuple(takes.split()), same_as, tuple(mentions.split()), **rest)


CUDA = "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator"
BASE = "vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase"
VLLM_GROUP = "vllm.distributed.parallel_state:GroupCoordinator"
GROUP = "sglang.srt.distributed.parallel_state:GroupCoordinator"
DP = "sglang.srt.layers.dp_attention"
FUSION = "sglang.srt.layers.flashinfer_comm_fusion"
MERGE = "weft_vllm/context_parallel.py:merging.merge"
KV_EVENTS = "vllm.distributed.kv_events"
EVENT_CLASSES = ("EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch")
"""Classes that a subscriber decodes, in the order of their definition."""
NEEDS: dict[str, tuple[Need, ...]] = {
    "vllm": (
        need("vllm.plugins:DEFAULT_PLUGINS_GROUP", value="'vllm.general_plugins'"),
        need("vllm.plugins:load_general_plugins", mentions="DEFAULT_PLUGINS_GROUP func"),
        need("vllm.plugins:load_plugins_by_group", mentions="envs.VLLM_PLUGINS plugin.name"),
        need(
            "vllm.platforms.cuda:CudaPlatformBase.get_device_communicator_cls",
            value="'vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator'",
        ),
        need(
            "vllm.platforms.interface:Platform.get_pass_manager_cls",
            value="'vllm.compilation.passes.pass_manager.PostGradPassManager'",
        ),
        need("vllm.platforms.interface:Platform.is_cuda", takes="self"),
        need(
            f"{VLLM_GROUP}.__init__",
            mentions="current_platform.get_device_communicator_cls resolve_obj_by_qualname _register_group",
        ),
        need("vllm.distributed.parallel_state:_register_group", mentions="_groups weakref.ref"),
        need("vllm.distributed.parallel_state:all_reduce", takes="tensor group_name", mentions="_groups"),
        need(f"{VLLM_GROUP}.graph_capture", mentions="CudaCommunicator isinstance"),
        need(f"{VLLM_GROUP}.all_reduce", mentions="torch.ops.vllm.all_reduce"),
        need(f"{VLLM_GROUP}._all_reduce_out_place", mentions="self.device_communicator.all_reduce"),
        need(f"{VLLM_GROUP}._all_gather_out_place", mentions="self.device_communicator.all_gather"),
        need(f"{VLLM_GROUP}._reduce_scatter_out_place", mentions="self.device_communicator.reduce_scatter"),
        need(f"{VLLM_GROUP}.all_gatherv", mentions="self.device_communicator.all_gatherv"),
        need(f"{VLLM_GROUP}.reduce_scatterv", mentions="self.device_communicator.reduce_scatterv"),
        need(f"{VLLM_GROUP}.gather", mentions="self.device_communicator.gather"),
        need(f"{VLLM_GROUP}.destroy", mentions="self.device_communicator.destroy"),
        Need((CUDA,), bases=("DeviceCommunicatorBase",)),
        need(
            f"{BASE}.__init__",
            takes="self cpu_group device device_group unique_name",
            mentions="self.cpu_group self.device self.unique_name self.world_size self.rank_in_group",
        ),
        *(
            need(f"{CUDA}.{name}", f"{BASE}.{name}", same_as=f"weft_vllm/collectives.py:WeftCollectives.{name}")
            for name in (
                *("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "gather"),
                "destroy",
            )
        ),
        need(
            f"{BASE}.reduce_scatterv_into_output",
            same_as="weft_vllm/collectives.py:WeftCollectives.reduce_scatterv_into_output",
            since="0.33.0",
        ),
        need("vllm.config.vllm:get_current_vllm_config_or_none"),
        need("vllm.config.vllm:VllmConfig", mentions="additional_config parallel_config compilation_config"),
        need("vllm.config.vllm:VllmConfig.compute_hash", mentions="self.additional_config"),
        need(
            "vllm.config.parallel:ParallelConfig",
            mentions="disable_custom_all_reduce enable_elastic_ep use_ubatching",
        ),
        need("vllm.config.compilation:PassConfig", mentions="fuse_allreduce_rms"),
        need("vllm.config.compilation:CompilationConfig", mentions="pass_config"),
        need("vllm.compilation.backends:VllmBackend.__init__", mentions="current_platform.get_pass_manager_cls"),
        need("vllm.compilation.passes.inductor_pass:InductorPass.is_applicable_for_range", takes="self compile_range"),
        need(
            "vllm.compilation.passes.pass_manager:PostGradPassManager.configure",
            same_as="weft_vllm/fusion.py:WeftPassManager.configure",
            mentions="self.passes RMSNormQuantFusionPass self.pass_config.fuse_allreduce_rms",
        ),
        need("vllm.ir.ops.layernorm:fused_add_rms_norm", takes="x x_residual weight epsilon variance_size"),
        need(
            "vllm.v1.attention.ops.dcp:dcp_a2a_lse_reduce",
            "vllm.v1.attention.ops.dcp_alltoall:dcp_a2a_lse_reduce",
            same_as=MERGE,
        ),
        need(
            "vllm.v1.attention.ops.dcp:cp_lse_ag_out_rs",
            "vllm.v1.attention.ops.common:cp_lse_ag_out_rs",
            same_as=MERGE,
        ),
        need("vllm.v1.attention.ops.dcp:mask_dcp_empty_shards_", takes="lse seq_lens query_start_loc", since="0.30.0"),
        *(need(f"{KV_EVENTS}:{name}") for name in EVENT_CLASSES),
    ),
    "sglang": (
        need("sglang.srt.plugins:GENERAL_PLUGINS_GROUP", value="'sglang.srt.plugins'"),
        need("sglang.srt.plugins:load_plugins", mentions="GENERAL_PLUGINS_GROUP func HookRegistry.apply_hooks"),
        need("sglang.srt.plugins:load_plugins_by_group", mentions="envs.SGLANG_PLUGINS.get ep.name"),
        need("sglang.srt.plugins.hook_registry:HookRegistry.register", takes="cls target hook hook_type"),
        *(
            need(f"sglang.srt.plugins.hook_registry:HookType.{name}", value=f"'{name.lower()}'")
            for name in ("BEFORE", "AFTER", "AROUND")
        ),
        need("sglang.srt.utils.common:is_cuda"),
        need(
            f"{GROUP}.__init__",
            takes="self group_ranks local_rank",
            mentions="self.unique_name self.world_size self.rank_in_group self.cpu_group self.device",
        ),
        need(f"{GROUP}.destroy", takes="self"),
        need(f"{GROUP}.all_reduce", mentions="self._resolve_outplace_all_reduce_method outplace_all_reduce"),
        need("sglang.srt.distributed.parallel_state:outplace_all_reduce", mentions="group._all_reduce_out_place"),
        need(
            "sglang.srt.distributed.parallel_state:reg_all_gather_into_tensor",
            mentions="group._all_gather_into_tensor",
        ),
        need(
            "sglang.srt.distributed.parallel_state:reg_reduce_scatter_tensor", mentions="group._reduce_scatter_tensor"
        ),
        need("sglang.srt.distributed.parallel_state:reg_all_to_all_single", mentions="group._all_to_all_single"),
        need("sglang.srt.distributed.parallel_state:_ENABLE_CUSTOM_ALL_REDUCE", value="True"),
        *(
            need(f"{GROUP}.{name}", same_as=f"weft_sglang/hooks.py:{hook}")
            for name, hook in {
                "_resolve_outplace_all_reduce_method": "all_reduce_method",
                "_all_reduce_out_place": "all_reduce",
                "_all_gather_into_tensor": "all_gather_into_tensor",
                "_reduce_scatter_tensor": "reduce_scatter_tensor",
                "_all_to_all_single": "all_to_all_single",
                "all_gatherv": "all_gatherv",
                "reduce_scatterv": "reduce_scatterv",
            }.items()
        ),
        need(
            f"{GROUP}._can_use_flashinfer_allreduce", same_as="weft_sglang/hooks.py:can_use_flashinfer", since="0.5.23"
        ),
        need(f"{DP}:_dp_gather_via_all_gather", same_as="weft_sglang/hooks.py:dp_gather"),
        need(f"{DP}:dp_reduce_scatter_tensor", same_as="weft_sglang/hooks.py:dp_reduce_scatter"),
        need(f"{DP}:world_dp_gather_enabled"),
        need(f"{DP}:is_dp_gatherv_active"),
        need("sglang.srt.layers.dcp.comm:dcp_a2a_lse_reduce", same_as="weft_sglang/hooks.py:merge"),
        need(
            f"{FUSION}:flashinfer_allreduce_residual_rmsnorm",
            takes="input_tensor residual weight eps max_token_num use_oneshot",
        ),
        need(f"{FUSION}:pre_initialize_workspaces", same_as="weft_sglang/hooks.py:pre_initialize"),
        need(f"{FUSION}:resolve_fusion_group", takes="use_attn_tp_group", since="0.5.23"),
        need(
            "sglang.srt.layers.layernorm:_forward_with_allreduce_fusion",
            mentions="flashinfer_allreduce_residual_rmsnorm",
        ),
        need("sglang.srt.runtime_context:get_parallel"),
        need("sglang.srt.runtime_context:get_server_args"),
    ),
}


# --- what sources have ------------------------------------------------------------------------------------------------


def module_files(module: str) -> tuple[str, str]:
    """Return the possible files of a module, below the folder of its package."""
    path = module.replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


def lookup(tree: ast.AST, symbol: str) -> ast.AST | None:
    """The definition of a symbol, `Class.method`, also below `if`; None where there is none."""
    node: ast.AST | None = tree
    for part in symbol.split("."):
        node = next((each for each in ast.walk(node) if part in defined(each)), None) if node is not None else None
    return node


def defined(node: ast.AST) -> tuple[str, ...]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def describe(node: ast.AST, mentions: Sequence[str] = ()) -> dict[str, Any]:
    """A definition as JSON: parameters with defaults, bases, the value, and which of the names its body has."""
    found: dict[str, Any] = {}
    if isinstance(node, ast.FunctionDef):
        found["parameters"] = list(parameters(node))
        returned = [each.value for each in node.body if isinstance(each, ast.Return) and each.value is not None]
        if len(returned) == 1 and isinstance(returned[0], ast.Constant):
            found["value"] = ast.unparse(returned[0])
    elif isinstance(node, ast.ClassDef):
        found["bases"] = [ast.unparse(base) for base in node.bases]
        fields = [ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign)]
        keywords = [f"{each.arg}={ast.unparse(each.value)}" for each in node.keywords]
        found |= {name: value for name, value in (("fields", fields), ("keywords", keywords)) if value}
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        found["value"] = ast.unparse(node.value)
    if mentions:
        names = set(names_in(node))
        found["mentions"] = [name for name in mentions if name in names]
    return found


def parameters(node: ast.FunctionDef) -> Iterator[str]:
    """`name` or `name=default` of each, in order; those after a star begin with one."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in [*zip(plain, defaults, strict=True)]:
        yield argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield f"*{argument.arg}" if default is None else f"*{argument.arg}={ast.unparse(default)}"


def names_in(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute):
            yield ast.unparse(each)
        elif isinstance(each, ast.FunctionDef):
            yield each.name


def extract(root: Path, needs: Sequence[Need]) -> dict[str, dict[str, Any]]:
    """Return the symbols of the needs that the sources below root have."""
    found = {}
    for each in needs:
        for name in each.names:
            module, symbol = name.split(":")
            for path in (root / file for file in module_files(module)):
                if path.is_file() and (node := lookup(ast.parse(path.read_text()), symbol)) is not None:
                    found.setdefault(name, {}).update(merged(found.get(name, {}), describe(node, each.mentions)))
    return found


def merged(one: Mapping[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two descriptions of a symbol, with the names that either mentions."""
    both = [*one.get("mentions", []), *other.get("mentions", [])]
    return {**one, **other, **({"mentions": both} if both else {})}


# --- whether it fits --------------------------------------------------------------------------------------------------


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def problems(needs: Sequence[Need], found: Found, version: str) -> list[str]:
    """Return a line for each need that the version does not meet."""
    return [line for each in needs for line in problems_of(each, found, version)]


def problems_of(each: Need, found: Found, version: str) -> Iterator[str]:
    if each.since and numbers(version) < numbers(each.since):
        return
    there = [name for name in each.names if name in found]
    if not there:
        yield f"{' or '.join(each.names)} is missing"
    for name in there:
        yield from (f"{name} {line}" for line in differences(each, found[name]))


def differences(each: Need, it: Mapping[str, Any]) -> Iterator[str]:
    given = [parameter.split("=")[0].lstrip("*") for parameter in it.get("parameters", ())]
    if tuple(given[: len(each.takes)]) != each.takes:
        yield f"takes {given}, not {list(each.takes)}"
    if each.same_as and (line := difference(it["parameters"], each.same_as)):
        yield line
    for wanted in each.mentions:
        if wanted not in it.get("mentions", ()):
            yield f"does not mention {wanted}"
    if each.value and it.get("value") != each.value:
        yield f"is {it.get('value')}, not {each.value}"
    if not set(each.bases) <= set(it.get("bases", ())):
        yield f"has the bases {it.get('bases')}, not {list(each.bases)}"


def difference(theirs: list[str], same_as: str) -> str:
    """Return the difference of an engine's function from the plug-in's that replaces it; empty if there is none."""
    own = own_parameters(same_as)
    if own[: len(theirs)] != theirs or any("=" not in more for more in own[len(theirs) :]):
        return f"takes {theirs}, and {same_as} takes {own}"
    return ""


@cache
def own_parameters(same_as: str) -> list[str]:
    """Return the parameters of a plug-in's function; a hook's first is the original."""
    file, symbol = same_as.split(":")
    node = lookup(ast.parse(next(PLUGINS.glob(f"*/src/{file}")).read_text()), symbol)
    assert isinstance(node, ast.FunctionDef), same_as
    return [parameter for parameter in parameters(node) if parameter != "original"]


# --- fetching ---------------------------------------------------------------------------------------------------------


class RemoteFile(io.RawIOBase):
    """A file behind a URL, of which only what is read is fetched."""

    def __init__(self, url: str):
        self.url, self.position = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as reply:
            self.size = int(reply.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        end = min(self.position + len(buffer), self.size)
        if self.position >= end:
            return 0
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={self.position}-{end - 1}"})
        with urllib.request.urlopen(request) as reply:
            if reply.status != 206:
                raise SystemExit("the package index gives no parts of files; unpack the wheel and pass --from FOLDER")
            data = reply.read()
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def wheel_url(engine: str, version: str) -> str:
    """Return the URL of the wheel that pip would fetch, by whatever index it is configured with."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 28, 31, 34, 35)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
    command += ["--no-deps", "--ignore-installed", "--only-binary=:all:", "--python-version=3.12", *platforms]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        subprocess.run(
            [*command, f"--target={folder}", f"--report={report}", f"{engine}=={version}"],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        return str(json.loads(report.read_text())["install"][0]["download_info"]["url"])


def fetch(engine: str, version: str, folder: Path) -> None:
    """The needed files of a wheel, to the folder."""
    modules = {name.split(":")[0] for each in NEEDS[engine] for name in each.names}
    wanted = {file for module in modules for file in module_files(module)}
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(wheel_url(engine, version)), 1 << 18)) as wheel:
        for info in sorted(wheel.infolist(), key=lambda info: info.header_offset):
            if info.filename in wanted:
                wheel.extract(info, folder)


def versions(engine: str) -> tuple[str, ...]:
    """Return the versions that the plug-in supports."""
    tree = ast.parse((PLUGINS / f"weft-{engine}/src/weft_{engine}/__init__.py").read_text())
    node = lookup(tree, "VERSIONS")
    assert isinstance(node, ast.Assign)
    return tuple(ast.literal_eval(node.value))


def stored(engine: str, version: str) -> Path:
    return HERE / "contracts" / f"{engine}-{version}.json"


def main() -> None:
    from plugins import vllm_events  # of the engine, which tests of the plug-ins do without

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", help="ENGINE-VERSION; default: all that the plug-ins support")
    parser.add_argument("--from", dest="folder", type=Path, help="a folder with the unpacked wheel of the one version")
    options = parser.parse_args()
    asked = options.versions or [f"{engine}-{version}" for engine in ENGINES for version in versions(engine)]
    failed = False
    for name in asked:
        engine, version = name.split("-")
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.folder or Path(temporary)
            if options.folder is None:
                fetch(engine, version, folder)
            found = extract(folder, NEEDS[engine])
            events = vllm_events.source_file(folder)
            wrong = vllm_events.problems(vllm_events.load(events.read_text())) if engine == "vllm" else []
        wrong += problems(NEEDS[engine], found, version)
        print(f"{name}: {len(found)} symbols, " + ("as Weft takes them" if not wrong else "; ".join(wrong)))
        failed |= bool(wrong)
        if not wrong:
            stored(engine, version).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if failed:
        raise SystemExit("not stored where something differs")


if __name__ == "__main__":
    main()
