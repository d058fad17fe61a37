"""Biases of keys, such as ALiBi's, need no matrix of all pairs.

They are the same for all queries but differ between heads. Added to a mask of all pairs, they would
make a matrix for each head. Biases that grow evenly are biases by distance instead, and most others
can become one more feature of the keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trifuse import spellings
from trifuse.ops import _modes
from trifuse.written_out.parts import Form


def biases_by_distance(by_key: Tensor, form: Form) -> Tensor | None:
    """Return biases of keys that grow evenly, as ALiBi's, as biases by distance; or None.

    The softmax is the same with m · (j - i) as with m · j + c. So they need not be combined with
    the mask of all pairs into a matrix. Keys that no query attends to may have any small bias.

    Args:
        by_key: (B or 1, H, 1, Lk).
        form: that of the attention; it decides which keys are attended to.

    Returns:
        (B or 1, H, Lq + Lk - 1). None if there is nothing to gain, if the biases have gradients or
        don't grow evenly, or if reading them would wait for a device.
    """
    bias, Lq, Lk = form.bias, form.query.shape[-2], form.key.shape[-2]
    masks = [x for x in (bias, form.mask) if x is not None and x.shape[-2] > 1]
    if not masks or len(form.leading) != 2 or by_key.dim() != 4 or by_key.shape[1] == 1:
        return None
    if not is_readable(by_key) or Lk <= 1 or by_key.shape[-1] != Lk or not are_small(by_key):
        return None
    seen = torch.ones(1, 1, Lk, dtype=torch.bool)
    for mask in masks:
        takes_part = mask if mask.dtype == torch.bool else mask.detach() > spellings.LOW
        seen = seen & takes_part.expand(*takes_part.shape[:-1], Lk).any(-2)
    batch = torch.broadcast_shapes(seen.shape[:1], by_key.shape[:1])
    seen = seen.any(1).expand(*batch, Lk)  # of any head
    values, keys = by_key.detach()[:, :, 0].double(), torch.arange(Lk)
    first = keys.masked_fill(~seen, Lk - 1).amin(-1)[:, None, None]
    last = keys.masked_fill(~seen, 0).amax(-1)[:, None, None]
    values = values.expand(seen.shape[0], -1, -1)
    ends = [values.gather(-1, end.expand(-1, values.shape[1], 1)) for end in (first, last)]
    slopes = (ends[1] - ends[0]) / (last - first).clamp(min=1)
    off = (ends[0] + slopes * (keys - first) - values).masked_fill(~seen[:, None], 0).abs()
    inside = values.where(seen[:, None], ends[0])
    spread = inside.amax(-1, keepdim=True) - inside.amin(-1, keepdim=True)
    if not (off <= 2 * torch.finfo(by_key.dtype).eps * spread).all():
        return None
    distances = torch.arange(Lq + Lk - 1) - (Lq - 1)
    return (slopes * distances).to(torch.promote_types(by_key.dtype, torch.float32))


def fits_a_feature(by_key: Tensor, form: Form) -> bool:
    """Whether biases of keys can become a feature of the keys, and would otherwise be a matrix."""
    query, rows = form.query, [x for x in (form.bias, form.mask) if x is not None]
    if len(form.leading) != 2 or by_key.dim() != 4 or by_key.shape[1] == 1:
        return False
    Lk = form.key.shape[-2]
    if all(x.shape[-2] == 1 for x in rows) or Lk == 0 or by_key.shape[-1] != Lk:
        return False
    if form.softcap is not None or form.packed is not None:
        return False
    if query.device.type != "cpu" and _widens_tiles(query.shape[-1]):
        return False  # the features beside the one would cost more than a matrix
    # 16 bits hold the biases as they are, beside the reciprocal of the scale.
    exact = _is_power_of_two(form.scale) and by_key.dtype == query.dtype
    return exact or query.dtype in (torch.float32, torch.float64)


def _widens_tiles(E: int) -> bool:
    """Whether a GPU's tiles, whose width is a power of 2, would be wider with 8 more features."""
    return (E - 1).bit_length() != (E + 7).bit_length()


def _is_power_of_two(scale: float) -> bool:
    return math.frexp(scale)[0] == 0.5


def with_feature(
    query: Tensor, key: Tensor, by_key: Tensor, scale: float
) -> tuple[Tensor, Tensor, float]:
    """Return queries, keys and a scale whose scores have the biases of the keys added to them.

    The new feature comes last, so its product, the largest, is added once, to the sum of the
    others. Kernels read rows in groups of 8 numbers, so the other features added with it are 0.
    """
    if not _is_power_of_two(scale):  # 1 / scale would be rounded, and so would each bias
        query, scale = query * scale, 1.0
    ones = query.new_zeros(8)
    ones[0] = 1 / scale
    if key.dtype in (torch.float32, torch.float64):
        by_key = _nearer_to_zero(by_key, key.dtype)
    biases = nn.functional.pad(by_key.mT.to(key.dtype), (0, 7)).expand(*key.shape[:-1], 8)
    return (
        torch.cat([query, ones.expand(*query.shape[:-1], 8)], -1),
        torch.cat([key, biases], -1),
        scale,
    )


def of_each_head(x: Tensor, heads: int) -> Tensor:
    """Return keys or values with one head for each query head."""
    if x.shape[1] == 1:
        return x.expand(-1, heads, -1, -1)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _nearer_to_zero(by_key: Tensor, dtype: torch.dtype) -> Tensor:
    """Subtract from each row its bias nearest to 0, if all biases of the row have one sign.

    The softmax stays the same, no bias grows in magnitude, and scores lose fewer bits to the
    biases.
    """
    by_key = by_key.to(torch.promote_types(by_key.dtype, dtype))
    read = by_key.detach()
    least = read.amin(-1, keepdim=True).clamp(min=0)
    most = read.amax(-1, keepdim=True).clamp(spellings.LOW, 0)  # below LOW, biases leave keys out
    return by_key - (least + most)


def are_small(biases: Tensor) -> bool:
    """Whether a number as low as :data:`trifuse.spellings.LOW` stays the same with them added."""
    return bool((biases.abs() < -spellings.LOW).all())


def is_readable(by_key: Tensor) -> bool:
    """Whether code may depend on the numbers, of which none has a gradient."""
    return not by_key.requires_grad and _modes.is_readable(by_key)
