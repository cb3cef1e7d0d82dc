"""Pack an engine with its packages, for a machine with Hopper GPUs that reaches no package index.

The bundle omits packages that the machine has (--have names them, one a line), and code that a Hopper GPU does not run
in bfloat16. Most of a wheel is code for other GPUs: it is zeroed inside a library, so that it compresses away. torch
there must be 2.11.0. Prepare, with the Python version of that machine, for vLLM 0.25.1:

    python3.12 -m venv env && env/bin/pip install torch==2.11.0 -r bench/scripts/rivals/requirements-vllm-0.25.1.txt
    env/bin/pip install --no-deps vllm==0.25.1 flashinfer-python==0.6.13 cuda-tile tabulate
    env/bin/python bench/scripts/rivals/bundle.py vllm --have have.txt --out vllm.tar.xz

and for SGLang 0.5.17, with only the requirements that text generation imports:

    python3.12 -m venv env && env/bin/pip install torch==2.11.0 torchvision==0.26.0
    env/bin/pip install --no-deps -r bench/scripts/rivals/requirements-sglang-0.5.17.txt
    env/bin/python bench/scripts/rivals/bundle.py sglang --have have.txt --out sglang.tar.xz

Unpacked there into a folder, that folder is the PYTHONPATH: compare.py --path vllm=FOLDER. With several GPUs
FlashInfer's fused all-reduce compiles for minutes at the first start, unless --compiled names a folder with its
NAME/NAME.so.

NVLink multicast, which can put the GPUs of a shared host out of service, is refused in the bundle: code that creates
such objects raises, and a sitecustomize.py sets the variables that keep NCCL and torch from it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HOPPER = 90
UNUSED_FILES = r"/tests?/|\.a$|xgrammar/.*(include|3rdparty)|^include/|__pycache__"
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Environment that keeps NCCL, torch and NVSHMEM from creating multicast objects."""
SITE = f'''"""No NVLink multicast in processes that have this folder on their path."""
import os, sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

NO_MULTICAST = {NO_MULTICAST!r}
os.environ.update(NO_MULTICAST)
os.environ.pop("TORCH_SYMMMEM", None)
here = os.path.dirname(os.path.abspath(__file__))  # Python takes one sitecustomize: the next on the path follows
following = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p or ".") != here])
if following is not None and following.loader is not None:
    following.loader.exec_module(module_from_spec(following))
'''


@dataclass(frozen=True)
class Patch:
    """Replacement of a text that a file has once."""

    file: str
    old: str
    new: str


def refused(file: str, line: str) -> Patch:
    """Return a patch: the code that begins with this line raises."""
    return Patch(file, line, f'        raise RuntimeError("no multicast here")\n{line}')


def guarded(file: str, line: str) -> Patch:
    """Return a patch: the code that begins with this line raises unless NO_MULTICAST is set, because it asks torch for
    memory with multicast."""
    missing = '__import__("os").environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1"'
    return Patch(file, line, f'    if {missing}:\n        raise RuntimeError("no multicast here")\n{line}')


COMM = "distributed/device_communicators"
FLASHINFER = (
    refused(
        "flashinfer/comm/mnnvl.py", '        """Create multicast object, exchange handle, map memory, and bind."""\n'
    ),
    refused(
        "flashinfer/comm/mixed_comm.py", '        """Initialize CUDA virtual memory for intra-node communication.\n'
    ),
    refused(
        "flashinfer/comm/trtllm_mnnvl_ar.py",
        "        requested_workspace_size = buffer_size_in_bytes * self.NUM_LAMPORT_BUFFERS\n",
    ),
    guarded(
        "flashinfer/comm/torch_symmetric_memory.py",
        "    # Ensure symmetric memory is set up with the correct store before\n",
    ),
)


@dataclass(frozen=True)
class Contents:
    """Contents of an engine's bundle.

    Attributes:
        replaced: packages that it needs in another version than most machines have.
        unused: packages to omit.
        unused_files: pattern of files to omit.
        trimmed: pattern of the libraries whose code for other GPUs is zeroed.
        kernels: pattern of the kernels to keep in these, by library.
        without_ptx: pattern of the libraries that bfloat16 uses without their PTX.
        stubs: text of modules that are imported and not used.
        patches: in addition to FlashInfer's.
    """

    replaced: frozenset[str]
    unused: frozenset[str]
    unused_files: str
    trimmed: str
    kernels: Mapping[str, bytes] = field(default_factory=dict)
    without_ptx: str = r"(?!)"
    stubs: Mapping[str, str] = field(default_factory=dict)
    patches: Sequence[Patch] = ()


ENGINES = {
    "vllm": Contents(
        replaced=frozenset({"protobuf"}),
        unused=frozenset({"cryptography", "nvidia-cutlass-dsl", "pycparser", "cffi"}),
        unused_files=r"flashinfer/data/|mistral_common/data/|pycountry/(locales|databases)|cudnn/.*\.h$|nvtx/.*\.pyx|vllm/(vllm_flash_attn/_vllm_fa2_C"
        r"|.*vllm-rs$|third_party/deep_gemm/(include|_C.cpython-3(10|11|13|14))|third_party/fmha_sm100|_qutlass_C"
        r"|.*/static/|.*fused_moe/configs/(?!.*H[12]00))",
        trimmed=r"vllm/_(moe_)?C_stable_libtorch\.abi3\.so$",
        without_ptx=r"vllm/_(moe_)?C_stable_libtorch\.abi3\.so$",  # of Marlin and of CUTLASS in eight bits
        patches=(
            Patch(f"vllm/{COMM}/symm_mem.py", "    symm_mem_available = True\n", "    symm_mem_available = False\n"),
        ),
    ),
    "sglang": Contents(
        replaced=frozenset({"transformers", "tokenizers"}),
        unused=frozenset(),
        # FlashInfer compiles its norms at the first start, which takes the compiler half a minute.
        unused_files=r"flashinfer/data/(?!cccl/|include/|csrc/(norm|flashinfer_norm_binding)\.cu|csrc/tvm_ffi_utils\.h)"
        r"|sglang/(multimodal_gen|test|benchmark|eval)/|sglang/srt/(server|grpc|multimodal)/_core\."
        r"|sglang/.*device_name=(?!.*H[12]00)|sgl_kernel/(sm100/|infllm_ops|flashmla_ops)",
        trimmed=r"sgl_kernel/.*\.so$",
        # FlashAttention 3 with heads of 128 in bfloat16: any other takes a file of its own, 500 MB in all.
        kernels={
            "flash_ops": rb"ILi128EEE(NS7_ILi\d+EEESA_|SA_SA_)EEELi128ENS_10bfloat16_tEf|FwdCombine|prepare_varlen"
        },
        stubs={
            **{"soundfile.py": "", "IPython/__init__.py": "", "IPython/display.py": "HTML = display = None\n"},
            "deep_gemm/__init__.py": "",  # for sparse attention, which draft layers import
        },
        patches=(
            Patch(
                f"sglang/srt/{COMM}/torch_symm_mem.py",
                "        torch_symm_mem_available = True\n",
                "        torch_symm_mem_available = False\n",
            ),
            Patch(
                f"sglang/srt/{COMM}/triton_symm_mem_ag.py",
                "        if x.dim() != 2 or x.dtype != torch.bfloat16:\n",
                "        return None\n        if x.dim() != 2 or x.dtype != torch.bfloat16:\n",
            ),
            guarded(
                f"sglang/srt/{COMM}/custom_all_reduce_v2.py",
                "    from torch._C._distributed_c10d import _SymmetricMemory\n",
            ),
        ),
    ),
}
FATBIN, ELF = 0xBA55ED50, 2


def collect(contents: Contents, have: set[str], out: Path, compiled: Path | None = None) -> None:
    """Copy the packages of this environment that are not in `have`. compiled: a folder of FlashInfer's modules."""
    unused_files, trimmed = re.compile(f"{UNUSED_FILES}|{contents.unused_files}"), re.compile(contents.trimmed)
    for package in importlib.metadata.distributions():
        if (name := plain(package.metadata["Name"])) in have - contents.replaced or name in contents.unused:
            continue
        for file in map(str, package.files or []):
            source, to = Path(str(package.locate_file(file))), out / file
            if file.startswith("..") or unused_files.search(file) or not source.is_file():
                continue
            _copy(source, to)
            if trimmed.search(file):
                kernels = next((kept for part, kept in contents.kernels.items() if part in file), b"")
                ptx = re.search(contents.without_ptx, file) is None
                to.write_bytes(trim(bytearray(source.read_bytes()), kernels, ptx))
            elif ".so" in source.suffixes:
                _strip(to)
    for file, text in {**contents.stubs, "sitecustomize.py": SITE}.items():
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_text(text)
    for patch in (*FLASHINFER, *contents.patches):
        text = (path := out / patch.file).read_text()
        assert text.count(patch.old) == 1, f"{patch.file} is another in this version: look for multicast again"
        path.write_text(text.replace(patch.old, patch.new))
    for library in compiled.glob("*/*.so") if compiled else ():
        _copy(library, to := out / "flashinfer/data/aot" / library.parent.name / library.name)
        _strip(to)


def _strip(library: Path) -> None:
    subprocess.run(["strip", "--strip-unneeded", library], stderr=subprocess.DEVNULL)


def plain(name: str) -> str:
    """Return a package's name in the spelling that all its spellings share."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _copy(source: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, to)


def trim(library: bytearray, kernels: bytes = b"", ptx: bool = True) -> bytearray:
    """Zero the GPU code in a shared library's fatbins that Hopper does not run, and code without a name that `kernels`
    finds.

    Hopper does not run other GPUs' machine code. It runs PTX only if there is no machine code for Hopper, and if the
    PTX is not for newer GPUs. ptx: whether any PTX is kept.
    """
    kept = re.compile(kernels)
    for start, size in _fatbin_sections(library):
        at = start
        while at < start + size - 16:
            magic, _, header, body = struct.unpack_from("<IHHQ", library, at)
            if magic != FATBIN:
                at += 8
                continue
            entries = list(_entries(library, at + header, at + header + body))
            here = any(kind == ELF and arch == HOPPER for kind, arch, _, _ in entries)
            for kind, arch, code, length in entries:
                runs = arch == HOPPER if kind == ELF else ptx and not here and arch <= HOPPER
                if not runs or not kept.search(library, code, code + length):
                    library[code : code + length] = bytes(length)
            at += header + body
    return library


def _fatbin_sections(library: bytearray) -> Iterator[tuple[int, int]]:
    """Yield offsets and sizes, by the section headers of ELF64."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", library, table + number * entry) for number in range(count)]
    for header in headers:
        name = headers[names][4] + header[0]
        if bytes(library[name : library.index(0, name)]) in (b".nv_fatbin", b"__nv_relfatbin"):
            yield header[4], header[5]


def _entries(library: bytearray, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, architecture, offset and size of each piece of code of a fatbin."""
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        (arch,) = struct.unpack_from("<I", library, at + 28)
        yield kind, arch, at + header, size
        at += header + size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES, help="engine in this Python's environment")
    parser.add_argument("--have", type=Path, required=True, help="file with the packages of that machine, one a line")
    parser.add_argument("--compiled", type=Path, help="folder of FlashInfer's modules: NAME/NAME.so")
    parser.add_argument("--out", type=Path, help="defaults to ENGINE.tar.xz")
    args = parser.parse_args()
    out = args.out or Path(f"{args.engine}.tar.xz")
    with tempfile.TemporaryDirectory() as folder:
        have = {plain(name) for name in args.have.read_text().split()}
        collect(ENGINES[args.engine], have, Path(folder), args.compiled)
        subprocess.run(["tar", "-C", folder, "-cf", out, "-I", "xz -9 -T2", "."], check=True)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
