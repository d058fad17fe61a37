"""Checks that the calls for compute-sanitizer on a GPU launch every CUDA kernel."""

from __future__ import annotations

import re

import pytest
from host_build import ROOT, build_operator, serving_as_cuda
from test_gpu import EACH_KERNEL, MODULES
from tested_kernels import Kernel


def kernels(operator: str) -> set[str]:
    """Returns the names of an operator's kernels, as its launches give them."""
    names: set[str] = set()
    for source in (ROOT / "csrc/cuda").glob(f"{operator}*.cu"):
        names |= set(re.findall(r"__global__[^;{]*?\b(\w+)_kernel\(", source.read_text()))
    return {f"{operator}_{name.removeprefix(f'{operator}_')}" for name in names}


@pytest.mark.parametrize("operator", EACH_KERNEL)
def test_each_kernel_is_launched(operator):
    library = build_operator(operator)
    before = {kernel: library.launches(kernel) for kernel in kernels(operator)}
    assert before
    with serving_as_cuda(library), Kernel("cuda").serving(), library.device(compute_capability=90):
        for case in EACH_KERNEL[operator].values():
            MODULES[operator].run(case())
    assert [name for name, count in before.items() if library.launches(name) == count] == []
