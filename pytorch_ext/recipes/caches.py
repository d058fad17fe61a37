"""Caches of transformers, to whose keys and values a layer that runs as one op appends in place.

transformers' ``DynamicCache`` makes new tensors at each step, of all tokens so far. Here the
tensors that it holds are views of memory with room for further tokens, so that a step writes only
its own. Such memory belongs to one layer of one cache, and only as long as that layer holds the
very tensors that were put there: a layer that was cropped, reordered or copied gets memory of its
own at the next step, and room in it at the one after.

The layers of a cache are served if their class is transformers' own, and ``update`` has the
statements that this module stands in for.
"""

from __future__ import annotations

import ast
import functools
import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trifuse.ops import encoder_layer as ops
from trifuse.recipes import code


@dataclass(slots=True)
class _Room:
    """The memory of a layer, from the first of its tokens on."""

    keys: Tensor  # as the layer holds them: views of what follows
    values: Tensor
    key_memory: Tensor
    value_memory: Tensor

    def is_of(self, layer: Any) -> bool:
        """Whether the layer holds what was put there."""
        return self.keys is layer.keys and self.values is layer.values

    def takes(self, new: int) -> bool:
        """Whether further tokens can be written to the memory."""
        return self.keys.size(2) + new <= self.key_memory.size(2) and _writable(self.key_memory)


# Kept outside the layers: a copy of a layer may share its tensors.
_rooms: WeakKeyDictionary[Any, _Room] = WeakKeyDictionary()


class Place(NamedTuple):
    """Where the keys and values of further tokens go."""

    layer: Any  # of a cache of transformers
    kind: str
    cache: ops.Cache
    seen: int  # the number of keys that the layer gives to an attention

    def advance(self, new: int) -> None:
        """Count ``new`` further tokens, whose keys and values have been written."""
        layer, (key, value, past) = self.layer, self.cache
        if self.kind == _STATIC:
            layer.cumulative_length.add_(new)
            return
        length = past + new
        if self.kind == _SLIDING:
            layer.cumulative_length += new
            left = max(length - layer.sliding_window + 1, 0)
            if left:
                length -= left
                key, value = (t.narrow(2, left, t.size(2) - left) for t in (key, value))
        keys, values = key.narrow(2, 0, length), value.narrow(2, 0, length)
        layer.keys, layer.values = keys, values
        room = _rooms.get(layer)
        if room is None:
            _rooms[layer] = _Room(keys, values, key, value)
        else:
            room.keys, room.values, room.key_memory, room.value_memory = keys, values, key, value


def reserve(cache: Any, index: int, x: Tensor, heads: int, head_dim: int) -> Place | None:
    """Reserve memory for the keys and values of further tokens.

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
    if not _is_known(cache) or cache.offloading or not B * new:
        return None
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    kind = _kind_of(layer)
    if kind is None or (kind == _SLIDING and not _slides(layer)):
        return None
    room = _rooms.get(layer)
    if room is not None and not room.is_of(layer):
        room = None
    if room is not None and room.takes(new):
        past = room.keys.size(2)
        return Place(layer, kind, ops.Cache(room.key_memory, room.value_memory, past), past + new)
    if not layer.is_initialized:
        from trifuse._transformers_versions import initialize_cache_layer

        initialize_cache_layer(layer, x.new_empty((B, heads, 0, head_dim)))
    keys, values = layer.keys, layer.values
    held = keys.shape[2] if keys.numel() else 0
    if held and not all(_fits(t, (B, heads, held, head_dim), x) for t in (keys, values)):
        return None
    if kind == _STATIC:
        past = int(layer.cumulative_length)
        if past + new > held or not _writable(keys, values):
            return None
        return Place(layer, kind, ops.Cache(keys, values, past), held)
    # Half again as much as is needed, so that the copies of a whole text add up to a few times its
    # length. A layer that holds what others put there may be changed by them before each step.
    needed = held + new
    reserved = needed if held and room is None else max(needed + needed // 2, _LEAST)
    shape = B, heads, reserved, head_dim
    memory = x.new_empty(shape), x.new_empty(shape)
    if held:
        for larger, t in zip(memory, (keys, values), strict=True):
            larger[:, :, :held] = t
    return Place(layer, kind, ops.Cache(*memory, held), needed)


_LEAST = 64  # tokens


def _fits(t: Tensor, shape: tuple[int, ...], x: Tensor) -> bool:
    return t.shape == shape and t.dtype == x.dtype and t.device == x.device and not t.requires_grad


def _writable(*tensors: Tensor) -> bool:
    """Whether torch lets tensors be changed now."""
    return torch.is_inference_mode_enabled() or not any(t.is_inference() for t in tensors)


def _slides(layer: Any) -> bool:
    """Whether a layer drops the tokens before its window, and keeps some."""
    return layer.sliding_window > 1 and not getattr(layer, "record_past", False)


# Recognition --------------------------------------------------------------------------------------

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
    """The name of a cache layer's class, if it is one of transformers' that is known."""
    cls = type(layer)
    if cls.__module__ != "transformers.cache_utils" or "update" in vars(layer):
        return None
    name = cls.__name__
    return name if name in _UPDATES and _is_update_of(name, cls.update) else None


@functools.cache
def _is_update_of(name: str, update: Any) -> bool:
    return code.body(update) in [*map(code.normal, _UPDATES[name])]


def _is_known(cache: Any) -> bool:
    """Whether a cache hands keys and values over to its layers, and does nothing else."""
    return "update" not in vars(cache) and _hands_over(getattr(type(cache), "update", None))


# The statements of a cache's ``update`` but those for its offloading.
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
