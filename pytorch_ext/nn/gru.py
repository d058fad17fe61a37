"""``torch.nn.GRU`` and ``GRUCell`` on the fused operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trifuse.nn import sizes
from trifuse.nn.lstm import RecurrentWithoutCells
from trifuse.nn.quantization import Unquantizable
from trifuse.ops import _checks
from trifuse.ops import gru as ops


@sizes.checked("input_size", "hidden_size")
class GRU(RecurrentWithoutCells):
    """``torch.nn.GRU`` on the fused operator.

    The arguments, the parameters' names and their initialisation are torch's own. Both directions
    of a layer run in one call; weights may be replaced by plain tensors, as weight drop does.
    Dropout between layers uses trifuse's generator on a CPU.

    Args:
        linear_before_reset: as in :func:`trifuse.gru`; False is the GRU as first published.

    Raises:
        TypeError: ``linear_before_reset`` is not a bool.
        ValueError: a size is above 2^60.
    """

    qconfig = Unquantizable(nn.GRU)

    # Also on the class, because fuse changes the class of a torch.nn.GRU and calls no __init__.
    linear_before_reset = True

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        linear_before_reset: bool = True,
    ) -> None:
        super().__init__(
            "GRU",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
        )
        self.linear_before_reset = _checks.flag("linear_before_reset", linear_before_reset)

    def extra_repr(self) -> str:
        return super().extra_repr() + _repr_of(self)

    def _layer(
        self, k: int, x: Tensor, states: list[Tensor | None], lengths: Tensor | None
    ) -> list[Tensor]:
        parameters = self._parameters_of(ops.Parameters, k)
        return list(
            ops.layer(
                x,
                states[0],
                parameters,
                lengths,
                reverse=self._reverse(),
                linear_before_reset=self.linear_before_reset,
            )
        )


@sizes.checked("input_size", "hidden_size")
class GRUCell(nn.GRUCell):
    """``torch.nn.GRUCell`` on the fused operator.

    Args:
        input_size, hidden_size, bias, device, dtype: as in torch.
        linear_before_reset: as in :func:`trifuse.gru`; False is the GRU as first published.

    Raises:
        TypeError: ``linear_before_reset`` is not a bool.
        ValueError: a size is above 2^60.
    """

    qconfig = Unquantizable(nn.GRUCell)

    linear_before_reset = True  # also on the class, as in GRU

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        linear_before_reset: bool = True,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.linear_before_reset = _checks.flag("linear_before_reset", linear_before_reset)

    def extra_repr(self) -> str:
        return super().extra_repr() + _repr_of(self)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """One step. Shapes as in torch."""
        return ops.gru_cell(
            input,
            hx,
            self.weight_ih,
            self.weight_hh,
            self.bias_ih,
            self.bias_hh,
            linear_before_reset=self.linear_before_reset,
        )


def _repr_of(module: GRU | GRUCell) -> str:
    return "" if module.linear_before_reset else ", linear_before_reset=False"
