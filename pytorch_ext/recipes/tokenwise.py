"""Decides whether a module treats tokens one by one, except in attention on packed tokens.

The code of its class is followed from ``forward`` on, with the layout of each value: tokens,
(B, L, ...), or heads, (B, H, L, E). Only code that keeps the tokens apart is allowed: submodules
(which are examined separately), elementwise functions, splitting into heads and back, and attention
that gets the mask that was passed in, through transformers' interface or written out. Anything else
is a reason why the module isn't known to treat tokens one by one. So unfamiliar code is either
understood or left alone.

A decoder's tokens also attend to its memory, the tokens of an encoder. These are packed separately,
and never mix with the decoder's tokens outside of attention.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from trifuse.nn import packing
from trifuse.nn.dropout import DROPOUTS
from trifuse.nn.walks import ABSENT, Grounds
from trifuse.recipes import arguments, disentangled, layouts, norms, rotations, sublayers
from trifuse.recipes.arguments import (
    BIAS,
    CACHES,
    MASK,
    MEMORY,
    MEMORY_BIAS,
    MEMORY_MASK,
    RELATIVE,
    RELATIVE_EMBEDDINGS,
    ROTARY,
    WINDOW_MASK,
    Arguments,
)
from trifuse.recipes.layouts import Value
from trifuse.recipes.own_biases import OwnBias
from trifuse.recipes.reader import (
    Reader,
    SubmoduleCall,
    Unknown,
    trait_of,
    uses_experts_interface,
)
from trifuse.recipes.written_out import WrittenOut

# The arguments with which a module gets packed sequences, a memory or a bias, with their kinds. All
# other arguments hold tokens, or are None as in ``ABSENT``.
Inputs = frozenset[tuple[str, Value]]
_ONLY_A_MASK: Inputs = frozenset({(MASK, Value("mask"))})


def layer_inputs(takes: Arguments, memory: bool, cached: bool) -> Inputs:
    """Return the inputs of a stack's layer.

    Args:
        takes: the layer's arguments.
        memory: whether it gets a memory.
        cached: whether it gets an empty cache, or two, if it gets a memory.
    """
    known = {takes.mask: Value("mask"), WINDOW_MASK: Value("mask")}
    known |= {BIAS: Value("bias"), ROTARY: layouts.HEADS}
    known |= dict.fromkeys((RELATIVE, RELATIVE_EMBEDDINGS), Value("distances"))
    if cached:
        known |= dict.fromkeys(CACHES, Value("caches" if memory else "cache"))
    if memory:
        known |= {
            MEMORY: Value("tokens", 1, layouts.OF_MEMORY),
            MEMORY_MASK: Value("mask", 0, layouts.OF_MEMORY),
            MEMORY_BIAS: Value("bias", 0, layouts.OF_MEMORY),
        }
    return frozenset((name, kind) for name, kind in known.items() if name in takes.named)


class Examiner:
    """Examines the modules of a stack, in the order in which they hold each other.

    Args:
        layers: the stack's layers.
        memory: whether they get a memory.
        cached: whether they get an empty cache.

    Attributes:
        grounds: what the answers depend on besides the classes of modules and their places.
    """

    def __init__(
        self, layers: Iterable[nn.Module], memory: bool = False, cached: bool = False
    ) -> None:
        self.inputs: dict[nn.Module, Inputs | None] = {
            layer: layer_inputs(arguments.of(layer), memory, cached) for layer in layers
        }
        self.verdicts: dict[nn.Module, _Verdict | str | None] = {}
        self.grounds = Grounds(trait_of)

    def why_not(self, module: nn.Module) -> str | None:
        """Return why a module of transformers isn't known to treat tokens one by one, or None."""
        verdict = self._verdict(module)
        if not isinstance(verdict, _Verdict):
            return verdict
        unknown = packing.why_unknown(sublayers.original(type(module)))
        if verdict.uses is not None:
            return f"{unknown}: it uses {verdict.uses}"
        for call in verdict.calls:
            for child in call.modules(module):
                if call.drops_weights and type(child) not in DROPOUTS:
                    return f"{unknown}: it calls {call.name} on the weights of attention"
                key = call, type(child)
                if key not in verdict.given:
                    verdict.given[key] = _given_to(child, call)
                given = verdict.given[key]
                if given is None:
                    name = f"{type(module).__module__}.{type(module).__qualname__}"
                    passes = f"doesn't pass its mask to {call.name}, or under another name"
                    return f"is a {name}, which {passes}"
                if self.inputs.setdefault(child, given) != given:
                    self.inputs[child] = None
                    self.verdicts.pop(child, None)
                within = self._verdict(child)
                whole = getattr(within, "returns_tuple", None)
                if (call[:2], whole) in verdict.results:
                    return f"{unknown}: it uses a part of what {call.name} returns"
        return None

    def _verdict(self, module: nn.Module) -> _Verdict | str | None:
        """Follow a module's code; or return why that is impossible, or None if it isn't needed."""
        if module not in self.verdicts:
            self.verdicts[module] = self._follow(module)
        return self.verdicts[module]

    def _follow(self, module: nn.Module) -> _Verdict | str | None:
        source = sublayers.original(type(module))
        if not sublayers.is_of_transformers(source):
            return packing.why_unknown(type(module))
        if _is_elementary(source):
            self.grounds.note_functions(source, *norms.METHODS)
            return None
        if isinstance(module, disentangled.DisentangledAttention):
            self.grounds.note_functions(source, *disentangled.METHODS)
            self.grounds.traits[module] = {disentangled.SKIPPED: ABSENT}
            return disentangled.why_not(module)
        if rotations.is_known(module):
            self.grounds.note_functions(source, "forward")
            self.grounds.traits[module] = {rotations.TRAIT: trait_of(module, rotations.TRAIT)}
            return rotations.why_not(module)
        inputs = self.inputs.get(module, _ONLY_A_MASK)
        if inputs is None:
            return f"{packing.why_unknown(source)}: its calls differ in their arguments"
        verdict = _examine(module, source, inputs, isinstance(module, (OwnBias, WrittenOut)))
        self.grounds.note_functions(source, *verdict.methods)
        self.grounds.traits[module] = verdict.read
        return verdict


def _is_elementary(source: type[nn.Module]) -> bool:
    """Whether a class of transformers computes an activation, a norm or a linear layer."""
    if source.__module__ == "transformers.activations" or norms.has_known_form(source):
        return True
    from transformers.pytorch_utils import Conv1D

    return source is Conv1D  # trifuse's class is recognised by the module that holds it


def why_not(module: nn.Module) -> str | None:
    """As :meth:`Examiner.why_not`, for a module that gets no memory."""
    return Examiner(()).why_not(module)


class _Verdict(NamedTuple):
    """The result of following the code of a class."""

    uses: str | None  # what isn't known to keep tokens apart
    calls: frozenset[SubmoduleCall]
    results: frozenset[tuple[Any, bool]]  # uses of results; True: as a tensor, False: as a tuple
    returned: Value | None  # None: unknown
    returns: dict[SubmoduleCall, Value | None]  # what calls of submodules must return
    methods: dict[str, types.FunctionType]  # those followed; a class's may be replaced later
    read: dict[str, Any]  # the attributes on which this verdict depends
    given: dict[
        tuple[SubmoduleCall, type], Inputs | None
    ]  # what calls give to submodules of a class

    @property
    def returns_tuple(self) -> bool | None:
        """Whether it returns a tuple; None if it returns what a submodule does, or is unknown."""
        if self.returned is None or self.returned.kind == "results":
            return None
        return self.returned.kind == "tuple"


_verdicts: dict[tuple[type, Inputs, bool], list[_Verdict]] = {}


def _examine(module: nn.Module, source: type[nn.Module], inputs: Inputs, attends: bool) -> _Verdict:
    known = _verdicts.setdefault((source, inputs, attends), [])
    for verdict in known:
        same = all(getattr(source, name) is method for name, method in verdict.methods.items())
        if (
            same
            and all(trait_of(module, name) == trait for name, trait in verdict.read.items())
            and all(_returned(module, call) == made for call, made in verdict.returns.items())
        ):
            return verdict
    reader = Reader(module, source, dict(inputs), attends, _returned)
    uses, returned = None, None
    try:
        of_experts = uses_experts_interface(source)
        returned = reader.experts() if of_experts else reader.method("forward", None)
    except Unknown as unknown:
        uses = str(unknown)
    except (IndexError, TypeError, ValueError):  # code that wouldn't run on the known layouts
        uses = "what can't be followed"
    results = frozenset(reader.results)
    calls = frozenset(reader.calls)
    returns = dict(reader.returns)
    verdict = _Verdict(uses, calls, results, returned, returns, reader.followed, reader.read, {})
    known.append(verdict)
    return verdict


def _returned(module: nn.Module, call: SubmoduleCall) -> Value | None:
    """Return what a call's submodules return, if it is known, and alike for all of them."""
    try:
        found = {_returned_by(child, call) for child in call.modules(module)}
    except (AttributeError, IndexError, KeyError):  # another module of the class, without them
        return Value("mixed")
    return found.pop() if len(found) == 1 else None


def _returned_by(child: nn.Module, call: SubmoduleCall) -> Value | None:
    source, given = sublayers.original(type(child)), _given_to(child, call)
    if given is None or not sublayers.is_of_transformers(source) or _is_elementary(source):
        return None
    return _examine(child, source, given, isinstance(child, (OwnBias, WrittenOut))).returned


def _given_to(child: nn.Module, call: SubmoduleCall) -> Inputs | None:
    """Return the inputs of a child in a call; None if it takes a mask but doesn't get one."""
    takes = arguments.of(child)
    given: dict[str, Value] = {}
    for place, value in call.special:
        if isinstance(place, int):
            if place >= len(takes.positional):
                return None
            place = takes.positional[place]
        if place not in takes.named and not takes.takes_more:
            return None
        given[place] = value
    masked = any(value.kind == "mask" for value in given.values())
    return None if takes.mask in takes.named and not masked else frozenset(given.items())
