"""Functions that rotate queries and keys by their positions, such as ``apply_rotary_pos_emb``.

transformers has a copy in nearly every family with rotary embeddings. A function is recognised by
its statements and by those of the function that it calls, ``rotate_half`` as a rule.
:func:`trifuse.ops.rotary.rotate` computes the same in one pass over queries and one over keys.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifuse.ops import rotary
from trifuse.recipes import code


class Rotation(NamedTuple):
    """This describes a function that rotates, as its statements show it.

    The function's parameters are the tensors that it rotates, then ``cos`` and ``sin``, or ``sin``
    and ``cos``. Of the others, only ``unsqueeze_dim`` has an effect.
    """

    in_float32: bool = False  # whether it computes in float32, and rounds only its results
    keeps_dtype: bool = False  # whether its results have the dtype of what it rotates in any case
    partial: bool = False  # whether heads may have more features than there are cosines
    unsqueeze_dim: int | None = None  # where cos and sin get a dimension; None: as the caller says
    tensors: int = 2  # how many it rotates
    interleaved: bool = False  # whether neighbouring features are a pair
    per_pair: bool = False  # whether it uses one cosine for each pair
    repeated: bool = True  # whether ``cos`` still has a column for each feature
    helper: str = "rotate_half"  # the function that it calls
    sine_first: bool = False  # whether ``sin`` comes before ``cos``
    last: bool = False  # whether it rotates only as many tokens as have cosines, the last ones

    def takes(self, x: Tensor, cos: Tensor) -> bool:
        """Whether :func:`trifuse.ops.rotary.rotate` rounds as the function does."""
        if self.in_float32 and x.dtype == torch.float64:
            return False
        if not self.keeps_dtype and cos.dtype != x.dtype:
            return False  # the result would have the wider dtype
        return self.partial or cos.shape[-1] * (1 if self.repeated else 2) == x.shape[-1]


def rotation_of(function: Any) -> Rotation | None:
    """Return what a function is, if it rotates in a known way; None for anything else."""
    if not inspect.isfunction(function):
        return None
    known = _ROTATIONS.get(code.body_if_function(function))
    if known is None:
        return None
    return _with_helper(known, code.body_if_function(scope_of(function).get(known.helper)))


@functools.cache
def _with_helper(known: Rotation, helper: str | None) -> Rotation | None:
    """Return the rotation whose helper has these statements; None if they aren't known."""
    interleaved = _HELPERS[known.helper].get(helper)
    if interleaved is None or (known.per_pair and known.repeated and not interleaved):
        return None
    return known._replace(interleaved=interleaved)


@functools.cache
def scope_of(function: Any) -> dict[str, Any]:
    """Return the globals of a function, which may be wrapped."""
    scope: dict[str, Any] = inspect.unwrap(function).__globals__
    return scope


def uses_any(method: Any) -> bool:
    """Whether a method may call such a function."""
    method = inspect.unwrap(method)
    names = method.__code__.co_names
    return any(rotation_of(method.__globals__.get(name)) is not None for name in names)


def rotate(function: Any, *args: Tensor, **options: Any) -> Any:
    """Return ``function(*args, **options)``, computed in one pass if the function is known."""
    # Dynamo can't read the function's source. It traces the operations, which Inductor fuses.
    known = None if torch.compiler.is_compiling() else rotation_of(function)
    rotated = None
    if known is not None:
        rotated = _rotate_last(known, *args) if known.last else _rotate(known, *args, **options)
    if rotated is None:
        return function(*args, **options)
    return tuple(rotated) if len(rotated) > 1 else rotated[0]


def _rotate(known: Rotation, *args: Tensor, **options: Any) -> list[Tensor] | None:
    """Return what a known function does, by the kernel; None if that can't serve the call."""
    if len(args) != known.tensors + 2 or not all(isinstance(each, Tensor) for each in args):
        return None
    *given, cos, sin = args
    if known.sine_first:
        cos, sin = sin, cos
    if not all(known.takes(x, cos) for x in given):
        return None
    dim = known.unsqueeze_dim
    if dim is None:
        dim = options.get("unsqueeze_dim", 1)
    if known.per_pair and known.repeated:
        cos, sin = (each[..., : each.shape[-1] // 2] for each in (cos, sin))
    found = [
        rotary.rotate(
            x,
            cos,
            sin,
            dim,
            in_float32=known.in_float32,
            interleaved=known.interleaved,
            per_pair=known.per_pair,
        )
        for x in given
    ]
    rotated = [x for x in found if x is not None]
    return rotated if len(rotated) == len(found) else None


def _rotate_last(known: Rotation, *args: Tensor) -> list[Tensor] | None:
    """As :func:`_rotate`, if only the last tokens are rotated, as many as there are cosines."""
    if len(args) != known.tensors + 2 or not all(isinstance(each, Tensor) for each in args):
        return None
    *given, cos, sin = args
    tokens = sin.shape[-2] if sin.dim() > 1 else 0
    before = [x.shape[-2] - tokens if x.dim() > 1 else -1 for x in given]
    if any(count < 0 for count in before):
        return None
    parts = [x.split((n, tokens), dim=-2) for x, n in zip(given, before, strict=True)]
    rotated = _rotate(known._replace(last=False, unsqueeze_dim=0), *(x for _, x in parts), cos, sin)
    if rotated is None:
        return None
    return [torch.cat((first, x), dim=-2) for (first, _), x in zip(parts, rotated, strict=True)]


# The statements -----------------------------------------------------------------------------------

_HALVES = """
x1 = x[..., : x.shape[-1] // 2]
x2 = x[..., x.shape[-1] // 2 :]
return torch.cat((-x2, x1), dim=-1)
"""
_NEIGHBOURS = """
x1 = x[..., 0::2]
x2 = x[..., 1::2]
return torch.stack((-x2, x1), dim=-1).flatten(-2)
"""
_COHERES_NEIGHBOURS = """
x1 = x[..., ::2]
x2 = x[..., 1::2]
rot_x = torch.stack([-x2, x1], dim=-1).flatten(-2)
return rot_x
"""
_GPT_JS_NEIGHBOURS = """
x1 = x[:, :, :, ::2]
x2 = x[:, :, :, 1::2]
x = torch.stack((-x2, x1), dim=-1)
return x.flatten(-2)
"""
_GPT_OSSES_HALVES = """
first_half, second_half = torch.chunk(x, 2, dim=-1)
first_ = first_half * cos - second_half * sin
second_ = second_half * cos + first_half * sin
return torch.cat((first_, second_), dim=-1)
"""
_PRIVACY_FILTERS_NEIGHBOURS = """
first_half, second_half = x[..., ::2], x[..., 1::2]
first_ = first_half * cos - second_half * sin
second_ = second_half * cos + first_half * sin
return torch.stack((first_, second_), dim=-1).flatten(-2)
"""
# By the name of the function that is called, and its statements: whether neighbouring features are
# a pair.
_HELPERS: dict[str, dict[str | None, bool]] = {
    "rotate_half": {
        code.normal(_HALVES): False,
        code.normal(_NEIGHBOURS): True,
        code.normal(_COHERES_NEIGHBOURS): True,
    },
    "rotate_every_two": {code.normal(_GPT_JS_NEIGHBOURS): True},
    "_apply_rotary_emb": {
        code.normal(_GPT_OSSES_HALVES): False,
        code.normal(_PRIVACY_FILTERS_NEIGHBOURS): True,
    },
}
# Several functions have these parts in common.
_UNSQUEEZED = """
cos = cos.unsqueeze(unsqueeze_dim)
sin = sin.unsqueeze(unsqueeze_dim)
"""
_REPEATED = """
cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
"""
_ROTATED = """
q_embed = (q * cos) + (rotate_half(q) * sin)
k_embed = (k * cos) + (rotate_half(k) * sin)
"""
_SPLIT = """
rotary_dim = cos.shape[-1]
q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
"""
_PARTLY_ROTATED = f"""
{_SPLIT}
q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
q_embed = torch.cat([q_embed, q_pass], dim=-1)
k_embed = torch.cat([k_embed, k_pass], dim=-1)
return q_embed, k_embed
"""

_LLAMAS = f"""
{_UNSQUEEZED}
{_ROTATED}
return q_embed, k_embed
"""
_MODERN_BERTS = f"""
original_dtype = q.dtype
{_UNSQUEEZED}
q_embed = (q.float() * cos) + (rotate_half(q.float()) * sin)
k_embed = (k.float() * cos) + (rotate_half(k.float()) * sin)
return q_embed.to(original_dtype), k_embed.to(original_dtype)
"""
_OLMOS = f"""
q_type, k_type = q.dtype, k.dtype
{_UNSQUEEZED}
{_ROTATED}
return q_embed.to(q_type), k_embed.to(k_type)
"""
_QWEN_VLS = f"""
orig_q_dtype = q.dtype
orig_k_dtype = k.dtype
q, k = q.float(), k.float()
cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
{_ROTATED}
q_embed = q_embed.to(orig_q_dtype)
k_embed = k_embed.to(orig_k_dtype)
return q_embed, k_embed
"""
_GPT_NEOXS = _UNSQUEEZED + _PARTLY_ROTATED
_PHI_3S = f"""
{_UNSQUEEZED}
{_SPLIT}
q_embed = torch.cat([(q_rot * cos) + (rotate_half(q_rot) * sin), q_pass], dim=-1)
k_embed = torch.cat([(k_rot * cos) + (rotate_half(k_rot) * sin), k_pass], dim=-1)
return q_embed, k_embed
"""
_NEMOTRONS = f"""
{_UNSQUEEZED}
rot_dim = cos.shape[-1]
q, q_pass = q[..., :rot_dim], q[..., rot_dim:]
k, k_pass = k[..., :rot_dim], k[..., rot_dim:]
{_ROTATED}
return torch.cat((q_embed, q_pass), dim=-1), torch.cat((k_embed, k_pass), dim=-1)
"""
_GEMMA_3NS = f"""
{_UNSQUEEZED}
return (x * cos) + (rotate_half(x) * sin)
"""
_GLMS = _UNSQUEEZED + _REPEATED + _PARTLY_ROTATED
_HELIUMS = f"""
{_UNSQUEEZED}
{_REPEATED}
{_ROTATED}
return q_embed, k_embed
"""
_GPT_JS = """
sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
return (tensor * cos) + (rotate_every_two(tensor) * sin)
"""
_ERNIES = f"""
original_dtype = q.dtype
{_UNSQUEEZED}
{_REPEATED}
q_embed = (q.float() * cos) + (rotate_half(q).float() * sin)
k_embed = (k.float() * cos) + (rotate_half(k).float() * sin)
return q_embed.to(original_dtype), k_embed.to(original_dtype)
"""
_COHERES = f"""
dtype = q.dtype
q = q.float()
k = k.float()
{_UNSQUEEZED}
{_ROTATED}
return q_embed.to(dtype=dtype), k_embed.to(dtype=dtype)
"""
_GPT_OSSES = f"""
{_UNSQUEEZED}
q_embed = _apply_rotary_emb(q, cos, sin)
k_embed = _apply_rotary_emb(k, cos, sin)
return q_embed, k_embed
"""
_DINO_V3S = """
num_tokens = q.shape[-2]
num_patches = sin.shape[-2]
num_prefix_tokens = num_tokens - num_patches
q_prefix_tokens, q_patches = q.split((num_prefix_tokens, num_patches), dim=-2)
k_prefix_tokens, k_patches = k.split((num_prefix_tokens, num_patches), dim=-2)
q_patches = (q_patches * cos) + (rotate_half(q_patches) * sin)
k_patches = (k_patches * cos) + (rotate_half(k_patches) * sin)
q = torch.cat((q_prefix_tokens, q_patches), dim=-2)
k = torch.cat((k_prefix_tokens, k_patches), dim=-2)
return q, k
"""
_ROTATIONS: dict[str | None, Rotation] = {
    code.normal(_LLAMAS): Rotation(),
    code.normal(_MODERN_BERTS): Rotation(in_float32=True, keeps_dtype=True),
    code.normal(_OLMOS): Rotation(keeps_dtype=True),
    code.normal(_QWEN_VLS): Rotation(in_float32=True, keeps_dtype=True, unsqueeze_dim=-2),
    code.normal(_GPT_NEOXS): Rotation(partial=True),
    code.normal(_PHI_3S): Rotation(partial=True),
    code.normal(_NEMOTRONS): Rotation(partial=True),
    code.normal(_GEMMA_3NS): Rotation(tensors=1),
    code.normal(_GLMS): Rotation(partial=True, per_pair=True),
    code.normal(_HELIUMS): Rotation(per_pair=True),
    code.normal(_GPT_JS): Rotation(
        tensors=1,
        unsqueeze_dim=2,
        per_pair=True,
        repeated=False,
        helper="rotate_every_two",
        sine_first=True,
    ),
    code.normal(_ERNIES): Rotation(in_float32=True, keeps_dtype=True, per_pair=True),
    code.normal(_COHERES): Rotation(in_float32=True, keeps_dtype=True),
    code.normal(_DINO_V3S): Rotation(last=True),
    code.normal(_GPT_OSSES): Rotation(per_pair=True, repeated=False, helper="_apply_rotary_emb"),
}
