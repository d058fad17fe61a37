"""Fused counterparts of :mod:`trifuse.models.elmo`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trifuse.models import elmo
from trifuse.models.elmo import LSTMState
from trifuse.nn.linear import is_intercepted, linear_activation
from trifuse.ops import _modes
from trifuse.ops.lstm import lstm


class ProjectedLSTM(elmo.ProjectedLSTM):
    """The recurrence on :func:`trifuse.lstm`.

    Attributes:
        recompute: as in :func:`trifuse.lstm`. It may be set on a module at any time.
    """

    recompute = False  # a class attribute: fuse changes modules' classes and calls no __init__

    def forward(
        self, x: Tensor, lengths: Tensor | None = None, state: LSTMState | None = None
    ) -> tuple[Tensor, LSTMState]:
        """As :meth:`trifuse.models.elmo.ProjectedLSTM.forward`."""
        state = self._check(x, lengths, state)
        if lengths is not None and not lengths.is_floating_point():
            lengths = lengths.long()  # the operator takes no narrower integers than int32
        return lstm(
            x,
            state,
            self.weight_ih,
            self.weight_hh,
            self.bias,
            None,
            self.weight_hr,
            lengths=lengths,
            batch_first=True,
            reverse=self.reverse,
            cell_clip=self.cell_clip,
            proj_clip=self.proj_clip,
            forget_bias=self.forget_bias,
            recompute=self.recompute,
        )


class Highway(elmo.Highway):
    """The layer with ReLU fused into its product; one pass mixes input and transform."""

    def forward(self, x: Tensor) -> Tensor:
        """As :meth:`trifuse.models.elmo.Highway.forward`."""
        transformed = linear_activation(self.transform, x, "relu")
        gate = torch.sigmoid(self.carry(x))
        dtype = torch.promote_types(x.dtype, gate.dtype)  # under autocast they may differ
        return torch.lerp(x.to(dtype), transformed.to(dtype), gate.to(dtype))


class CharacterEncoder(elmo.CharacterEncoder):
    """The encoder; on a CPU it encodes each distinct word of a batch once.

    Of the padding at the end of all words, it reads only as much as the widest filter covers,
    because further windows are identical and don't change the maximum.
    """

    def forward(self, char_ids: Tensor) -> Tensor:
        """As :meth:`trifuse.models.elmo.CharacterEncoder.forward`."""
        if (
            char_ids.device.type != "cpu"  # on a GPU the host would wait for the number of words
            or char_ids.numel() == 0
            or torch.compiler.is_compiling()
            or _modes.transform_active()
            or any(is_intercepted(module) for module in self.modules() if module is not self)
        ):
            return super().forward(char_ids)
        words, place = torch.unique(char_ids.flatten(0, 1), dim=0, return_inverse=True)
        changes = (words[:, 1:] != words[:, :-1]).any(0).nonzero()
        ends = int(changes[-1]) + 1 if len(changes) else 0  # from here on all is padding
        convolutions: Any = self.convolutions
        widest = max(convolution.kernel_size[0] for convolution in convolutions)
        distinct = super().forward(words[None, :, : ends + widest])[0]
        return F.embedding(place, distinct).unflatten(0, char_ids.shape[:2])
