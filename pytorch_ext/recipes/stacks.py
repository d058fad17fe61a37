"""Encoders of transformers that compute on real tokens only, found by the loop over their layers.

Somewhere in its code, an encoder sends its hidden states through its layers, one after another ::

    for layer in self.layers:                    # or over indices, or with layers left out
        hidden_states = layer(hidden_states, attention_mask, ...)
    hidden_states = self.final_norm(hidden_states)    # may be missing

Around this loop a few statements are added, and the method is compiled again from its source, into
a subclass: the call of the first layer packs the real tokens of a padded batch, and after the loop
they are unpacked, with 0 in the padding. In between, the layers get packed tokens, and
:class:`PackedSequences` instead of the mask. Other tensors that have one row for each token are
packed with them: rotary embeddings, for example.

This is done only if :mod:`trifuse.recipes.tokenwise` finds that the layers treat tokens one by one,
and if the mask is that of padding, perhaps with a window of equal reach to both sides.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse._transformers import NAME
from trifuse.nn import packing
from trifuse.nn.packing import Obstacle, PackedSequences
from trifuse.recipes import code, norms, sublayers, tokenwise
from trifuse.recipes.tokenwise import ABSENT, MASK


class Unpadded(nn.Module):
    """The first base of every encoder that computes on real tokens only; the second is its source.

    If the batch is padded, its real tokens are packed into one row, and the output is 0 at padded
    positions. Other attention implementations, other masks than those of padding, caches, and
    layers that are hooked or patched (as by ``output_hidden_states=True``) run as in transformers.
    """

    unpad = True

    def _trifuse_pass(self) -> _Pass:
        return _Pass(self)

    def why_padded(self) -> Obstacle | str | None:
        """Why the encoder computes padding in any batch; None if it can leave padding out."""
        if (chosen := _attention(self)) != NAME:
            return f'its attention runs by attn_implementation="{chosen}"'
        cls: Any = type(self)
        return packing.find_obstacle(self, _KNOWN, cls.origin.parts, tokenwise.why_not)


_KNOWN = ("trifuse.huggingface",)


def has_our_attention(stack: nn.Module) -> bool:
    """Whether a stack's configuration selects our attention."""
    return _attention(stack) == NAME


def _attention(stack: nn.Module) -> str | None:
    for module in stack.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            chosen: str | None = config._attn_implementation
            return chosen
    return None


# A run of the layers ------------------------------------------------------------------------------


class _Pass:
    """One pass of a batch through the layers of a stack, packed or not."""

    def __init__(self, stack: Unpadded) -> None:
        self.stack = stack
        self.begun = False
        self.packed: PackedSequences | None = None
        self.shape = torch.Size()
        self.seen: list[tuple[Tensor, Any]] = []  # the tensors packed so far, and what they became

    def call(self, layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call a layer; the first call packs the batch if that is possible."""
        first, self.begun = not self.begun, True
        if first and torch.compiler.is_compiling():
            if any(isinstance(value, Tensor) for value in (*args, kwargs.get(MASK))):
                packing.warn_padded(self.stack, "torch.compile can't read its mask")
        elif first:
            given = dict(zip(tokenwise.argument_names(layer)[1:], args, strict=False)) | kwargs
            if (why := self._begin(hidden_states, given.get(MASK))) is not None:
                packing.warn_padded(self.stack, why)
        if self.packed is None:
            return layer(hidden_states, *args, **kwargs)
        names = tokenwise.argument_names(layer)[1 : len(args) + 1]
        try:
            if len(names) < len(args):
                raise _Unpackable("its layers take unnamed arguments")
            if not isinstance((dict(zip(names, args, strict=True)) | kwargs).get(MASK), Tensor):
                raise _Unpackable("not all of its layers get a mask")
            packed = [self._argument(*each) for each in zip(names, args, strict=True)]
            options = {name: self._argument(name, value) for name, value in kwargs.items()}
        except _Unpackable as why:
            packing.warn_padded(self.stack, str(why))
            if not first:
                hidden_states = self.end(hidden_states)
            self.packed = None
            return layer(hidden_states, *args, **kwargs)
        if first:
            hidden_states = packing.gather(hidden_states, self.packed)
        return layer(hidden_states, *packed, **options)

    def end(self, hidden_states: Tensor) -> Tensor:
        """Return what the last layer returned, unpacked."""
        if self.packed is None:
            return hidden_states
        return packing.scatter(hidden_states, self.packed, self.shape)

    def _begin(self, hidden_states: Tensor, mask: Any) -> Obstacle | str | None:
        """Pack the batch unless that would gain nothing; return why it can't be packed, or None."""
        if not isinstance(mask, Tensor):  # no padding, or the model has packed the batch itself
            return None
        if (why := self.stack.why_padded()) is not None:
            return why
        if (why := packing.why_unreadable(mask)) is not None:
            return why
        if hidden_states.dim() != 3:
            return "its hidden states aren't those of a batch of sequences"
        self.shape = hidden_states.shape
        keep = _padding(mask, *self.shape[:2])
        if keep is None:
            return _OTHER_MASK
        packed = packing.find(keep)
        if packed.indices.shape[0] not in (0, keep.numel()):
            self.packed = packed
        return None

    def _argument(self, name: str, value: Any) -> Any:
        """Return a layer's argument for packed tokens."""
        if value is None or value is False:
            return value
        if name in ABSENT or name in _WISHES:
            raise _Unpackable(f"its layers get {name}")
        if isinstance(value, (bool, int, float, str)):
            return value
        if type(value) in (tuple, list):
            return type(value)(self._argument(name, item) for item in value)
        if not isinstance(value, Tensor):
            raise _Unpackable(f"its layers get {name}")
        for known, packed in self.seen:
            if known is value:
                return packed
        packed = self._mask(value) if name == MASK else self._tokens(name, value)
        self.seen.append((value, packed))
        return packed

    def _mask(self, mask: Tensor) -> PackedSequences:
        assert self.packed is not None
        B, L = self.shape[:2]
        keep = _padding(mask, B, L)
        if keep is None:
            raise _Unpackable(_OTHER_MASK)
        if not keep.flatten().nonzero().squeeze(-1).equal(self.packed.indices):
            raise _Unpackable("its masks differ in their padding")
        return self.packed._replace(window=_window(mask, keep))

    def _tokens(self, name: str, value: Tensor) -> Tensor:
        assert self.packed is not None
        B, L = self.shape[:2]
        ids = value.dim() == 2 and not value.is_floating_point()
        if not (ids or value.dim() == 3) or value.shape[0] not in (1, B) or value.shape[1] != L:
            raise _Unpackable(f"its layers get {name} of another shape than the tokens")
        return packing.gather(value.expand(B, *value.shape[1:]), self.packed)


class _Unpackable(Exception):  # noqa: N818 - an answer, not an error
    """Why a layer can't get packed tokens."""


_WISHES = ("output_attentions", "output_hidden_states")
_OTHER_MASK = "its mask isn't that of padding alone"


def _padding(mask: Tensor, B: int, L: int) -> Tensor | None:
    """Return the real tokens, bool (B, L), by a mask of theirs; None if it has another form.

    Args:
        mask: (B, 1, 1, L), boolean, or floating with 0 for real tokens and the least number for
            others. Or int8, with a window: see :mod:`trifuse.huggingface`.
    """
    if mask.dtype == torch.int8 and mask.shape[1::2] == (1, L) and mask.shape[0] in (1, B):
        return mask[:, 0, 0].bool().expand(B, L)
    if mask.shape == (B, 1, 1, L):
        if mask.dtype == torch.bool:
            return mask[:, 0, 0]
        if mask.is_floating_point():
            keep = mask == 0
            if bool((keep | (mask <= torch.finfo(mask.dtype).min)).all()):
                return keep[:, 0, 0]
    return None


def _window(mask: Tensor, keep: Tensor) -> int | None:
    """Return how far each token sees to either side; None if it sees all of its sequence.

    Args:
        mask: the mask, as :func:`_padding` takes it.
        keep: bool (B, L), True where a token is real.

    Raises:
        _Unpackable: there is padding inside a sequence. Packed, the tokens around it would be
            nearer to each other.
    """
    if mask.dtype != torch.int8:
        return None
    reach = mask.shape[2] - 2
    positions = torch.arange(keep.shape[1], device=keep.device).expand_as(keep)
    first = positions.masked_fill(~keep, keep.shape[1]).min(-1).values
    last = positions.masked_fill(~keep, -1).max(-1).values
    if (last - first).max() <= reach:
        return None
    if (last - first >= keep.sum(-1)).any():
        raise _Unpackable("its window reaches over padding inside a sequence")
    return reach


# Recognition --------------------------------------------------------------------------------------


class Stack(NamedTuple):
    """A module that can leave padding out."""

    parts: tuple[str, ...]  # the submodules that get packed tokens: the layers, then norms


def recognise(module: nn.Module) -> Stack | str | None:
    """Return what a module is as a stack; why it can't leave padding out; or None if it is none."""
    source = type(module)
    if not sublayers.is_of_transformers(sublayers.original(source)) or "forward" in vars(module):
        return None
    if source not in _loops:
        forward: Any = source.forward
        tree = code.parse(forward)
        _loops[source] = None if tree is None else _find_loop(tree)
    loop = _loops[source]
    if loop is None or not isinstance(getattr(module, loop.layers, None), nn.ModuleList):
        return None
    if isinstance(loop, _Refused):
        return loop.why
    closing = []
    for name in loop.closing:
        norm = getattr(module, name, None)
        if not isinstance(norm, nn.Module) or not norms.is_known(norm):
            break
        closing.append(name)
    layers = getattr(module, loop.layers).modules()
    if any(getattr(each, "is_causal", None) is True for each in layers):
        return _CAUSAL
    return Stack((loop.layers, *closing))


def find(model: nn.Module) -> dict[nn.Module, Stack | str]:
    """Return the stacks in a model, and why they can't leave padding out if they can't."""
    found: dict[nn.Module, Stack | str] = {}
    causal: set[nn.Module] = set()
    for module in model.modules():
        if masks := _masks_made(type(module)):
            if all("causal" in name for name in masks):
                causal.update(module.modules())
            else:
                causal.difference_update(module.modules())
        stack = recognise(module)
        if stack is not None:
            found[module] = _CAUSAL if module in causal else stack
    return found


def why_none(model: nn.Module) -> str:
    """Return why a model of transformers holds no stack that can leave padding out."""
    reasons = (stack for stack in find(model).values() if isinstance(stack, str))
    return next(reasons, "its code has no loop over layers that is known to do without it")


def _masks_made(cls: type) -> set[str]:
    """The functions by which the code of a class makes masks."""
    if cls not in _makers:
        of_transformers = sublayers.is_of_transformers(sublayers.original(cls))
        names = code.names_used(cls) if of_transformers else frozenset()
        _makers[cls] = {n for n in names if n.startswith("create_") and n.endswith("_mask")}
    return _makers[cls]


_makers: dict[type, set[str]] = {}
_CAUSAL = "its attention is causal"


class _Loop(NamedTuple):
    """A loop over layers in a function's statements."""

    at: int  # its place among the statements
    call: ast.Call
    hidden_states: str
    layers: str
    closing: tuple[str, ...]  # the modules that are called on its result, right after it


class _Refused(NamedTuple):
    """A loop over layers that can't be followed."""

    layers: str
    why: str


_loops: dict[type, _Loop | _Refused | None] = {}


def _find_loop(tree: ast.FunctionDef) -> _Loop | _Refused | None:
    """Find the loop that sends hidden states and a mask through layers."""
    found: list[tuple[int, ast.For, ast.Call, str]] = []
    for at, statement in enumerate(tree.body):
        if isinstance(statement, ast.For):
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and (name := _called_list(node, statement)):
                    found.append((at, statement, node, name))
    if not found:
        return None
    at, loop, call, layers = found[0]
    if len(found) > 1:
        return _Refused(layers, "its code calls its layers in several places")
    result = next(
        (
            node.targets[0]
            for node in ast.walk(loop)
            if isinstance(node, ast.Assign) and node.value is call and len(node.targets) == 1
        ),
        None,
    )
    name = result.id if isinstance(result, ast.Name) else None
    if name is None or not (isinstance(call.args[0], ast.Name) and call.args[0].id == name):
        return _Refused(layers, "its layers return more than their hidden states")
    uses = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id == name]
    leaves = any(isinstance(node, ast.Return) for node in ast.walk(loop))
    if len(uses) != 2 or leaves or loop.orelse:
        return _Refused(layers, "its code uses the hidden states between its layers")
    closing = []
    for statement in tree.body[at + 1 :]:
        if (norm := _applied(statement, name)) is None:
            break
        closing.append(norm)
    return _Loop(at, call, name, layers, tuple(closing))


def _called_list(call: ast.Call, loop: ast.For) -> str | None:
    """The list of a layer that is called in a loop, on hidden states and a mask; or None."""
    given = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg)]
    if not call.args or not any("mask" in ast.unparse(argument) for argument in given):
        return None
    called = call.func
    if isinstance(called, ast.Subscript):
        return tokenwise.own_list(called.value)
    target = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
    if isinstance(called, ast.Name) and isinstance(target, ast.Name) and called.id == target.id:
        return tokenwise.own_list(loop.iter)
    return None


def _applied(statement: ast.stmt, name: str) -> str | None:
    """Match ``name = self.module(name)``."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
        return None
    called = statement.value.func
    if not isinstance(called, ast.Attribute):
        return None
    applied = ast.parse(f"{name} = self.{called.attr}({name})").body[0]
    return called.attr if ast.unparse(statement) == ast.unparse(applied) else None


# Classes ------------------------------------------------------------------------------------------

_classes: dict[tuple[type, tuple[str, ...]], type[nn.Module]] = {}


def unpadded_class(source: type[nn.Module], parts: tuple[str, ...]) -> type[nn.Module]:
    """Return the subclass of a stack's class that leaves padding out, or the class if it can't.

    Args:
        source: the class.
        parts: those of the :class:`Stack` that :func:`recognise` found.
    """
    if (source, parts) not in _classes:
        _classes[source, parts] = _make(source, parts)
    return _classes[source, parts]


def _make(source: Any, parts: tuple[str, ...]) -> Any:
    forward = source.forward
    tree = code.parse(forward)
    loop = None if tree is None else _find_loop(tree)
    if tree is None or not isinstance(loop, _Loop):
        return source
    before, after = tree.body[: loop.at], tree.body[loop.at + 1 :]
    statement = tree.body[loop.at]
    closing = after[: len(parts) - 1]
    variable = "_trifuse_pass"
    loop.call.args.insert(0, loop.call.func)
    loop.call.func = ast.Attribute(ast.Name(variable, ast.Load()), "call", ast.Load())
    begin = ast.parse(f"{variable} = self._trifuse_pass()").body
    end = ast.parse(f"{loop.hidden_states} = {variable}.end({loop.hidden_states})").body
    for made in (*begin, *end):
        for node in ast.walk(made):
            ast.copy_location(node, statement)
    tree.body = [*before, *begin, statement, *closing, *end, *after[len(closing) :]]
    if isinstance(source, sublayers.FusedType) and "forward" in vars(source):
        sublayers.rewrite(tree, source.origin.roles, inspect.unwrap(forward).__globals__)
    compiled = code.compile_like(tree, forward)
    if compiled is None:
        return source
    made_by = unpadded_class, (source, parts)
    fused = isinstance(source, sublayers.FusedType)
    origin = source.origin if fused else sublayers.Origin(source, made_by)
    members = {
        "__module__": "trifuse.recipes",
        "__qualname__": source.__qualname__,
        "__doc__": source.__doc__,
        "forward": compiled,
        "_trifuse_origin": origin._replace(source=source, made_by=made_by, parts=parts),
    }
    unpadded: Any = sublayers.FusedType(source.__name__, (Unpadded, source), members)
    _let_record(unpadded)
    return unpadded


def _let_record(cls: Any) -> None:
    """Let transformers find, by the class, which intermediate results a model can return."""
    if not hasattr(cls, "_can_record_outputs"):
        return
    from transformers.modeling_utils import _CAN_RECORD_REGISTRY

    dict.__setitem__(_CAN_RECORD_REGISTRY, str(cls), cls._can_record_outputs)
