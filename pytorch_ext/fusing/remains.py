"""This module finds what runs as before in a fused model, and says why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn as torch_nn

from trifuse import nn
from trifuse.fusing.report import UNPADDED, FuseReport, Left, Note
from trifuse.nn import packing
from trifuse.nn.dropout_add_layer_norm import is_fused
from trifuse.recipes import boundaries, code, embeddings, lone_sums, stacks, sublayers, written_out


def notes(model: torch_nn.Module) -> Iterator[Note]:
    """Yield the parts of the fused modules in ``model`` that do not run fused at present."""
    held = {
        id(attention)
        for layer in model.modules()
        if type(layer) in _CALL_WITHOUT_WEIGHTS
        for attention in layer.children()
    }
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and id(module) not in held:
            yield Note(path, "by softmax where weights are asked for, torch's default")
        if not all(
            is_fused(dropout, norm) for dropout, norm in _ends_of_sublayers(module)
        ) or sublayers.ends_stay_apart(module):
            yield Note(path, "dropout, sum and norm one by one")
        if (note := written_out.note(module)) is not None:
            yield Note(path, note)


_CALL_WITHOUT_WEIGHTS = (
    torch_nn.TransformerEncoderLayer,
    torch_nn.TransformerDecoderLayer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def _ends_of_sublayers(module: Any) -> Iterator[tuple[torch_nn.Module, torch_nn.Module]]:
    """Yield each dropout with the norm that a fused module can run in the same operator."""
    if isinstance(module, nn.BertSelfOutput):
        yield module.dropout, module.LayerNorm
    elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        for k in (1, 2, 3):
            if hasattr(module, f"norm{k}"):
                yield getattr(module, f"dropout{k}"), getattr(module, f"norm{k}")


def norms_apart(model: torch_nn.Module) -> Iterator[Left]:
    """Yield the norms in modules of transformers that no operator serves, and why."""
    for path, holder in model.named_modules():
        source = sublayers.original(type(holder))
        if not sublayers.is_of_transformers(source):
            continue
        for name, reason in sublayers.norms_apart(holder):
            inside = f"{path}.{name}" if path else name
            yield Left(inside, f"{source.__name__}.{name}", reason)


def sums_apart(model: torch_nn.Module) -> Iterator[Left]:
    """Yield the modules of transformers with a sum that stays torch's though a norm may take it."""
    paths = {module: path for path, module in model.named_modules()}
    for layer, why, when in boundaries.find_apart(model):
        reason = f"the sum at its end, because {why}"
        yield Left(paths[layer], _source_name(layer), f"{when}, {reason}" if when else reason)
    for module, holder, norm, how in lone_sums.find(model):
        if module is holder:
            in_one = isinstance(module, embeddings.OneEmbedding)
            which = "except in inference on a CPU, " * in_one + f"the sum before its {norm}"
            why = f"its code adds {how}" if how else "its code isn't a known form"
            if "forward" in vars(module):
                why = "its forward was replaced"
        else:
            which = f"the sum before {_source_name(holder)}.{norm}"
            why = "only a layer's last sum is joined with a norm in another module"
        yield Left(paths[module], _source_name(module), f"{which}, because {why}")


def _source_name(module: torch_nn.Module) -> str:
    return sublayers.original(type(module)).__name__


def own_attention(model: torch_nn.Module) -> Iterator[Left]:
    """Yield the attentions of models set to "trifuse" that compute their attention themselves."""
    seen = set()
    for root, chosen in attn_implementations(model):
        if chosen != "trifuse":
            continue
        for path, module in model.get_submodule(root).named_modules(prefix=root):
            if module not in seen and _attends_by_itself(module):
                yield Left(path, type(module).__name__, "computes its attention by itself")
            seen.add(module)


def torch_attention(model: torch_nn.Module) -> Iterator[Left]:
    """Yield the modules that call ``F.scaled_dot_product_attention``, or compute a softmax.

    Attentions of transformers models are left out: :func:`own_attention` has them.
    """
    of_transformers = {
        part for _, outermost in models_of_transformers(model) for part in outermost.modules()
    }
    for path, module in model.named_modules():
        cls = type(module)
        if module in of_transformers or _is_ours_or_torchs(cls):
            continue
        names = code.names_used(cls) | code.names_used_by_helpers(cls)
        if "scaled_dot_product_attention" in names:
            why = "calls F.scaled_dot_product_attention"
        elif "softmax" in names and "attention" in cls.__name__.lower():
            why = "writes its softmax out"
        else:
            continue
        yield Left(path, cls.__name__, f"{why}; run it inside trifuse.attention()")


def _attends_by_itself(module: torch_nn.Module) -> bool:
    """Whether a module named as an attention computes it, bypassing ``ALL_ATTENTION_FUNCTIONS``."""
    cls = type(module)
    by_itself = written_out.computed_by(cls) not in (None, written_out.INTERFACE)
    return by_itself and not _is_ours_or_torchs(cls)


def _is_ours_or_torchs(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("torch", "trifuse")


def report_padding(model: torch_nn.Module, report: FuseReport) -> None:
    """Report which stacks leave padding out, and which models have no stack that can."""
    found = list(padding(model))
    for path, stack, why in found:
        if why is None:
            report.unpadded.append(path)
        else:
            report.padded.append(Left(path, type(stack).__name__, str(why)))
            packing.warn_padded(stack, why)
    # The rows of stacks claim that they leave padding out. Some stacks may not at present.
    computing = {each.path for each in report.padded}
    report.swapped = [
        each._replace(after=each.after.removesuffix(UNPADDED)) if each.path in computing else each
        for each in report.swapped
    ]
    refused = {stack: why for stack, why in stacks.find(model).items() if isinstance(why, str)}
    if found:
        for path, module in model.named_modules():
            if (other := refused.get(module)) is not None:
                report.padded.append(Left(path, type(module).__name__, other))
                packing.warn_padded(module, other)
    left = {each.path: each.reason for each in reversed(report.left)}  # the first reason counts
    for path, module in models_of_transformers(model):
        inside = f"{path}." if path else ""
        if not any(stack == path or stack.startswith(inside) for stack, _, _ in found):
            why = left.get(path) or _why_no_stack(module, path, left)
            report.padded.append(Left(path, type(module).__name__, why))
            packing.warn_padded(module, why)
    if not (found or report.padded):
        why = "nothing in it is known to do without it"
        report.padded.append(Left("", type(model).__name__, why))
        packing.warn_padded(model, why)


def _why_no_stack(model: torch_nn.Module, path: str, left: dict[str, str]) -> str:
    """Say why a model of transformers has no stack, by the stacks that were left alone first."""
    for name, module in model.named_modules(prefix=path):
        if name in left and isinstance(stacks.recognise(module), stacks.Stack):
            return left[name]
    return stacks.why_none(model)


def padding(
    model: torch_nn.Module,
) -> Iterator[tuple[str, torch_nn.Module, packing.Obstacle | str | None]]:
    """Yield each stack in ``model`` set to leave padding out, and why it doesn't, or None."""
    module: Any
    for path, module in model.named_modules():
        # Tests the class, since wrappers such as LoRA's forward the wrapped module's attributes.
        if hasattr(type(module), "why_padded") and module.unpad:
            yield path, module, module.why_padded()


def attn_implementations(model: torch_nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the path and the ``attn_implementation`` of each transformers model in ``model``."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            yield path, module.config._attn_implementation


def models_of_transformers(model: torch_nn.Module) -> Iterator[tuple[str, torch_nn.Module]]:
    """Yield the outermost transformers models in ``model``, with their paths."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    inside: set[torch_nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            yield path, module
            inside.update(module.modules())
