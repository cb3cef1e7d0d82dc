"""The wheel has its native kernels compiled ahead (`weft/kernels/build.py`); all else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "src"))
from weft.kernels.build import BUILT, build_ahead


class Native(Distribution):
    """Is of one platform, though setuptools compiles nothing."""

    def has_ext_modules(self) -> bool:
        return True


class BuildWithKernels(build_py):
    """An editable installation has no built kernels: its sources change, and are compiled when first used."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            build_ahead(Path(self.build_lib, "weft", "kernels", BUILT.name))


class WheelOfEveryPython(bdist_wheel):
    """The libraries are free of Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=Native, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfEveryPython})
