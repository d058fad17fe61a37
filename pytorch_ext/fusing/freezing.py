"""``freeze=True``: weights are packed for good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch import nn as torch_nn

from trifuse import nn
from trifuse.fusing.report import FuseReport, Left
from trifuse.fusing.steps import Absent, Freezing, Step
from trifuse.nn.linear import OnProduct, is_plain
from trifuse.nn.linear import freeze as freeze_weights
from trifuse.ops import _linear_choice


def freeze_model(model: torch_nn.Module, report: FuseReport) -> None:
    """Freeze the weights that trifuse's product reads, except shared ones."""
    uses = Counter(
        _address(t)
        for module in model.modules()
        for t in (*module._parameters.values(), *module._buffers.values())
        if t is not None
    )
    chosen: list[OnProduct] = []
    for path, module in model.named_modules():
        if type(module) is nn.MultiheadAttention and not module.frozen:
            if not _linear_choice.can_freeze(module.out_proj.weight.dtype):
                continue
            if (why := _why_computed(module, _IN_PROJECTIONS)) is not None:
                report.left.append(Left(path, type(module).__name__, f"not frozen: {why}"))
                continue
            step = Step(module, "frozen", Absent.ABSENT, True)
            step.do()
            report._steps.append(step)
        elif is_plain(module):
            if (why := _why_not_frozen(module, uses)) is not None:
                report.left.append(Left(path, type(module).__name__, f"not frozen: {why}"))
                continue
            chosen.append(module)
        else:
            continue
        report.frozen.append(path)
    report._steps += map(Freezing, chosen, freeze_weights(chosen))


def _why_not_frozen(module: torch_nn.Module, uses: Counter[int | None]) -> str | None:
    if (why := _why_computed(module, ["weight"])) is not None:
        return why
    weight = cast(Tensor, module.weight)
    if type(weight) is not torch_nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.numel() == 0:
        return "no product of ours serves it"
    if weight.dim() != 2:  # between calls under FullyShardedDataParallel(use_orig_params=True)
        return "its weight is no matrix"
    if not _linear_choice.can_freeze(weight.dtype):
        return f"torch's product serves it; {_linear_choice.choose(weight.dtype).reason}"
    if uses[_address(weight)] > 1:
        return "its weight is shared"
    return None


_IN_PROJECTIONS = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]


def _why_computed(module: torch_nn.Module, names: Sequence[str]) -> str | None:
    """Return which weight is no parameter: torch's pruning, for example, makes it in each call."""
    computed = [name for name in names if name not in module._parameters]
    return f"its {computed[0]} is no parameter" if computed else None


def _address(t: Tensor) -> int | None:
    """Return where a tensor's memory begins; None if it has none of its own."""
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):  # a DTensor, a sparse tensor, one that a lazy module makes
        return None
