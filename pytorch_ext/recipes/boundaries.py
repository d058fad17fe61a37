"""The boundary between two pre-norm layers: a sum that ends one, and the norm that begins the next.

    hidden_states = residual + hidden_states          # the end of a layer
    return hidden_states

    residual = hidden_states                          # the beginning of the next one
    hidden_states = self.input_layernorm(hidden_states)

The layer computes both in one call of the operator, with the next layer's norm, and returns the
sum. The norm is kept until its module gets this same sum, and is returned then. If the sum is
changed on the way, the module computes the norm as usual.

The norm after the last layer may belong to the model that holds the stack of layers::

    encoder_outputs = self.encoder(...)
    last_hidden_state = self.final_layer_norm(encoder_outputs.last_hidden_state)

Such a stack may also be called by itself. Then its norm would get a gradient of 0 instead of none,
and the sum none where a caller wants one, so with gradients its last sum is computed alone.
"""

from __future__ import annotations

import ast
import itertools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trifuse.nn import packing
from trifuse.nn.dropout_add_layer_norm import (
    counting_changes,
    keep_normed,
    normed_before,
    saves_its_tensors,
)
from trifuse.nn.linear import is_intercepted, why_intercepted
from trifuse.recipes import code, norms, sublayers


class Following(NamedTuple):
    """The norm that comes after a layer."""

    module: nn.Module  # the one that holds the norm
    norm: str  # its name there
    in_float16: bool  # whether it gets the sum in float16 too, which some models clamp before it
    # The modules that return the layer's sum, and those that take it, before the norm gets it.
    between: tuple[nn.Module, ...] = ()
    leaves_stack: bool = False  # whether one of them is a stack, whose callers see the sum

    def find(self) -> nn.Module | None:
        """Return the norm that is there now."""
        return self.module._modules.get(self.norm)


# Keyed by the layer that ends: Following(*arguments), given the modules. They are kept outside the
# layers, with weak references, so that no layer is saved, copied or kept alive together with the
# one before it.
_following: WeakKeyDictionary[nn.Module, tuple[tuple[weakref.ref[nn.Module], ...], str, bool, bool]]
_following = WeakKeyDictionary()

NEXT = "_trifuse_next"  # an attribute of a module whose layers are joined: a Joined


class Joined:
    """Joins the layers of a module again after it is copied or loaded."""

    def __init__(
        self, holder: nn.Module, pairs: Iterable[tuple[nn.Module, Following]] = ()
    ) -> None:
        self._holder = None if holder is None else weakref.ref(holder)
        for layer, after in pairs:
            join(layer, after)

    def __reduce__(self) -> Any:
        holder = None if self._holder is None else self._holder()
        parts = [] if holder is None else list(holder.modules())
        pairs = [(part, after) for part in parts if (after := following(part)) is not None]
        inside = set(parts)
        kept = [(layer, after) for layer, after in pairs if inside.issuperset(_modules(after))]
        return Joined, (holder, kept)


# By a module between a sum and its norm, such as the stack of a layer: the one that ends with it.
_closing: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = WeakKeyDictionary()


def join(layer: nn.Module, after: Following) -> None:
    """Make a layer compute the norm that comes next."""
    references = tuple(map(weakref.ref, _modules(after)))
    _following[layer] = references, after.norm, after.in_float16, after.leaves_stack
    for outer in after.between:
        _closing[outer] = weakref.ref(layer)


def following(layer: nn.Module) -> Following | None:
    """Return what follows a layer, if the two were joined and no module between them is gone."""
    if (kept := _following.get(layer)) is None:
        return None
    references, norm, in_float16, leaves_stack = kept
    modules = [module for reference in references if (module := reference()) is not None]
    if len(modules) < len(references):
        return None
    return Following(modules[0], norm, in_float16, tuple(modules[1:]), leaves_stack)


def _modules(after: Following) -> tuple[nn.Module, ...]:
    return after.module, *after.between


def close(layer: nn.Module, x: Any, residual: Any, dropout: Any, clamped: bool) -> Any:
    """Return residual + dropout(x), and keep its norm for the module that comes next.

    The operands of a method's last sum may also be something other than tensors.

    Args:
        layer: the layer that ends.
        x, residual, dropout: as :func:`trifuse.recipes.sublayers.add_then_norm` takes them.
        clamped: whether the layer clamps a sum in float16 afterwards.
    """
    if torch.compiler.is_compiling():
        return sublayers.add(x, residual, dropout)
    after = following(layer)
    see = (layer,) if after is None else (layer, *after.between, after.find())
    # A hook may change the sum in place, so the backward must not need it.
    hooked = torch.is_grad_enabled() and any(
        is_intercepted(each) for each in see if each is not None
    )
    alone = after is None or hooked or (after.leaves_stack and torch.is_grad_enabled())
    norm = None if after is None or alone else _next_norm(layer, after, x, residual)
    if norm is None or (clamped and x.dtype == torch.float16):
        return sublayers.add(x, residual, dropout, saved=not hooked)
    normed, total = sublayers.add_then_norm(x, residual, dropout, norm, prenorm=True)
    total = counting_changes(total)
    keep_normed(total, norm, normed)
    return total


def unpack(
    stack: nn.Module, total: Tensor, packed: packing.PackedSequences, shape: torch.Size
) -> Tensor:
    """Return the sum of packed tokens at the end of a stack, unpacked, with 0 in the padding.

    If its norm was kept for the module that comes after the stack, this norm is unpacked too, and
    kept for the unpacked sum.
    """
    padded = packing.scatter(total, packed, shape)
    closing = _closing.get(stack)
    layer = None if closing is None else closing()
    after = None if layer is None else following(layer)
    norm = None if after is None else after.find()
    normed = None if norm is None else normed_before(total, norm)
    if norm is None or normed is None:
        return padded
    bias = (norms.parameters(norm, normed) or {}).get("bias")
    if bias is None:
        unpacked = packing.scatter(normed, packed, shape)
    else:  # the norm of 0
        rows = bias.to(normed.dtype).expand(shape[:-1].numel(), -1)
        unpacked = rows.index_copy(0, packed.indices, normed.squeeze(0)).view(shape)
    padded = counting_changes(padded)
    keep_normed(padded, norm, unpacked)
    return padded


def _next_norm(layer: nn.Module, after: Following, x: Any, residual: Any) -> nn.Module | None:
    """Return the norm that comes next, if the operator can serve it with the sum."""
    if not (isinstance(x, Tensor) and isinstance(residual, Tensor)):
        return None
    if saves_its_tensors(torch.is_grad_enabled()):
        return None
    if getattr(layer, "gradient_checkpointing", False) and layer.training:
        return None  # the next layer gets another tensor
    if x.shape != residual.shape or x.dtype != residual.dtype:
        return None
    norm = after.find()
    return norm if _obstacle(after, norm, x) is None else None


def _obstacle(after: Following, norm: Any, x: Tensor) -> str | None:
    """Return why the operator can't serve the norm that comes next, with a sum like x, or None."""
    if x.dtype == torch.float16 and not after.in_float16:
        return "its code clamps it in float16"
    if not norms.takes_before(norm):
        return _why_not_taken(norm)
    if not norms.has_no_parameters(norm):
        weight = norm.weight
        if weight is None:
            return "the next norm has no weight"
        if type(weight) is not nn.Parameter or weight.shape != x.shape[-1:]:
            return _SHARDED
        if weight.device != x.device:
            return "the next norm is on another device"
        if weight.dtype != x.dtype:
            return "the next norm's weight has another dtype"
        if x.dtype not in _SERVED:
            return _UNSERVED
        if weight.untyped_storage().nbytes() == 0:
            return _SHARDED
    if norms.parameters(norm, x) is None:
        why = why_intercepted(norm)
        return _UNSERVED if why is None else f"the next norm has {why}"
    return None


_SERVED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SHARDED = "the next norm's weight is sharded, or made only when the norm runs"
_UNSERVED = "no kernel of ours serves the next norm"


def _why_not_taken(norm: nn.Module | None) -> str:
    """Return why the next norm takes no result that was kept for it."""
    if norm is None:
        return "the next norm was taken out"
    if (why := why_intercepted(norm)) is not None:
        return f"the next norm has {why}"
    if "forward" in vars(norm):
        return "the forward of the next norm was replaced"
    device = next((each.device.type for each in norm.parameters()), "cpu")
    if type(norm) is nn.LayerNorm and device != "cpu":
        return f"the next norm is a LayerNorm on {device}, where fuse leaves LayerNorm to torch"
    return _UNSERVED


# Recognition --------------------------------------------------------------------------------------


def opening(tree: ast.FunctionDef, roles: tuple[tuple[str, str], ...]) -> str | None:
    """Return the name of the norm that a method applies to its first argument, or None."""
    arguments = tree.args.args
    if len(arguments) < 2:
        return None
    name = arguments[1].arg
    known = {child for child, role in roles if role == "norm"}
    for statement in tree.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and (norm := _applied(node, name)) in known:
                return norm
        if name in stored_names(statement):
            return None
    return None


def _applied(call: ast.Call, given: str | ast.expr) -> str | None:
    """Match ``self.norm(given)``, and return the name of the norm."""
    called = code.own_attribute(call.func)
    text = given if isinstance(given, str) else ast.unparse(given)
    return called if ast.unparse(call) == f"self.{called}({text})" else None


def only_packs(statement: ast.stmt) -> bool:
    """Whether a statement at a method's end only packs results or returns them."""
    if isinstance(statement, ast.Return):
        return not _calls(statement)
    if isinstance(statement, ast.If):
        return not _calls(statement) and all(map(only_packs, statement.body + statement.orelse))
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.value, ast.Tuple) and not _calls(statement)
    if isinstance(statement, ast.Assign):
        return _is_packed(statement.value) and not _calls(statement)
    return False


def _is_packed(value: ast.expr) -> bool:
    """Whether a value is a tuple, perhaps one of two, or one that something is appended to."""
    if isinstance(value, ast.IfExp):
        return _is_packed(value.body) and _is_packed(value.orelse)
    return isinstance(value, ast.Tuple) or (isinstance(value, ast.BinOp) and _joins(value))


def is_returned_first(name: str, statements: list[ast.stmt]) -> bool:
    """Whether a method returns a variable, or a tuple that begins with it.

    Args:
        name: of the variable, assigned before.
        statements: the method's last ones, which only pack or clamp.
    """
    nodes = [node for each in statements if not clamps(each) for node in ast.walk(each)]
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    first = {name}  # the variables that are this one, or a tuple that begins with it
    for node in assigned:
        if first_variable(node.value) in first:
            first |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in assigned:
        if first_variable(node.value) not in first:
            first -= {target.id for target in node.targets if isinstance(target, ast.Name)}
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    return bool(returned) and all(first_variable(value) in first for value in returned)


def first_variable(value: ast.expr | None) -> str | None:
    """Return the variable that a value is, or that is the value's first element."""
    if isinstance(value, ast.IfExp):
        either = first_variable(value.body)
        return either if either == first_variable(value.orelse) else None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and _joins(value):
        value = value.left
    if isinstance(value, ast.Tuple) and value.elts:
        value = value.elts[0]
    return value.id if isinstance(value, ast.Name) else None


def _joins(sides: ast.BinOp) -> bool:
    """Whether an operation has a tuple on one side."""
    return isinstance(sides.left, ast.Tuple) or isinstance(sides.right, ast.Tuple)


def clamps(statement: ast.stmt) -> bool:
    """Whether a statement clamps what a method returns, in float16 alone."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return False
    return ast.unparse(statement.test).endswith(".dtype == torch.float16")


def _calls(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(statement))


class _Meeting(NamedTuple):
    """A layer, and the norm that comes after it."""

    holder: nn.Module  # of both
    layer: nn.Module
    # The modules from the layer, or from the stack that ends with it, to the one whose sum ends it;
    # none if no sum is known to.
    ends: list[nn.Module]
    after: Following


def find(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, Following]]:
    """Yield each module whose sum can be computed with the norm after it.

    Yields:
        The module that holds both, the one that ends with the sum, and what comes after it. The
        sum may be that of a layer or of its last sublayer, or that of a stack's last layer; the
        norm that of the next layer or of its first sublayer, or one of the holder's own.
    """
    for holder, _, ends, after in _meetings_in(model):
        if ends:
            yield holder, ends[-1], after


def _meetings_in(model: nn.Module) -> Iterator[_Meeting]:
    for holder in model.modules():
        for ending, norm in _parts_of(holder).meetings:
            outer = layer = holder._modules.get(ending)
            if outer is None or layer is None or norm not in holder._modules:
                continue
            while inside := _looped(layer):
                layer = inside[-1]
            ends = _at_end(outer)
            clamped = any(map(_clamps, ends[:-1]))
            stack = any(map(_looped, ends[:-1]))
            after = Following(holder, norm, not clamped, tuple(ends[:-1]), stack)
            if ends or layer is not outer:
                yield _Meeting(holder, layer, ends, after)
        for layer, begins, norm in _borders(holder):
            ends = _at_end(layer)
            clamped = len(ends) > 1 and _clamps(layer)
            clamped = clamped or (bool(begins) and _clamps(holder))
            module, between = (holder, *begins)[-1], (*ends[:-1], *begins)
            yield _Meeting(holder, layer, ends, Following(module, norm, not clamped, between))


def _borders(holder: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module], str]]:
    """Yield the layers in a module's lists that are followed by a norm.

    Yields:
        The layer; the modules from the next layer to the one that holds the norm, or none if
        ``holder`` does; and the norm's name.
    """
    for name, layers in holder.named_children():
        each = modules_of(layers)
        for layer, after in itertools.pairwise(each):
            if (opening := _at_beginning(after)) is not None:
                yield layer, *opening
        if each and (after_all := _norm_after(holder, name)) is not None:
            yield each[-1], [], after_all


class Apart(NamedTuple):
    """A layer whose last sum isn't computed together with a norm."""

    layer: nn.Module
    why: str
    when: str = ""  # in which calls; "" stands for all


def find_apart(model: nn.Module) -> Iterator[Apart]:
    """Yield the layers that still end with a sum of torch's after all possible joins, and why."""
    meetings = [each for each in _meetings_in(model) if _is_norm(each.after.find())]
    for each in meetings:
        if (apart := _why_apart(each)) is not None:
            yield apart
    followed = {each.ends[-1] for each in meetings if each.ends}
    for lists in (module.children() for module in model.modules()):
        for layer in (each for layers in lists for each in modules_of(layers)):
            ends = _at_end(layer)
            if ends and ends[-1] not in followed:
                followed.add(ends[-1])
                yield Apart(layer, "no norm was found that takes it")


def _is_norm(module: nn.Module | None) -> bool:
    return module is not None and norms.is_known(module)


def _why_apart(meeting: _Meeting) -> Apart | None:
    """Return why, and in which calls, a layer's last sum and the norm after it stay apart."""
    outer, ends = meeting.layer, meeting.ends
    if not ends:
        return Apart(outer, _why_open(outer))
    layer, after = ends[-1], following(ends[-1])
    if after is None:
        return Apart(outer, _why_left(layer))
    norm = after.find()
    if (why := _obstacle(after, norm, _example(layer, norm))) is not None:
        return Apart(outer, why)
    for each in (layer, *after.between):
        if (why := why_intercepted(each)) is not None:
            return Apart(outer, f"{_name(each)} has {why}", _GRADIENTS)
    if after.leaves_stack:
        why = f"the next norm is {_name(after.module)}'s, and the layers may be called without it"
        return Apart(outer, why, _GRADIENTS)
    if any(getattr(each, "gradient_checkpointing", False) for each in (outer, layer)):
        return Apart(outer, "gradient checkpointing is on", "in training")
    return None


_GRADIENTS = "with gradients"


def _name(module: nn.Module) -> str:
    return sublayers.original(type(module)).__name__


def _example(layer: nn.Module, norm: Any) -> Tensor:
    """Return a tensor without elements that is like the hidden states of a layer."""
    weight = getattr(norm, "weight", None)
    like = [each for each in layer.parameters() if each.dim() == 2 and each.is_floating_point()]
    if weight is not None:
        like.append(weight)
    shape = getattr(norm, "normalized_shape", (1,)) if weight is None else weight.shape
    return like[0].new_empty(0, *shape) if like else torch.empty(0, *shape)


def _why_open(layer: nn.Module) -> str:
    """Return why no sum is known to end a layer."""
    while inside := _last_of(layer):
        layer = inside
    source: Any = sublayers.original(type(layer))
    if not sublayers.is_of_transformers(source):
        return f"{source.__name__} isn't a class of transformers"
    tree = code.parse(source.forward, to_read=True)
    if tree is None:
        return f"the code of {source.__name__} can't be read"
    rest = [each for each in tree.body if not (only_packs(each) or clamps(each))]
    last = ast.unparse((rest or tree.body)[-1]).splitlines()[0].rstrip(":")
    return f"the code of {source.__name__} ends with `{last}`"


def _why_left(layer: nn.Module) -> str:
    """Return why a layer that ends with a sum was left as it is."""
    if "forward" in vars(layer):
        return f"the forward of this {_name(layer)} was replaced"
    return f"this {_name(layer)} was left as it is"


def takes_sum(holder: nn.Module, norm: str) -> bool:
    """Whether a module's code computes a norm together with a sum of its own."""
    cls: Any = type(holder)
    return isinstance(cls, sublayers.FusedType) and norm in cls._trifuse_origin.norms_of(holder)


def _clamps(module: nn.Module) -> bool:
    """Whether the code of a module clamps its hidden states in float16."""
    names = code.names_used(sublayers.original(type(module)))
    return {"clamp", "float16"} <= names


def _at_end(layer: nn.Module | None) -> list[nn.Module]:
    """Return the modules from a layer to the one whose sum ends it.

    That is the layer, or the last of its sublayers, and so on. A stack is such a layer too. The
    list is empty if none has one.
    """
    if layer is None or closes(layer):
        return [] if layer is None else [layer]
    inner = _at_end(_last_of(layer))
    return [layer, *inner] if inner else []


def _last_of(layer: nn.Module) -> nn.Module | None:
    """Return the last of a layer's sublayers, if its result is the layer's own."""
    last = (_looped(layer) or _sublayers(layer))[-1:]
    return last[0] if last else layer._modules.get(_parts_of(layer).last)


def closes(layer: nn.Module) -> bool:
    """Whether a module ends with a sum, and can compute the norm that comes next."""
    cls: Any = type(layer)
    if not isinstance(cls, sublayers.FusedType):
        if not sublayers.is_of_transformers(type(layer)):
            return False
        cls = sublayers.fused_class(cls, sublayers.roles(layer))
    return isinstance(cls, sublayers.FusedType) and cls._trifuse_origin.closes


def _at_beginning(layer: nn.Module | None) -> tuple[list[nn.Module], str] | None:
    """Return the norm that begins a layer: its own, or that of the first of its sublayers.

    Returns:
        The modules from the layer to the one that holds the norm, and the norm's name.
    """
    if layer is None:
        return None
    parts = _parts_of(layer)
    if (norm := layer._modules.get(parts.opens)) is not None:
        return ([layer], parts.opens) if norms.is_known(norm) else None
    first = _sublayers(layer)[:1]
    inner = _at_beginning(first[0] if first else layer._modules.get(parts.first))
    return None if inner is None else ([layer, *inner[0]], inner[1])


class _Parts(NamedTuple):
    """The names of the submodules with which a module begins and ends; "" if there is none."""

    opens: str = ""  # the norm that it applies to its first argument
    first: str = ""  # the module that gets the first argument
    last: str = ""  # the module whose result it returns
    loop: str = ""  # the list of modules that run one after another, to the result that it returns
    # Pairs of a submodule and a norm in the same module that gets the submodule's result.
    meetings: tuple[tuple[str, str], ...] = ()


# Keyed also by the methods that were followed, because those of a class may be replaced.
_known: dict[tuple[sublayers.Roles, tuple[tuple[str, types.FunctionType], ...]], _Parts] = {}


def _parts_of(module: nn.Module) -> _Parts:
    source: Any = sublayers.original(type(module))
    if not sublayers.is_of_transformers(source):
        return _Parts()
    key = sublayers.roles(module), tuple(code.methods(source))
    if key not in _known:
        _known[key] = _PartsReader(*key).read()
    return _known[key]


class _PartsReader:
    """Follows the hidden states through the methods of a module, from one submodule to the next."""

    def __init__(
        self, roles: sublayers.Roles, methods: tuple[tuple[str, types.FunctionType], ...]
    ) -> None:
        self.roles = roles
        self.methods = dict(methods)

    def read(self) -> _Parts:
        """Return the parts of the module, those that its ``forward`` shows."""
        forward = self._tree("forward")
        if forward is None or len(forward.args.args) < 2:
            return _Parts()
        opens = opening(forward, self.roles) or ""
        first = "" if opens else self._first(forward)
        last, loop = self._last(forward), self._looped(forward)
        return _Parts(opens, first, last, loop, tuple(self._meetings(forward)))

    def _first(self, tree: ast.FunctionDef) -> str:
        name = tree.args.args[1].arg
        for statement in tree.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and (called := self._child(node)):
                    given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == name)]
                    if any(ast.unparse(each) == name for each in given):
                        return called
            if name in stored_names(statement):
                return ""
        return ""

    def _last(self, tree: ast.FunctionDef) -> str:
        at = len(tree.body) - 1
        while at >= 0 and only_packs(tree.body[at]):
            at -= 1
        last = tree.body[at] if at >= 0 else None
        call = last.value if isinstance(last, ast.Assign) else None
        target = first_target(last)
        if not isinstance(call, ast.Call) or target is None:
            return ""
        if not is_returned_first(target, tree.body[at + 1 :]):
            return ""
        method = self._method(call)
        return self._child(call) if method is None else self._last(method)

    def _meetings(self, tree: ast.FunctionDef) -> Iterator[tuple[str, str]]:
        results: dict[str, str] = {}  # by variable, the module whose result it holds
        for statement in tree.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and (given := _only_argument(node)) is not None:
                    result = whole(given)
                    if result not in results:
                        continue
                    method = self._method(node)
                    norm = opening(method, self.roles) if method else _applied(node, given)
                    if norm is not None and (norm, "norm") in self.roles:
                        yield results[result], norm
            if isinstance(statement, ast.If):
                continue  # it changes another tensor, or its norm isn't the one expected
            results = self._after(statement, results)

    def _after(self, statement: ast.stmt, results: dict[str, str]) -> dict[str, str]:
        """Return which variables hold a submodule's result after a statement.

        Args:
            statement: of a method.
            results: the submodules, by variable, before it.
        """
        value, target = assigned_value(statement), first_target(statement)
        after = {k: v for k, v in results.items() if k not in stored_names(statement)}
        if target is None or value is None:
            return after
        if isinstance(value, ast.Call) and (child := self._child(value)):
            after[target] = child
        elif (held := results.get(first_variable(value) or whole(value))) is not None:
            after[target] = held
        return after

    def _looped(self, tree: ast.FunctionDef) -> str:
        """Return the name of a list whose modules run one after another, up to the result.

        A statement under a condition may change the result. The norm isn't used then.
        """
        results: dict[str, str] = {}  # by variable, the list of the module that returned it
        for statement in tree.body:
            if isinstance(statement, ast.If):
                continue
            if isinstance(statement, ast.For):
                outer = {k: v for k, v in results.items() if k not in stored_names(statement)}
                results = outer | _results_of_loop(statement)
            elif isinstance(statement, ast.Return):
                return results.get(first_variable(result_of(statement.value)) or "", "")
            else:
                after, lists = self._after(statement, results), set(results.values())
                results = {name: held for name, held in after.items() if held in lists}
        return ""

    def _tree(self, name: str) -> ast.FunctionDef | None:
        return code.parse(self.methods[name]) if name in self.methods else None

    def _method(self, call: ast.Call) -> ast.FunctionDef | None:
        return self._tree(_own(call))

    def _child(self, call: ast.Call) -> str:
        name = _own(call)
        return "" if name in self.methods else name


def _own(call: ast.Call) -> str:
    """Match ``self.name(...)``, perhaps called for parts of its argument; return the name."""
    return code.own_attribute(call.args[0] if _is_in_chunks(call) else call.func) or ""


def _only_argument(call: ast.Call) -> ast.expr | None:
    given = call.args[3:] if _is_in_chunks(call) else call.args
    return given[0] if len(given) == 1 else None


def _is_in_chunks(call: ast.Call) -> bool:
    """Match ``apply_chunking_to_forward(method, chunk_size, dim, *arguments)``.

    With a chunk size of 0 the method gets its arguments whole; otherwise other tensors.
    """
    return ast.unparse(call.func) == "apply_chunking_to_forward" and len(call.args) > 3


def whole(value: ast.expr) -> str:
    """Return the code of a value, or that of the results whose hidden states it is."""
    return ast.unparse(value).removesuffix("[0]").removesuffix(f".{_RESULT}")


_RESULT = "last_hidden_state"  # what transformers calls the result of a stack, among others


def result_of(value: ast.expr | None) -> ast.expr | None:
    """Return the hidden states among what a method returns, if they are named."""
    if isinstance(value, ast.Call):
        named = (each.value for each in value.keywords if each.arg == _RESULT)
        return next(named, value)
    return value


def _results_of_loop(loop: ast.For) -> dict[str, str]:
    """Return the variables that hold the result of a list's last module after a loop over it.

    Returns:
        The name of the list, by variable.
    """
    name = code.own_list(loop.iter)
    target = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
    held: set[str] = set()
    for statement in loop.body:
        value, assigned = assigned_value(statement), first_target(statement)
        called = value.func if isinstance(value, ast.Call) else None
        follows = value is not None and whole(value) in held
        if isinstance(statement, ast.If):
            continue
        held -= stored_names(statement)
        if assigned is not None and (
            follows or (called is not None and ast.unparse(called) == ast.unparse(target))
        ):
            held.add(assigned)
    return {} if name is None else dict.fromkeys(held, name)


def assigned_value(statement: ast.stmt | None) -> ast.expr | None:
    """Return the value that a statement assigns to one target, or None."""
    if isinstance(statement, ast.Assign):
        return statement.value if len(statement.targets) == 1 else None
    return statement.value if isinstance(statement, ast.AnnAssign) else None


def first_target(statement: ast.stmt | None) -> str | None:
    """Return the variable to which a statement assigns a value, or the value's first item."""
    target: ast.expr
    if isinstance(statement, ast.AnnAssign):
        target = statement.target
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        (target,) = statement.targets
    else:
        return None
    if isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[0]
    return target.id if isinstance(target, ast.Name) else None


def stored_names(statement: ast.stmt) -> set[str]:
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return {node.id for node in nodes if isinstance(node.ctx, ast.Store)}


def _sublayers(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of the only list that a layer holds, as T5's blocks do."""
    lists = [child for child in layer.children() if isinstance(child, nn.ModuleList)]
    return modules_of(lists[0]) if len(lists) == 1 else []


def _looped(stack: nn.Module) -> list[nn.Module]:
    """Return the modules that a stack runs one after another, up to its result; none if unknown."""
    layers = stack._modules.get(_parts_of(stack).loop)
    return [] if layers is None else modules_of(layers)


def modules_of(modules: nn.Module | None) -> list[nn.Module]:
    """Return the modules of a list; none if some are missing, as a list may hold None."""
    each = list(modules) if isinstance(modules, nn.ModuleList) else []
    return [] if None in each else each


# Keyed by the method that was read, since a class's method may be replaced, and the layers' name.
_after: dict[tuple[Any, str], str | None] = {}


def _norm_after(holder: nn.Module, layers: str) -> str | None:
    """Return the name of the norm that a module applies right after the loop over its layers."""
    source: Any = sublayers.original(type(holder))
    key = source.forward, layers
    if key not in _after:
        _after[key] = _read(source, layers)
    name = _after[key]
    return name if name is not None and name in holder._modules else None


def _read(source: Any, layers: str) -> str | None:
    tree = code.parse(source.forward) if sublayers.is_of_transformers(source) else None
    body = [] if tree is None else tree.body
    for loop, statement in itertools.pairwise(body):
        if not isinstance(loop, ast.For) or code.own_list(loop.iter) != layers:
            continue
        if isinstance(statement, ast.If) and len(statement.body) == 1 and not statement.orelse:
            tested = ast.unparse(statement.test).removesuffix(" is not None")
            (statement,) = statement.body
            if tested != f"self.{_called_name(statement)}":
                continue
        value = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(value, ast.Call) and len(value.args) == 1:
            return _applied(value, ast.unparse(value.args[0]))
    return None


def _called_name(statement: ast.stmt) -> str | None:
    """Return the name of the module in ``x = self.name(...)``."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    called = value.func if isinstance(value, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else None
