"""Put trifuse into a model that exists already, and take it out again.

``fuse`` changes no weights and makes no modules: it gives a module the class of its fused
counterpart, which holds the same parameters under the same names. So the state_dict, tied weights,
hooks, the device, the training flag and every reference to the module stay what they were.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn as torch_nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from trifuse import backends, nn
from trifuse.models import bert, elmo, transformer
from trifuse.ops import linear


class Swapped(NamedTuple):
    """A module that now runs fused."""

    path: str  # its name in the model; "" is the model itself
    before: str
    after: str


class Left(NamedTuple):
    """A module that was looked at and left alone."""

    path: str
    module: str
    reason: str


@dataclass
class FuseReport:
    """What :func:`fuse` did. ``print(report)`` shows it as a table.

    Attributes:
        swapped: the modules that now run fused and did not before.
        left: the modules that could have been meant, and why they were left alone.
        linear: for each dtype of the linear layers met, which product serves it and why.
    """

    swapped: list[Swapped] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    linear: dict[torch.dtype, str] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def revert(self) -> None:
        """Undo the swaps of this report, the latest first. A second call does nothing.

        A module whose class was changed again since is left as it is.
        """
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines = [f"{len(self.swapped)} swapped, {len(self.left)} left"]
        rows = [swapped for swapped in self.swapped if swapped.after not in _MANY]
        for name in _MANY:  # too many to list
            layers = [swapped for swapped in self.swapped if swapped.after == name]
            if layers:
                count = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
                rows.append(Swapped(f"({count})", layers[0].before, name))
        rows += [Swapped(path, module, f"left: {reason}") for path, module, reason in self.left]
        rows = [Swapped(path or "(the model)", was, now) for path, was, now in rows]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines += [f"  {path:{widths[0]}}  {was:{widths[1]}}  {now}" for path, was, now in rows]
        lines += [f"  linear layers: {choice}" for choice in self.linear.values()]
        return "\n".join(lines)


_MANY = ("trifuse.nn.Linear", "trifuse.nn.Dropout")


def fuse(model: torch_nn.Module, unpad: bool = False) -> FuseReport:
    """Make what trifuse knows in ``model`` run on its operators, in place.

    Known are ``torch.nn.MultiheadAttention``, ``torch.nn``'s Transformer layers (whose inference
    fast path is taken out of the way), ``trifuse.models``, transformers' BERT, and the attention of
    all models of Hugging Face transformers that choose it by ``attn_implementation``. Such a model
    gets a copy of its configuration that says "trifuse", so that another model built from the same
    configuration object stays as it is.

    ``torch.nn.Linear`` on a CPU is multiplied by our product where that is the faster one, which is
    measured once per process and dtype, in about 0.3 s: see :mod:`trifuse.ops.linear`.
    ``torch.nn.LSTM``, ``GRU`` and their cells run fused on a CPU where the extension is built, and
    are no instances of torch's classes while they do: see :mod:`trifuse.nn.lstm`.
    ``torch.nn.Dropout`` on a CPU draws by trifuse's generator, which is not torch's: the same seed
    drops other elements.

    Subclasses are left alone, as are modules whose ``forward`` was replaced on the instance: what
    they compute isn't known here. The report says so. Calling this twice changes nothing more.

    Args:
        model: any module; it is changed, not copied.
        unpad: leave the padding that a boolean mask shows out of everything that the stacks
            (``torch.nn.TransformerEncoder`` and ``TransformerDecoder``) and models (both BERTs
            without the heads on top of them, ``trifuse.models.transformer``'s with theirs) compute,
            in training too: see :mod:`trifuse.nn.packing`. They then give 0 at padded positions;
            what real tokens get does not change. Without it, a padded position gets what the layers
            make of it.

    Returns:
        What was swapped and what was left and why, with ``revert()``.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``.
        ValueError: the environment variable ``TRIFUSE_LINEAR`` is none of auto, cpp and torch.
    """
    if not isinstance(model, torch_nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module; got {type(model).__name__}")
    report = FuseReport()
    table = _swaps(unpad, report)
    for path, module in model.named_modules():
        # The base first: a transformers model chooses its attention before it is made to unpad.
        for swap in [table[cls] for cls in reversed(type(module).__mro__) if cls in table]:
            try:
                change = swap(module)
            except _CannotSwap as reason:
                report.left.append(Left(path, type(module).__name__, str(reason)))
            else:
                if change is not None:
                    report.swapped.append(Swapped(path, change.before, change.after))
                    report._undo.append(change.undo)
    return report


class _CannotSwap(Exception):  # noqa: N818 - an answer, not an error
    """Why a module is left alone."""


class _Change(NamedTuple):
    before: str
    after: str
    undo: Callable[[], None]


# Swaps a module in place and says how to undo that; None where it is fused already.
_Swap = Callable[[Any], "_Change | None"]


def _swaps(unpad: bool, report: FuseReport) -> dict[type, _Swap]:
    """From the type of a module, or of one of its bases, to what swaps it."""
    classes: dict[type[torch_nn.Module], type[torch_nn.Module]] = {
        torch_nn.TransformerEncoderLayer: nn.TransformerEncoderLayer,
        torch_nn.TransformerDecoderLayer: nn.TransformerDecoderLayer,
        bert.SoftmaxAttention: nn.SoftmaxAttention,
        transformer.SoftmaxAttention: nn.SoftmaxAttention,
        transformer.AddNorm: nn.AddNorm,
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
    table: dict[type, _Swap] = {
        torch_nn.MultiheadAttention: _swap_multihead_attention,
        torch_nn.TransformerEncoder: functools.partial(_swap_transformer_encoder, unpad=unpad),
        torch_nn.TransformerDecoder: functools.partial(_swap_transformer_decoder, unpad=unpad),
        torch_nn.Dropout: _swap_dropout,
        torch_nn.Linear: functools.partial(_swap_linear, report=report),
        torch_nn.LSTM: functools.partial(_swap_recurrent, target=nn.LSTM, operator="lstm"),
        torch_nn.LSTMCell: functools.partial(_swap_recurrent, target=nn.LSTMCell, operator="lstm"),
        torch_nn.GRU: functools.partial(_swap_recurrent, target=nn.GRU, operator="gru"),
        torch_nn.GRUCell: functools.partial(_swap_recurrent, target=nn.GRUCell, operator="gru"),
    }
    if "transformers" in sys.modules:  # else no module of the model can be one of its
        from transformers import PreTrainedModel

        table[PreTrainedModel] = _swap_transformers_attention
    if "transformers.models.bert.modeling_bert" in sys.modules:
        from transformers.models.bert import modeling_bert

        from trifuse import huggingface

        classes |= {
            modeling_bert.BertIntermediate: huggingface.BertIntermediate,
            modeling_bert.BertSelfOutput: huggingface.BertSelfOutput,
            modeling_bert.BertOutput: huggingface.BertOutput,
        }
        if unpad:
            table |= {
                theirs: functools.partial(_swap_transformers_bert, source=theirs, target=ours)
                for theirs, ours in (
                    (modeling_bert.BertModel, huggingface.BertModel),
                    (modeling_bert.BertEncoder, huggingface.BertEncoder),
                )
            }
    for source, target in classes.items():
        table[source] = functools.partial(_retype, source=source, target=target)
    return table


def _retype(
    module: torch_nn.Module, source: type[torch_nn.Module], target: type[torch_nn.Module]
) -> _Change | None:
    """Change the class of a module that is exactly a ``source`` into ``target``."""
    if isinstance(module, target):
        return None
    if parametrize.is_parametrized(module):  # torch has made it a class of its own
        raise _CannotSwap("a parameter of it is parametrized; do that after fusing")
    if type(module) is not source:
        raise _CannotSwap(f"a subclass of {source.__name__}")
    if "forward" in vars(module):
        raise _CannotSwap("its forward was replaced on the instance")
    module.__class__ = target

    def undo() -> None:
        if type(module) is target:
            module.__class__ = source

    return _Change(_qualified(source), _qualified(target), undo)


def _swap_multihead_attention(module: torch_nn.MultiheadAttention) -> _Change | None:
    packed = module._qkv_same_embed_dim
    change = _retype(module, torch_nn.MultiheadAttention, nn.MultiheadAttention)
    if change is None:
        return None
    nn.MultiheadAttention.adopt(module)

    def undo() -> None:
        change.undo()
        if type(module) is torch_nn.MultiheadAttention:
            module._qkv_same_embed_dim = packed

    return change._replace(undo=undo)


def _unpad(module: torch_nn.Module, change: _Change | None) -> _Change | None:
    """Have an encoder of trifuse's leave out the padding."""
    if module.unpad:
        return change
    setattr(module, "unpad", True)  # noqa: B010 - mypy has a module's attributes be modules

    def undo() -> None:
        del module.unpad
        if change is not None:
            change.undo()

    if change is None:
        name = _qualified(type(module))
        return _Change(name, "the same, without padding", undo)
    return change._replace(undo=undo)


def _swap_linear(module: torch_nn.Linear, report: FuseReport) -> _Change | None:
    if isinstance(module, (nn.Linear, NonDynamicallyQuantizableLinear)):
        return None  # the latter is torch's MultiheadAttention's, which never calls it
    if type(module) is torch_nn.Linear and module.weight.device.type != "cpu":
        return None
    dtype = module.weight.dtype
    choice = linear.choose(dtype)
    report.linear[dtype] = f"{'cpp' if choice.faster else 'torch'}; {choice.reason}"
    return _retype(module, torch_nn.Linear, nn.Linear) if choice.faster else None


def _swap_transformer_encoder(module: torch_nn.TransformerEncoder, unpad: bool) -> _Change | None:
    known = (torch_nn.TransformerEncoderLayer, nn.TransformerEncoderLayer)
    if all(type(layer) in known for layer in module.layers):
        with contextlib.suppress(_CannotSwap):
            change = _retype(module, torch_nn.TransformerEncoder, nn.TransformerEncoder)
            return _unpad(module, change) if unpad else change
    # A subclass, or one whose layers may count on the float masks that torch's encoder makes. The
    # attention inside is fused all the same, and takes no NestedTensor.
    if not module.use_nested_tensor:
        return None
    module.use_nested_tensor = False

    def undo() -> None:
        module.use_nested_tensor = True

    return _Change(_qualified(type(module)), "the same, without NestedTensors", undo)


def _swap_transformer_decoder(module: torch_nn.TransformerDecoder, unpad: bool) -> _Change | None:
    known = (torch_nn.TransformerDecoderLayer, nn.TransformerDecoderLayer)
    if not all(type(layer) in known for layer in module.layers):
        raise _CannotSwap("layers that aren't torch's; what they hold is fused all the same")
    change = _retype(module, torch_nn.TransformerDecoder, nn.TransformerDecoder)
    return _unpad(module, change) if unpad else change


def _swap_dropout(module: torch_nn.Dropout) -> _Change | None:
    if module.p == 0 or type(module) is not torch_nn.Dropout:
        return None
    return _retype(module, torch_nn.Dropout, nn.Dropout)


def _swap_recurrent(
    module: torch_nn.Module, target: type[torch_nn.Module], operator: str
) -> _Change | None:
    (source,) = (cls for cls in _RECURRENT if isinstance(module, cls))
    weight = next(module.parameters(), None)
    if weight is not None and not isinstance(module, target):
        if weight.device.type == "cuda":
            raise _CannotSwap("on a GPU, where torch has cuDNN's kernels for it")
        call = backends.Call(operator, weight.device.type, weight.dtype)
        choice = backends.choose(call)
        if choice.backend == "eager" and choice.refused:  # and not because it was asked for
            raise _CannotSwap("no fused kernel serves it here")
    return _retype(module, source, target)


_RECURRENT = (torch_nn.LSTM, torch_nn.LSTMCell, torch_nn.GRU, torch_nn.GRUCell)


def _swap_transformers_attention(model: Any) -> _Change | None:
    """Switch a whole transformers model to ``attn_implementation="trifuse"``.

    The models nested in it go with it, or it stays: it may build the mask that they use.
    """
    from transformers import PreTrainedConfig, PreTrainedModel

    from trifuse import huggingface

    before = model.config._attn_implementation
    if before == huggingface.NAME:
        return None
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            name = type(part).__name__
            if not part._can_set_attn_implementation():
                raise _CannotSwap(f"{name} doesn't choose its attention by attn_implementation")
            # Some versions of transformers say yes for models that cap scores, and don't cap.
            capped = getattr(part.config, "attn_logit_softcapping", None) is not None
            if capped or not part._supports_sdpa:
                raise _CannotSwap(f"{name} needs more of attention than a softmax of masked scores")
            if part.config.output_attentions:
                raise _CannotSwap(f"{name} returns its attention weights")
    huggingface.register()
    held = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    ]
    copies: dict[int, Any] = {}  # deepcopy's memo: an object held twice is copied once
    for module, name, config in held:
        own = copy.deepcopy(config, copies)
        own._attn_implementation = huggingface.NAME
        setattr(module, name, own)

    def undo() -> None:
        for module, name, config in held:
            setattr(module, name, config)

    return _Change(f'attn_implementation="{before}"', f'"{huggingface.NAME}"', undo)


def _swap_transformers_bert(
    module: Any, source: type[torch_nn.Module], target: type[torch_nn.Module]
) -> _Change | None:
    from trifuse import huggingface

    chosen = module.config._attn_implementation
    if chosen != huggingface.NAME:  # its model, which comes before it, was left alone
        raise _CannotSwap(f'its model runs with attn_implementation="{chosen}"')
    return _retype(module, source, target)


def _qualified(cls: type) -> str:
    """``torch.nn.MultiheadAttention`` and the like: by package, as one would import it."""
    package = "torch.nn" if cls.__module__.startswith("torch.nn.") else cls.__module__
    if package.startswith("trifuse.nn."):
        package = "trifuse.nn"
    return f"{package}.{cls.__name__}"
