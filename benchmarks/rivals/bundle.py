"""Packs vLLM 0.25.1, and what it needs, for a machine with Hopper GPUs that reaches no package index.

Left out: what the packages of that machine have (--have names them, one a line), and what a Hopper GPU does not run in
bfloat16. Most of a wheel is code for other GPUs: what cannot be left out of a library is zeroed, so that it compresses
away. torch there must be 2.11.0. Prepare, with the Python version of that machine:

    python3.12 -m venv env && env/bin/pip install torch==2.11.0 -r benchmarks/rivals/requirements-vllm-0.25.1.txt
    env/bin/pip install --no-deps flashinfer-python==0.6.13 cuda-tile tabulate
    pip download --no-deps vllm==0.25.1 && unzip -d vllm-0.25.1 vllm-0.25.1*.whl
    env/bin/python benchmarks/rivals/bundle.py vllm-0.25.1 --have have.txt --out vllm.tar.xz

About 65 MB. Unpacked there into a folder, that folder is the PYTHONPATH: compare.py --path vllm=FOLDER.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

HOPPER = 90
REPLACED = {"protobuf"}
"""Packages that vLLM needs newer than most machines have them."""
UNUSED = {"cryptography", "nvidia-cutlass-dsl", "pycparser", "cffi"}
UNUSED_FILES = re.compile(
    r"flashinfer/data/|mistral_common/data/|pycountry/(locales|databases)|/tests?/|\.a$|cudnn/.*\.h$|nvtx/.*\.pyx"
    r"|xgrammar/.*(include|3rdparty)|^include/|__pycache__"
)
UNUSED_OF_VLLM = re.compile(
    r"_vllm_fa2_C|vllm-rs$|third_party/deep_gemm/(include|_C.cpython-3(10|11|13|14))|third_party/fmha_sm100|_qutlass_C"
    r"|/static/|__pycache__|fused_moe/configs/(?!.*H[12]00)"
)
TRIMMED = re.compile(r"vllm/_(moe_)?C_stable_libtorch\.abi3\.so$")
MULTICAST = '        """Create multicast object, exchange handle, map memory, and bind."""\n'
"""FlashInfer's, which some hosts must not use."""
FATBIN, ELF = 0xBA55ED50, 2


def collect(wheel: Path, have: set[str], out: Path) -> None:
    """Copies the packages of this environment that are not in `have`, and an unpacked wheel of vLLM."""
    for package in importlib.metadata.distributions():
        if (name := plain(package.metadata["Name"])) in have - REPLACED or name in UNUSED:
            continue
        for file in package.files or []:
            source = Path(str(package.locate_file(file)))
            if not str(file).startswith("..") and not UNUSED_FILES.search(str(file)) and source.is_file():
                _copy(source, out / file)
    for library in out.rglob("*.so*"):
        subprocess.run(["strip", "--strip-unneeded", library], stderr=subprocess.DEVNULL)
    for source in wheel.rglob("*"):
        name = str(source.relative_to(wheel))
        if source.is_file() and not UNUSED_OF_VLLM.search(name):
            _copy(source, out / name)
            if TRIMMED.search(name):
                (out / name).write_bytes(trim(bytearray(source.read_bytes())))
    multicast = out / "flashinfer/comm/mnnvl.py"
    text = multicast.read_text()
    assert text.count(MULTICAST) == 1, "FlashInfer's multicast is set up elsewhere in this version"
    multicast.write_text(text.replace(MULTICAST, MULTICAST + '        raise RuntimeError("no multicast here")\n'))


def plain(name: str) -> str:
    """A package's name as all spellings of it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _copy(source: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, to)


def trim(library: bytearray) -> bytearray:
    """Zeroes the GPU code in a shared library's fatbins that Hopper does not run: other machine code, and PTX where
    there is machine code for Hopper, or it is for newer GPUs."""
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
                if not (arch == HOPPER if kind == ELF else not here and arch <= HOPPER):
                    library[code : code + length] = bytes(length)
            at += header + body
    return library


def _fatbin_sections(library: bytearray) -> Iterator[tuple[int, int]]:
    """Offsets and sizes, by the section headers of ELF64."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", library, table + number * entry) for number in range(count)]
    for header in headers:
        name = headers[names][4] + header[0]
        if bytes(library[name : library.index(0, name)]) in (b".nv_fatbin", b"__nv_relfatbin"):
            yield header[4], header[5]


def _entries(library: bytearray, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture, offset and size of each piece of code of a fatbin."""
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        (arch,) = struct.unpack_from("<I", library, at + 28)
        yield kind, arch, at + header, size
        at += header + size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="vLLM's wheel, unpacked")
    parser.add_argument("--have", type=Path, required=True, help="a file: packages of that machine, one a line")
    parser.add_argument("--out", type=Path, default=Path("vllm.tar.xz"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        collect(args.wheel, {plain(name) for name in args.have.read_text().split()}, Path(folder))
        subprocess.run(["tar", "-C", folder, "-cf", args.out, "-I", "xz -T2", "."], check=True)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
