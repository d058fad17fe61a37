"""Builds ``trifuse._C`` and maps the import name ``trifuse`` onto the folders of the repository.

Everything declarative is in pyproject.toml. This file holds what is not:

- finding torch from inside pip's isolated build environment,
- compiling each CPU kernel once per instruction set (csrc/cpu/capability.h),
- compiling the CUDA kernels where nvcc is found, also against a CPU build of torch: they include no
  header of it (NVCC names another nvcc; set but empty, the kernels are left out;
  TORCH_CUDA_ARCH_LIST says for which GPUs),
- installing without the extension, or without CUDA kernels, and saying why, where they can't be
  built,
- compiling it with sanitizers instead, into a folder of its own (TRIFUSE_SANITIZE; see
  tests/sanitize.py).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
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

# What torch calls becomes an object for each of these operators, for CPU and GPU together, and one
# for all others and the bindings: torch's headers take longer to compile than what includes them.
# Sources of one object share their unnamed namespaces.
LARGE_OPERATORS = ("attention", "lstm")

# What TRIFUSE_SANITIZE may be, and the compiler's flags for it. The build for memory also counts
# which lines run. In the one for threads they are std::threads (csrc/cpu/threads.h).
SANITIZERS = {
    "memory": ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "--coverage"],
    "threads": ["-fsanitize=thread", "-DTRIFUSE_STD_THREADS"],
}


def kernel_flags(capability: str) -> list[str]:
    """Flags for one instruction set. ATen's vector types are chosen by the same macros."""
    aten = "AVX512" if capability.endswith("_BF16") else capability
    return [
        f"-DCPU_CAPABILITY={aten}",
        *([] if aten == "DEFAULT" else [f"-DCPU_CAPABILITY_{aten}"]),
        f"-DTRIFUSE_CAPABILITY={capability}",
        *CAPABILITIES[capability],
    ]


def is_compiled(kernel: Path, capability: str) -> bool:
    """Whether a kernel has code of its own for an instruction set: those that add products of
    bfloat16 have none for kernels without products (csrc/cpu/kernels.h)."""
    return not (capability.endswith("_BF16") and kernel.name.startswith("dropout"))


def cuda_architectures() -> list[str]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST, which is read as torch's own extensions read it.

    If it is not set: machine code for the GPUs that are there, and PTX for later ones; if there are
    none, machine code for sm_80 and sm_90, and PTX. Beside a CPU build of torch, which can run none
    of it, PTX alone: most of the time would go into machine code.
    """
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not asked and torch.version.cuda is None:
        return ["-gencode=arch=compute_80,code=compute_80"]
    if not asked and not torch.cuda.is_available():
        # One front end for both: no kernel has instructions of its own for sm_90.
        return ["-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]"]
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    try:
        flags = _get_cuda_arch_flags()
    except (ValueError, IndexError) as error:  # the latter: "native", and no GPU
        raise ValueError(f"TORCH_CUDA_ARCH_LIST={asked!r}: {error}") from None
    # Lists are written for more than one package; kernels here begin with sm_80.
    return [flag for flag in flags if int(re.findall(r"compute_(\d+)", flag)[0]) >= 80]


def hopper_architecture(architectures: list[str]) -> str:
    """nvcc's flag for csrc/cuda/*_hopper.cu, whose instructions sm_90a alone has: machine code
    where others are compiled to sm_90's, otherwise PTX."""
    code = "sm" if "sm_90" in " ".join(architectures) else "compute"
    return f"-gencode=arch=compute_90a,code={code}_90a"


class Job(NamedTuple):
    """One object to compile."""

    sources: list[Path]  # several are compiled as if one included the others
    target: Path
    command: list[str]  # without the names of files

    def size(self) -> int:
        """About how long it takes, to begin with the longest."""
        return sum(source.stat().st_size for source in self.sources)

    def is_fresh(self) -> bool:
        """Whether nothing that went into the object, by the compiler's own list, is newer."""
        depends = self.target.with_suffix(".d")
        if not (self.target.exists() and depends.exists()):
            return False
        names = depends.read_text().replace("\\\n", " ").split(": ", 1)[1].split()
        built = self.target.stat().st_mtime
        inputs = map(Path, names)
        return all(path.exists() and path.stat().st_mtime < built for path in inputs)

    def run(self) -> None:
        if self.is_fresh():
            return
        files = ["-MMD", "-MF", str(self.target.with_suffix(".d")), "-o", str(self.target), "-c"]
        if len(self.sources) == 1:
            files.append(str(self.sources[0]))
        else:
            files += ["-x", "c++", "-"]
        text = "".join(f'#include "{source}"\n' for source in self.sources)
        done = subprocess.run([*self.command, *files], input=text, capture_output=True, text=True)
        print(done.stderr, file=sys.stderr, end="")
        if done.returncode:
            names = ", ".join(source.name for source in self.sources)
            raise RuntimeError(f"{names} did not compile: {done.stderr[-2000:]}")


class BuildExtension(build_ext):
    """Compiles with the compilers directly: a handful of files, each with flags of its own."""

    cuda_error = "the extension was not built"

    def run(self) -> None:
        self.nvcc = os.environ.get("NVCC", shutil.which("nvcc"))
        self.sanitizer = os.environ.get("TRIFUSE_SANITIZE")
        # First: a setting that is wrong is no reason to install without the extension.
        if self.sanitizer:
            self.nvcc = ""  # links otherwise, and sanitizers see nothing of a GPU
            if self.sanitizer not in SANITIZERS:
                expected = " or ".join(SANITIZERS)
                raise ValueError(f"TRIFUSE_SANITIZE: expected {expected}; got {self.sanitizer!r}")
            if self.inplace:
                raise ValueError(
                    "TRIFUSE_SANITIZE: a sanitized extension loads in a prepared process alone, so "
                    "it does not replace the one in place; run `python setup.py build --build-lib "
                    "FOLDER`"
                )
        self.architectures = cuda_architectures() if self.nvcc and torch else []
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
        sanitize = SANITIZERS[self.sanitizer] if self.sanitizer else []
        if sanitize:
            # The last -O counts: so much compiles fast and is not slow.
            common += ["-O1", "-g1", "-fno-omit-frame-pointer", "-DTRIFUSE_SANITIZE", *sanitize]
        # GCC warns of its own intrinsics' undefined values, and of an ABI before 4.6.
        common += ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi"]
        common += ["-DAT_PARALLEL_OPENMP=1", "-DTORCH_EXTENSION_NAME=_C"]
        common += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        # Headers of torch's then include those operators that they use, not all of them.
        host = [compiler, *common, "-DAT_PER_OPERATOR_HEADERS", *includes]
        sources = sorted((ROOT / "csrc").glob("**/*.cpp"))
        kernels = [source for source in sources if source.stem.endswith("_kernel")]

        def job(sources: list[Path], name: str, command: list[str]) -> Job:
            # Another command is another object.
            settings = " ".join([*command, *map(str, sources)])
            digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
            return Job(sources, build / f"{name}.{digest}.o", command)

        def torch_facing_jobs(with_cuda: bool) -> list[Job]:
            groups: dict[str, list[Path]] = {}
            for source in sources:
                if source in kernels or (source.parent.name == "cuda" and not with_cuda):
                    continue
                name = source.stem if source.stem in LARGE_OPERATORS else "operators"
                groups.setdefault(name, []).append(source)
            code = [flag.split(",code=")[1].strip("[]") for flag in self.architectures]
            built_for = [f'-DTRIFUSE_CUDA_CODE="{",".join(code)}"'] if with_cuda else []
            return [
                job(group, name, [*host, *(built_for if name == "operators" else [])])
                for name, group in groups.items()
            ]

        kernel_jobs = []
        for capability in CAPABILITIES:
            command = [compiler, *common, *kernel_flags(capability), *includes]
            for source in kernels:
                if is_compiled(source, capability):
                    kernel_jobs.append(job([source], f"{source.stem}.{capability}", command))
        cuda_jobs = []
        if self.nvcc and self.architectures:
            command = [self.nvcc, "-ccbin", compiler, "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}"]
            command += ["--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]
            for source in sorted((ROOT / "csrc/cuda").glob("*.cu")):
                is_hopper = source.stem.endswith("_hopper")
                flags = (
                    [hopper_architecture(self.architectures)] if is_hopper else self.architectures
                )
                cuda_jobs.append(job([source], f"{source.stem}.cuda", [*command, *flags]))
            self.cuda_error = ""
        elif self.nvcc:
            self.cuda_error = "neither TORCH_CUDA_ARCH_LIST nor a GPU asks for sm_80 or later"
        else:
            self.cuda_error = "nvcc was not found (looked at $NVCC and the path)"
        host_jobs = torch_facing_jobs(with_cuda=bool(cuda_jobs))

        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            jobs = sorted([*host_jobs, *kernel_jobs, *cuda_jobs], key=Job.size, reverse=True)
            runs = {one.target: pool.submit(one.run) for one in jobs}
            errors = [runs[one.target].exception() for one in cuda_jobs]
            if any(errors):
                self.cuda_error = next(str(error) for error in errors if error)
                cuda_jobs, host_jobs = [], torch_facing_jobs(with_cuda=False)
                runs |= {one.target: pool.submit(one.run) for one in host_jobs}
            if self.cuda_error:
                message = f"trifuse: installing without CUDA kernels. {self.cuda_error}"
                print(message, file=sys.stderr)
            for one in (*kernel_jobs, *host_jobs):
                runs[one.target].result()

        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        # The linker keeps the first copy it meets of an inline function. Code for narrow vectors
        # comes first, so that none compiled for wide ones is shared with what runs everywhere.
        objects = [str(one.target) for one in (*host_jobs, *kernel_jobs, *cuda_jobs)]
        linker = [compiler]
        if cuda_jobs:
            # nvcc knows where its runtime lies, which is linked in: a second one in the process, of
            # whichever version torch brings, is no trouble if neither sees the other's names.
            linker = [self.nvcc, "-ccbin", compiler, "-cudart", "static"]
            linker += ["-Xlinker", "--exclude-libs=ALL"]
        link = [*linker, *sanitize, "-shared", *objects, "-o", str(output)]
        for path in library_paths():
            link += [f"-L{path}", "-Xlinker", f"-rpath={path}"]
        link += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(link, check=True)


if __name__ == "__main__":
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
