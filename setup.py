"""Builds the CPU library; without a compiler the installation goes on, and torch serves instead.

One binary serves every machine of an architecture: there is no -march here. The files isa_*.cpp switch their own
instructions on, and the library chooses at run time.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/cpu/src")


class BuildLibrary(build_ext):
    """A plain shared library for ctypes: no Python in it, so no interpreter's version in its name."""

    def get_ext_filename(self, name: str) -> str:
        return str(Path(*name.split(".")).with_suffix(".so"))

    def build_extension(self, extension: Extension) -> None:
        """Compile one file on each core: the instruction sets' files take most of the time, and alike."""
        one_by_one = self.compiler.compile
        objects = self.compiler.object_filenames

        def together(sources: list[str], output_dir: str, **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda source: one_by_one([source], output_dir, **options), sources))
            return objects(sources, 0, output_dir)

        self.compiler.compile = together
        super().build_extension(extension)

    def copy_file(self, infile: str, outfile: str, *args: Any, **options: Any) -> Any:
        """Put a new file in the old one's place: a process that has the old library mapped keeps it whole."""
        Path(outfile).unlink(missing_ok=True)
        return super().copy_file(infile, outfile, *args, **options)

    def get_export_symbols(self, extension: Extension) -> list[str]:
        return []


setup(
    cmdclass={"build_ext": BuildLibrary},
    ext_modules=[
        Extension(
            "kernels.cpu.headrace_cpu",
            sources=sorted(map(str, SOURCES.glob("*.cpp"))),
            depends=["setup.py", *sorted(map(str, SOURCES.glob("*.h")))],
            language="c++",
            # -ffp-contract=off: the compiler may not fuse a product into a sum here and not there, because a row's
            # result must not depend on the tile that it was computed in.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-fvisibility=hidden",
                "-pthread",
                "-Wall",
                "-Wextra",
                "-Wno-maybe-uninitialized",  # in GCC's own headers of AVX-512
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
)
