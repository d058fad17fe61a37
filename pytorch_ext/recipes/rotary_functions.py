"""Functions that rotate queries and keys by their positions, such as ``apply_rotary_pos_emb``.

transformers has a copy in nearly every family with rotary embeddings. A function is recognised by
its statements and by those of ``rotate_half``, which it calls. :func:`trifuse.ops.rotary.rotate`
computes the same in one pass over queries and one over keys.
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
    """What the statements of such a function show.

    Its parameters are the tensors that it rotates, then ``cos`` and ``sin``. Of the others, only
    ``unsqueeze_dim`` has an effect.
    """

    in_float32: bool = False  # whether it computes in float32, and rounds only its results
    keeps_dtype: bool = False  # whether its results have the dtype of what it rotates in any case
    partial: bool = False  # whether heads may have more features than there are cosines
    unsqueeze_dim: int | None = None  # where cos and sin get a dimension; None: as the caller says
    tensors: int = 2  # how many it rotates

    def takes(self, x: Tensor, cos: Tensor) -> bool:
        """Whether :func:`trifuse.ops.rotary.rotate` rounds as the function does."""
        if self.in_float32 and x.dtype == torch.float64:
            return False
        if not self.keeps_dtype and cos.dtype != x.dtype:
            return False  # the result would have the wider dtype
        return self.partial or cos.shape[-1:] == x.shape[-1:]


def rotation_of(function: Any) -> Rotation | None:
    """Return what a function is, if it rotates in a known way; None for anything else."""
    if not inspect.isfunction(function):
        return None
    half = inspect.unwrap(function).__globals__.get("rotate_half")
    if _statements(half) != _HALVES or (statements := _statements(function)) is None:
        return None
    return _ROTATIONS.get(statements)


@functools.cache
def _statements(function: Any) -> str | None:
    """The statements of a function in normal form; None if they can't be read."""
    return code.body(function) if inspect.isfunction(function) else None


def uses_any(method: Any) -> bool:
    """Whether a method may call such a function."""
    method = inspect.unwrap(method)
    names = method.__code__.co_names
    return any(rotation_of(method.__globals__.get(name)) is not None for name in names)


def rotate(function: Any, *args: Tensor, **options: Any) -> Any:
    """Return ``function(*args, **options)``, computed in one pass if the function is known."""
    # Dynamo can't read the function's source. It traces the operations, which Inductor fuses.
    known = None if torch.compiler.is_compiling() else rotation_of(function)
    if known is None:
        return function(*args, **options)
    *given, cos, sin = args
    if not all(isinstance(x, Tensor) and known.takes(x, cos) for x in given):
        return function(*args, **options)
    dim = known.unsqueeze_dim
    if dim is None:
        dim = options.get("unsqueeze_dim", 1)
    rotated = [rotary.rotate(x, cos, sin, dim, in_float32=known.in_float32) for x in given]
    if any(x is None for x in rotated):
        return function(*args, **options)
    return tuple(rotated) if known.tensors > 1 else rotated[0]


# The statements -----------------------------------------------------------------------------------

_HALVES = code.normal("""
x1 = x[..., : x.shape[-1] // 2]
x2 = x[..., x.shape[-1] // 2 :]
return torch.cat((-x2, x1), dim=-1)
""")
_LLAMAS = """
cos = cos.unsqueeze(unsqueeze_dim)
sin = sin.unsqueeze(unsqueeze_dim)
q_embed = (q * cos) + (rotate_half(q) * sin)
k_embed = (k * cos) + (rotate_half(k) * sin)
return q_embed, k_embed
"""
_MODERN_BERTS = """
original_dtype = q.dtype
cos = cos.unsqueeze(unsqueeze_dim)
sin = sin.unsqueeze(unsqueeze_dim)
q_embed = (q.float() * cos) + (rotate_half(q.float()) * sin)
k_embed = (k.float() * cos) + (rotate_half(k.float()) * sin)
return q_embed.to(original_dtype), k_embed.to(original_dtype)
"""
_OLMOS = """
q_type, k_type = q.dtype, k.dtype
cos = cos.unsqueeze(unsqueeze_dim)
sin = sin.unsqueeze(unsqueeze_dim)
q_embed = (q * cos) + (rotate_half(q) * sin)
k_embed = (k * cos) + (rotate_half(k) * sin)
return q_embed.to(q_type), k_embed.to(k_type)
"""
_QWEN_VLS = """
orig_q_dtype = q.dtype
orig_k_dtype = k.dtype
q, k = q.float(), k.float()
cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
q_embed = (q * cos) + (rotate_half(q) * sin)
k_embed = (k * cos) + (rotate_half(k) * sin)
q_embed = q_embed.to(orig_q_dtype)
k_embed = k_embed.to(orig_k_dtype)
return q_embed, k_embed
"""
_GPT_NEOXS = """
cos = cos.unsqueeze(unsqueeze_dim)
sin = sin.unsqueeze(unsqueeze_dim)
rotary_dim = cos.shape[-1]
q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
q_embed = torch.cat([q_embed, q_pass], dim=-1)
k_embed = torch.cat([k_embed, k_pass], dim=-1)
return q_embed, k_embed
"""
_GEMMA_3NS = """
cos = cos.unsqueeze(unsqueeze_dim)
sin = sin.unsqueeze(unsqueeze_dim)
return (x * cos) + (rotate_half(x) * sin)
"""
_ROTATIONS = {
    code.normal(_LLAMAS): Rotation(),
    code.normal(_MODERN_BERTS): Rotation(in_float32=True, keeps_dtype=True),
    code.normal(_OLMOS): Rotation(keeps_dtype=True),
    code.normal(_QWEN_VLS): Rotation(in_float32=True, keeps_dtype=True, unsqueeze_dim=-2),
    code.normal(_GPT_NEOXS): Rotation(partial=True),
    code.normal(_GEMMA_3NS): Rotation(tensors=1),
}
