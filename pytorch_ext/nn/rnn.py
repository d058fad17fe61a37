"""``torch.nn.RNN`` and ``RNNCell`` on the fused operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trifuse.nn import sizes
from trifuse.nn.lstm import RecurrentWithoutCells
from trifuse.nn.quantization import Unquantizable
from trifuse.ops import rnn as ops


@sizes.checked("input_size", "hidden_size")
class RNN(RecurrentWithoutCells):
    """``torch.nn.RNN`` on the fused operator.

    The arguments, the parameters' names and their initialisation are torch's own. Both directions
    of a layer run in one call; weights may be replaced by plain tensors, as weight drop does.
    Dropout between layers uses trifuse's generator on a CPU.

    Raises:
        ValueError: ``nonlinearity`` is neither "tanh" nor "relu", or a size is above 2^60.
    """

    qconfig = Unquantizable(nn.RNN)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        mode = "RNN_RELU" if ops.is_relu(nonlinearity) else "RNN_TANH"
        super().__init__(
            mode,
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
        self.nonlinearity = nonlinearity

    def _layer(
        self, k: int, x: Tensor, states: list[Tensor | None], lengths: Tensor | None
    ) -> list[Tensor]:
        parameters = self._parameters_of(ops.Parameters, k)
        # torch's module uses its mode, even if its attribute ``nonlinearity`` is changed later.
        options = {"nonlinearity": "relu" if self.mode == "RNN_RELU" else "tanh"}
        return list(
            ops.layer(x, states[0], parameters, lengths, reverse=self._reverse(), **options)
        )


@sizes.checked("input_size", "hidden_size")
class RNNCell(nn.RNNCell):
    """``torch.nn.RNNCell`` on the fused operator; the constructor is torch's own.

    Raises:
        ValueError: a size is above 2^60.
    """

    qconfig = Unquantizable(nn.RNNCell)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """One step. Shapes as in torch.

        Raises:
            ValueError: ``nonlinearity`` is neither "tanh" nor "relu" (``trifuse.ArgumentError``,
                also a ``RuntimeError``, as in torch); or as :func:`trifuse.rnn_cell`.
        """
        return ops.rnn_cell(
            input,
            hx,
            self.weight_ih,
            self.weight_hh,
            self.bias_ih,
            self.bias_hh,
            nonlinearity=self.nonlinearity,
        )
