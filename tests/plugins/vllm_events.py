"""KV events of Weft, decoded by vLLM's source or by its fields in contracts/."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from plugins.contracts import EVENT_CLASSES, KV_EVENTS
from weft.engine.kv.cache_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

EVENTS = [
    BlockStored([7, 2**64 - 1], None, [1, 2, 3, 4], 2, None, "GPU", None),
    BlockStored([9], 7, [5, 6], 2, None, "GPU", None, [("salt",)], 1, "sliding_window", 5),
    BlockRemoved([7, 9], "GPU", 1),
    AllBlocksCleared(),
]


def source_of(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The classes as a contract has them."""
    text = "import msgspec\nfrom typing import Any\n"
    for name in EVENT_CLASSES:
        it = found[f"{KV_EVENTS}:{name}"]
        text += f"class {name}({', '.join(it['bases'] + it.get('keywords', []))}):\n"
        text += "".join(f"    {field}\n" for field in it.get("fields", ())) + "    pass\n"
    return text


def load(source: str) -> ModuleType:
    """The module, without what it imports of vLLM's."""
    module, tree = ModuleType(f"{KV_EVENTS}_alone"), ast.parse(source)
    module.__dict__.update(ExternalBlockHash=bytes | int, KVEventsConfig=object, init_logger=lambda name: None)
    kept = [each for each in tree.body if not (isinstance(each, ast.ImportFrom) and "vllm" in str(each.module))]
    sys.modules[module.__name__] = module  # where msgspec looks for the names in annotations
    exec(compile(ast.Module(kept, []), KV_EVENTS, "exec"), module.__dict__)
    return module


def problems(theirs: ModuleType) -> list[str]:
    """Return a line for each value that vLLM's decoder reads otherwise than Weft has written it."""
    sent = KVEventBatch(1.5, list(EVENTS), 3)
    try:
        read = msgspec.msgpack.Decoder(theirs.KVEventBatch).decode(msgspec.msgpack.encode(sent))
    except msgspec.DecodeError as error:
        return [f"{KV_EVENTS} does not decode KV events: {error}"]
    pairs = [(sent, read), *zip(sent.events, read.events, strict=True)]
    wrong = [f"{type(one).__name__} is {type(other).__name__}" for one, other in pairs]
    wrong = [line for line in wrong if len({*line.split(" is ")}) == 2]
    for one, other in pairs:
        for name in one.__struct_fields__:
            if name != "events" and getattr(other, name, None) != getattr(one, name):
                wrong.append(f"{KV_EVENTS}:{type(one).__name__}.{name} is read as {getattr(other, name, None)}")
    return wrong


def source_file(folder: Path) -> Path:
    """Return the module's file below the folder of an unpacked wheel."""
    return folder / f"{KV_EVENTS.replace('.', '/')}.py"
