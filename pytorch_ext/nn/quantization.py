"""Makes eager quantization (``torch.ao.quantization``) raise for fused modules."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


class Unquantizable:
    """The attribute ``qconfig`` of a fused module, which torch sets on modules it may quantize.

    ``quantize_dynamic``, ``prepare`` and ``prepare_qat`` look modules up by their exact class and
    would silently skip a fused one. So setting a configuration raises. Setting None raises if the
    torch class that the module replaces was meant to be quantized.

    Args:
        replaced_class: the torch class that the module replaces.
    """

    def __init__(self, replaced_class: type[nn.Module]) -> None:
        self.replaced_class = replaced_class

    def __get__(self, module: nn.Module | None, owner: type[nn.Module]) -> Any:
        if module is None:
            return self
        if "qconfig" not in vars(module):
            raise AttributeError(f"{owner.__name__} has no attribute 'qconfig'")
        return vars(module)["qconfig"]

    def __set__(self, module: nn.Module, qconfig: Any) -> None:
        if qconfig is not None or self.replaced_class in _quantized_by_class():
            raise TypeError(
                f"model: expected torch.nn.{self.replaced_class.__name__}, which "
                f"torch.ao.quantization knows by its exact class; got "
                f"trifuse.nn.{type(module).__name__}. Quantize before trifuse.fuse, or after "
                f"report.revert()"
            )
        vars(module)["qconfig"] = None

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)["qconfig"]


def _quantized_by_class() -> set[Any]:
    """Returns the classes (and names) that torch is configuring, read from its stack frame.

    A module gets None both if its class wasn't requested and if its class wasn't found; only the
    arguments of torch's traversal distinguish the two.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_propagate_qconfig_helper":
            return set(frame.f_locals.get("qconfig_dict", ()))
        frame = frame.f_back
    return set()
