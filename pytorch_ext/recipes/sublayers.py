"""The ends of sublayers, and linear layers with their activation, found in any module's code.

Libraries write the end of a sublayer in only a few ways, such as ::

    hidden_states = self.dropout(hidden_states)         # may be missing
    hidden_states = residual + hidden_states
    residual = hidden_states                            # pre-norm; missing in post-norm layers
    hidden_states = self.post_attention_layernorm(hidden_states)

Such statements are replaced by one call of the operator, and all others stay as they are. So the
rest of a method may compute anything. The method is compiled again from its source, into a subclass
that adds nothing else, so a module with this class computes the same.
"""

from __future__ import annotations

import ast
import copyreg
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse.nn import packing
from trifuse.nn.dropout import DROPOUTS, drop
from trifuse.nn.dropout_add_layer_norm import norm_alone, same_dtype
from trifuse.nn.linear import (
    activation_name,
    gated_halves,
    gated_linear,
    is_frozen,
    is_intercepted,
    is_plain,
    linear_activation,
)
from trifuse.ops.activations import Activation
from trifuse.ops.dropout_add_layer_norm import dropout_add_layer_norm
from trifuse.recipes import boundaries, code, norms, rewriting, rotary_functions

# The submodules of a module that take part, by name: "norm", "dropout", "linear", "activation".
Roles = tuple[tuple[str, str], ...]


class Origin(NamedTuple):
    """The class and the names that a fused class was made from."""

    source: type[nn.Module]
    made_by: tuple[Any, tuple[Any, ...]]  # the function that made it, and its arguments
    roles: Roles = ()
    norms: tuple[str, ...] = ()  # the attributes whose norms are fused with the sum
    alone: tuple[str, ...] = ()  # those of them that another branch of the code calls alone
    parts: tuple[str, ...] = ()  # of a stack without padding, the submodules with packed tokens
    closes: bool = False  # whether it ends with a sum
    only_closes: bool = False  # whether nothing else was changed
    # Further norms that are fused with the sum, by the value of the attribute named "flag".
    flag: str = ""
    norms_by_flag: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # if it is false, or true

    def norms_of(self, module: nn.Module) -> tuple[str, ...]:
        """Return the attributes of a module whose norms are fused with the sum at present."""
        if not self.flag:
            return self.norms
        return self.norms + self.norms_by_flag[bool(getattr(module, self.flag, False))]


class FusedType(type):
    """The type of the classes made here. With it, pickle can make them again in another process."""

    # This names what a class was made from. Dynamo reads it; that of torch 2.11 could not read a
    # property of this type.
    _trifuse_origin: Origin


def _reduce(cls: FusedType) -> Any:
    return cls._trifuse_origin.made_by if _is_made_here(cls) else cls.__qualname__


def _is_made_here(cls: type) -> bool:
    """Whether a class was made here, unlike other code's subclass of such a class."""
    return "_trifuse_origin" in vars(cls)


copyreg.pickle(FusedType, _reduce)


class Fused(nn.Module):
    """The methods that compiled methods call in place of the replaced statements."""

    _trifuse_adders: tuple[Any, ...]  # the functions that drop and add, whose calls were replaced

    def _trifuse_add_norm(self, x: Tensor, residual: Tensor, dropout: Any, norm: Any) -> Tensor:
        return add_then_norm(x, residual, dropout, norm, prenorm=False)[0]

    def _trifuse_add_then_norm(
        self, x: Tensor, residual: Tensor, dropout: Any, norm: Any
    ) -> tuple[Tensor, Tensor]:
        return add_then_norm(x, residual, dropout, norm, prenorm=True)

    def _trifuse_close(self, x: Tensor, residual: Tensor, dropout: Any, clamped: bool) -> Tensor:
        return boundaries.close(self, x, residual, dropout, clamped)

    def _trifuse_adds(self, *functions: Any) -> bool:
        return all(each in self._trifuse_adders for each in functions)

    def _trifuse_drop(self, x: Tensor, options: tuple[float, bool]) -> Tensor:
        return drop(x, *options)

    def _trifuse_rotate(self, function: Any, *args: Tensor, **options: Any) -> Any:
        return rotary_functions.rotate(function, *args, **options)

    def _trifuse_activate(self, x: Tensor, linear: Any, activation: Any) -> Tensor:
        name = name_of(activation)
        is_module = isinstance(activation, nn.Module)
        if name is None or (is_module and is_intercepted(activation)):
            out: Tensor = activation(linear(x))
            return out
        return linear_activation(linear, x, name)

    def _trifuse_weight_dtype(self, linear: Any) -> Any:
        return linear._frozen.dtype if is_frozen(linear) else linear.weight.dtype

    def _trifuse_has_weight(self, linear: Any) -> bool:
        return is_frozen(linear) or isinstance(linear.weight, Tensor)

    def _trifuse_gate(self, x: Tensor, gate: Any, up: Any, activation: Any) -> Tensor:
        name = name_of(activation)
        if name is None or is_intercepted(activation):
            out: Tensor = activation(gate(x)) * up(x)
            return out
        return gated_linear(gate, up, x, name)

    def _trifuse_gate_halves(self, x: Tensor, both: Any, activation: Any, first: int) -> Tensor:
        name = name_of(activation)
        if name is None or is_intercepted(activation):
            halves = both(x).chunk(2, dim=-1)
            out: Tensor = activation(halves[first]) * halves[1 - first]
            return out
        return gated_halves(both, x, name, first)


def add_then_norm(
    x: Tensor,
    residual: Tensor,
    dropout: nn.Module | tuple[float, bool] | None,
    norm: nn.Module,
    prenorm: bool,
) -> tuple[Tensor, Tensor]:
    """Return norm(s) and s = residual + dropout(x), fused if the modules allow it.

    Args:
        x, residual: the two terms of the sum.
        dropout: a module; or the p and the training flag of ``torch.nn.functional.dropout``.
        norm: a module.
        prenorm: whether the caller uses the sum; otherwise the second result may be anything.
    """
    x, p, training = _before_sum(x, dropout)
    if p == 0 and x.shape != residual.shape:
        # One row of positions may serve all sequences. Broadcast, so that one sequence is rounded
        # like a batch.
        x, residual = torch.broadcast_tensors(x, residual)
    x, residual = _both_contiguous(x, residual)
    if x.shape == residual.shape:
        wide, wide_residual = same_dtype(x, residual)
        if (arguments := norms.parameters(norm, wide)) is not None:
            arguments |= {"dropout_p": p, "training": training}
            if prenorm:
                return dropout_add_layer_norm(wide, wide_residual, prenorm=True, **arguments)
            return dropout_add_layer_norm(wide, wide_residual, **arguments), x
    total = residual + (drop(x, p, training) if p else x)
    return norm_alone(total, norm), total


def _before_sum(x: Tensor, dropout: Any) -> tuple[Tensor, float, bool]:
    """Return a term of a sum, and the p and training flag of the dropout that remains.

    p is 0 unless it applies.
    """
    p, training = 0.0, False
    if isinstance(dropout, tuple):
        p, training = dropout
        if p >= 1:
            x, p = drop(x, p, training), 0.0
    elif dropout is not None:
        if type(dropout) in DROPOUTS and not is_intercepted(dropout):
            p, training = dropout.p, dropout.training
        if p >= 1 or p == 0:
            x, p = dropout(x), 0.0
    return x, p if training else 0.0, training


def _both_contiguous(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return both terms of a sum contiguous if one of them is.

    torch's sum has the layout of the term that is written first, and code may view it.
    """
    if not (isinstance(x, Tensor) and isinstance(residual, Tensor)):
        return x, residual  # numbers, or tuples
    if x.shape != residual.shape or x.is_contiguous() == residual.is_contiguous():
        return x, residual
    return x.contiguous(), residual.contiguous()


def add(x: Tensor, residual: Tensor, dropout: Any, saved: bool = True) -> Tensor:
    """Return residual + dropout(x), as :func:`add_then_norm` computes it.

    Args:
        x, residual, dropout: as there.
        saved: whether the backward may need the result, which then can't be changed in place.
    """
    x, p, training = _before_sum(x, dropout)
    x, residual = _both_contiguous(x, residual)
    if p and (x.shape, x.dtype) == (residual.shape, residual.dtype):
        # A standalone dropout would drop other elements.
        _, total = dropout_add_layer_norm(x, residual, dropout_p=p, training=training, prenorm=True)
        return total if saved else total.clone()
    return residual + (drop(x, p, training) if p else x)


def roles(module: nn.Module) -> Roles:
    """Return the submodules that may take part in a fused operator."""
    found = []
    for name, child in module.named_children():
        if norms.is_known(child):
            found.append((name, "norm"))
        elif type(child) in DROPOUTS:
            found.append((name, "dropout"))
        elif type(child) is nn.Linear or is_plain(child) or _is_linear(child):
            found.append((name, "linear"))
        elif name_of(child) is not None:
            found.append((name, "activation"))
    return tuple(sorted(found))


# Linear layers of transformers with code of their own, which have a class on our product.
_LINEAR = (
    ("transformers.pytorch_utils", "Conv1D"),
    ("transformers.models.falcon.modeling_falcon", "FalconLinear"),
)


def _is_linear(module: nn.Module) -> bool:
    cls = type(module)
    return (cls.__module__, cls.__qualname__) in _LINEAR


def name_of(activation: Any) -> Activation | None:
    """The name of an activation that the linear layer's product can apply, or None.

    Args:
        activation: a module, or a function of a model.
    """
    is_module = isinstance(activation, nn.Module)
    if is_module and (name := activation_name(activation)) is not None:
        return name
    module = getattr(type(activation) if is_module else activation, "__module__", None) or ""
    if module.startswith("transformers."):
        from trifuse.recipes import activations

        return activations.activation_name(activation)
    return None


def chunking_of(*classes: Any) -> list[tuple[dict[str, Any], str]] | None:
    """Where classes find the function that runs a network on one part of the tokens after another.

    Returns:
        The globals of each ``forward`` that calls it, and its name; None if one of them calls
        another function by that name than transformers'.
    """
    from transformers import pytorch_utils

    name = "apply_chunking_to_forward"
    forwards: list[Any] = [inspect.unwrap(cls.forward) for cls in classes]
    scopes = [each.__globals__ for each in forwards if name in each.__code__.co_names]
    if any(scope.get(name) is not getattr(pytorch_utils, name) for scope in scopes):
        return None
    return [(scope, name) for scope in scopes]


# The key includes the methods that were compiled again, because those of a class may be replaced.
_classes: dict[tuple[type, Roles, tuple[Any, ...]], type[nn.Module]] = {}


def fused_class(source: type[nn.Module], roles: Roles) -> type[nn.Module]:
    """Return the subclass of ``source`` whose methods run fused, or ``source`` if none does.

    Args:
        source: the class of a module.
        roles: what :func:`roles` returned for the module.
    """
    key = source, roles, tuple(code.methods(source))
    if key not in _classes:
        _classes[key] = _make(source, roles)
    return _classes[key]


def _make(source: type[nn.Module], roles: Roles) -> type[nn.Module]:
    first: type[nn.Module] = Fused
    closes = False
    found: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    flag = ""
    by_flag: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
    only_closes = False
    members: dict[str, Any] = {}
    adders: set[Any] = set()
    if norms.has_known_form(source):
        first = norms.FusedNorm
        members["forward"] = norms.FusedNorm.forward
        members["_trifuse_form"] = norms.form_of(source)
    else:
        for name, method in code.methods(source):
            if not rewriting.may_match(roles, method) or (tree := code.parse(method)) is None:
                continue
            rewriter = rewriting.rewrite(tree, roles, inspect.unwrap(method).__globals__)
            ends = any(role in ("norm", "dropout") for _, role in roles) or rewriting.drops(method)
            if name == "forward" and ends:
                changes = rewriter.changes
                closes = rewriter.close(tree.body)
                only_closes = closes and not changes
            if not rewriter.changes:
                continue
            called = _called(tree)
            if rewriter.adders and (unchanged := code.parse(method)) is not None:
                rewriter.guard(tree, unchanged)
            if (made := code.compile_like(tree, method)) is not None:
                members[name] = made
                adders.update(rewriter.adders.values())
                fused = _named(rewriter.norms)
                found += fused
                alone += tuple(name for name in fused if name in called)
                if rewriter.flag and name == "forward":
                    flag = rewriter.flag
                    by_flag = _named(rewriter.norms_by_flag[0]), _named(rewriter.norms_by_flag[1])
    if not members:
        return source
    made_by = fused_class, (source, roles)
    only_closes = only_closes and len(members) == 1
    members["_trifuse_adders"] = tuple(adders)
    origin = Origin(source, made_by, roles, found, alone, (), closes, only_closes, flag, by_flag)
    return subclass(first, origin, members)


def _called(tree: ast.FunctionDef) -> set[str | None]:
    """Return the names of the submodules that a method calls; None if it calls anything else."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {code.own_attribute(call.func) for call in calls}


def _named(norms: list[str]) -> tuple[str, ...]:
    return tuple(name for name in dict.fromkeys(norms) if name)


def subclass(first: type[nn.Module], origin: Origin, members: dict[str, Any]) -> type[nn.Module]:
    """Return a subclass of a module's class, ``origin.source``, that runs fused.

    Args:
        first: the first base, whose methods come before those of the source.
        members: further members of the class.
    """
    source = origin.source
    made: Any = FusedType(
        source.__name__,
        (first, source),
        {
            "__module__": "trifuse.recipes",
            "__qualname__": source.__qualname__,
            "__doc__": source.__doc__,
            "_trifuse_origin": origin,
            **members,
        },
    )
    _let_record(made)
    return made


def _let_record(cls: Any) -> None:
    """Make transformers find, by the class, which intermediate results a model can return."""
    if not hasattr(cls, "_can_record_outputs"):
        return
    from transformers.modeling_utils import _CAN_RECORD_REGISTRY

    dict.__setitem__(_CAN_RECORD_REGISTRY, str(cls), cls._can_record_outputs)


def origin_of(source: Any, made_by: tuple[Any, tuple[Any, ...]]) -> Origin:
    """Return the origin of a subclass; it keeps what recipes found in the source."""
    origin = source._trifuse_origin if isinstance(source, FusedType) else Origin(source, made_by)
    return origin._replace(source=source, made_by=made_by)


def original(cls: Any) -> type[nn.Module]:
    """Return the class from which recipes, or FSDP2, have made a class, or the class itself."""
    source: Any = cls
    while True:
        made = source
        source = made._trifuse_origin.source if _is_made_here(made) else packing.unsharded(made)
        if source is made:
            return source


def is_of_transformers(cls: type) -> bool:
    """Whether a class belongs to transformers or to code that it loads."""
    return cls.__module__.split(".")[0] in ("transformers", "transformers_modules")


def norms_alone(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's LayerNorms that are not fused with the sum before them.

    A norm that only some branches of the module's code fuse is among them, as in GPT-NeoX.
    """
    cls: Any = type(module)
    taken: set[str] = set()
    if isinstance(cls, FusedType):
        taken = set(cls._trifuse_origin.norms_of(module)) - set(cls._trifuse_origin.alone)
    for name, child in module.named_children():
        if type(child) is nn.LayerNorm and name not in taken:
            yield name


def norms_apart(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of a module's norms that no operator serves, and why."""
    alone = set(norms_alone(module))
    for name, child in module.named_children():
        kind = type(child)
        if name in alone:
            yield name, _why_alone(child)
        elif isinstance(child, nn.RMSNorm) or (
            kind.__name__.endswith("Norm")
            and is_of_transformers(kind)
            and not norms.is_known(child)
            and not any(child.children())  # a norm, not an encoder named by its norms
        ):
            yield name, f"{kind.__name__} isn't a known form of LayerNorm or RMSNorm"


def _why_alone(norm: nn.Module) -> str:
    """Return why a LayerNorm that isn't fused with a sum runs on torch."""
    if not norms.is_known(norm):
        return "it is a norm over several dimensions"
    if "forward" in vars(norm):
        return "its forward was replaced on the instance"
    device = next(norm.parameters(), torch.empty(0)).device.type
    if device != "cpu":
        return f"on {device}, fuse leaves LayerNorm to torch"
    return "no kernel of ours serves it here"


def ends_stay_apart(module: nn.Module) -> bool:
    """Whether a fused module holds a norm that must be called separately at present."""
    cls: Any = type(module)
    if not isinstance(cls, FusedType):
        return False
    for name in cls._trifuse_origin.norms_of(module):
        norm = getattr(module, name, None)
        if not isinstance(norm, nn.Module) or is_intercepted(norm) or not norms.is_known(norm):
            return True
    return False
