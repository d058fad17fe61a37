"""Caches of transformers. A layer that runs as one op appends to their keys and values in place.

transformers' ``DynamicCache`` makes new tensors at each step, of all tokens so far. Here the
tensors that it holds are views of memory with room for further tokens, so that a step writes only
its own. Such memory belongs to one layer of one cache, and only as long as that layer holds exactly
the tensors that were put there. A layer that was cropped, reordered or copied gets its own memory
at the next step, and room in it at the step after. A prompt gets no room, so that the file of a
cache that is saved after the prompt holds nothing else.

The layers of a cache are served if their class is transformers' own, and its ``update`` has the
statements that this module replaces. A cache is not changed before the op has run.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from trifuse.ops import encoder_layer as ops
from trifuse.recipes import code


@dataclass(slots=True)
class _Room:
    """The memory of a layer, from the first of its tokens on.

    Only the layer keeps its tensors alive, and their room is freed together with them.
    """

    keys: ReferenceType[Tensor]  # as the layer holds them: views of the memory below
    values: ReferenceType[Tensor]
    shape: torch.Size  # of both
    key_memory: Tensor
    value_memory: Tensor

    def is_of(self, layer: Any) -> bool:
        """Whether the layer still holds the tensors put there, and these view the memory."""
        return self._shows(layer.keys, self.keys, self.key_memory) and self._shows(
            layer.values, self.values, self.value_memory
        )

    def _shows(self, held: Tensor | None, shown: ReferenceType[Tensor], memory: Tensor) -> bool:
        found = shown()
        if held is None or found is not held:
            return False
        # Even the same tensor may have other memory by now, after held.data = ...
        return (
            held.data_ptr() == memory.data_ptr()
            and held.shape == self.shape
            and held.stride() == memory.stride()
        )

    def takes(self, new: int) -> bool:
        """Whether further tokens can be written to the memory."""
        return self.shape[2] + new <= self.key_memory.size(2) and _writable(self.key_memory)


# Kept outside the layers, because a copy of a layer may share its tensors.
_rooms: WeakKeyDictionary[Any, _Room] = WeakKeyDictionary()


def _keep_room(layer: Any, keys: Tensor, values: Tensor, memory: tuple[Tensor, Tensor]) -> None:
    of = ref(layer)

    def forget(dead: ReferenceType[Tensor]) -> None:
        holder = of()
        room = None if holder is None else _rooms.get(holder)
        if room is not None and (dead is room.keys or dead is room.values):
            del _rooms[holder]

    _rooms[layer] = _Room(ref(keys, forget), ref(values, forget), keys.shape, *memory)


@dataclass(slots=True)
class Place:
    """Where the keys and values of further tokens go."""

    owner: Any  # a cache of transformers
    index: int
    layer: Any  # of the cache, or a new one that it gets when the tokens are counted
    state: dict[str, Any] | None  # the attributes that it gets then, if it isn't initialised yet
    kind: str
    keys: Any  # those that the layer holds; a tensor if there are earlier tokens
    values: Any
    heads: int  # of keys
    head_dim: int
    past: int  # tokens before the further ones
    seen: int  # the number of keys that the layer gives to an attention
    room: _Room | None
    memory: tuple[Tensor, Tensor] | None = None  # after `reserve`

    def reserve(self, x: Tensor) -> ops.Cache:
        """Return memory with the earlier tokens and space for those of x, (B, L, ...)."""
        if self.kind == _STATIC:
            self.memory = self.keys, self.values
        elif self.room is not None and self.room.takes(x.size(1)):
            # Aliases, whose version counters the op increments. So the tensors that the layer held
            # before count as unchanged, like their values, and autograd accepts them.
            self.memory = self.room.key_memory.data, self.room.value_memory.data
        else:
            self.memory = self._grown(x)
        return ops.Cache(*self.memory, self.past)

    def _grown(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Half as much again as is needed, so that the copies of a whole text add up to a few times
        # its length. But exactly as much as needed for a prompt, which may be all there is, and for
        # tensors that the layer got from elsewhere, because it may get such tensors before each
        # step.
        needed = self.past + x.size(1)
        reserved = needed if self.room is None else max(needed + needed // 2, _LEAST)
        shape = x.size(0), self.heads, reserved, self.head_dim
        memory = x.new_empty(shape), x.new_empty(shape)
        for larger, held in zip(memory, (self.keys, self.values), strict=True):
            if self.past:
                larger[:, :, : self.past] = held
            if needed < reserved:
                larger[:, :, needed:] = 0  # pickle also writes the room
        return memory

    def advance(self, new: int) -> None:
        """Count ``new`` further tokens, whose keys and values have been written."""
        layer, layers = self.layer, self.owner.layers
        while len(layers) < self.index:
            layers.append(self.owner.layer_class_to_replicate())
        if len(layers) == self.index:
            layers.append(layer)
        if self.state is not None:
            vars(layer).update(self.state)
        if self.kind == _STATIC:
            layer.cumulative_length.add_(new)
            return
        assert self.memory is not None
        key, value = self.memory
        length = self.past + new
        if self.kind == _SLIDING:
            layer.cumulative_length += new
            left = max(length - layer.sliding_window + 1, 0)
            if left:
                length -= left
                key, value = (t.narrow(2, left, t.size(2) - left) for t in (key, value))
        keys, values = key.narrow(2, 0, length), value.narrow(2, 0, length)
        _keep_room(layer, keys, values, (key, value))
        layer.keys, layer.values = keys, values


def find(cache: Any, index: int, x: Tensor, heads: int, head_dim: int) -> Place | None:
    """Find where the keys and values of further tokens go. The cache stays as it is.

    Args:
        cache: of transformers.
        index: of the layer.
        x: (B, L, ...), of the tokens, in the dtype of their keys.
        heads: the number of key heads.
        head_dim: the number of features of each.

    Returns:
        None if the cache must append them itself.
    """
    B, new = x.size(0), x.size(1)
    sizes = heads, head_dim
    # A pair of caches, of an encoder and a decoder, inherits the method but has no layers.
    if not _is_known(cache) or getattr(cache, "offloading", True) or not B * new:
        return None
    layer = _layer(cache, index)
    kind = None if layer is None else _kind_of(layer)
    if kind is None or (kind == _SLIDING and not _slides(layer)):
        return None
    room = _rooms.get(layer)
    if room is not None and not room.is_of(layer):
        del _rooms[layer]
        room = None
    if room is not None and room.takes(new):
        past = room.shape[2]
        return Place(
            cache,
            index,
            layer,
            None,
            kind,
            layer.keys,
            layer.values,
            *sizes,
            past,
            past + new,
            room,
        )
    initialised, state = layer, None
    if not layer.is_initialized:
        from trifuse._transformers_versions import initialize_cache_layer

        initialised = copy.copy(layer)
        initialize_cache_layer(initialised, x.new_empty((B, heads, 0, head_dim)))
        state = vars(initialised)
    keys, values = initialised.keys, initialised.values
    held = keys.shape[2] if keys.numel() else 0
    if held and not all(_fits(t, (B, heads, held, head_dim), x) for t in (keys, values)):
        return None
    if kind == _STATIC:
        past = int(initialised.cumulative_length)
        if past + new > held or not _writable(keys, values):
            return None
        return Place(cache, index, layer, state, kind, keys, values, *sizes, past, held, None)
    return Place(cache, index, layer, state, kind, keys, values, *sizes, held, held + new, room)


def own(cache: Any) -> Any:
    """Return the cache of a decoder's own tokens, which may be one of a pair."""
    return cache.self_attention_cache if _is_pair(cache) else cache


def memory(cache: Any, index: int) -> tuple[Tensor, Tensor] | None:
    """Return the keys and values of an encoder's output that a cache holds for a layer, if any."""
    if not _is_pair(cache) or not cache.is_updated.get(index):
        return None
    layers = cache.cross_attention_cache.layers
    if index >= len(layers) or _kind_of(layers[index]) not in (_DYNAMIC, _STATIC):
        return None
    keys, values = layers[index].keys, layers[index].values
    return (keys, values) if isinstance(keys, Tensor) and isinstance(values, Tensor) else None


def _is_pair(cache: Any) -> bool:
    cls = type(cache)
    return cls.__module__ == _MODULE and cls.__name__ == "EncoderDecoderCache"


def _layer(cache: Any, index: int) -> Any:
    """The layer that a cache has or makes at an index; None if there can't be one."""
    if index < len(cache.layers):
        return cache.layers[index]
    make = cache.layer_class_to_replicate
    return None if make is None else make()


_LEAST = 64  # tokens


def _fits(t: Tensor, shape: tuple[int, ...], x: Tensor) -> bool:
    return t.shape == shape and t.dtype == x.dtype and t.device == x.device and not t.requires_grad


def _writable(*tensors: Tensor) -> bool:
    """Whether torch allows these tensors to be changed now."""
    return torch.is_inference_mode_enabled() or not any(t.is_inference() for t in tensors)


def _slides(layer: Any) -> bool:
    """Whether a layer drops the tokens before its window, and keeps some."""
    return layer.sliding_window > 1 and not getattr(layer, "record_past", False)


# Recognition --------------------------------------------------------------------------------------

_MODULE = "transformers.cache_utils"
_DYNAMIC, _SLIDING, _STATIC = "DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer"

_BEGIN_BY_KEYS = """
if not self.is_initialized:
    self.lazy_initialization(key_states)
"""
_BEGIN_BY_BOTH = """
if not self.is_initialized:
    self.lazy_initialization(key_states, value_states)
"""
_APPEND = """
self.keys = torch.cat([self.keys, key_states], dim=-2)
self.values = torch.cat([self.values, value_states], dim=-2)
return (self.keys, self.values)
"""
_APPEND_AND_SLIDE = """
self.cumulative_length += key_states.shape[-2]
full_key_states = torch.cat([self.keys, key_states], dim=-2)
full_value_states = torch.cat([self.values, value_states], dim=-2)
self.keys = full_key_states[:, :, -self.sliding_window + 1:, :]
self.values = full_value_states[:, :, -self.sliding_window + 1:, :]
return (full_key_states, full_value_states)
"""
_APPEND_AND_SLIDE_UNLESS_RECORDING = """
self.cumulative_length += key_states.shape[-2]
full_key_states = torch.cat([self.keys, key_states], dim=-2)
full_value_states = torch.cat([self.values, value_states], dim=-2)
if not self.record_past:
    self.keys = full_key_states[:, :, -self.sliding_window + 1:, :]
    self.values = full_value_states[:, :, -self.sliding_window + 1:, :]
    return (full_key_states, full_value_states)
else:
    self.keys = full_key_states
    self.values = full_value_states
    num_visible = self.sliding_window - 1 + key_states.shape[-2]
    return (full_key_states[:, :, -num_visible:, :], full_value_states[:, :, -num_visible:, :])
"""
_WRITE_AT_LENGTH = """
kv_length = key_states.shape[-2]
cache_position = torch.arange(kv_length, device=self.device) + self.cumulative_length
self.cumulative_length.add_(kv_length)
try:
    self.keys.index_copy_(2, cache_position, key_states)
    self.values.index_copy_(2, cache_position, value_states)
except NotImplementedError:
    self.keys[:, :, cache_position] = key_states
    self.values[:, :, cache_position] = value_states
return (self.keys, self.values)
"""
# The statements of ``update`` in the versions of transformers.
_UPDATES = {
    _DYNAMIC: (_BEGIN_BY_KEYS + _APPEND, _BEGIN_BY_BOTH + _APPEND),
    _SLIDING: (
        _BEGIN_BY_KEYS + _APPEND_AND_SLIDE,
        _BEGIN_BY_BOTH + _APPEND_AND_SLIDE_UNLESS_RECORDING,
    ),
    _STATIC: (_BEGIN_BY_BOTH + _WRITE_AT_LENGTH,),
}


def _kind_of(layer: Any) -> str | None:
    """The name of a cache layer's class, if it is a known class of transformers."""
    cls = type(layer)
    if cls.__module__ != _MODULE or "update" in vars(layer):
        return None
    name = cls.__name__
    return name if name in _UPDATES and _is_update_of(name, cls.update) else None


@functools.cache
def _is_update_of(name: str, update: Any) -> bool:
    return code.body(update) in [*map(code.normal, _UPDATES[name])]


def _is_known(cache: Any) -> bool:
    """Whether a cache only passes keys and values on to its layers."""
    own = getattr(cache, "__dict__", {})  # instances of a class with __slots__ have none
    return "update" not in own and _hands_over(getattr(type(cache), "update", None))


# The statements of a cache's ``update`` except those for its offloading.
_HAND_OVER = """
if self.layer_class_to_replicate is not None:
    while len(self.layers) <= layer_idx:
        self.layers.append(self.layer_class_to_replicate())
keys, values = self.layers[layer_idx].update(key_states, value_states, {rest})
return (keys, values)
"""


@functools.cache
def _hands_over(update: Any) -> bool:
    tree = code.parse(update) if inspect.isfunction(update) else None
    if tree is None:
        return False
    body = [
        each
        for each in tree.body[ast.get_docstring(tree) is not None :]
        if not (isinstance(each, ast.If) and ast.unparse(each.test) == "self.offloading")
    ]
    statements = ast.unparse(ast.Module(body=body, type_ignores=[]))
    rests = ("cache_kwargs", "*args, **kwargs")
    return statements in [code.normal(_HAND_OVER.format(rest=rest)) for rest in rests]
