"""Builds ``trifuse._C`` and maps the import name ``trifuse`` onto the folders of the repository.

Everything declarative is in pyproject.toml. This file holds what is not:

- finding torch from inside pip's isolated build environment,
- compiling each CPU kernel once per instruction set (csrc/cpu/capability.h),
- compiling the CUDA kernels where nvcc is found, also against a CPU build of torch: they include no
  header of it (NVCC names another nvcc; set but empty, the kernels are left out),
- installing without the extension, or without CUDA kernels, and saying why, where they can't be
  built.
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
from typing import NamedTuple

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


# Machine code for these, and PTX from which drivers make it for GPUs to come. No kernel has
# instructions of its own for sm_90a, and one front end for both takes two thirds of the time.
CUDA_ARCHITECTURES = ("-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]",)


class Job(NamedTuple):
    """One object to compile."""

    source: Path
    target: Path
    command: list[str]  # without the names of files

    def is_fresh(self) -> bool:
        """Whether nothing that went into the object, by the compiler's own list, is newer."""
        depends = self.target.with_suffix(".d")
        if not (self.target.exists() and depends.exists()):
            return False
        names = depends.read_text().replace("\\\n", " ").split(": ", 1)[1].split()
        inputs = [Path(__file__), self.source, *map(Path, names)]
        built = self.target.stat().st_mtime
        return all(path.exists() and path.stat().st_mtime < built for path in inputs)

    def run(self) -> None:
        if self.is_fresh():
            return
        files = ["-MMD", "-MF", str(self.target.with_suffix(".d"))]
        files += ["-c", str(self.source), "-o", str(self.target)]
        done = subprocess.run([*self.command, *files], capture_output=True, text=True)
        print(done.stderr, file=sys.stderr, end="")
        if done.returncode:
            raise RuntimeError(f"{self.source.name} did not compile: {done.stderr[-2000:]}")


class BuildExtension(build_ext):
    """Compiles with the compilers directly: a handful of files, each with flags of its own."""

    cuda_error = "the extension was not built"

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
            f'"""Written by setup.py."""\n\nERROR = {error!r}\nCUDA_ERROR = {self.cuda_error!r}\n',
            encoding="utf-8",
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
        sources = sorted((ROOT / "csrc").glob("**/*.cpp"))
        kernels = [source for source in sources if source.stem.endswith("_kernel")]

        def job(source: Path, variant: str, command: list[str]) -> Job:
            name = "_".join(source.relative_to(ROOT / "csrc").with_suffix("").parts)
            return Job(source, build / f"{name}.{variant}.o", command)

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            nvcc, cuda_jobs = os.environ.get("NVCC", shutil.which("nvcc")), []
            if nvcc:
                command = [nvcc, "-ccbin", compiler, "-std=c++20", "-O3", *CUDA_ARCHITECTURES]
                command += ["--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]
                command.append(f"-I{ROOT / 'csrc'}")
                for source in sorted((ROOT / "csrc/cuda").glob("*.cu")):
                    cuda_jobs.append(job(source, "cuda", command))
            # Longest first: CUDA, then the kernels for wide vectors.
            cuda_runs = [pool.submit(one.run) for one in cuda_jobs]
            kernel_jobs = [
                job(source, capability, [compiler, *common, *kernel_flags(capability), *includes])
                for capability in CAPABILITIES
                for source in kernels
            ]
            kernel_runs = [pool.submit(one.run) for one in kernel_jobs[::-1]]
            self.cuda_error = "nvcc was not found (looked at $NVCC and the path)"
            if nvcc:
                errors = [run.exception() for run in cuda_runs]
                self.cuda_error = next((str(error) for error in errors if error), "")
            if self.cuda_error:
                message = f"trifuse: installing without CUDA kernels. {self.cuda_error}"
                print(message, file=sys.stderr)
                nvcc, cuda_jobs = None, []
            # What torch calls: with or without the ops of csrc/cuda.
            host = [*common, *includes, *(["-DTRIFUSE_HAS_CUDA"] if nvcc else [])]
            host_jobs = [
                job(source, "with_cuda" if nvcc else "host", [compiler, *host])
                for source in sources
                if source not in kernels and (nvcc or source.parent.name != "cuda")
            ]
            host_runs = [pool.submit(one.run) for one in host_jobs]
            for run in (*kernel_runs, *host_runs):
                run.result()

        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        # The linker keeps the first copy it meets of an inline function. Code for narrow vectors
        # comes first, so that none compiled for wide ones is shared with what runs everywhere.
        objects = [str(one.target) for one in (*host_jobs, *kernel_jobs, *cuda_jobs)]
        linker = [compiler]
        if nvcc:
            # nvcc knows where its runtime lies, which is linked in: a second one in the process, of
            # whichever version torch brings, is no trouble if neither sees the other's names.
            linker = [nvcc, "-ccbin", compiler, "-cudart", "static"]
            linker += ["-Xlinker", "--exclude-libs=ALL"]
        link = [*linker, "-shared", *objects, "-o", str(output)]
        for path in library_paths():
            link += [f"-L{path}", "-Xlinker", f"-rpath={path}"]
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
