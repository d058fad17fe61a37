"""Builds ``trifuse._C`` and maps the import name ``trifuse`` onto the folders of the repository.

Everything declarative is in pyproject.toml. This file does the rest:

- finding torch from inside pip's isolated build environment,
- writing the compiler's and linker's calls as a ninja file (Graph), and running ninja,
- compiling each CPU kernel once per instruction set (csrc/cpu/capability.h),
- compiling the CUDA kernels if nvcc is found, even beside a CPU build of torch: they include none
  of torch's headers (NVCC names another nvcc; set but empty, it leaves the kernels out;
  TORCH_CUDA_ARCH_LIST selects the GPUs),
- installing without the extension, or without the CUDA kernels, if they can't be built, and saying
  why,
- compiling the extension with sanitizers instead, into a separate folder (TRIFUSE_SANITIZE; see
  tests/support/sanitize.py), for the instruction sets in TRIFUSE_SANITIZE_SETS (default: all).
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
VERSION = (ROOT / "pytorch_ext/_version.py").read_text().split('"')[1]

try:
    import torch
except ImportError:
    # pip builds in an isolated environment, but with the interpreter of the target environment. The
    # extension must be built against the torch installed there: it loads with no other.
    sys.path.append(sysconfig.get_path("purelib"))
    try:
        import torch
    except ImportError:
        torch = None  # type: ignore[assignment]

# A kernel file compiles to one object per instruction set (is_compiled). The set's name, or that of
# its vector type, is the code's namespace.
X86 = {
    # It serves only CPUs without AVX2, and compiles in half the time so.
    "DEFAULT": ["-O2"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
}
X86["AVX512_BF16"] = [*X86["AVX512"], "-mavx512bf16"]
X86["AMX_BF16"] = [*X86["AVX512_BF16"], "-mamx-tile", "-mamx-bf16"]
CAPABILITIES = X86 if platform.machine() in ("x86_64", "AMD64") else {"DEFAULT": []}

# The torch-facing sources compile to one object for each of these operators (CPU and GPU together)
# and one for the bindings and all other operators: torch's headers take longer to compile than the
# sources that include them. Sources of one object share their unnamed namespaces.
LARGE_OPERATORS = ("attention", "lstm")

# Values of TRIFUSE_SANITIZE and their compiler flags. The memory build also records line coverage.
# The threads build uses std::thread instead of OpenMP (csrc/cpu/threads.h).
SANITIZERS = {
    "memory": ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "--coverage"],
    "threads": ["-fsanitize=thread", "-DTRIFUSE_STD_THREADS"],
}


def kernel_flags(capability: str) -> list[str]:
    """Returns the flags for one instruction set. Its macros also select ATen's vector types."""
    aten = "AVX512" if capability.endswith("_BF16") else capability
    return [
        f"-DCPU_CAPABILITY={aten}",
        *([] if aten == "DEFAULT" else [f"-DCPU_CAPABILITY_{aten}"]),
        f"-DTRIFUSE_CAPABILITY={capability}",
        *CAPABILITIES[capability],
    ]


def is_compiled(kernel: Path, capability: str) -> bool:
    """Returns whether a kernel is compiled for an instruction set. The ``_BF16`` sets only add
    instructions for bfloat16, so kernels that use none of these skip them. Their namespace is that
    of the vector types (csrc/cpu/kernels.h)."""
    text = kernel.read_text(encoding="utf-8")
    for_vector_types = re.search(r"^namespace trifuse::CPU_CAPABILITY\b", text, re.MULTILINE)
    return not (capability.endswith("_BF16") and for_vector_types)


def cuda_architectures() -> list[str]:
    """Returns nvcc's flags for TORCH_CUDA_ARCH_LIST, parsed as for torch's own extensions.

    If it is not set: machine code for the GPUs present, and PTX for later ones. Without a GPU:
    machine code for sm_80 and sm_90, and PTX. Beside a CPU build of torch, which can run neither:
    PTX alone, because machine code would take most of the compile time.
    """
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not asked and torch.version.cuda is None:
        return ["-gencode=arch=compute_80,code=compute_80"]
    if not asked and not torch.cuda.is_available():
        # One front-end pass serves both. Only decoding's second kernel would use an instruction of
        # sm_90 alone, to begin while the first one ends.
        return ["-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]"]
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    try:
        flags = _get_cuda_arch_flags()
    except (ValueError, IndexError) as error:  # IndexError: "native" without a GPU
        raise ValueError(f"TORCH_CUDA_ARCH_LIST={asked!r}: {error}") from None
    # The list may be meant for other packages too; kernels here need sm_80 or later.
    return [flag for flag in flags if int(re.findall(r"compute_(\d+)", flag)[0]) >= 80]


def hopper_architecture(architectures: list[str]) -> str:
    """Returns nvcc's flag for csrc/cuda/*_hopper.cu, which need sm_90a: machine code if the other
    kernels compile to machine code for sm_90, otherwise PTX."""
    code = "sm" if "sm_90" in " ".join(architectures) else "compute"
    return f"-gencode=arch=compute_90a,code={code}_90a"


def ninja_program() -> str:
    """Returns ninja's path; raises RuntimeError if there is none."""
    program = shutil.which("ninja")
    if program is not None:
        return program
    try:
        import ninja
    except ImportError:
        raise RuntimeError("ninja was not found; run `pip install ninja`") from None
    return str(Path(ninja.BIN_DIR) / "ninja")


class Graph:
    """Objects to compile and libraries to link: a ninja file in ``folder``.

    https://ninja-build.org/manual.html. Nothing is made again unless its command changed or a file
    that it was made from, by the compiler's own list of them.
    """

    RULES = """ninja_required_version = 1.5

rule compile
  command = $call -MMD -MF $out.d -o $out -c $in
  depfile = $out.d
  deps = gcc
  description = compile $name

rule link
  command = $call $in -o $out $libraries
  description = link $name
"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.edges: list[tuple[int, str]] = []  # with the size of the sources
        folder.mkdir(parents=True, exist_ok=True)

    def compile(self, sources: list[Path], name: str, command: list[str]) -> Path:
        """Adds an object and returns its path. Several sources compile as one."""
        # The name holds a digest, so that objects of other settings stay beside this one.
        settings = " ".join([*command, *map(str, sources)])
        target = self.folder / f"{name}.{hashlib.sha256(settings.encode()).hexdigest()[:8]}.o"
        source = sources[0]
        if len(sources) > 1:
            source = target.with_suffix(".cpp")
            if not source.exists():
                source.write_text("".join(f'#include "{one}"\n' for one in sources))
        size = sum(one.stat().st_size for one in sources)
        self._add(size, target, "compile", [source], name=name, call=shlex.join(command))
        return target

    def link(self, objects: list[Path], target: Path, command: list[str], after: list[str]) -> None:
        """Adds a library. ``after`` holds the linker's arguments that follow the objects."""
        target.parent.mkdir(parents=True, exist_ok=True)
        call, libraries = shlex.join(command), shlex.join(after)
        self._add(-1, target, "link", objects, name=target.name, call=call, libraries=libraries)

    def _add(
        self, size: int, target: Path, rule: str, inputs: list[Path], **variables: str
    ) -> None:
        def path(one: Path) -> str:
            return re.sub(r"([$ :])", r"$\1", str(one))

        lines = [f"build {path(target)}: {rule} {' '.join(map(path, inputs))}"]
        lines += [f"  {name} = {value.replace('$', '$$')}" for name, value in variables.items()]
        self.edges.append((size, "\n".join(lines)))

    def run(self) -> None:
        """Makes everything; raises RuntimeError with the end of what the compilers printed."""
        # The largest sources come first: among those that are ready, ninja starts with the first.
        edges = [text for _, text in sorted(self.edges, key=lambda edge: -edge[0])]
        (self.folder / "build.ninja").write_text("\n\n".join([self.RULES, *edges]) + "\n")
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        command = [ninja_program(), "-C", str(self.folder), "-j", jobs, "-k", "0"]
        printed: collections.deque[str] = collections.deque(maxlen=60)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                printed.append(line)
        if process.returncode:
            raise RuntimeError(f"the extension did not compile: {''.join(printed)[-2000:]}")


class Commands:
    """The compilers' calls, without file names.

    Raises:
        RuntimeError: there is no torch or no compiler.
    """

    def __init__(self, sanitizer: str | None) -> None:
        if torch is None:
            raise RuntimeError(
                "torch was not found while building; install torch, then run "
                "`pip install --no-build-isolation .`"
            )
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            raise RuntimeError("no C++ compiler was found (looked at $CXX, c++ and g++)")
        self.compiler = compiler
        # Compiled with OpenMP but not linked with it: torch brings its own runtime, and a second
        # one would start a second pool of threads.
        flags = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall"]
        # GCC warns about undefined values in its own intrinsics and an ABI that changed in 4.6.
        flags += ["-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-psabi"]
        flags += ["-DAT_PARALLEL_OPENMP=1", "-DTORCH_EXTENSION_NAME=_C"]
        flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        self.sanitizers = SANITIZERS[sanitizer] if sanitizer else []
        self.flags = flags
        self.sanitized: list[str] = []
        if sanitizer:
            # They follow all others: the last -O wins. -O1 compiles fast and runs fast enough.
            self.sanitized = ["-O1", "-g1", "-fno-omit-frame-pointer", "-DTRIFUSE_SANITIZE"]
            self.sanitized += self.sanitizers
        self.sanitized_sets = os.environ.get("TRIFUSE_SANITIZE_SETS", " ".join(CAPABILITIES))
        self.includes = self._includes()

    @staticmethod
    def _includes() -> list[str]:
        from torch.utils.cpp_extension import include_paths

        system = [*include_paths(), sysconfig.get_path("include")]
        try:
            import pybind11
        except ImportError:  # torch's folder of headers holds a version of it too
            pass
        else:
            system.insert(0, pybind11.get_include())
        return [f"-I{ROOT / 'csrc'}", *(f"-isystem{path}" for path in system)]

    def host(self) -> list[str]:
        """Returns the command for a source that is compiled once."""
        # AT_PER_OPERATOR_HEADERS: torch's headers include only the operators that they use.
        command = [self.compiler, *self.flags, *self.sanitized]
        command += ["-DAT_PER_OPERATOR_HEADERS", *self.includes]
        # Sanitized, these sources take long to compile, and little time when they run.
        return [*command, "-O0"] if self.sanitizers else command

    def kernel(self, capability: str) -> list[str]:
        """Returns the command for a kernel. ``TRIFUSE_SANITIZE_SETS`` names the instruction sets
        that are sanitized; the others are linked as the ordinary build compiles them."""
        flags = [*self.flags, *kernel_flags(capability)]
        if capability in self.sanitized_sets.split():
            flags += self.sanitized
        return [self.compiler, *flags, *self.includes]

    def cuda(self, nvcc: str, architectures: list[str]) -> list[str]:
        command = [nvcc, "-ccbin", self.compiler, "-std=c++20", "-O3", f"-I{ROOT / 'csrc'}"]
        command += ["--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]
        return [*command, *architectures]


def is_kernel(source: Path) -> bool:
    return source.stem.endswith("_kernel")


def sources() -> list[Path]:
    return sorted((ROOT / "csrc").glob("**/*.cpp"))


def write_compile_commands(commands: Commands) -> None:
    """Writes build/compile_commands.json, which clang-tidy and editors read."""
    widest = [name for name in CAPABILITIES if not name.endswith("_BF16")][-1]
    entries = []
    for source in sources():
        command = commands.kernel(widest) if is_kernel(source) else commands.host()
        call = [*command, "-c", str(source)]
        entries.append({"directory": str(ROOT), "file": str(source), "arguments": call})
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build/compile_commands.json").write_text(json.dumps(entries, indent=1))


def extension(
    commands: Commands, output: Path, nvcc: str = "", architectures: list[str] | None = None
) -> Graph:
    """Returns the graph that makes the extension, with CUDA kernels if given nvcc and its flags."""
    # Kept between builds, unlike pip's own folder; one per version of Python and torch.
    folder = f"{sysconfig.get_config_var('SOABI')}-torch-{torch.__version__}"
    graph = Graph(ROOT / "build" / folder)
    # The linker keeps the first copy of an inline function. Code for narrow vectors comes first, so
    # that code that runs everywhere never gets a copy compiled for wide vectors.
    objects = [
        *host_objects(graph, commands, architectures or []),
        *kernel_objects(graph, commands),
    ]
    linker = [commands.compiler]
    if nvcc:
        for source in sorted((ROOT / "csrc/cuda").glob("*.cu")):
            flags = architectures or []
            if source.stem.endswith("_hopper"):
                flags = [hopper_architecture(flags)]
            command = commands.cuda(nvcc, flags)
            objects.append(graph.compile([source], f"{source.stem}.cuda", command))
        # nvcc finds its own runtime, which is linked statically. torch may load a second one of
        # another version; they don't conflict, because --exclude-libs hides ours.
        linker = [nvcc, "-ccbin", commands.compiler, "-cudart", "static"]
        linker += ["-Xlinker", "--exclude-libs=ALL"]
    graph.link(objects, output, [*linker, *commands.sanitizers, "-shared"], torch_libraries())
    return graph


def host_objects(graph: Graph, commands: Commands, architectures: list[str]) -> list[Path]:
    """Adds the sources that are compiled once, grouped (LARGE_OPERATORS)."""
    groups: dict[str, list[Path]] = {}
    for source in sources():
        if is_kernel(source) or (source.parent.name == "cuda" and not architectures):
            continue
        name = source.stem if source.stem in LARGE_OPERATORS else "operators"
        groups.setdefault(name, []).append(source)
    objects = []
    for name, group in groups.items():
        command = commands.host()
        if name == "operators" and architectures:
            code = [flag.split(",code=")[1].strip("[]") for flag in architectures]
            command.append(f'-DTRIFUSE_CUDA_CODE="{",".join(code)}"')
        objects.append(graph.compile(group, name, command))
    return objects


def kernel_objects(graph: Graph, commands: Commands) -> list[Path]:
    return [
        graph.compile([source], f"{source.stem}.{capability}", commands.kernel(capability))
        for capability in CAPABILITIES
        for source in filter(is_kernel, sources())
        if is_compiled(source, capability)
    ]


def torch_libraries() -> list[str]:
    from torch.utils.cpp_extension import library_paths

    found = []
    for path in library_paths():
        found += [f"-L{path}", "-Xlinker", f"-rpath={path}"]
    return [*found, "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]


class BuildExtension(build_ext):
    """Writes a ninja file of its own: setuptools has one set of flags for all sources."""

    cuda_error = "the extension was not built"

    def run(self) -> None:
        self.nvcc = os.environ.get("NVCC", shutil.which("nvcc"))
        self.sanitizer = os.environ.get("TRIFUSE_SANITIZE")
        # Checked first: a wrong setting must raise, not install without the extension.
        if self.sanitizer:
            self.nvcc = ""  # nvcc links differently, and sanitizers don't cover GPU code
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
        self.lists_commands = bool(self.inplace)  # setuptools clears `inplace` while it builds
        error = ""
        try:
            super().run()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            message = f"trifuse: the C++ extension was not built; installing without it. {error}"
            print(message, file=sys.stderr)
            for stale in package.glob("_C.*.so"):  # left by an earlier build
                stale.unlink()
        package.mkdir(parents=True, exist_ok=True)
        (package / "_build_info.py").write_text(
            f'"""Written by setup.py."""\n\nERROR = {error!r}\nCUDA_ERROR = {self.cuda_error!r}\n',
            encoding="utf-8",
        )

    def get_outputs(self) -> list[str]:
        return [*super().get_outputs(), str(Path(self.build_lib) / "trifuse/_build_info.py")]

    def build_extension(self, ext: Extension) -> None:
        commands = Commands(self.sanitizer)
        if self.lists_commands:
            write_compile_commands(commands)
        output = Path(self.get_ext_fullpath(ext.name)).absolute()
        if self.nvcc and self.architectures:
            try:
                extension(commands, output, self.nvcc, self.architectures).run()
                self.cuda_error = ""
                return
            except RuntimeError as error:
                self.cuda_error = str(error)
        elif self.nvcc:
            self.cuda_error = (
                "no GPU architecture of sm_80 or later was selected "
                "(TORCH_CUDA_ARCH_LIST, or the GPUs present)"
            )
        elif self.sanitizer:
            self.cuda_error = "a sanitized extension has no CUDA kernels"
        else:
            self.cuda_error = "nvcc was not found (looked at $NVCC and the path)"
        extension(commands, output).run()
        print(f"trifuse: installed without CUDA kernels. {self.cuda_error}", file=sys.stderr)


if __name__ == "__main__":
    setup(
        version=VERSION,
        packages=[
            "trifuse",
            "trifuse.benchmarks",
            "trifuse.compiler",
            "trifuse.fusing",
            "trifuse.kernels",
            "trifuse.models",
            "trifuse.nn",
            "trifuse.ops",
            "trifuse.recipes",
            "trifuse.reference",
            "trifuse.written_out",
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
