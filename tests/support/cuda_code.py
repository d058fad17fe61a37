"""The CUDA kernels as nvcc compiles them: registers, stack, instructions.

A source is compiled again when it changes. The results are kept in build/cuda_code. No GPU is
needed. Without nvcc, tests that compile are skipped. A warning by nvcc fails them.

Without ``--exhaustive`` only some instances of each kernel are compiled. Together they have each
value of each template parameter.

The first half of the work, up to PTX, is taken from the build of the extension where that has it of
the source as it is now. `make test` builds with warnings as errors; a source that warns is left out
of the build and compiled here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from covering import covering
from filelock import FileLock

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/cuda_code"


def target(source: Path, exhaustive: bool) -> str:
    """Returns nvcc's flag for the architectures of a source: sm_80, and sm_90 too if exhaustive.

    As in setup.py, one pass of the compiler's front end serves both. Sources for Hopper GPUs
    compile only for them.
    """
    if source.stem.endswith("_hopper"):
        return "-gencode=arch=compute_90a,code=sm_90a"
    return f"-gencode=arch=compute_80,code=[{'sm_80,sm_90' if exhaustive else 'sm_80'}]"


class Code(NamedTuple):
    """One kernel compiled for one architecture."""

    architecture: str  # 80, 90, 90a
    kernel: str  # without namespaces and arguments: backward_kernel<float, true, 512>
    registers: int  # per thread
    stack: int  # bytes per thread, nearly all of them spills
    sass: str  # one instruction per line

    def count(self, instruction: str) -> int:
        """Counts the instructions that match a regular expression such as LDG.E.128."""
        return len(re.findall(rf"\b{instruction}\b", self.sass))


def _is_fresh(target: Path) -> bool:
    """Returns whether a file is newer than every file in nvcc's list of what it was made from."""
    depends = target.with_suffix(".d")
    if not (target.exists() and depends.exists()):
        return False
    names = depends.read_text().replace("\\\n", " ").split(": ", 1)[1].split()
    made = target.stat().st_mtime
    inputs = map(Path, names)
    return all(path.exists() and path.stat().st_mtime < made for path in inputs)


def _built_ptx(
    source: Path, architectures: str, tool: str, folder: Path
) -> tuple[Path, str] | None:
    """Extracts into a folder the PTX that the build of the extension has of a source as it is now.

    Returns its path and what it was made from, written as nvcc does; None if there is none.
    """
    try:
        program = runpy.run_path(str(ROOT / "setup.py"))["ninja_program"]()
    except RuntimeError:
        return None
    virtual = re.findall(r"arch=compute_(\w+)", architectures)[0]
    for built in (ROOT / "build").glob(f"*/{source.stem}.cuda.*.o"):
        ninja = [program, "-C", str(built.parent)]
        # Fails for objects of earlier settings, which ninja's file does not name.
        command = [*ninja, "-n", str(built)]
        if "no work to do" not in subprocess.run(command, capture_output=True, text=True).stdout:
            continue
        command = [tool, "--extract-ptx", "all", str(built)]
        subprocess.run(command, cwd=folder, capture_output=True, check=True)
        for ptx in folder.glob(f"*.sm_{virtual}.ptx"):
            command = [*ninja, "-t", "deps", str(built)]
            deps = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            names = [line.strip() for line in deps.splitlines() if line.startswith(" ")]
            return ptx, f"{ptx.name}: {' '.join(names)}\n"
    return None


def _selected(ptx: Path) -> list[str]:
    """Returns the names of a selection of the kernels in a file: each value of each template
    parameter of a kernel occurs."""
    names = re.findall(r"^\s*(?:\.\w+\s+)*\.entry (\w+)", ptx.read_text(), re.MULTILINE)
    grids: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for name, short in zip(names, _short_names(names), strict=True):
        kernel, _, arguments = short.partition("<")
        grids.setdefault(kernel, []).append((name, tuple(arguments.split(", "))))
    return [
        grid[i][0]
        for grid in grids.values()
        for i in covering([arguments for _, arguments in grid], 1)
    ]


def compile_operator(operator: str, config: pytest.Config) -> list[Code]:
    """Compiles the kernels of csrc/cuda/<operator>*.cu: a selection of their instances; with
    ``--exhaustive`` all, for all architectures of the source."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here")
    triton = pytest.importorskip("triton", reason="which brings cuobjdump")
    tool = triton.knobs.nvidia.cuobjdump.path
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Werror=all-warnings"]
    exhaustive = config.getoption("exhaustive")
    versions = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    # The result also depends on compilers, flags, and this file, which reads the report.
    rest = " ".join([versions.stdout, tool, triton.__version__, *flags, Path(__file__).read_text()])

    def run(command: list[str], source: Path) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{source.name}: {done.stderr[-4000:]}"
        # Serialised products of a warpgroup are reported as a note, not as a warning.
        assert "Performance Loss" not in done.stdout + done.stderr, done.stderr[-4000:]

    def compile_one(source: Path) -> list[Code]:
        architectures = target(source, exhaustive)
        settings = f"{rest} {architectures} {exhaustive}"
        digest = hashlib.sha256(settings.encode()).hexdigest()[:16]
        found = BUILD / f"{source.stem}.{digest}.json"
        depends = found.with_suffix(".d")
        # Another test worker may be compiling it.
        with FileLock(found.with_suffix(".lock")), tempfile.TemporaryDirectory() as folder:
            if not _is_fresh(found):
                built = _built_ptx(source, architectures, tool, Path(folder))
                if built is None:
                    ptx = Path(folder, f"{source.stem}.ptx")
                    virtual = architectures.partition(",")[0].replace("-gencode=arch", "-arch")
                    command = [nvcc, *flags, virtual, "-ptx", "-o", str(ptx), str(source)]
                    run([*command, f"-I{ROOT / 'csrc'}", "-MMD", "-MF", str(depends)], source)
                else:
                    ptx, inputs = built
                    depends.write_text(inputs)
                command = [nvcc, *flags, architectures, "-fatbin", str(ptx)]
                if not exhaustive:
                    command += [f"-Xptxas=--entry={name}" for name in _selected(ptx)]
                run([*command, "-o", fatbin := f"{folder}/fatbin"], source)
                command = [tool, "--dump-resource-usage", "--dump-sass", fatbin]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found.write_text(json.dumps(_read(done.stdout)))
            return [Code(*code) for code in json.loads(found.read_text())]

    sources = sorted((ROOT / "csrc/cuda").glob(f"{operator}*.cu"))
    assert sources, operator
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [code for codes in pool.map(compile_one, sources) for code in codes]


def _read(report: str) -> list[Code]:
    """Reads cuobjdump's report, which has a part for each architecture."""
    _, *parts = re.split(r"^arch = sm_(\w+)$", report, flags=re.MULTILINE)
    return [
        code
        for architecture, part in zip(parts[::2], parts[1::2], strict=True)
        for code in _read_architecture(architecture, part)
    ]


def _read_architecture(architecture: str, report: str) -> list[Code]:
    """Reads the resources of all functions, then the instructions of each."""
    sass = {}
    for part in re.split(r"^\s*Function : ", report, flags=re.MULTILINE)[1:]:
        name, _, instructions = part.partition("\n")
        # The rest of a line is the instruction's address and its bits.
        sass[name.strip()] = "\n".join(re.findall(r"^\s*/\*\w+\*/\s+(.*?)\s*;", instructions, re.M))
    usages = re.findall(r"Function (\w+):\s*REG:(\d+) STACK:(\d+)", report)
    shorts = _short_names([name for name, *_ in usages])
    return [
        Code(architecture, short, int(registers), int(stack), sass[name])
        for (name, registers, stack), short in zip(usages, shorts, strict=True)
    ]


def _short_names(mangled: list[str]) -> list[str]:
    command = ["c++filt", *mangled]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [_short(name) for name in done.stdout.splitlines()]


def _short(name: str) -> str:
    name = re.sub(r"trifuse::cuda::|\(anonymous namespace\)::|\((?:int|bool)\)|void ", "", name)
    name = name.replace("(Masks)", "Masks ")  # an enumerator, by its number
    return name[: name.index("(")]
