"""Each kind of module that ``trifuse.fuse`` supports, and the class that it gets.

A function named ``swap_...`` swaps a module in place. It returns the change, or None if there is
nothing to do, and raises :class:`CannotSwap` if the module has to stay as it is.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, cast

from torch import nn as torch_nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from trifuse import backends, nn
from trifuse.fusing.attention_choice import swap_transformers_attention
from trifuse.fusing.report import UNPADDED, FuseReport
from trifuse.fusing.steps import Absent, CannotSwap, Change, Step, Swap, qualified, retype
from trifuse.models import bert, elmo, transformer
from trifuse.nn.linear import OnProduct
from trifuse.ops import _linear_choice
from trifuse.recipes import (
    disentangled,
    embeddings,
    own_biases,
    stacks,
    sublayers,
    window_biases,
    written_out,
)


def swaps_of(
    model: torch_nn.Module, unpad: bool, freeze: bool, report: FuseReport
) -> dict[type, Swap]:
    """Map each class to the function that swaps its instances, those of subclasses included."""
    classes: dict[type[torch_nn.Module], type[torch_nn.Module]] = {
        torch_nn.MultiheadAttention: nn.MultiheadAttention,
        torch_nn.TransformerEncoderLayer: nn.TransformerEncoderLayer,
        torch_nn.TransformerDecoderLayer: nn.TransformerDecoderLayer,
        bert.SoftmaxAttention: nn.SoftmaxAttention,
        transformer.SoftmaxAttention: nn.SoftmaxAttention,
        transformer.AddNorm: nn.AddNorm,
        transformer.Products: nn.Products,
        bert.BertEmbeddings: nn.BertEmbeddings,
        bert.BertIntermediate: nn.BertIntermediate,
        bert.BertSelfOutput: nn.BertSelfOutput,
        elmo.CharacterEncoder: nn.CharacterEncoder,
        elmo.Highway: nn.Highway,
        elmo.ProjectedLSTM: nn.ProjectedLSTM,
    }
    if unpad:
        classes |= {
            bert.BertModel: nn.BertModel,
            bert.BertEncoder: nn.BertEncoder,
            transformer.Transformer: nn.UnpaddedTransformer,
            transformer.LanguageModel: nn.UnpaddedLanguageModel,
        }
    swaps: dict[type, Swap] = {
        torch_nn.TransformerEncoder: functools.partial(_swap_transformer_encoder, unpad=unpad),
        torch_nn.TransformerDecoder: functools.partial(_swap_transformer_decoder, unpad=unpad),
        torch_nn.Dropout: _swap_dropout,
        torch_nn.Linear: functools.partial(
            _swap_linear,
            targets=_linear_classes(),
            report=report,
            freeze=freeze,
        ),
        torch_nn.LSTM: functools.partial(_swap_recurrent, target=nn.LSTM, operator="lstm"),
        torch_nn.LSTMCell: functools.partial(_swap_recurrent, target=nn.LSTMCell, operator="lstm"),
        torch_nn.GRU: functools.partial(_swap_recurrent, target=nn.GRU, operator="gru"),
        torch_nn.GRUCell: functools.partial(_swap_recurrent, target=nn.GRUCell, operator="gru"),
        torch_nn.RNN: functools.partial(_swap_recurrent, target=nn.RNN, operator="rnn"),
        torch_nn.RNNCell: functools.partial(_swap_recurrent, target=nn.RNNCell, operator="rnn"),
    }
    if "transformers" in sys.modules:  # otherwise the model can hold none of its modules
        from transformers import PreTrainedModel

        swaps[PreTrainedModel] = functools.partial(
            swap_transformers_attention, whole=model, copies={}
        )
    if "transformers.pytorch_utils" in sys.modules:
        from transformers import pytorch_utils

        from trifuse.recipes import conv1d

        swaps[pytorch_utils.Conv1D] = functools.partial(
            _swap_linear,
            targets={pytorch_utils.Conv1D: conv1d.Conv1D},
            report=report,
            freeze=freeze,
        )
    for source, target in classes.items():
        swaps[source] = functools.partial(retype, source=source, target=target)
    return swaps


def swap_by_recipe(module: torch_nn.Module, only_closes: bool = False) -> Change | None:
    """Fuse what the recipes recognise in a module's code; leave other modules out of the report.

    Args:
        module: the module.
        only_closes: whether to do so even if only the sum at its end is recognised. That pays off
            if a norm comes next.
    """
    source = type(module)
    if isinstance(source, sublayers.FusedType):
        return None
    if parametrize.is_parametrized(module):
        return None
    target: Any = sublayers.fused_class(source, sublayers.roles(module))
    if target is source or (target._trifuse_origin.only_closes and not only_closes):
        return None
    return retype(module, source, target)


def swap_embeddings(module: torch_nn.Module) -> Change | None:
    """Make embeddings run in one call in inference."""
    source = type(module)
    if issubclass(source, embeddings.OneEmbedding) or parametrize.is_parametrized(module):
        return None
    return retype(module, source, embeddings.one_embedding_class(source))


def swap_written_out(module: torch_nn.Module) -> Change | None:
    """Make an attention that computes its own softmax run inside ``trifuse.attention()``."""
    source = type(module)
    if issubclass(source, written_out.WrittenOut) or parametrize.is_parametrized(module):
        return None
    return retype(module, source, written_out.written_out_class(source))


def swap_disentangled(module: torch_nn.Module, unpad: bool) -> Change | None:
    """Make DeBERTa's attention read its terms from tables, and accept packed tokens."""
    source = type(module)
    taken = issubclass(source, disentangled.DisentangledAttention)
    if taken or parametrize.is_parametrized(module):
        return None
    change = retype(module, source, disentangled.disentangled_class(source))
    packed = ", which takes packed tokens" * unpad
    return change and change._replace(after=f"{change.after}{packed}")


def swap_own_bias(module: torch_nn.Module) -> Change | None:
    """Make a module with a bias by distance produce a table instead of a matrix."""
    return _swap_bias(module, own_biases.DistanceBiased, own_biases.own_bias_class)


def swap_window_bias(module: torch_nn.Module) -> Change | None:
    """Make a module that picks biases of windows from a table produce no matrix of them."""
    return _swap_bias(module, window_biases.WindowBias, window_biases.window_bias_class)


def _swap_bias(
    module: torch_nn.Module, base: type, class_of: Callable[[Any], type[torch_nn.Module]]
) -> Change | None:
    source = type(module)
    if issubclass(source, base) or parametrize.is_parametrized(module):
        return None
    target = class_of(source)
    return None if target is source else retype(module, source, target)


def swap_stack(module: torch_nn.Module, parts: tuple[str, ...]) -> Change | None:
    """Make an encoder of transformers leave out the padding, if it runs on trifuse's attention."""
    source = type(module)
    if hasattr(source, "why_padded") or not stacks.has_our_attention(module):
        return None
    target = stacks.unpadded_class(source, parts)
    if target is source:
        raise CannotSwap("its forward can't be compiled again, which leaving padding out takes")
    change = retype(module, source, target)
    return change and change._replace(after=f"{change.after}{UNPADDED}")


def _unpad(module: torch_nn.Module, change: Change | None) -> Change | None:
    """Make a fused stack leave out the padding."""
    if module.unpad:
        return change
    step = Step(module, "unpad", Absent.ABSENT, True)
    step.do()
    if change is None:
        return Change(qualified(type(module)), f"the same{UNPADDED}", [step])
    return change._replace(steps=[*change.steps, step])


def _linear_classes() -> dict[type[torch_nn.Module], type[torch_nn.Module]]:
    """Return our classes of linear layers, by torch's, and its subclasses whose code is known."""
    found: dict[type[torch_nn.Module], type[torch_nn.Module]] = {torch_nn.Linear: nn.Linear}
    if "transformers.models.falcon.modeling_falcon" in sys.modules:
        from transformers.models.falcon import modeling_falcon

        from trifuse.recipes import falcon_linear

        if falcon_linear.is_known():
            found[modeling_falcon.FalconLinear] = falcon_linear.FalconLinear
    return found


def _swap_linear(
    module: Any,
    targets: dict[type[torch_nn.Module], type[torch_nn.Module]],
    report: FuseReport,
    freeze: bool,
) -> Change | None:
    source = type(module) if type(module) in targets else next(iter(targets))
    if isinstance(module, (OnProduct, NonDynamicallyQuantizableLinear)):
        return None  # the latter belongs to torch's MultiheadAttention, which never calls it
    if type(module) is source and module.weight.device.type != "cpu":
        return None
    dtype = module.weight.dtype
    choice = _linear_choice.choose(dtype)
    report.linear[dtype] = f"{choice.product}; {choice.reason}"
    wanted = choice.faster or (freeze and _linear_choice.can_freeze(dtype))
    return retype(module, source, targets[source]) if wanted else None


def _swap_transformer_encoder(module: torch_nn.TransformerEncoder, unpad: bool) -> Change | None:
    known = (torch_nn.TransformerEncoderLayer, nn.TransformerEncoderLayer)
    if all(type(layer) in known for layer in module.layers):
        with contextlib.suppress(CannotSwap):
            change = retype(module, torch_nn.TransformerEncoder, nn.TransformerEncoder)
            return _unpad(module, change) if unpad else change
    # A subclass, or an encoder whose layers may rely on the float masks that torch's encoder makes.
    # The attention inside is fused anyway, and it takes no NestedTensor.
    if not module.use_nested_tensor:
        return None
    step = Step(module, "use_nested_tensor", True, False)
    step.do()
    return Change(qualified(type(module)), "the same, without NestedTensors", [step])


def _swap_transformer_decoder(module: torch_nn.TransformerDecoder, unpad: bool) -> Change | None:
    known = (torch_nn.TransformerDecoderLayer, nn.TransformerDecoderLayer)
    if not all(type(layer) in known for layer in module.layers):
        raise CannotSwap("layers that aren't torch's; what they hold is fused all the same")
    change = retype(module, torch_nn.TransformerDecoder, nn.TransformerDecoder)
    return _unpad(module, change) if unpad else change


def _swap_dropout(module: torch_nn.Dropout) -> Change | None:
    ours = 0 < module.p < 1 and not module.inplace  # otherwise ours has nothing to gain
    if not ours or type(module) is not torch_nn.Dropout:
        return None
    return retype(module, torch_nn.Dropout, nn.Dropout)


def _swap_recurrent(
    module: torch_nn.Module, target: type[torch_nn.Module], operator: str
) -> Change | None:
    (source,) = (cls for cls in _RECURRENT if isinstance(module, cls))
    weight = next(module.parameters(), None)
    if weight is not None and not isinstance(module, target):
        call = backends.Call(operator, weight.device.type, weight.dtype)
        if call.device == "cuda" and (why := _why_cudnn(module, call)) is not None:
            raise CannotSwap(f"on a GPU, where torch has cuDNN's kernels for it: {why}")
        choice = backends.choose(call)
        if choice.backend == backends.FALLBACK and choice.refused:  # not on request
            raise CannotSwap("no fused kernel serves it here")
    return retype(module, source, target)


_MEASURED_UNITS = 1024  # the smallest layer that has been timed beside cuDNN's


def _why_cudnn(module: torch_nn.Module, call: backends.Call) -> str | None:
    """Return why a recurrent module on a GPU stays torch's; None if ours has measured faster."""
    if isinstance(module, (torch_nn.LSTMCell, torch_nn.GRUCell, torch_nn.RNNCell)):
        return "single steps have not measured faster"
    if getattr(module, "proj_size", 0):
        return "projections have not measured faster"
    if cast(Any, module).hidden_size < _MEASURED_UNITS:
        return f"fewer than {_MEASURED_UNITS} units have not been measured"
    if call.dtype.itemsize != 2:
        return "only 16 bits have measured faster"
    if backends.choose(call).backend != "cuda":
        return "only the CUDA kernels have measured faster"
    return None


_RECURRENT = (
    torch_nn.LSTM,
    torch_nn.LSTMCell,
    torch_nn.GRU,
    torch_nn.GRUCell,
    torch_nn.RNN,
    torch_nn.RNNCell,
)
