"""Workers for tests of the fuzzer's reports. They import little, and so start at once."""

from __future__ import annotations

import os
import time
from typing import Any

CRASHES, HANGS = 8, 9  # seeds


def work(operator: str, backend: str, seeds: Any, reports: Any, shrink_seconds: float) -> None:
    """Stands in for ``fuzz.worker.work``: finds nothing; crashes or hangs at two seeds."""
    while (seed := seeds.recv()) is not None:
        if seed == CRASHES:
            os.abort()
        if seed == HANGS:
            time.sleep(3600)
        reports.send(None)
