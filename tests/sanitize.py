"""``make sanitize``: the C++ extension under the compiler's sanitizers.

It is built twice, each time into a folder of its own:

- ``memory``: with AddressSanitizer, UndefinedBehaviorSanitizer, and counts of the lines that run;
- ``threads``: with ThreadSanitizer, its tasks on std::thread (csrc/cpu/threads.h).

First, each build has to report the errors planted in csrc/cpu/planted.h. Then the calls of
sanitized_calls.py run on the kernels of every instruction set of this machine. They must end
without a report, and must reach every kernel. ``--lines`` also lists the lines that no call
reached. No report on this code is suppressed. torch, Python and OpenMP's runtime are not
instrumented; their own threads, where they have any, are limited to one. One report on glibc is
suppressed (sanitize_threads.supp).
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CALLS = Path(__file__).with_name("sanitized_calls.py")
SUPPRESSED = Path(__file__).with_name("sanitize_threads.supp")


class Build(NamedTuple):
    """A build with sanitizers. Its name is the value of TRIFUSE_SANITIZE; see setup.py."""

    name: str
    runtime: str  # the library that must be loaded before any other
    threads: tuple[str, ...]  # numbers of threads for the calls, in turn
    environment: dict[str, str]
    planted: dict[str, str]  # errors, and the text of their reports

    @property
    def folder(self) -> Path:
        return ROOT / f"build/sanitize-{self.name}"


BUILDS = (
    Build(
        "memory",
        "libasan.so",
        ("1", "2", "3"),
        {
            # Python, torch and this extension keep some memory until the process ends.
            "ASAN_OPTIONS": "detect_leaks=0:strict_init_order=1:detect_stack_use_after_return=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
            # OpenMP starts two of three requested threads: Crew has to count those that run.
            "OMP_THREAD_LIMIT": "2",
        },
        {
            "read past the end": "AddressSanitizer: heap-buffer-overflow",
            "misaligned load": "runtime error: load of misaligned address",
            "overflow": "runtime error: signed integer overflow",
        },
    ),
    Build(
        "threads",
        "libtsan.so",
        ("2", "3"),
        {
            "TSAN_OPTIONS": f"second_deadlock_stack=1:history_size=4:suppressions={SUPPRESSED}",
            # torch's own regions run in one thread. Ours have as many as torch.set_num_threads
            # sets, so all threads that ThreadSanitizer sees are ours.
            "OMP_THREAD_LIMIT": "1",
        },
        dict.fromkeys(
            ("race between tasks", "race in a crew", "relaxed hand-over"),
            "ThreadSanitizer: data race",
        ),
    ),
)
REPORT = re.compile(r"runtime error:|(Address|Thread|UndefinedBehavior)Sanitizer")


class SanitizeError(Exception):
    """Ends the run with a message for the user."""


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def build(which: Build) -> None:
    """Compiles changed sources, with the compiler and the torch of an ordinary build."""
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(which.folder)]
    environment = {**os.environ, "TRIFUSE_SANITIZE": which.name}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    if done.returncode or not extension(which).exists():
        raise SanitizeError(f"the extension was not built with sanitizers for {which.name}")


def extension(which: Build) -> Path:
    return next(iter(which.folder.glob("trifuse/_C.*.so")), which.folder / "trifuse/_C.so")


def run(which: Build, *arguments: str) -> tuple[int, str]:
    """Runs Python with the sanitized extension. Returns the exit status and all output."""
    # The C++ library too: as the process starts, the runtime looks for the function that throws.
    libraries = [which.runtime, "libstdc++.so.6"]
    found = [
        subprocess.run(
            [compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in libraries
    ]
    for name, path in zip(libraries, found, strict=True):
        if not Path(path).is_absolute():
            raise SanitizeError(f"{compiler()} has no {name}; install its sanitizers' libraries")
    environment = {
        **os.environ,
        **which.environment,
        "LD_PRELOAD": " ".join(found),
        "PYTHONPATH": str(which.folder),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TRITON_INTERPRET": "1",
    }
    environment.pop("TRIFUSE_CPU_CAPABILITY", None)
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


def check_planted(which: Build, error: str) -> None:
    """Checks that a planted error is reported."""
    status, output = run(which, "-c", f"from trifuse import _C; _C.planted({error!r})")
    if which.planted[error] not in output:
        raise SanitizeError(
            f"{which.name}: the planted {error!r} was not reported, so nothing would be "
            f"(exit status {status}):\n{output}"
        )


def check_calls(which: Build, job: tuple[str, ...]) -> None:
    """Runs the calls on one instruction set's kernels. A report is an error."""
    capability, *options = job
    status, output = run(which, str(CALLS), capability, *which.threads, *options)
    if status or REPORT.search(output):
        raise SanitizeError(f"{which.name}, {capability}: exit status {status}\n{output}")
    print(f"{which.name}: {output.strip()}", flush=True)


def capabilities(which: Build) -> list[str]:
    code = "from trifuse import _C; print(' '.join(_C.cpu_capabilities()))"
    status, output = run(which, "-c", code)
    if status:
        raise SanitizeError(f"{which.name}: the extension does not load:\n{output}")
    return output.split()


# Coverage ----------------------------------------------------------------------------------------


class Reached(NamedTuple):
    """How often each function and line of the C++ code ran in one object, by file and line."""

    functions: dict[tuple[str, int], int]
    names: dict[tuple[str, int], str]
    lines: dict[tuple[str, int], int]


def counts() -> list[Path]:
    """Returns the files of counts that objects of the memory build wrote as processes ended."""
    return sorted((ROOT / "build").glob("*/*.gcda"))


def read_counts(path: Path) -> Reached:
    gcov = subprocess.run(
        [compiler(), "-print-prog-name=gcov"], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [gcov, "--json-format", str(path)], cwd=folder, check=True, capture_output=True
        )
        [packed] = Path(folder).glob("*.gcov.json.gz")
        found = json.loads(gzip.decompress(packed.read_bytes()))
    reached = Reached({}, {}, {})
    for file in found["files"]:
        source = Path(found["current_working_directory"], file["file"]).resolve()
        # The kernels, and the headers that they share with the CUDA kernels.
        if source.parent not in (ROOT / "csrc/cpu", ROOT / "csrc"):
            continue
        name = str(source.relative_to(ROOT))
        # A template has one function per type. It counts as reached if any of them was.
        for function in file["functions"]:
            place = name, function["start_line"]
            reached.names[place] = function["demangled_name"]
            before = reached.functions.get(place, 0)
            reached.functions[place] = before + function["execution_count"]
        for line in file["lines"]:
            place = name, line["line_number"]
            reached.lines[place] = reached.lines.get(place, 0) + line["count"]
    return reached


def check_reached(ran: list[str], show_lines: bool) -> None:
    """Checks that every function of the kernels ran, for each instruction set."""
    # Objects of one instruction set share inline functions, and the linker keeps only one object's
    # copy and counts. So counts are added up over the objects.
    sums = {capability: Reached({}, {}, {}) for capability in ran}
    for path in counts():
        kernel, _, capability = path.name.rsplit(".", 2)[0].partition(".")  # without the digest
        if not kernel.endswith("_kernel") or capability not in ran:
            continue
        found, total = read_counts(path), sums[capability]
        total.names.update(found.names)
        for place, count in found.functions.items():
            total.functions[place] = total.functions.get(place, 0) + count
        for place, count in found.lines.items():
            total.lines[place] = total.lines.get(place, 0) + count
    missed = []
    for capability, total in sums.items():
        missed += [
            f"{capability}: {file}:{line}: {total.names[file, line]}"
            for (file, line), count in sorted(total.functions.items())
            # Functions that all instruction sets share are counted in one of them alone.
            if count == 0 and f"::{capability}::" in total.names[file, line]
        ]
        if show_lines:
            lines = sorted(place for place, count in total.lines.items() if count == 0)
            for file, places in itertools.groupby(lines, lambda place: place[0]):
                numbers = " ".join(str(line) for _, line in places)
                print(f"{capability}: no call reached {file}: {numbers}")
    if missed:
        raise SanitizeError("no call reached\n" + "\n".join(missed))
    print("memory: every function of the kernels was reached")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=[which.name for which in BUILDS])
    parser.add_argument("--lines", action="store_true", help="name lines that no call reached")
    asked = parser.parse_args(arguments)
    for path in counts():
        path.unlink()
    for which in BUILDS:
        if asked.only not in (None, which.name):
            continue
        begun = time.monotonic()
        build(which)
        print(f"{which.name}: built in {time.monotonic() - begun:.0f} s", flush=True)
        for error in which.planted:
            check_planted(which, error)
        print(f"{which.name}: reports the errors planted", flush=True)
        ran = capabilities(which)
        jobs: list[tuple[str, ...]] = [(capability,) for capability in ran]
        if "DEFAULT" in ran:  # the slowest, so it starts first, in two processes
            jobs.remove(("DEFAULT",))
            for dtypes in (("float32", "float64"), ("bfloat16", "float16")):
                jobs.insert(0, ("DEFAULT", "--dtypes", *dtypes))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(functools.partial(check_calls, which), jobs):
                pass
        if which.name == "memory":
            check_reached(ran, asked.lines)
        print(f"{which.name}: no report; {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except SanitizeError as failure:
        sys.exit(f"make sanitize: {failure}")
