"""Runs models as ONNX programs."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@functools.cache
def _keep_the_registry() -> None:
    """Makes torch build its table of ONNX functions once. By default it does so for each export,
    which takes half of an export's time."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    built: Any = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
    ONNXRegistry.from_torchlib = built  # type: ignore[method-assign]


def run_as_onnx(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Exports a model and returns the program's outputs for the inputs.

    ONNX Runtime runs it, or onnx's own evaluator if that is not installed.
    """
    pytest.importorskip("onnxscript")
    _keep_the_registry()
    program: Any = torch.onnx.export(model, inputs, dynamo=True, verbose=False)
    serialized = program.model_proto.SerializeToString()
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime

        session: Any = onnxruntime.InferenceSession(serialized)
    else:
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(serialized)
    names = [given.name for given in program.model_proto.graph.input]
    values = (given.numpy() for given in inputs)
    outputs = session.run(None, dict(zip(names, values, strict=True)))
    return [torch.from_numpy(output) for output in outputs]
