"""This module finds which models can have ``attn_implementation="trifuse"``, with which masks.

transformers accepts the name of an attention for any model. A model that computes its attention
itself would add our boolean mask to its scores, or miss the causality that a mask of None leaves to
the attention. The names used in the code of its classes distinguish the two kinds.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel, masking_utils

from trifuse._transformers import NAME
from trifuse.recipes import arguments, code, written_out


class _Verdict(NamedTuple):
    """Whether a class of models can run our attention, and with which masks."""

    reason: str | None = None  # why it can't run our attention
    eager_masks: bool = False  # whether it needs the masks of "eager"
    # Whether an attention that gets no mask isn't causal, as with "eager", though it is marked as
    # causal; and the same if it is called with ``is_causal=True``.
    ignores_marks: bool = False
    ignores_arguments: bool = False


def why_not(model: type[PreTrainedModel]) -> str | None:
    """Why models of this class can't have ``attn_implementation="trifuse"``, or None if they can.

    They can't if one of their attentions applies the mask that our mask function builds in a
    softmax of its own, and none goes through transformers' ``AttentionInterface``. Nor can they if
    they look the attention's name up in a table of functions of their own. A table of classes, as
    BERT has in transformers 4.57, gets ours: the class of "eager", which runs fused. A part with a
    configuration of its own, such as a tower of a vision-language model, is not examined: it is
    checked as a model of its own when it is constructed.

    Args:
        model: a class of transformers' models, or one loaded from the hub.
    """
    verdict = _examine(model)
    if _verdicts.get(model, verdict) != verdict:  # methods have been replaced since
        _verdicts.clear()
        _examined.clear()
    _verdicts[model] = verdict
    return verdict.reason


# The last verdict on each class. Examining a class at each call would take too long.
_verdicts: dict[type[PreTrainedModel], _Verdict] = {}


def _last_verdict(model: type[PreTrainedModel]) -> _Verdict:
    if model not in _verdicts:
        _verdicts[model] = _examine(model)
    return _verdicts[model]


def _examine(model: type[PreTrainedModel]) -> _Verdict:
    parts, tables = _parts(model)
    for name, table in tables.items():
        if NAME not in table:
            eager = table["eager"]
            if not (isinstance(eager, type) and written_out.computes_softmax(eager)):
                return _Verdict(_refusal(model, f"looks its attention up in {name}"))
            table[NAME] = written_out.written_out_class(eager)
    through_interface, by_themselves = _attentions(parts)
    if not any(_makes_masks(part) for part in parts):
        by_themselves = []  # they get masks that the model makes itself
    if by_themselves and not through_interface and not tables:
        what = f"computes attention itself, in {by_themselves[0].__name__}"
        return _Verdict(_refusal(model, what))
    attentions = {*through_interface, *by_themselves}
    added = any(_adds_to_mask(part) for part in parts if part not in attentions)
    # torch's attention and FlashAttention read from a layer whether it is causal. Without either,
    # nothing guarantees that a layer marked causal is causal. VideoPrism, on FlashAttention alone,
    # marks its causal layers as not causal.
    flash = getattr(model, "_supports_flash_attn", False)
    marked = model._supports_sdpa or (flash and not any(map(_is_never_causal, through_interface)))
    unmarked = bool(through_interface) and not marked
    apart = bool(by_themselves) or unmarked
    return _Verdict(
        eager_masks=apart or added,
        ignores_marks=apart,
        ignores_arguments=apart and not model._supports_sdpa,
    )


def _attentions(parts: list[type]) -> tuple[list[type], list[type]]:
    """The parts of a model that call the interface, and those that attend without it."""
    modules = [part for part in parts if not issubclass(part, PreTrainedModel)]
    through_interface = [part for part in modules if _uses_attention_interface(part)]
    by_themselves = [
        part for part in modules if part not in through_interface and _computes_attention(part)
    ]
    return through_interface, by_themselves


# "eager" computes this in models that need only a softmax of masked scores.
_PLAIN_EAGER = """
{scaling}
attn_weights = torch.matmul(query, key.transpose({dims})) * scaling
if attention_mask is not None:
    {masked}
attn_weights = {softmax}
{weights}
attn_output = torch.matmul(attn_weights, value)
attn_output = attn_output.transpose(1, 2).contiguous()
return (attn_output, attn_weights)
"""
_MASKED = (
    "attn_weights = attn_weights + attention_mask",
    # transformers 4.57
    "causal_mask = attention_mask[:, :, :, : key.shape[-2]]; "
    "attn_weights = attn_weights + causal_mask",
)
_DROPOUT = "attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)"
# transformers 4.57; a call with such a mask raises
_HEADS = "if head_mask is not None: attn_weights = attn_weights * head_mask.view(1, -1, 1, 1)"
_WEIGHTS = _DROPOUT, f"{_DROPOUT}\n{_HEADS}", f"{_HEADS}\n{_DROPOUT}"
_SCALING = "", "if scaling is None: scaling = query.size(-1) ** -0.5"
_NORMALISED = (
    "nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)",
    "nn.functional.softmax(attn_weights, dim=-1)",
)
_PLAIN = {
    code.normal(
        _PLAIN_EAGER.format(
            scaling=scaling, dims=dims, masked=masked, softmax=softmax, weights=weights
        )
    )
    for scaling in _SCALING
    for dims in ("2, 3", "-1, -2")
    for masked in _MASKED
    for softmax in _NORMALISED
    for weights in _WEIGHTS
}


def is_plain(model: type[PreTrainedModel]) -> bool:
    """Whether the code of a model's attentions is just a softmax of masked scores.

    Such models are accepted even if they don't declare support for "sdpa", as LayoutLM doesn't in
    transformers 4.57. Modules that aren't attentions may have a softmax and take the mask too, as
    NLLB-MoE's routers do: they get that of "eager".
    """
    through_interface, by_themselves = _attentions(_parts(model)[0])
    if any(map(written_out.names_attention, by_themselves)) or not through_interface:
        return False
    eager = [
        value
        for part in through_interface
        for _, value in mentioned(part)
        if isinstance(value, types.FunctionType) and "eager" in value.__name__
    ]
    return bool(eager) and all(code.body(function) in _PLAIN for function in eager)


def _refusal(model: type, what: str) -> str:
    return (
        f'{model.__name__} {what}: attn_implementation="{NAME}" can\'t serve it. Load it with '
        'attn_implementation="eager", and call trifuse.fuse(model), which serves attention that is '
        "written out. If it is a part of another model, give that one a dict, as "
        f'{{"": "{NAME}", "vision_config": "eager"}}'
    )


@torch.compiler.assume_constant_result
def why_not_by_config(config: type) -> str | None:
    return _examine_by_config(config).reason


@torch.compiler.assume_constant_result
def has_eager_masks(config: type) -> bool:
    return _examine_by_config(config).eager_masks


@torch.compiler.assume_constant_result
def ignores_causality(config: type, by_argument: bool) -> bool:
    """Whether attentions without a mask aren't causal although they are called or marked so.

    Args:
        config: the class of their configuration.
        by_argument: whether an argument of a call says so; otherwise an attribute does.
    """
    verdict = _examine_by_config(config)
    return verdict.ignores_arguments if by_argument else verdict.ignores_marks


def _examine_by_config(config: type) -> _Verdict:
    """Combine the verdicts on a configuration's models, those of its own package if it has any."""
    if config not in _examined:
        models = [model for model in _subclasses(PreTrainedModel) if model.config_class is config]
        package = config.__module__.rpartition(".")[0]
        own = [model for model in models if model.__module__.rpartition(".")[0] == package]
        verdicts = [_last_verdict(model) for model in own or models]
        reasons = (verdict.reason for verdict in verdicts if verdict.reason is not None)
        others = (any(each) for each in zip(*(verdict[1:] for verdict in verdicts), strict=True))
        _examined[config] = _Verdict(next(reasons, None), *others)
    return _examined[config]


_examined: dict[type, _Verdict] = {}


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    children: list[type[Any]] = cls.__subclasses__()
    for child in children:
        yield child
        yield from _subclasses(child)


def _parts(model: type[PreTrainedModel]) -> tuple[list[type], dict[str, dict[str, Any]]]:
    """The module classes that a model is made of, itself first, and its tables of attentions.

    A nested model with another configuration class is not a part.
    """
    found: dict[type, None] = {model: None}
    tables: dict[str, dict[str, Any]] = {}
    waiting: list[Any] = [model]
    while waiting:
        for name, value in mentioned(waiting.pop()):
            values: list[Any] = [value]
            if isinstance(value, dict):
                values = list(value.values())
                modules = all(isinstance(v, type) and issubclass(v, nn.Module) for v in values)
                functions = all(isinstance(v, types.FunctionType) for v in values)
                if "eager" in value and (modules or functions):
                    tables[name] = value
            for part in values:
                if not (isinstance(part, type) and issubclass(part, nn.Module)) or part in found:
                    continue
                another = issubclass(part, PreTrainedModel)
                if another and getattr(part, "config_class", None) is not model.config_class:
                    continue
                if not part.__module__.startswith("torch."):
                    found[part] = None
                    waiting.append(part)
    return list(found), tables


def _makes_masks(part: type) -> bool:
    return any(
        getattr(value, "__module__", None) == masking_utils.__name__ and name.endswith("_mask")
        for name, value in mentioned(part)
    )


def _adds_to_mask(part: type) -> bool:
    """Whether a module adds a bias to the mask of its attentions, as BEiT's layers do.

    A boolean mask would count as 0 and 1 there.
    """
    forward = getattr(part, "forward", None)
    return isinstance(forward, types.FunctionType) and _has_sum_of_mask(forward)


@functools.cache  # by the method, which may be replaced
def _has_sum_of_mask(forward: types.FunctionType) -> bool:
    if not any("bias" in name for name in inspect.unwrap(forward).__code__.co_names):
        return False
    tree = code.parse(forward, to_read=True)
    return tree is not None and any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and any(
            isinstance(side, ast.Name) and side.id == arguments.MASK
            for side in (node.left, node.right)
        )
        for node in ast.walk(tree)
    )


_SOFTMAX = {"softmax", "Softmax", "scaled_dot_product_attention", "MultiheadAttention"}


def _uses_attention_interface(part: type) -> bool:
    """Whether a module calls its attention through transformers' ``AttentionInterface``."""
    return any(
        isinstance(value, AttentionInterface) or name == "ALL_ATTENTION_FUNCTIONS"
        for name, value in mentioned(part)
    )


def _is_never_causal(part: type) -> bool:
    """Whether an attention marks itself as not causal, whatever its configuration says."""
    tree = code.parse(part.__init__, to_read=True)  # type: ignore[misc]
    return tree is None or any(
        isinstance(node, ast.Assign) and ast.unparse(node) == "self.is_causal = False"
        for node in ast.walk(tree)
    )


def _computes_attention(part: type) -> bool:
    """Whether a module takes a mask and has a softmax of its own."""
    names: set[str] = set()
    for name, value in mentioned(part):
        names.add(name)
        if isinstance(value, types.FunctionType) and not value.__module__.startswith("torch."):
            names.update(name for name, _ in names_in(value))
    takes_mask = any(
        name.endswith("mask")
        for method in _methods(part)
        if method.__name__ != "__init__"
        for name in method.__code__.co_varnames[: method.__code__.co_argcount]
    )
    return takes_mask and not names.isdisjoint(_SOFTMAX)


def mentioned(part: type) -> Iterator[tuple[str, Any]]:
    """Yield the names in the code of a class's methods, each with its global value or None."""
    for method in _methods(part):
        yield from names_in(method)


def names_in(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    waiting = [function.__code__]
    while waiting:
        block = waiting.pop()
        for name in block.co_names:
            yield name, function.__globals__.get(name)
        for value in block.co_consts:
            if isinstance(value, types.CodeType):
                waiting.append(value)
            elif isinstance(value, tuple):  # may hold the names of a call's keyword arguments
                yield from ((name, None) for name in value if isinstance(name, str))


def _methods(part: type) -> Iterator[types.FunctionType]:
    """Yield the methods of a class, with those of its bases that it inherits or calls by super().

    Methods of torch's classes and of the bases that all transformers models share are left out.
    """
    taken: set[str] = set()
    for cls in part.__mro__:
        if cls.__module__.startswith("torch.") or cls.__module__ in _SHARED:
            continue
        for name, value in vars(cls).items():
            method = getattr(value, "__func__", getattr(value, "fget", value))
            if name in taken or not callable(method) or isinstance(method, type):
                continue
            if name == "_init_weights":  # it names classes that this model may not hold
                continue
            method = inspect.unwrap(method)
            if isinstance(method, types.FunctionType):
                if "super" not in method.__code__.co_names:
                    taken.add(name)
                yield method


_SHARED = {"builtins", PreTrainedModel.__module__, "transformers.modeling_layers"}
