"""``make fuzz SECONDS=600 SEED=7 OPERATOR=attention BACKEND=cpp``: see CONTRIBUTING.md.

Each worker is a process, so that a crash or a hang is reported like any other failure, with the
seed of the call that caused it. A new worker takes its place.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import time
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .worker import BACKENDS, OPERATORS, runs, work

# Seconds. A call in Triton's interpreter or on the host model of CUDA can take long.
HANGS_AFTER = 300.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, in all")
    parser.add_argument("--calls", type=int, help="how many of each operator instead")
    parser.add_argument("--seed", type=int, default=None, help="of the first call; the rest follow")
    parser.add_argument("--operator", nargs="*", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument(
        "--backend",
        nargs="*",
        choices=BACKENDS,
        default=["cpp", "eager"],
        help="default: cpp and eager; triton, in its interpreter, and cuda, under the host model, "
        "are slow and run only if named",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--shrink-seconds", type=float, default=60.0)
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    jobs = [(o, b) for b in options.backend for o in options.operator if runs(o, b)]
    return Fuzzing(jobs, seed, options).run()


class Fuzzing:
    """Runs jobs one after another. A job is an operator and a backend; workers share its calls."""

    def __init__(self, jobs: list[tuple[str, str]], seed: int, options: Any) -> None:
        self.jobs, self.seed, self.options = jobs, seed, options
        self.kinds: dict[str, int] = {}
        self.made = 0

    def run(self) -> int:
        total = self.options.calls or self.options.seconds / len(self.jobs)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
        # After Ctrl-C the summary counts the calls until then.
        interrupted = contextlib.suppress(KeyboardInterrupt)
        with interrupted, Progress(*columns, TimeElapsedColumn()) as self.progress:
            for operator, backend in self.jobs:
                task = self.progress.add_task(f"{operator}, {backend}", total=total, said="")
                self._job(operator, backend, task, total)
        print(f"{self.made} calls from seed {self.seed}, {sum(self.kinds.values())} failed")
        for kind, count in self.kinds.items():
            print(f"{count:6} {kind}")
        return 1 if self.kinds else 0

    def _job(self, operator: str, backend: str, task: Any, total: float) -> None:
        """Runs one job on several workers, for a time or for a number of calls."""
        if backend == "cuda":
            from host_build import build_operator

            build_operator(operator)  # takes minutes, so a worker that builds would seem to hang
        workers = [
            _Worker(operator, backend, self.options.shrink_seconds)
            for _ in range(min(self.options.workers, self.options.calls or self.options.workers))
        ]
        try:
            self._deal(workers, task, total)
        finally:
            for worker in workers:
                worker.end()

    def _deal(self, workers: list[_Worker], task: Any, total: float) -> None:
        """Deals seeds to the workers and records what they find."""
        calls = self.options.calls
        start, given, done = time.monotonic(), 0, 0
        idle = list(workers)
        while True:
            more = given < calls if calls else time.monotonic() - start < total
            if more:
                while idle and (not calls or given < calls):
                    idle.pop().begin(self.seed + given)
                    given += 1
            busy = [w for w in workers if w.seed is not None]
            if not busy and not more:
                break
            multiprocessing.connection.wait([w.reports for w in busy], timeout=1.0)
            for worker in busy:
                found, finished = worker.poll()
                if found is not None:
                    kind, text = found
                    if kind not in self.kinds:
                        self.progress.console.print(
                            f"\n{kind}\n{text}", markup=False, highlight=False, soft_wrap=True
                        )
                    self.kinds[kind] = self.kinds.get(kind, 0) + 1
                if finished:
                    done += 1
                    self.made += 1
                    idle.append(worker)
            self.progress.update(
                task,
                completed=done if calls else min(total, time.monotonic() - start),
                said=f"{done} calls",
            )


class _Worker:
    def __init__(self, operator: str, backend: str, shrink_seconds: float) -> None:
        self.arguments = operator, backend, shrink_seconds
        self.seed: int | None = None
        self._start()

    def _start(self) -> None:
        operator, backend, shrink_seconds = self.arguments
        context = multiprocessing.get_context("spawn")
        theirs, self.seeds = context.Pipe(duplex=False)
        self.reports, sent = context.Pipe(duplex=False)
        self.process = context.Process(
            target=work, args=(operator, backend, theirs, sent, shrink_seconds), daemon=True
        )
        # Ctrl-C ends this process, which ends its workers; they print nothing.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process.start()
        signal.signal(signal.SIGINT, handler)
        theirs.close()
        sent.close()

    def begin(self, seed: int) -> None:
        self.seed, self.since = seed, time.monotonic()
        self.seeds.send(seed)

    def poll(self) -> tuple[tuple[str, str] | None, bool]:
        """Returns the failure of the current call, if it failed, and whether the call is over."""
        operator, backend, shrink_seconds = self.arguments
        hangs = time.monotonic() - self.since > HANGS_AFTER + shrink_seconds
        try:
            if self.reports.poll():
                found, self.seed = self.reports.recv(), None
                return found, True
            if not hangs:
                return None, False
        except EOFError:
            pass
        again = f"make fuzz CALLS=1 SEED={self.seed} OPERATOR={operator} BACKEND={backend}"
        if hangs:
            self.process.kill()
        self.process.join()
        how = "hangs" if hangs else f"crashed with exit code {self.process.exitcode}"
        self.seed = None
        self._start()
        return (f"{operator} {how}", again), True

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.seeds.send(None)
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()


if __name__ == "__main__":
    sys.exit(main())
