"""``make sanitize``: the C++ extension under the compiler's sanitizers.

It is built twice, each time into a separate folder:

- ``memory``: with AddressSanitizer, UndefinedBehaviorSanitizer, and counts of the lines that run;
- ``threads``: with ThreadSanitizer, its tasks on std::thread (csrc/cpu/threads.h).

First, each build must report the errors planted in csrc/cpu/planted.h. Then the calls of
sanitized_calls.py run on the kernels of every instruction set of this machine. They must end
without a report, and must reach every kernel. ``--lines`` also lists the lines that no call
reached. No report on this code is suppressed. torch, Python and OpenMP's runtime are not
instrumented. If they have their own threads, these are limited to one. One report on glibc is
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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
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
            # OpenMP starts two of three requested threads, so Crew has to count those that run.
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
    # Instruction sets that this machine lacks need no sanitizers.
    from trifuse import _C

    here = " ".join(_C.cpu_capabilities())
    environment = {**os.environ, "TRIFUSE_SANITIZE": which.name, "TRIFUSE_SANITIZE_SETS": here}
    done = subprocess.run(command, cwd=ROOT, env=environment)
    if done.returncode or not extension(which).exists():
        raise SanitizeError(f"the extension was not built with sanitizers for {which.name}")


def extension(which: Build) -> Path:
    return next(iter(which.folder.glob("trifuse/_C.*.so")), which.folder / "trifuse/_C.so")


def run(which: Build, *arguments: str) -> tuple[int, str]:
    """Runs Python with the sanitized extension. Returns the exit status and all output."""
    # Preloads the C++ library too, because when the process starts the runtime looks for the
    # function that throws.
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


def brief_sets(ran: list[str]) -> list[str]:
    """Returns the instruction sets that run fewer and smaller calls.

    All kernels have one source, so only the best set and the sets for bfloat16 run all calls.
    Without vectors each call would take ten times as long.
    """
    return [capability for capability in ran if not capability.endswith("_BF16")][:-1]


# Coverage ----------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A line of a function. A template has one function per type."""

    file: str
    line: int
    function: str  # demangled, without the instruction set


class Reached(NamedTuple):
    """Counts of how often each function, by its first line, and each line ran on one set."""

    functions: Counter[Place]
    lines: Counter[Place]


def counts() -> list[Path]:
    """Returns the files of counts that objects of the memory build wrote as processes ended."""
    return sorted((ROOT / "build").glob("*/*.gcda"))


def read_counts(path: Path, capability: str, reached: Reached) -> None:
    """Adds one object's counts of the functions that only its instruction set has."""
    gcov = subprocess.run(
        [compiler(), "-print-prog-name=gcov"], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [gcov, "--json-format", str(path)], cwd=folder, check=True, capture_output=True
        )
        [packed] = Path(folder).glob("*.gcov.json.gz")
        found = json.loads(gzip.decompress(packed.read_bytes()))
    for file in found["files"]:
        source = Path(found["current_working_directory"], file["file"]).resolve()
        # The kernels, and the headers that they share with the CUDA kernels.
        if source.parent not in (ROOT / "csrc/cpu", ROOT / "csrc"):
            continue
        name = str(source.relative_to(ROOT))
        own, inside = {}, set[int]()
        for function in file["functions"]:
            readable = function["demangled_name"]
            # Functions that all instruction sets share are counted in only one of them.
            if f"::{capability}::" in readable:
                readable = readable.replace(f"::{capability}::", "::")
                own[function["name"]] = readable
                place = Place(name, function["start_line"], readable)
                reached.functions[place] += function["execution_count"]
                inside |= set(range(function["start_line"], function["end_line"] + 1))
        for line in file["lines"]:
            # For a lambda in several instances of a template, gcov adds up the lines, and then
            # names no function.
            function_name = line.get("function_name", "")
            if function_name in own or (not function_name and line["line_number"] in inside):
                place = Place(name, line["line_number"], own.get(function_name, ""))
                reached.lines[place] += line["count"]


def by_line(places: Counter[Place]) -> Counter[tuple[str, int]]:
    """Adds up the counts of a template's functions of all types."""
    sums = Counter[tuple[str, int]]()
    for place, count in places.items():
        sums[place.file, place.line] += count
    return sums


_WAITS = "csrc/cpu/failure.h"  # whether a thread has to wait for another depends on timing
# Functions that need the matrix unit. A sanitizer does not detect the memory accesses that load its
# registers, so sanitized builds multiply in software.
_OF_THE_UNIT = re.compile(
    r"multiply_block<|multiply_32_columns\(|multiply_by_column\(|add_row_product<|OneRow::"
)
# A function that the compiler inlines before it adds the counters; the function itself counts none.
_INLINED = re.compile(r"\brounded_to<c10::BFloat16, float>")


def check_reached(ran: list[str], show_lines: bool) -> None:
    """Checks that every function of the kernels ran, for each instruction set, except those that
    need the matrix unit and those that are inlined.

    Brief calls must reach each line that the other calls reach, for some type.
    """
    # Objects of one instruction set share inline functions, and the linker keeps only one object's
    # copy and counts. So counts are added up over the objects.
    sums = {capability: Reached(Counter(), Counter()) for capability in ran}
    for path in counts():
        kernel, _, capability = path.name.rsplit(".", 2)[0].partition(".")  # without the digest
        if kernel.endswith("_kernel") and capability in ran:
            read_counts(path, capability, sums[capability])
    missed = []
    all_calls = [by_line(sums[name].lines) for name in ran if name not in brief_sets(ran)]
    for capability, total in sums.items():
        functions, lines = by_line(total.functions), by_line(total.lines)
        missed += [
            f"{capability}: {place.file}:{place.line}: {place.function}"
            for place in sorted(total.functions)
            if not functions[place.file, place.line]
            and not _OF_THE_UNIT.search(place.function)
            and not _INLINED.search(place.function)
        ]
        never = sorted(place for place, count in lines.items() if not count)
        if capability in brief_sets(ran):
            missed += [
                f"{capability}: {file}:{line}, which all calls reach"
                for file, line in never
                if file != _WAITS and any(reached[file, line] for reached in all_calls)
            ]
        if show_lines:
            for file, places in itertools.groupby(never, lambda place: place[0]):
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
        jobs: list[tuple[str, ...]] = []
        for capability in reversed(ran):  # those that take longest come first
            options = ["--brief"] if capability in brief_sets(ran) else []
            if capability.endswith("_BF16"):
                jobs.append((capability,))
                continue
            for dtypes in (["float32"], ["float64"], ["bfloat16", "float16"]):
                jobs.append((capability, *options, "--dtypes", *dtypes))
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
