"""``torch.nn.GRU`` and ``GRUCell`` on the fused operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trifuse.nn.lstm import RecurrentWithoutCells
from trifuse.nn.quantization import Unquantizable
from trifuse.ops import gru as ops


class GRU(RecurrentWithoutCells):
    """``torch.nn.GRU`` on the fused operator.

    The arguments, the parameters' names and their initialisation are torch's own. Both directions
    of a layer run in one call; weights may be replaced by plain tensors, as weight drop does.
    Dropout between layers uses trifuse's generator on a CPU.
    """

    qconfig = Unquantizable(nn.GRU)

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
    ) -> None:
        super().__init__(
            "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype,
        )  # fmt: skip

    def _layer(
        self, k: int, x: Tensor, states: list[Tensor | None], lengths: Tensor | None
    ) -> list[Tensor]:
        parameters = self._parameters_of(ops.Parameters, k)
        return list(ops.layer(x, states[0], parameters, lengths, reverse=self._reverse()))


class GRUCell(nn.GRUCell):
    """``torch.nn.GRUCell`` on the fused operator; the constructor is torch's own."""

    qconfig = Unquantizable(nn.GRUCell)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """One step. Shapes as in torch."""
        return ops.gru_cell(input, hx, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
