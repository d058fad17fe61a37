"""trifuse under torch.distributed, with gloo and 2 and 4 processes, against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import processes
import pytest
import torch
from covering import selected_parameters
from filelock import FileLock

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch has no distributed"
)


BIT_FOR_BIT = [name for name in processes.names() if name.endswith("bit_for_bit")]


@pytest.fixture(scope="module")
def errors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[str]]]:
    """Returns the errors of all selected checks, by the number of processes and the name."""
    wanted: dict[int, list[str]] = {}
    for each in selected_parameters(request, "test_check_passes_in_every_process"):
        wanted.setdefault(each["size"], []).append(each["name"])
    if selected_parameters(request, "test_eight_processes_drop_what_one_drops"):
        wanted[8] = BIT_FOR_BIT
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    found = shared / "errors_in_processes.json"
    with FileLock(found.with_suffix(".lock")):  # another test worker may be running them
        if not found.exists():
            folder = tmp_path_factory.mktemp("processes")
            exhaustive = request.config.getoption("exhaustive")
            found.write_text(json.dumps(processes.run(wanted, folder, exhaustive)))
    errors: dict[str, dict[str, list[str]]] = json.loads(found.read_text())
    return errors


@pytest.mark.parametrize("size", processes.SIZES)
@pytest.mark.parametrize("name", processes.names())
@pytest.mark.covering(1)
def test_check_passes_in_every_process(name, size, errors):
    found = errors[str(size)][name]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", BIT_FOR_BIT)
def test_eight_processes_drop_what_one_drops(name, errors):
    assert len(BIT_FOR_BIT) == 2
    found = errors["8"][name]
    assert not found, "\n".join(found)


def test_rules_are_registered_when_dtensor_is_imported_and_not_before():
    code = """
import sys, torch, trifuse
assert "torch.distributed.tensor" not in sys.modules
from torch.distributed.tensor import DTensor
handlers = DTensor._op_dispatcher._custom_op_handlers
for name in ("attention", "dropout_add_layer_norm", "lstm", "gru", "rnn"):
    for op in (f"{name}_forward", f"{name}_backward"):
        packet = getattr(torch.ops.trifuse, op)
        assert all(getattr(packet, overload) in handlers for overload in packet.overloads()), op
assert torch.ops.trifuse.dropout.eager in handlers and torch.ops.trifuse.linear.default in handlers
"""
    subprocess.run([sys.executable, "-c", code], check=True)
