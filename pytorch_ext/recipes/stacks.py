"""Stacks of transformers that compute on real tokens only, found by the loop over their layers.

Somewhere in its code, an encoder sends its hidden states through its layers, one after another ::

    for layer in self.layers:                    # or over indices, or with layers left out
        hidden_states = layer(hidden_states, attention_mask, ...)
    hidden_states = self.final_norm(hidden_states)    # may be missing

Layers may return more than their hidden states. A decoder's layers may also get the hidden states
of an encoder and their mask. A decoder leaves padding out of a text that it gets as a whole: under
teacher forcing, or a prompt. If there is an empty cache, keys and values go to their places in it.

A few statements are added around this loop, and the method is compiled again from its source, into
a subclass. The call of the first layer packs the real tokens of a padded batch. After the loop they
are unpacked, with 0 in the padding. In between, the layers get packed tokens, and
:class:`PackedSequences` instead of the mask. Other tensors with one row for each token, such as
rotary embeddings, are packed too. A bias of positions is cut to the length of the longest sequence.

This is done only if :mod:`trifuse.recipes.tokenwise` finds that the layers treat tokens one by one,
and if the mask is that of padding, perhaps causal or with a window; and not if the model then reads
the result where there may be padding (:mod:`trifuse.recipes.pooling`).
"""

from __future__ import annotations

import ast
import inspect
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from trifuse._transformers import NAME
from trifuse.nn import packing, walks
from trifuse.nn.packing import Obstacle
from trifuse.recipes import (
    arguments,
    code,
    norms,
    pooling,
    rewriting,
    sublayers,
    tokenwise,
    written_out,
)
from trifuse.recipes.arguments import ABSENT, HIDDEN_STATES, MEMORY, WISHES
from trifuse.recipes.passes import Pass


class Unpadded(nn.Module):
    """Mixin for fused classes of stacks that compute on real tokens only.

    If the batch is padded, its real tokens are packed into one row, and the output is 0 at padded
    positions. Other attention implementations, other masks than those of padding, caches, and
    layers that are hooked or patched (as by ``output_hidden_states=True``) run as in transformers.
    """

    unpad = True

    def _trifuse_pass(
        self,
        output_hidden_states: bool | None = False,
        output_attentions: bool | None = False,
        output_router_logits: bool | None = False,  # of experts, in transformers 4.57
    ) -> Pass:
        weighed = "attention" if output_attentions else "experts" if output_router_logits else ""
        return Pass(self, bool(output_hidden_states), weighed)

    def why_padded(self, memory: bool | None = None, cached: bool = False) -> Obstacle | str | None:
        """Return why the stack computes padding in any batch; None if it can leave padding out.

        Args:
            memory: whether its layers get the hidden states of an encoder. Default: whether it is
                the decoder of an encoder-decoder.
            cached: whether they get an empty cache, in which they keep keys and values.
        """
        chosen = _chosen(self)
        if chosen != NAME and not _is_written_out(self):
            return f'its attention runs by attn_implementation="{chosen}"'
        cls: Any = type(self)
        layers, *_ = parts = cls._trifuse_origin.parts
        if memory is None:
            memory = _is_decoder(self) and _is_causal(self, layers)
        return packing.find_obstacle(
            self,
            _KNOWN,
            parts,
            lambda: tokenwise.Examiner(getattr(self, layers), memory, cached),
            (memory, cached),
        )


_KNOWN = ("trifuse.huggingface", "trifuse.recipes.conv1d", "trifuse.recipes.falcon_linear")


def has_our_attention(stack: nn.Module) -> bool:
    """Whether a stack's configuration selects our attention, or its own can be fused."""
    return _chosen(stack) == NAME or _is_written_out(stack)


def _is_written_out(stack: nn.Module) -> bool:
    """Whether all attentions of a stack compute their softmax themselves, by their classes."""
    if walks.holds(stack, "written out"):
        return True
    written = written_out.all_written_out(stack)
    if written:
        walks.keep(stack, "written out", walks.Grounds(), inside=())
    return written


def _chosen(stack: nn.Module) -> str | None:
    """Return the name of the attention that a stack's configuration selects."""
    for module in stack.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            chosen: str | None = config._attn_implementation
            return chosen
    return None


# Recognition --------------------------------------------------------------------------------------


class Stack(NamedTuple):
    """A module that can leave padding out."""

    parts: tuple[str, ...]  # the submodules that get packed tokens: the layers, then norms


def recognise(module: nn.Module) -> Stack | str | None:
    """Return a module as a stack; or why it can't leave padding out; or None if it is no stack."""
    source = type(module)
    if not sublayers.is_of_transformers(sublayers.original(source)) or "forward" in vars(module):
        return None
    forward: Any = source.forward
    loop = _loop_of(forward)
    if loop is None or not isinstance(getattr(module, loop.layers, None), nn.ModuleList):
        return None
    if isinstance(loop, _Refused):
        return None if loop.why == _NO_MASK else loop.why
    if loop.by_name and not _take_states_first(getattr(module, loop.layers)):
        return None
    for name in loop.between:
        other = getattr(module, name, None)
        if other is not None and not _keeps_padding_apart(other):
            return _BETWEEN
    if not all(_only_cuts(source, cut) for cut in loop.cuts):
        return _BETWEEN
    closing = []
    for name in loop.closing:
        norm = getattr(module, name, None)
        if not isinstance(norm, nn.Module) or not norms.is_known(norm):
            break
        closing.append(name)
    if _is_causal(module, loop.layers) and not (loop.memory and _is_decoder(module)):
        config = getattr(module, "config", None)
        if getattr(config, "add_cross_attention", False) is True:
            return _CAUSAL
        if written_out.all_written_out(module) or _has_eager_masks(config):
            return _CAUSAL  # through a mask of all pairs
    return Stack((loop.layers, *closing))


def _take_states_first(layers: Iterable[nn.Module]) -> bool:
    """Whether the first argument of the layers is the hidden states."""
    return all(arguments.of(layer).positional[:1] == [HIDDEN_STATES] for layer in layers)


def _loop_of(forward: Any) -> _Loop | _Refused | None:
    """Return the loop over layers in a method."""
    if forward not in _loops:
        tree = code.parse(forward)
        _loops[forward] = None if tree is None else _find_loop(tree)
    return _loops[forward]


def _is_causal(stack: nn.Module, layers: str) -> bool:
    """Whether an attention of a stack's layers is causal."""
    inside = getattr(stack, layers).modules()
    return any(_CAUSALITY & {k for k, v in vars(each).items() if v is True} for each in inside)


_CAUSALITY = {"is_causal", "is_decoder"}  # attributes of attentions


def _has_eager_masks(config: Any) -> bool:
    """Whether a configuration's models get the masks of "eager" even with our attention."""
    from trifuse.recipes.attention_interface import has_eager_masks

    return config is not None and has_eager_masks(type(config))


def _is_decoder(stack: nn.Module) -> bool:
    """Whether a stack belongs to a model with an encoder and a decoder."""
    config = getattr(stack, "config", None)
    of_both = getattr(config, "is_encoder_decoder", False) is True
    return of_both or getattr(config, "cross_attention_hidden_size", None) is not None


def find(model: nn.Module) -> dict[nn.Module, Stack | str]:
    """Return the stacks in a model, or the reasons why they can't leave padding out."""
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
            dense = module in causal and written_out.all_written_out(module)
            found[module] = _CAUSAL if dense else stack
    for path, module in model.named_modules():
        if isinstance(found.get(module), Stack):
            loop = _loop_of(type(module).forward)
            if isinstance(loop, _Loop) and pooling.reads_padding(model, path, loop.result):
                found[module] = _POOLED
    return found


def why_none(model: nn.Module) -> str:
    """Return why a model of transformers holds no stack that can leave padding out."""
    reasons = (stack for stack in find(model).values() if isinstance(stack, str))
    if (reason := next(reasons, None)) is not None:
        return reason
    classes = {sublayers.original(type(module)) for module in model.modules()}
    loops = [_loop_of(cls.forward) for cls in classes if sublayers.is_of_transformers(cls)]
    if any(isinstance(loop, _Refused) and loop.why == _NO_MASK for loop in loops):
        return _NO_MASK
    return "its code has no loop over layers that is known to do without it"


def _masks_made(cls: Any) -> set[str]:
    """The functions with which the code of a class makes masks."""
    key = cls, cls.forward
    if key not in _makers:
        of_transformers = sublayers.is_of_transformers(sublayers.original(cls))
        names = code.names_used(cls) if of_transformers else frozenset()
        _makers[key] = {n for n in names if n.startswith("create_") and n.endswith("_mask")}
    return _makers[key]


# By the class and its method, which may be replaced.
_makers: dict[tuple[type, Any], set[str]] = {}
_CAUSAL = "its attention is causal"
_POOLED = "its result is read at fixed places, which may be padding"
_BETWEEN = "its code uses the hidden states between its layers"
_NO_MASK = "its layers get no mask of padding"

# DeBERTa-v2's convolution after its first layer. It convolves the embeddings, whose padding is 0,
# and adds the layer's result for each token to the token's result.
_CONVOLUTION = code.normal("""
out = self.conv(hidden_states.permute(0, 2, 1).contiguous()).permute(0, 2, 1).contiguous()
rmask = (1 - input_mask).bool()
out.masked_fill_(rmask.unsqueeze(-1).expand(out.size()), 0)
out = ACT2FN[self.conv_act](self.dropout(out))
layer_norm_input = residual_states + out
output = self.LayerNorm(layer_norm_input).to(layer_norm_input)
if input_mask is None:
    output_states = output
else:
    if input_mask.dim() != layer_norm_input.dim():
        if input_mask.dim() == 4:
            input_mask = input_mask.squeeze(1).squeeze(1)
        input_mask = input_mask.unsqueeze(2)
    input_mask = input_mask.to(output.dtype)
    output_states = output * input_mask
return output_states
""")


# Adds to the hidden states of an image's tokens, in three forms: transformers 5, and 4.57's two.
_ADDED = """
visual_pos_masks = visual_pos_masks.to(hidden_states.device)
visual_embeds = visual_embeds.to(hidden_states.device, hidden_states.dtype)
{copy}
local_this = hidden_states[visual_pos_masks, :]{copied} + visual_embeds
hidden_states[visual_pos_masks, :] = local_this
return hidden_states
"""
_IN_PLACE = _ADDED.format(copy="", copied=".clone()")
_ADDITIONS = {
    code.normal(_ADDED.format(copy="hidden_states = hidden_states.clone()", copied="")),
    code.normal(_IN_PLACE),
    code.normal("visual_pos_masks = visual_pos_masks[..., 0]" + _IN_PLACE),
}


def _keeps_padding_apart(called: Any) -> bool:
    """Whether results at real tokens don't depend on the hidden states of padding.

    Args:
        called: a module, or a method of the stack.
    """
    if isinstance(called, nn.Module):
        forward: Any = sublayers.original(type(called)).forward
        return code.body(forward) == _CONVOLUTION
    method: Any = getattr(called, "__func__", None)
    return isinstance(method, types.FunctionType) and (code.body(method) or "") in _ADDITIONS


class _Cut(NamedTuple):
    """A statement between layers, ``..., x = self.name(..., x)``, where x is the hidden states."""

    statement: ast.Assign
    name: str
    given: int  # the place of the hidden states among the arguments
    returned: int  # and in the tuple that is returned


def _only_cuts(source: type[nn.Module], cut: _Cut) -> bool:
    """Whether a method leaves tokens out of hidden states, or none, and does no more with them."""
    tree = code.parse(getattr(source, cut.name, None))  # type: ignore[arg-type]
    if tree is None or len(tree.args.args) < cut.given + 2:
        return False
    name = tree.args.args[cut.given + 1].arg
    known = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            returned = node.value.elts if isinstance(node.value, ast.Tuple) else []
            if len(returned) <= cut.returned or ast.unparse(returned[cut.returned]) != name:
                return False
            known += 1
        elif isinstance(node, ast.Attribute) and node.attr == "shape":
            known += ast.unparse(node.value) == name
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            if not isinstance(node.value, ast.Subscript) or ast.unparse(node.value.value) != name:
                return False
            known += 1
    loads = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name]
    return known == sum(isinstance(each.ctx, ast.Load) for each in loads)


class _Loop(NamedTuple):
    """A loop over layers in a function's statements."""

    at: int  # its place among the statements
    call: ast.Call
    result: str  # the variable that holds the hidden states after it
    layers: str
    closing: tuple[str, ...]  # the modules that are called on its result right after the loop
    memory: bool  # whether the layers get the hidden states of an encoder
    by_name: bool  # whether they get their own hidden states by name
    records: dict[str, ast.If]  # statements that record states or weights, by their condition
    between: dict[str, ast.Assign]  # modules and methods that change them between two layers
    cuts: list[_Cut]  # methods that may leave tokens out between two layers


class _Refused(NamedTuple):
    """A loop over layers that can't be followed."""

    layers: str
    why: str


# Keyed by the method that was read, because that of a class may be replaced.
_loops: dict[Any, _Loop | _Refused | None] = {}


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
    if not any(map(_is_mask, _given_beside(call))):
        return _Refused(layers, _NO_MASK)
    states = _hidden_states(call)
    name = states.id if isinstance(states, ast.Name) else None
    after = tree.body[at + 1 :]
    result = None if name is None else _result(loop, call, name, _read_in(after))
    nodes = list(_run_when_packed(loop, call))
    carries = [node for node in nodes if _gives(node, result, name)]
    if name is None or result is None or (name == result) != (not carries):
        return _Refused(layers, "its code doesn't pass hidden states from layer to layer")
    records: dict[str, Any] = {
        each.test.id: each  # type: ignore[attr-defined]
        for each in nodes
        if _is_record(each)
    }
    between: dict[str, Any] = {
        called: each for each in nodes if (called := _called_between(each, result))
    }
    cuts = [cut for each in nodes if (cut := _cut(each, result)) is not None]
    # Other variables that a layer returned are packed too.
    packed = {name, result, *_assigned_in(loop, call)}
    known = [*records.values(), *between.values(), *carries, *filter(_is_move, nodes)]
    known += [cut.statement for cut in cuts]
    apart = {node for each in known for node in ast.walk(each)}
    uses = Counter(
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and node.id in (name, result) and node not in apart
    )
    wanted = Counter([name, result])  # as an argument of the call, and as its result
    leaves = any(isinstance(node, ast.Return) for node in ast.walk(loop))
    if uses != wanted or leaves or loop.orelse:
        return _Refused(layers, _BETWEEN)
    if (packed - {result}) & _read_in(after):
        return _Refused(layers, "its code uses more of what its layers return than hidden states")
    closing = []
    for statement in after:
        if (norm := _applied(statement, result)) is None:
            break
        closing.append(norm)
    memory = any(isinstance(node, ast.Name) and node.id == MEMORY for node in ast.walk(call))
    by_name = not call.args
    return _Loop(at, call, result, layers, tuple(closing), memory, by_name, records, between, cuts)


def _run_when_packed(loop: ast.For, call: ast.Call) -> Iterator[ast.AST]:
    """Yield the nodes of a loop, except those that run only if layers get more than packed tokens.

    These are under ``if x is not None``, where the layers get x as one of ``ABSENT``.
    """
    given = {k.arg for k in call.keywords if k.arg in ABSENT and ast.unparse(k.value) == k.arg}
    waiting: list[ast.AST] = [loop]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).removesuffix(_GIVEN) in given:
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


_GIVEN = " is not None"


def _assigned_in(loop: ast.For, call: ast.Call) -> set[str]:
    """Return the variables that get a part of a layer's result, in each round of the loop."""
    assigned = [each for each in loop.body if isinstance(each, ast.Assign)]
    targets = [target for each in assigned if each.value is call for target in each.targets]
    whole = {target.id for target in targets if isinstance(target, ast.Name)}
    for each in assigned:
        if isinstance(each.value, ast.Subscript) and ast.unparse(each.value.value) in whole:
            targets += each.targets
    nodes = [node for target in targets for node in ast.walk(target)]
    return {node.id for node in nodes if isinstance(node, ast.Name)} - whole


def _read_in(statements: list[ast.stmt]) -> set[str]:
    """Return the variables that statements read."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    loads = (node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load))
    return {node.id for node in loads if isinstance(node, ast.Name)}


def _gives(node: ast.AST, value: str | None, name: str | None) -> bool:
    """Match ``name = value``, of two variables."""
    return isinstance(node, ast.Assign) and ast.unparse(node) == f"{name} = {value}"


def _called_between(node: ast.AST, result: str) -> str | None:
    """Match ``x = self.name(..., x, ...)``, where x is the hidden states; return the name."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
        return None
    given = [ast.unparse(each) for each in node.value.args]
    changed = [ast.unparse(target) for target in node.targets] == [result]
    if not changed or given.count(result) != 1:
        return None
    return code.own_attribute(node.value.func)


def _cut(node: ast.AST, result: str) -> _Cut | None:
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
        return None
    name, (target, *others) = code.own_attribute(node.value.func), node.targets
    if name is None or others or not isinstance(target, ast.Tuple):
        return None
    given = [ast.unparse(each) for each in node.value.args]
    returned = [ast.unparse(each) for each in target.elts]
    if not given.count(result) == returned.count(result) == 1:
        return None
    return _Cut(node, name, given.index(result), returned.index(result))


def _result(loop: ast.For, call: ast.Call, name: str, read_after: set[str]) -> str | None:
    """Return the variable that gets the hidden states from a layer's call, or None.

    If several may do so, it is the one that is passed to the call, ``name``.

    The code is ``x = call``, or ``x, ... = call``, or ``outputs = call`` and then ``x = outputs``
    or ``x = outputs[0]``, which may depend on whether they are a tuple. It is ``x = outputs[-1]``
    if the weights of attention would come first; they are never requested if tokens are packed.
    """
    assigned = [node for node in ast.walk(loop) if isinstance(node, ast.Assign)]
    targets = [node.targets for node in assigned if node.value is call]
    if len(targets) != 1 or len(targets[0]) != 1:
        return None
    (target,) = targets[0]
    if isinstance(target, ast.Tuple):
        target = target.elts[0]
    if not isinstance(target, ast.Name):
        return None
    first, last = f"{target.id}[0]", f"{target.id}[-1]"
    forms = [first, last, f"{first} if isinstance({target.id}, tuple) else {target.id}"]
    reads = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id == target.id]
    if len(reads) == 2 and target.id not in read_after:
        forms.append(target.id)  # no more than a name for it on the way
    named = [node.targets[0] for node in assigned if ast.unparse(node.value) in forms]
    names = [each.id for each in named if isinstance(each, ast.Name)]
    if name in names or not names:
        return name if names else target.id
    return names[0]


def _is_record(node: ast.AST) -> bool:
    """Whether a statement only records hidden states or attention weights for the caller."""
    if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and not node.orelse):
        return False
    kept = (ast.Assign, ast.AugAssign)
    return node.test.id in WISHES and all(isinstance(each, kept) for each in node.body)


def _is_move(node: ast.AST) -> bool:
    """Whether a statement moves the hidden states between devices of a model on many devices."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "self.model_parallel"


def _called_list(call: ast.Call, loop: ast.For) -> str | None:
    """The list whose layers a loop calls with hidden states and a mask, or None."""
    if _hidden_states(call) is None:
        return None
    if not any("mask" in ast.unparse(argument) for argument in _given_beside(call)):
        return None
    called = call.func
    if isinstance(called, ast.Subscript):
        return code.own_list(called.value)
    target = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
    if isinstance(called, ast.Name) and isinstance(target, ast.Name) and called.id == target.id:
        return code.own_list(loop.iter)
    return None


def _hidden_states(call: ast.Call) -> ast.expr | None:
    """The hidden states that a layer gets: its first argument, or the one with their name."""
    if call.args:
        return call.args[0]
    named = (keyword.value for keyword in call.keywords if keyword.arg == HIDDEN_STATES)
    return next(named, None)


def _given_beside(call: ast.Call) -> list[ast.expr]:
    """The other arguments of a layer."""
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg)]
    return [argument for argument in given if argument is not _hidden_states(call)]


def _is_mask(argument: ast.expr) -> bool:
    """Whether an argument's name is that of a mask of tokens; a mask of heads doesn't count."""
    return "mask" in ast.unparse(argument).replace("head_mask", "")


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

# Keyed also by the method that was compiled again, because that of a class may be replaced.
_classes: dict[tuple[type, tuple[str, ...], Any], type[nn.Module]] = {}


def unpadded_class(source: type[nn.Module], parts: tuple[str, ...]) -> type[nn.Module]:
    """Return the subclass of a stack's class that leaves padding out, or the class if it can't.

    Args:
        source: the class.
        parts: those of the :class:`Stack` that :func:`recognise` found.
    """
    key = source, parts, source.forward
    if key not in _classes:
        _classes[key] = _make(source, parts)
    return _classes[key]


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
    if not loop.call.args and (states := _hidden_states(loop.call)) is not None:
        loop.call.args = [states]
        loop.call.keywords = [each for each in loop.call.keywords if each.arg != HIDDEN_STATES]
    loop.call.args.insert(0, loop.call.func)
    loop.call.func = ast.Attribute(ast.Name(variable, ast.Load()), "call", ast.Load())
    recorded = ", ".join(f"{name}={name}" for name in loop.records)
    begin = ast.parse(f"{variable} = self._trifuse_pass({recorded})").body
    end = ast.parse(f"{loop.result} = {variable}.end({loop.result})").body
    for record in loop.records.values():
        _call_on_reads(record, f"{variable}.end", {loop.result, *_names(loop.call.args[1])})
    for other in loop.between.values():
        _call_on_reads(other, f"{variable}.end", {loop.result})
        other.value = _call(f"{variable}.pack", other.value)
    for cut in loop.cuts:
        _call_on_reads(cut.statement, f"{variable}.end", {loop.result})
        cut.statement.value = _call(f"{variable}.cut", cut.statement.value)
        cut.statement.value.args.append(ast.Constant(cut.returned))
    for made in (*begin, *end):
        for node in ast.walk(made):
            ast.copy_location(node, statement)
    tree.body = [*before, *begin, statement, *closing, *end, *after[len(closing) :]]
    if isinstance(source, sublayers.FusedType) and "forward" in vars(source):
        rewriting.rewrite(tree, source._trifuse_origin.roles, inspect.unwrap(forward).__globals__)
    compiled = code.compile_like(tree, forward)
    if compiled is None:
        return source
    origin = sublayers.origin_of(source, (unpadded_class, (source, parts)))
    return sublayers.subclass(Unpadded, origin._replace(parts=parts), {"forward": compiled})


def _call_on_reads(statement: ast.stmt, function: str, names: set[str]) -> None:
    """Replace each variable x of ``names`` that a statement reads with ``function(x)``."""
    reads = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)
    ]
    for read in reads:
        code.Replaced(read, _call(function, read)).visit(statement)


def _call(function: str, argument: ast.expr) -> ast.Call:
    return ast.Call(ast.parse(function, mode="eval").body, [argument], [])


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
