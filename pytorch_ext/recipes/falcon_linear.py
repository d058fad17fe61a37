"""Falcon's linear layer on trifuse's product.

transformers computes ``input @ weight.T``, then adds the bias, and rounds twice. The product rounds
once.
"""

from __future__ import annotations

from torch import Tensor
from transformers.models.falcon import modeling_falcon

from trifuse.nn.linear import FROZEN, Frozen, OnProduct, project
from trifuse.nn.quantization import Unquantizable
from trifuse.recipes import known_statements


class FalconLinear(OnProduct, modeling_falcon.FalconLinear):
    """Falcon's linear layer on trifuse's product where that is faster (CPU only).

    The parameters and their names are transformers' own.
    """

    qconfig = Unquantizable(modeling_falcon.FalconLinear)

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b, from (..., in_features) to (..., out_features)."""
        return project(self, "weight", input, self.weight, self.bias)


class FrozenFalconLinear(Frozen, FalconLinear):
    """A :class:`FalconLinear` whose weight is kept only in its packed form."""


FROZEN[FalconLinear] = FrozenFalconLinear

_FORWARD = known_statements.normal("""
hidden_states = input @ self.weight.T
if self.bias is None:
    return hidden_states
return hidden_states + self.bias
""")


def is_known() -> bool:
    """Whether the code of transformers' class is what ours computes."""
    return known_statements.of_class(modeling_falcon.FalconLinear) == _FORWARD
