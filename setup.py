"""Builds ``trifuse._C`` and maps the import name ``trifuse`` onto the folders of the repository.

Everything declarative is in pyproject.toml. This file holds what is not:

- finding torch from inside pip's isolated build environment,
- compiling each CPU kernel once per instruction set (csrc/cpu/capability.h),
- installing without the extension, and saying why, where it can't be built.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
VERSION = (ROOT / "pytorch_ext/_version.py").read_text().split('"')[1]

try:
    import torch
except ImportError:
    # pip builds in an environment of its own that hides the one it installs into, but runs the
    # same interpreter. Building against that torch is the point: no other one would do.
    sys.path.append(sysconfig.get_path("purelib"))
    try:
        import torch
    except ImportError:
        torch = None  # type: ignore[assignment]

# One object per kernel file and instruction set. The name is the namespace its code lives in.
X86 = {
    "DEFAULT": [],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
}
X86["AVX512_BF16"] = [*X86["AVX512"], "-mavx512bf16"]
X86["AMX_BF16"] = [*X86["AVX512_BF16"], "-DTRIFUSE_BRGEMM"]
CAPABILITIES = X86 if platform.machine() in ("x86_64", "AMD64") else {"DEFAULT": []}


def kernel_flags(capability: str) -> list[str]:
    """Flags for one instruction set. ATen's vector types are chosen by the same macros."""
    aten = "AVX512" if capability.endswith("_BF16") else capability
    return [
        f"-DCPU_CAPABILITY={aten}",
        *([] if aten == "DEFAULT" else [f"-DCPU_CAPABILITY_{aten}"]),
        f"-DTRIFUSE_CAPABILITY={capability}",
        *CAPABILITIES[capability],
    ]


class BuildExtension(build_ext):
    """Compiles with the C++ compiler directly: a handful of files, each with flags of its own."""

    def run(self) -> None:
        package = ROOT / "pytorch_ext" if self.inplace else Path(self.build_lib) / "trifuse"
        error = ""
        try:
            super().run()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            message = f"trifuse: the C++ extension was not built; installing without it. {error}"
            print(message, file=sys.stderr)
            for stale in package.glob("_C.*.so"):  # an earlier build's is not what was asked for
                stale.unlink()
        package.mkdir(parents=True, exist_ok=True)
        (package / "_build_info.py").write_text(
            f'"""Written by setup.py."""\n\nERROR = {error!r}\n', encoding="utf-8"
        )

    def get_outputs(self) -> list[str]:
        return [*super().get_outputs(), str(Path(self.build_lib) / "trifuse/_build_info.py")]

    def build_extension(self, ext: Extension) -> None:
        if torch is None:
            raise RuntimeError(
                "torch was not found while building; install torch, then run "
                "`pip install --no-build-isolation .`"
            )
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            raise RuntimeError("no C++ compiler was found (looked at $CXX, c++ and g++)")
        from torch.utils.cpp_extension import include_paths, library_paths

        # Kept between builds (pip's own folder is not), apart for each Python and torch.
        build = ROOT / "build" / f"{sysconfig.get_config_var('SOABI')}-torch-{torch.__version__}"
        build.mkdir(parents=True, exist_ok=True)
        includes = [f"-I{ROOT / 'csrc'}", *(f"-isystem{path}" for path in include_paths())]
        includes.append(f"-isystem{sysconfig.get_path('include')}")
        # OpenMP is only compiled against: torch brings its own runtime, and a second one linked
        # here would be a second pool of threads beside torch's.
        common = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall"]
        # GCC warns of its own intrinsics' undefined values, and of an ABI before 4.6.
        common += ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi"]
        common += ["-DAT_PARALLEL_OPENMP=1", "-DTORCH_EXTENSION_NAME=_C"]
        common += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        # The linker keeps the first copy it meets of an inline function. Code for narrow vectors
        # comes first, so that none compiled for wide ones is shared with what runs everywhere.
        jobs: list[tuple[Path, Path, list[str]]] = []
        sources = sorted((ROOT / "csrc").glob("**/*.cpp"))
        for capability in (None, *CAPABILITIES):
            for source in sources:
                if source.stem.endswith("_kernel") == (capability is not None):
                    name = "_".join(source.relative_to(ROOT / "csrc").with_suffix("").parts)
                    target = build / f"{name}.{capability or 'host'}.o"
                    jobs.append((source, target, kernel_flags(capability) if capability else []))

        def is_fresh(source: Path, target: Path) -> bool:
            """Whether nothing that went into an object, by the compiler's own list, is newer."""
            depends = target.with_suffix(".d")
            if not (target.exists() and depends.exists()):
                return False
            names = depends.read_text().replace("\\\n", " ").split(": ", 1)[1].split()
            inputs = [Path(__file__), source, *map(Path, names)]
            built = target.stat().st_mtime
            return all(path.exists() and path.stat().st_mtime < built for path in inputs)

        def compile_one(job: tuple[Path, Path, list[str]]) -> None:
            source, target, flags = job
            if is_fresh(source, target):
                return
            command = [compiler, *common, *flags, *includes, "-MMD", "-c", str(source), "-o"]
            command.append(str(target))
            done = subprocess.run(command, capture_output=True, text=True)
            print(done.stderr, file=sys.stderr, end="")
            if done.returncode:
                raise RuntimeError(f"{source.name} did not compile: {done.stderr[-2000:]}")

        # Longest first: the kernels for wide vectors.
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            list(pool.map(compile_one, jobs[::-1]))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        link = [compiler, "-shared", *(str(target) for _, target, _ in jobs), "-o", str(output)]
        for path in library_paths():
            link += [f"-L{path}", f"-Wl,-rpath,{path}"]
        link += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(link, check=True)


setup(
    version=VERSION,
    packages=[
        "trifuse",
        "trifuse.benchmarks",
        "trifuse.kernels",
        "trifuse.models",
        "trifuse.nn",
        "trifuse.ops",
        "trifuse.reference",
    ],
    package_dir={
        "trifuse": "pytorch_ext",
        "trifuse.benchmarks": "benchmarks",
        "trifuse.kernels": "kernels",
    },
    package_data={"trifuse": ["py.typed", "_C.pyi"]},
    ext_modules=[Extension("trifuse._C", sources=[])],
    cmdclass={"build_ext": BuildExtension},
)
