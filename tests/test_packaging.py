"""Installation with a compiler and without, the report of ``python -m trifuse``, and imports."""

from __future__ import annotations

import ast
import ctypes
import importlib.metadata
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trifuse
from trifuse import __main__ as report
from trifuse import backends

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "trifuse": "pytorch_ext",
    "trifuse/kernels": "kernels",
    "trifuse/benchmarks": "benchmarks",
}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments; ``environment`` is added to this process's."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_installed(
    where: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with the trifuse installed in ``where``.

    ``-S`` disables the import hook of an editable install, which would supply missing modules.
    """
    path = os.pathsep.join([str(where), str(Path(torch.__file__).parents[1])])
    return run("-S", *arguments, PYTHONPATH=path, **environment)


# Without a compiler -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder that ``pip install .`` installs to, with a compiler that fails.

    Installs from a copy of the sources, so that files built in place stay unchanged.
    """
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("site-packages")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    for name in (*PACKAGES.values(), "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=built)
    install = ("-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index")
    done = run(*install, "--target", str(target), str(source), CXX="false")
    assert done.returncode == 0, done.stderr
    return target


def test_without_a_compiler_it_installs_and_says_why(installed: Path) -> None:
    done = run_installed(installed, "-m", "trifuse")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("C++ kernels"))
    assert "none: RuntimeError" in line
    assert "did not compile" in line
    assert "the C++ extension is missing" in done.stdout


def test_without_a_compiler_it_computes(installed: Path) -> None:
    script = """
import torch, trifuse
q = torch.randn(2, 3, 5, 8, requires_grad=True)
for _ in range(2):
    out = trifuse.scaled_dot_product_attention(q, q, q, key_lengths=torch.tensor([2, 5]))
out.sum().backward()
print(trifuse.__file__, q.grad.isfinite().all().item())
"""
    done = run_installed(installed, "-c", script, TRIFUSE_BACKEND="auto")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(installed / "trifuse/__init__.py"), "True"]
    assert done.stderr.count("→ eager, because") == 1


def test_asking_for_what_was_not_built_raises(installed: Path) -> None:
    script = """
import torch, trifuse
q = torch.randn(1, 1, 2, 4)
trifuse.scaled_dot_product_attention(q, q, q)
"""
    done = run_installed(installed, "-c", script, TRIFUSE_BACKEND="cpp")
    assert done.returncode == 1
    assert "backend 'cpp' can't serve this call: the C++ extension is missing" in done.stderr


def test_everything_is_installed(installed: Path) -> None:
    """A package left out of setup.py's list would show only on someone else's machine."""
    expected = {"trifuse/_build_info.py"}
    for package, folder in PACKAGES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".pyi", ".typed") and path.name != "_build_info.py":
                expected.add(f"{package}/{path.relative_to(ROOT / folder)}")
    there = {
        str(path.relative_to(installed))
        for path in (installed / "trifuse").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert there == expected


def test_metadata(installed: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    assert distribution.version == trifuse.__version__
    assert distribution.metadata["License-Expression"] == "Apache-2.0"
    licences = [path for path in distribution.files or [] if path.name == "LICENSE"]
    assert licences
    assert "Apache License" in Path(licences[0].locate()).read_text()
    requirements = [line for line in distribution.requires or [] if "extra ==" not in line]
    assert requirements == ["torch>=2.11"]


def test_an_isolated_build_gets_what_setup_needs() -> None:
    """Not torch: the extension is built against the one that it is installed beside."""
    sections = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("\n[")
    (section,) = (part for part in sections if part.lstrip("[").startswith("build-system]"))
    (listed,) = re.findall(r"^requires = (\[.*\])$", section, re.MULTILINE)
    required = {re.match(r"[\w-]+", each)[0] for each in ast.literal_eval(listed)}
    assert required == {"setuptools", "ninja", "pybind11"}


# With a compiler --------------------------------------------------------------------------------


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="no compiler here")
def test_with_a_compiler_the_extension_is_there() -> None:
    """Falling back to eager must not hide a kernel that does not compile."""
    assert "error" not in backends.build_info(), backends.build_info()["error"]


@pytest.mark.skipif(backends._C is None, reason="built without the extension")
def test_capability_can_be_forced() -> None:
    done = run("-m", "trifuse", TRIFUSE_CPU_CAPABILITY="DEFAULT")
    assert "\n  in use         DEFAULT\n" in done.stdout


@pytest.mark.skipif(backends._C is None, reason="built without the extension")
def test_unknown_capability_is_reported() -> None:
    done = run("-m", "trifuse", TRIFUSE_CPU_CAPABILITY="AVX3")
    assert done.returncode == 0, done.stderr
    assert "none: TRIFUSE_CPU_CAPABILITY: expected one this machine can run" in done.stdout


def test_unknown_backend_is_refused() -> None:
    done = run("-c", "import trifuse", TRIFUSE_BACKEND="cudnn")
    assert "TRIFUSE_BACKEND: expected one of auto, cuda, triton, cpp, eager" in done.stderr


# GPU architectures -------------------------------------------------------------------------------


@pytest.fixture
def setup_script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The globals of setup.py, with TORCH_CUDA_ARCH_LIST unset and torch as a CPU build."""
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    return runpy.run_path(str(ROOT / "setup.py"))


def code(setup_script: dict[str, Any]) -> tuple[set[str], str]:
    """Returns the architectures of the CUDA kernels, and that of the kernels for Hopper alone."""
    flags = setup_script["cuda_architectures"]()
    hopper = setup_script["hopper_architecture"](flags)
    names = [re.findall(r"\w+_\w+", flag.split(",code=")[1]) for flag in flags]
    return {name for some in names for name in some}, hopper.split(",code=")[1]


@pytest.mark.parametrize(
    ("asked", "compiled", "hopper"),
    [
        ("8.0;9.0+PTX", {"sm_80", "sm_90", "compute_90"}, "sm_90a"),
        ("9.0a", {"sm_90a"}, "sm_90a"),
        ("7.5 8.6+PTX", {"sm_86", "compute_86"}, "compute_90a"),
        ("7.0", set(), "compute_90a"),
    ],
)
def test_architectures_are_those_asked_for(
    setup_script: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    compiled: set[str],
    hopper: str,
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert code(setup_script) == (compiled, hopper)


def test_architectures_follow_torch_and_the_gpus(
    setup_script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code(setup_script) == ({"compute_80"}, "compute_90a")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert code(setup_script) == ({"sm_80", "sm_90", "compute_80"}, "sm_90a")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "sm_120"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert code(setup_script) == ({"sm_90", "compute_90"}, "sm_90a")


def test_unknown_architecture_is_refused(
    setup_script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.9")
    with pytest.raises(ValueError, match=r"TORCH_CUDA_ARCH_LIST='8\.0;9\.9'.*9\.9"):
        setup_script["cuda_architectures"]()


# The report -------------------------------------------------------------------------------------


def test_report_agrees_with_explain() -> None:
    rows, reasons = report.service()
    assert rows
    assert {row[0] for row in rows} == {
        "attention",
        "dropout_add_layer_norm",
        "lstm",
        "gru",
        "rnn",
    }
    for operator, device, dtype, chosen, *answers in rows:
        qkv = torch.empty(3, 1, 2, 4, 64, device=device, dtype=getattr(torch, dtype))
        with trifuse.backend("auto"):
            if operator == "attention":
                choice = trifuse.explain(trifuse.scaled_dot_product_attention, *qkv)
            elif operator == "dropout_add_layer_norm":
                choice = trifuse.explain(trifuse.dropout_add_layer_norm, *qkv[:2])
            else:
                weight = qkv.new_empty({"lstm": 4, "gru": 3, "rnn": 1}[operator] * 64, 64)
                recurrent = getattr(trifuse, operator)
                choice = trifuse.explain(recurrent, qkv[0, 0], None, weight, weight)
        assert choice.backend == chosen
        assert answers[backends.ORDER.index(chosen)] == "yes"
        for backend, answer in zip(backends.ORDER, answers, strict=True):
            asked = backends.Call(operator, device, getattr(torch, dtype), 64)
            assert reasons.get(answer) == backends._WHY_NOT[backend](asked)


def test_report_names_every_setting_that_is_read() -> None:
    """Every TRIFUSE_… variable that the sources read."""
    folders = (ROOT / name for name in ("pytorch_ext", "kernels", "csrc"))
    kinds = (".py", ".cpp", ".h", ".cu", ".cuh")
    sources = [path for f in folders for path in f.rglob("*") if path.suffix in kinds]
    read = {
        name
        for path in sources
        for call in ("environ.get(", "getenv(", "environ[")
        for name in (part.split('"')[1] for part in path.read_text().split(call)[1:])
    }
    assert {name for name in read if name.startswith("TRIFUSE_")} <= set(report.ENVIRONMENT)


# Imports ----------------------------------------------------------------------------------------


def test_import_is_light() -> None:
    """Importing trifuse loads no package that torch has not loaded, and initialises no GPU."""
    script = """
import sys, torch
before = {name.partition(".")[0] for name in sys.modules}
import trifuse
after = {name.partition(".")[0] for name in sys.modules}
print(sorted(after - before - set(sys.stdlib_module_names)), torch.cuda.is_initialized())
"""
    done = run("-c", script)
    assert done.stdout.split("\n")[0].endswith("['trifuse'] False"), done.stdout + done.stderr


# A level imports only levels below it; models stand beside them all and import torch alone.
LEVELS = {
    "reference": {"reference"},
    "kernels": {"kernels", "reference"},
    "ops": {"_imports", "ops", "backends", "kernels", "reference"},
    "nn": {"nn", "models", "ops", "backends"},
    "compiler": {"compiler", "spellings", "ops", "backends"},
    "written_out": {"written_out", "deferred", "spellings", "nn", "ops", "backends"},
    "recipes": {
        *("recipes", "written_out", "attention_mode", "huggingface", "nn", "ops"),
        *("_transformers", "_transformers_versions"),
    },
    "fusing": {
        *("fusing", "recipes", "huggingface", "nn", "models", "ops", "backends"),
        "_transformers_versions",
    },
    "models": {"models"},
}


def _imports(path: Path, top_level: bool = False) -> Iterator[str]:
    """Yields the modules that a file imports, anywhere or at its top level alone."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{path}: a relative import"
            if node.module == "trifuse":
                yield from (f"trifuse.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_imports_only_those_below(level: str) -> None:
    folder = ROOT / ("kernels" if level == "kernels" else f"pytorch_ext/{level}")
    for path in folder.rglob("*.py"):
        for name in _imports(path):
            package, _, rest = name.partition(".")
            if package == "trifuse":
                assert rest.partition(".")[0] in LEVELS[level], f"{path} imports {name}"


# The folders of csrc from which the files of each folder may include. csrc itself holds the
# bindings and the code that CPUs and GPUs share.
INCLUDED = {
    "csrc": {"csrc"},
    "fast_path": {"csrc", "fast_path"},
    "cpu": {"csrc", "cpu"},
    "cuda": {"csrc", "cuda"},
}


def _includes(path: Path) -> list[tuple[str, Path | None]]:
    """Returns the names that a C++ or CUDA file includes, and the files in csrc that they name."""
    names = re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', path.read_text(), re.MULTILINE)
    folders = (path.parent, ROOT / "csrc")
    files = ((folder / name for folder in folders if (folder / name).is_file()) for name in names)
    return [(name, next(found, None)) for name, found in zip(names, files, strict=True)]


@pytest.mark.parametrize("level", INCLUDED)
def test_a_level_includes_only_those_below(level: str) -> None:
    """A folder of csrc includes its own files and those of csrc itself."""
    folder = ROOT / "csrc" / ("" if level == "csrc" else level)
    # bindings.cpp stands above all levels.
    sources = [path for path in folder.glob("*.*") if path.name != "bindings.cpp"]
    assert sources
    assert {p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()} < INCLUDED.keys()
    for path in sources:
        for name, file in _includes(path):
            if file:
                assert file.resolve().parent.name in INCLUDED[level], f"{path} includes {name}"


def _reached(sources: Iterable[Path]) -> set[Path]:
    """Returns the files, and those in csrc that they include, directly or not."""
    waiting = list(sources)
    seen = set(waiting)
    assert seen
    while waiting:
        for _, file in _includes(waiting.pop()):
            if file and file.resolve() not in seen:
                seen.add(file.resolve())
                waiting.append(file.resolve())
    return seen


def test_the_commands_that_compile_are_listed() -> None:
    """Building in place lists the command of every C++ file for clang-tidy."""
    if backends._C is None or not (ROOT / "build").is_dir():
        pytest.skip("the C++ extension was not built here")
    listed = json.loads((ROOT / "build/compile_commands.json").read_text())
    folders = (ROOT / "csrc" / name for name in ("", "cpu", "fast_path"))
    sources = {path for folder in folders for path in folder.glob("*.cpp")}
    assert {Path(entry["file"]) for entry in listed} >= sources


def test_shared_headers_serve_both_devices() -> None:
    shared = set((ROOT / "csrc").glob("*.h"))
    # The bindings alone include the first. CPUs alone have the op of the second.
    shared -= {ROOT / "csrc" / name for name in ("autograd.h", "encoder_layer_options.h")}
    for folder in ("cpu", "cuda"):
        assert shared <= _reached((ROOT / "csrc" / folder).glob("*.*")), folder


def test_cuda_kernels_include_nothing_of_torch() -> None:
    """nvcc compiles them beside any build of torch, even for CPUs alone."""
    reached = _reached((ROOT / "csrc/cuda").glob("*.cu"))
    assert (ROOT / "csrc/attention.h").resolve() in reached
    for path in reached:
        for name, _ in _includes(path):
            assert name.partition("/")[0] not in ("ATen", "c10", "torch"), f"{path} includes {name}"


def test_models_import_torch_alone() -> None:
    """They are the eager baselines. Functions that read checkpoints may import other libraries."""
    for path in (ROOT / "pytorch_ext/models").rglob("*.py"):
        for name in _imports(path, top_level=True):
            package = name.partition(".")[0]
            fine = package == "torch" or package in sys.stdlib_module_names
            assert fine or name.startswith("trifuse.models"), f"{path} imports {name}"


# The build --------------------------------------------------------------------------------------


def test_only_what_a_change_touched_is_made_again(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    header, library = tmp_path / "a.h", tmp_path / "out/library.so"
    header.write_text("inline int number() { return 1; }\n")
    for name, text in {
        "a": '#include "a.h"\nextern "C" int a() { return number(); }\n',
        "b": 'extern "C" int b() { return 2; }\n',
        "c": "static int c() { return 3; }\n",
        "d": 'extern "C" int d() { return c(); }\n',  # compiles only together with c
    }.items():
        (tmp_path / f"{name}.cpp").write_text(text)
    graph = runpy.run_path(str(ROOT / "setup.py"))["Graph"](tmp_path / "a folder")
    groups = [["a"], ["b"], ["c", "d"]]
    command = [compiler, "-fPIC", '-DTEXT="$x y"']
    objects = [
        graph.compile([tmp_path / f"{name}.cpp" for name in group], group[0], command)
        for group in groups
    ]
    graph.link(objects, library, [compiler, "-shared"], ["-lm"])

    def made() -> list[int]:
        graph.run()
        return [path.stat().st_mtime_ns for path in (*objects, library)]

    before = made()
    assert made() == before
    time.sleep(0.02)
    header.write_text("inline int number() { return 4; }\n")
    after = made()
    assert [x != y for x, y in zip(before, after, strict=True)] == [True, False, False, True]
    loaded = ctypes.CDLL(str(library))
    assert (loaded.a(), loaded.b(), loaded.d()) == (4, 2, 3)
    header.write_text("no C++\n")
    with pytest.raises(RuntimeError, match=r"did not compile(.|\n)*a\.h"):
        graph.run()
