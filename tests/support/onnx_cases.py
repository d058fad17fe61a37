"""ONNX's own test cases of its operators."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from onnx import helper
from onnx.backend.test.case import node as node_cases
from torch import Tensor


class OnnxCase(NamedTuple):
    """A case of one node."""

    name: str
    operator: str
    attributes: dict[str, Any]
    inputs: list[Tensor | None]  # None in the place of an optional input left out
    outputs: list[Tensor | None]
    rtol: float
    atol: float


@functools.cache
def onnx_cases(*operators: str) -> list[OnnxCase]:
    """Returns every case of the operators once, without those named _expanded, which repeat cases
    in smaller operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of ONNX's cases overflow when they are made
        for operator in operators:  # a module makes its cases when it is imported
            importlib.import_module(f"{node_cases.__name__}.{operator.lower()}")
    found = []
    for test in node_cases._NodeTestCases:
        (node, *more) = test.model.graph.node
        if more or node.op_type not in operators or "_expanded" in test.name:
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        ((inputs, outputs),) = test.data_sets
        name = test.name.removeprefix("test_")
        tensors = _in_places(node.input, inputs), _in_places(node.output, outputs)
        found.append(OnnxCase(name, node.op_type, attributes, *tensors, test.rtol, test.atol))
    return found


def _in_places(names: list[str], arrays: list[Any]) -> list[Tensor | None]:
    """Returns a tensor for each name, and None where the name is empty."""
    given = iter(arrays)
    tensors = [_tensor(next(given)) if name else None for name in names]
    assert next(given, None) is None
    return tensors


def _tensor(array: Any) -> Tensor:
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch can't read
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))
