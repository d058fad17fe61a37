"""Encoder layers that run as one op in inference (:mod:`trifuse.ops.encoder_layer`).

Layers with frozen weights do so for any number of tokens, others for few. With many tokens, the
parts of a layer keep packed copies of weights that aren't frozen, and Python's share of the time is
small.

A layer is described by its :class:`Parts`. Before each call it is checked that the layer still
consists of these modules, that none of them is in training mode or has hooks, and that no compiler
or mode intercepts the call. Otherwise the layer calls its parts. Consecutive layers run in one
call, because with one sentence, Python takes longer between two layers than one product takes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trifuse import backends
from trifuse.nn.dropout import DROPOUTS
from trifuse.nn.dropout_add_layer_norm import LAYER_NORMS
from trifuse.nn.linear import ACTIVATION_OPTIONS, OnProduct, is_frozen, is_plain
from trifuse.nn.packing import PackedSequences
from trifuse.nn.plans import (
    Checks,
    checks,
    forwards_of,
    joined,
    kept_outside,
    may_run,
    modules_in,
    plan_of,
    present_values,
)
from trifuse.ops import encoder_layer as ops
from trifuse.ops import linear as linear_ops
from trifuse.ops._attention_arguments import is_softcap
from trifuse.ops._linear_choice import choose
from trifuse.ops._linear_weights import FrozenWeight
from trifuse.ops.activations import Activation
from trifuse.ops.encoder_layer import Cache, Memory, Rotary


class MemoryParts(NamedTuple):
    """The modules of the attention to a memory, whose keys and values the caller projects."""

    query: nn.Module
    output: nn.Module
    norm: nn.Module


class Parts(NamedTuple):
    """The modules that an encoder layer consists of, whatever their names, and its options."""

    # Query, key and value; or one linear layer or nn.MultiheadAttention for all three.
    projections: tuple[nn.Module, ...]
    output: nn.Module  # of the attention; with an nn.MultiheadAttention, its out_proj
    up: nn.Module  # the first product of the feed-forward network
    down: nn.Module
    norms: tuple[nn.Module | None, nn.Module | None]  # with norm_first, some may be missing
    dropouts: tuple[nn.Module, ...]  # between the other modules; they do nothing in inference
    num_heads: int
    scale: float | None  # multiplies q·k; None: 1/√head_dim
    activation: Activation | None
    norm_first: bool = False
    # Whether the layer computes something else, such as causal attention, without a mask.
    needs_mask: bool = False
    # Further values that this description depends on: pairs of an object or a class and the name of
    # its attribute, or of a dictionary and a key.
    attributes: tuple[tuple[Any, str], ...] = ()
    # The linear layer whose result multiplies the activation. If it is ``up``, the activation is
    # applied to the first half of its result and multiplied by the second.
    factor: nn.Module | None = None
    num_key_heads: int | None = None  # None: num_heads
    # The attribute with the epsilon of norms that a library defines, which have a weight of their
    # input's dtype and no bias. None: the norms are torch's LayerNorms.
    own_eps: str | None = None
    centered: bool = False  # whether such norms subtract the mean, as LayerNorms do, not RMSNorms
    norms_from_one: bool = False  # whether 1 is added to their weights, which may be float32
    head_norms: tuple[nn.Module, ...] = ()  # of queries and of keys
    heads_normed_together: bool = False  # as in ops.Options
    # Norms of the results of the attention and of the network, with norm_first.
    result_norms: tuple[nn.Module, ...] = ()
    memory: MemoryParts | None = None
    softcap: float | None = None
    parallel: bool = False  # as in ops.Options
    residual_first: bool = False
    result_scale: float = 1.0
    by_head: bool = False
    rotary_in_float32: bool = False  # as in ops.Options
    rotary_interleaved: bool = False
    rotary_per_pair: bool = False
    # The modules, and the names of their parameters, that multiply the results of the attention and
    # of the network. None: no parameter does.
    factors: tuple[tuple[nn.Module, str] | None, ...] = ()
    # The module that drops weights of the attention in training; and a module (perhaps another one)
    # and the name of its attribute with the probability. None: unknown.
    attention_dropout: tuple[nn.Module, nn.Module, str] | None = None


# Weights, biases, norms and options of a layer, as the op takes them.
_Arguments = tuple[
    tuple[Tensor, ...], tuple[Tensor | None, ...], tuple[Tensor | None, ...], tuple[Any, ...]
]


class _Plan(NamedTuple):
    """The arguments that a call passes to the op, and what each call must check first."""

    checks: Checks  # of parameters, packed weights and options. A change makes a new plan.
    weights: _Weights
    biases: tuple[Tensor | None, ...]
    norms: tuple[Tensor | None, ...]
    options: ops.Options  # without a window
    needs_mask: bool
    # The index of the first weight of the attention to a memory, if the layer has one.
    memory_at: int | None


class _Stack(NamedTuple):
    """The plans of consecutive layers."""

    checks: Checks  # including the layers
    plans: tuple[_Plan, ...]
    made: dict[tuple[int, bool], tuple[_Arguments, ...]]  # by window and is_causal


# A plan refers to the modules in a layer (or in a list of layers), but not to the layer itself, so
# it does not keep the layer alive.
_plans: WeakKeyDictionary[nn.Module, _Plan] = kept_outside()
_stacks: WeakKeyDictionary[nn.ModuleList, _Stack] = kept_outside()

# Layers with other linear layers, such as quantized ones, and the classes of the modules in them.
_refused: WeakKeyDictionary[nn.Module, tuple[type, ...]] = WeakKeyDictionary()


def run(
    layer: nn.Module,
    x: Tensor,
    mask: Tensor | PackedSequences | None,
    describe: Callable[[Any], Parts | str | None],
    is_causal: bool = False,
    cache: Cache | None = None,
    rotary: Rotary | None = None,
    window: int = -1,
    reserve: Callable[[], Cache | None] | None = None,
    relative_bias: Callable[[], Tensor | None] | None = None,
    memory: Memory | None = None,
) -> Tensor | None:
    """Computes a layer's output, (B, L, features), as one op.

    Args:
        layer: the layer.
        x: (B, L, features).
        mask: None; 4-dimensional as ``attn_mask`` of :func:`trifuse.scaled_dot_product_attention`;
            or packed sequences.
        describe: returns a layer's parts; None, or a reason, if the op can't compute it. Called
            for a new layer and after a change.
        is_causal: whether a query attends to no key after itself. If packed sequences are causal,
            it doesn't whatever this says.
        cache, rotary: as in :func:`trifuse.ops.encoder_layer.encoder_layer`.
        window: how far a query attends, to both sides if not causal; -1: no bound. Packed sequences
            carry their own window.
        reserve: returns the cache, instead of ``cache``; None if the layer must call its parts.
            Called only if the op serves all other arguments.
        relative_bias: returns the bias, as :func:`trifuse.ops.encoder_layer.encoder_layer` takes
            it; None if the layer must call its parts. Called only if the layer can run as one op.
        memory: as in :func:`trifuse.ops.encoder_layer.encoder_layer`.

    Returns:
        The output; None if the layer must call its parts.
    """
    if not may_serve(layer, x):
        return None
    plan = plan_of(layer, _plans, functools.partial(_described, layer, describe))
    if plan is None or not _serves(plan, x, mask):
        return None
    if memory is not None and plan.memory_at is None:
        return None
    table = None if relative_bias is None else relative_bias()
    if table is None and relative_bias is not None:
        return None
    tokens = _tokens(mask, is_causal, window)
    arguments = _arguments(plan, tokens.window, tokens.is_causal, memory is not None)
    if reserve is not None:
        if not _takes(plan, x, tokens.mask, table, *(rotary or ()), *(memory or ())):
            return None
        cache = reserve()
        if cache is None:
            return None
    return ops.encoder_layer(
        x.contiguous(),
        tokens.mask,
        tokens.cu_seqlens,
        tokens.longest,
        *arguments,
        cache,
        rotary,
        table,
        memory,
    )


def may_serve(layer: nn.Module, x: Tensor) -> bool:
    """Whether :func:`run` may serve a call, by what is quick to check."""
    if not may_run() or layer.training or not isinstance(x, Tensor):
        return False
    if not x.is_cpu or x.is_nested:
        return False
    if x.requires_grad and torch.is_grad_enabled():
        return False
    return not _is_refused(layer)


def _is_refused(layer: nn.Module) -> bool:
    refused = _refused.get(layer)
    return refused is not None and refused == _classes(layer)


def has_few_rows(x: Tensor) -> bool:
    """Whether :func:`run` serves x, (..., features), if the layer's weights aren't frozen."""
    return math.prod(x.shape[:-1]) < linear_ops.ROWS_WORTH_CHECKING


def _classes(layer: nn.Module) -> tuple[type, ...]:
    return tuple(map(type, layer.modules()))


def _takes(plan: _Plan, x: Tensor, *others: Tensor | None) -> bool:
    """Whether the op can run on these tensors: a plain call without gradients, in one dtype."""
    if x.dtype != plan.weights.dtype:
        return False
    vectors = *plan.biases, *plan.norms
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in vectors):
        return False
    return ops.is_plain(x, *others, *plan.weights.tensors, *vectors)


def why_not(layer: nn.Module, describe: Callable[[Any], Parts | str | None]) -> str | None:
    """Returns why a layer in its present state can't run as one op; None if plain calls can."""
    made = _make(layer, describe(layer))
    return made if isinstance(made, str) else None


def run_all(
    layers: nn.ModuleList,
    x: Tensor,
    mask: Tensor | PackedSequences | None,
    describe: Callable[[Any], Parts | str | None],
    is_causal: bool = False,
) -> Tensor | None:
    """Computes the output of consecutive layers, (B, L, features), in one call.

    Args:
        layers: the layers.
        x, mask, describe, is_causal: as :func:`run` takes them, for each layer.

    Returns:
        The output of the last layer; None if the layers must be called one by one.
    """
    kept = _stacks.get(layers)
    # A kept plan checks the other layers itself.
    checked = itertools.islice(layers._modules.values(), None if kept is None else 1)
    if not all(may_serve(layer, x) for layer in checked):
        return None
    stack = _stack(layers, describe)
    if stack is None or not all(_serves(plan, x, mask) for plan in stack.plans):
        return None
    tokens = _tokens(mask, is_causal)
    arguments = _arguments_of_all(stack, tokens.window, tokens.is_causal)
    return ops.encoder_layers(
        x.contiguous(), tokens.mask, tokens.cu_seqlens, tokens.longest, arguments
    )


class Fixed(NamedTuple):
    """Consecutive layers for which :func:`run_all` passes the same tensors in every call."""

    checks: Checks
    arguments: tuple[_Arguments, ...]
    # Fewer rows than this are served; 0: any number.
    rows: int
    # The instruction set for which the weights are packed; None if they aren't.
    capability: str | None


def fixed(layers: nn.ModuleList, describe: Callable[[Any], Parts | str | None]) -> Fixed | None:
    """Returns layers in evaluation mode as :func:`run_all` passes them without a mask.

    Returns:
        None if it doesn't serve them, or if their arguments may change from call to call.
    """
    if any(map(_is_refused, layers._modules.values())):
        return None
    stack = _stack(layers, describe)
    if stack is None or not all(each.weights.are_fixed for each in stack.plans):
        return None
    capabilities = {each.weights.capability for each in stack.plans}
    arguments = _arguments_of_all(stack, -1, is_causal=False)
    if any(each.needs_mask for each in stack.plans) or len(capabilities) > 1:
        return None
    capability = capabilities.pop()
    if capability is None and not choose(stack.plans[0].weights.dtype).inference:
        return None
    rows = 0 if capability is not None else linear_ops.ROWS_WORTH_CHECKING
    return Fixed(stack.checks, arguments, rows, capability)


def _stack(layers: nn.ModuleList, describe: Callable[[Any], Parts | str | None]) -> _Stack | None:
    return plan_of(layers, _stacks, lambda: _make_stack(layers, describe))


def _arguments_of_all(stack: _Stack, window: int, is_causal: bool) -> tuple[_Arguments, ...]:
    arguments = stack.made.get((window, is_causal))
    if arguments is not None:
        return arguments
    arguments = tuple([_arguments(plan, window, is_causal) for plan in stack.plans])
    if all(plan.weights.are_fixed for plan in stack.plans):
        stack.made[window, is_causal] = arguments
    return arguments


def _serves(plan: _Plan, x: Tensor, mask: Any) -> bool:
    if plan.needs_mask and mask is None:
        return False
    weights = plan.weights
    if weights.capability is not None:
        return weights.capability == backends.cpu_capability()
    # Otherwise the parts compute products in another way.
    if not (has_few_rows(x) and choose(weights.dtype).inference):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in weights.tensors))


class _Tokens(NamedTuple):
    """A mask, or the boundaries of packed sequences, as the op takes them."""

    mask: Tensor | None
    cu_seqlens: Tensor | None
    longest: int
    window: int
    is_causal: bool


def _tokens(mask: Tensor | PackedSequences | None, is_causal: bool, window: int = -1) -> _Tokens:
    if isinstance(mask, PackedSequences):
        window = -1 if mask.window is None else mask.window
        is_causal = is_causal or mask.causal is True
        return _Tokens(None, mask.cu_seqlens, mask.max_seqlen, window, is_causal)
    return _Tokens(mask, None, 0, window, is_causal)


# Plans --------------------------------------------------------------------------------------------


def _make_stack(
    layers: nn.ModuleList, describe: Callable[[Any], Parts | str | None]
) -> _Stack | None:
    plans = []
    for layer in layers._modules.values():
        plan = plan_of(layer, _plans, functools.partial(_described, layer, describe))
        if plan is None:
            return None
        plans.append(plan)
    return _Stack(joined(layers, plans), tuple(plans), {})


def _described(layer: nn.Module, describe: Callable[[Any], Parts | str | None]) -> _Plan | None:
    made = _make(layer, describe(layer))
    if isinstance(made, str):
        if made == OTHER_LINEARS:
            _refused[layer] = _classes(layer)
        return None
    _refused.pop(layer, None)
    return made


class _Weights(NamedTuple):
    """The weights of a layer, frozen or not."""

    packed_from: torch.dtype | None
    # In the order of the op, packed if they are frozen.
    tensors: tuple[Tensor, ...]
    # The instruction set that they are packed for; None if they aren't.
    capability: str | None
    # Whether the two weights before the last are the halves of one stored weight, which is there
    # twice.
    halved: bool = False
    by_columns: tuple[bool, ...] = ()  # which are stored as (in_features, out_features)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights now: ``module.to(dtype)`` keeps a parameter."""
        return self.tensors[0].dtype if self.packed_from is None else self.packed_from

    @property
    def are_fixed(self) -> bool:
        """Whether every call gets the same tensors."""
        return not self.halved and not any(self.by_columns)

    def of_op(self) -> tuple[Tensor, ...]:
        """Returns the weights as the op takes them."""
        if self.halved:
            *others, both, _, down = self.tensors
            return *others, *both.chunk(2), down
        if any(self.by_columns):
            pairs = zip(self.tensors, self.by_columns, strict=True)
            return tuple([weight.t() if by_columns else weight for weight, by_columns in pairs])
        return self.tensors


def _make(layer: nn.Module, parts: Parts | str | None) -> _Plan | str:
    """Returns the plan of a layer, or why there can't be one."""
    if not isinstance(parts, Parts):
        return parts or "the code of a part of it isn't known"
    if not all(type(module) in DROPOUTS for module in parts.dropouts):
        return "one of its dropouts isn't torch's"
    if not (parts.scale is None or isinstance(parts.scale, (int, float))):
        return "the scale of its attention isn't a number"
    if not isinstance(parts.result_scale, (int, float)):
        return "its results are multiplied by something else than a number"
    if parts.softcap is not None and not is_softcap(parts.softcap):
        return "attention can't have the bound of its scores"
    forwards = forwards_of(layer)
    if forwards is None:
        return "the forward of the class of a part of it was replaced"
    first: Any = parts.projections[0]
    up: Any = parts.up
    joint = len(parts.projections) == 1
    attention = first if joint and not (is_frozen(first) or is_plain(first)) else None
    factors = [] if parts.factor is None else [parts.factor]
    beside = [] if parts.memory is None else [parts.memory.query, parts.memory.output]
    linears: list[Any] = [*parts.projections, parts.output, *beside, up, *factors, parts.down]
    halved = parts.factor is up
    if halved and up._parameters.get("bias") is not None:
        return "the halves of its first product have a bias"
    find = _packed_weights if is_frozen(up) else _stored_weights
    found = find(linears, attention, halved)
    if isinstance(found, str):
        return found
    weights, held = found
    norms = _norms(parts, weights.dtype)
    if isinstance(norms, str):
        return norms
    biases = [
        (module._parameters, "in_proj_bias" if module is attention else "bias")
        for module in linears
    ]
    scales = [(each[0]._parameters, each[1]) for each in parts.factors if each is not None]
    vectors = [*biases, *norms.vectors, *scales]
    if any(name not in parameters for parameters, name in vectors):
        return _COMPUTED
    factors_now = [parameters[name] for parameters, name in scales]
    if any(each is not None and each.dtype != weights.dtype for each in factors_now):
        return "its results are multiplied by vectors of another dtype than its linear layers"
    heads, key_heads = parts.num_heads, parts.num_key_heads or parts.num_heads
    if attention is not None:
        head_dim = attention.embed_dim // heads
    else:
        head_dim = out_features(first) // (heads + 2 * key_heads if joint else heads)
    modules = itertools.product(layer.modules(), ACTIVATION_OPTIONS)
    options = [(module, name) for module, name in modules if name in vars(module)]
    attributes = [*held, *norms.names, *options, *parts.attributes]
    owned = [(o if isinstance(o, (dict, type)) else vars(o), name) for o, name in attributes]
    return _Plan(
        checks(modules_in(layer), (*present_values([*vectors, *owned]), *forwards)),
        weights,
        (
            *(parameters[name] for parameters, name in biases),
            *(each if each is None else each[0]._parameters[each[1]] for each in parts.factors),
        ),
        norms.given,
        ops.Options(
            eps=norms.eps,
            num_heads=heads,
            num_key_heads=key_heads,
            head_dim=head_dim,
            intermediate_size=out_features(up) // (2 if halved else 1),
            scale=1 / math.sqrt(head_dim) if parts.scale is None else float(parts.scale),
            result_scale=float(parts.result_scale),
            softcap=parts.softcap,
            activation=parts.activation,
            norm_first=parts.norm_first,
            rms_norm=parts.own_eps is not None and not parts.centered,
            norms_from_one=parts.norms_from_one,
            parallel=parts.parallel,
            residual_first=parts.residual_first,
            by_head=parts.by_head,
            heads_normed_together=parts.heads_normed_together,
            rotary_in_float32=parts.rotary_in_float32,
            rotary_interleaved=parts.rotary_interleaved,
            rotary_per_pair=parts.rotary_per_pair,
            window_left=-1,
            window_right=-1,
        ),
        parts.needs_mask,
        None if parts.memory is None else len(parts.projections) + 1,
    )


def out_features(module: OnProduct) -> int:
    """Returns the number of features of a linear layer's result."""
    return (module._frozen.shape if is_frozen(module) else module._product_weight().shape)[0]


_COMPUTED = "a weight or a bias is computed from other parameters"  # as by pruning

# Weights, and the places where they were found: pairs of an object or a dictionary, and a name.
_Found = tuple[_Weights, list[tuple[Any, str]]]


def _packed_weights(linears: list[Any], attention: Any, halved: bool) -> _Found | str:
    """Returns the weights of frozen layers, or why the op can't read them.

    Args:
        linears: the linear layers, in the order of their weights in the op.
        attention: the first of them if it is an nn.MultiheadAttention, else None. The second is its
            output then.
        halved: whether the two before the last are one layer, whose weight is halved.
    """
    own = linears if attention is None else linears[1:]
    if not all(map(is_frozen, own)):
        return OTHER_LINEARS
    if attention is not None and not getattr(attention, "frozen", False):
        return OTHER_LINEARS
    weights: list[FrozenWeight] = [module._frozen for module in linears]
    if halved:
        halves = weights[-2].halves
        if halves is None:
            return "the halves of its first product are no multiple of 64 features"
        weights[-3:-1] = halves
    dtypes = {weight.dtype for weight in weights}
    capabilities = {weight.capability for weight in weights}
    if len(dtypes) != 1:
        return _SEVERAL_DTYPES
    if len(capabilities) != 1:
        return "its weights were packed for several instruction sets"
    packed = tuple(weight.packed for weight in weights)
    found = _Weights(dtypes.pop(), packed, capabilities.pop())
    return found, [(module, "_frozen") for module in linears]


def _stored_weights(linears: list[Any], attention: Any, halved: bool) -> _Found | str:
    """As :func:`_packed_weights`, for layers that aren't frozen."""
    own = linears if attention is None else linears[2:]
    if not all(map(is_plain, own)) or getattr(attention, "frozen", False):
        return OTHER_LINEARS
    by_columns = tuple(
        module is not attention and is_plain(module) and module.transposed for module in linears
    )
    if halved and any(by_columns):
        return "the halves of its first product are stored by columns"
    places = [
        (module._parameters, "in_proj_weight" if module is attention else "weight")
        for module in linears
    ]
    if any(name not in parameters for parameters, name in places):
        return _COMPUTED
    weights = tuple(parameters[name] for parameters, name in places)
    dtypes = {weight.dtype for weight in weights}
    if len(dtypes) != 1:
        return _SEVERAL_DTYPES
    return _Weights(None, weights, None, halved, by_columns), places


# Why a layer stays refused until a module of it is replaced.
OTHER_LINEARS = "its linear layers are neither all frozen nor all unfrozen ones on our product"
_SEVERAL_DTYPES = "its weights have several dtypes"


class _Norms(NamedTuple):
    """The vectors and epsilons of the norms for the op, and the places where they were found."""

    vectors: list[tuple[dict[str, Any], str]]  # dictionaries of parameters, and names
    names: list[tuple[nn.Module, str]]  # norms, and names of the attributes with the epsilons
    given: tuple[Tensor | None, ...]  # weights and biases
    eps: tuple[float, ...]


def _norms(parts: Parts, dtype: torch.dtype) -> _Norms | str:
    """Returns a layer's norms, or why the op can't compute them for inputs of this dtype."""
    memory = None if parts.memory is None else parts.memory.norm
    heads = parts.head_norms or (None, None)
    places = [*parts.norms, memory, *heads, *parts.result_norms]  # in the order of the op
    while len(places) > 2 and places[-1] is None:
        places.pop()
    norms: list[Any] = [norm for norm in places if norm is not None]
    if parts.own_eps is None:
        if not all(type(norm) in LAYER_NORMS for norm in norms):
            return "its norms aren't torch's LayerNorms"
        if not all(len(norm.normalized_shape) == 1 for norm in norms):
            return "its norms are over several dimensions"
    elif not all(norm.weight.dim() == 1 for norm in norms):
        return "its norms are over several dimensions"
    elif not (parts.norms_from_one or all(norm.weight.dtype == dtype for norm in norms)):
        return "its norms have weights of another dtype than its linear layers"
    names = ("weight", "bias") if parts.own_eps is None else ("weight",)
    eps = [(norm, parts.own_eps or "eps") for norm in norms]
    values = {norm: getattr(norm, name) for norm, name in eps}
    if not all(isinstance(value, (int, float)) and value >= 0 for value in values.values()):
        return "the epsilon of a norm isn't a number, or below 0"
    own = [{} if norm is None else norm._parameters for norm in places]
    return _Norms(
        [(norm._parameters, name) for norm in norms for name in names],
        eps,
        tuple(each.get(name) for each in own for name in ("weight", "bias")),
        tuple(-1.0 if norm is None else float(values[norm]) for norm in places),
    )


def _arguments(plan: _Plan, window: int, is_causal: bool, with_memory: bool = False) -> _Arguments:
    """Returns a layer's arguments."""
    options = (*plan.options[:-2], window, 0 if is_causal else window)
    arguments = plan.weights.of_op(), plan.biases, plan.norms, options
    if plan.memory_at is None or with_memory:
        return arguments
    return _without_memory(arguments, plan.memory_at)


def _without_memory(arguments: _Arguments, at: int) -> _Arguments:
    """Returns a layer's arguments for a call without the attention to a memory.

    Args:
        arguments: those for a call with it.
        at: the index of its first weight.
    """
    weights, biases, norms, options = arguments
    # Its norm is the third of the op's.
    eps = tuple(-1.0 if i == 2 else value for i, value in enumerate(options[0]))
    return (
        (*weights[:at], *weights[at + 2 :]),
        (*biases[:at], *biases[at + 2 :]),
        norms,
        (eps, *options[1:]),
    )
