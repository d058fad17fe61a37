"""Put trifuse into an existing model, and take it out again.

``fuse`` changes no weights and makes no modules: it gives a module the class of its fused
counterpart, which holds the same parameters under the same names. So the state_dict, tied weights,
hooks, the device, the training flag and every reference to the module stay as they were.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch import nn as torch_nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from trifuse import backends, nn
from trifuse.models import bert, elmo, transformer
from trifuse.nn import packing
from trifuse.nn.dropout_add_layer_norm import is_fused
from trifuse.nn.linear import OnProduct, is_frozen, is_plain, thaw
from trifuse.nn.linear import freeze as freeze_weights
from trifuse.nn.quantization import Unquantizable
from trifuse.ops import _linear_choice
from trifuse.recipes import (
    boundaries,
    code,
    disentangled,
    embeddings,
    layers,
    models,
    own_biases,
    packed_models,
    rotary_layers,
    stacks,
    sublayers,
    window_biases,
    written_out,
)


class Swapped(NamedTuple):
    """A module that now runs fused."""

    path: str  # its name in the model; "" is the model itself
    before: str  # its class, or what its configuration chose
    after: str  # the same, and what it leaves out or takes


class Left(NamedTuple):
    """A module that :func:`fuse` left alone, and why."""

    path: str
    module: str
    reason: str


class Note(NamedTuple):
    """The part of a swapped module that does not run fused."""

    path: str
    text: str


class _Absent(enum.Enum):
    ABSENT = enum.auto()  # the attribute wasn't there


@dataclass
class _Step:
    """An attribute (or the class) that :func:`fuse` changed, with its old and its new value."""

    owner: Any
    name: str
    before: Any
    after: Any

    def do(self) -> None:
        setattr(self.owner, self.name, self.after)

    def undo(self) -> None:
        """Restore the old value, unless the attribute has been changed again since."""
        now = getattr(self.owner, self.name, _Absent.ABSENT)
        if not (now is self.after or (isinstance(now, str) and now == self.after)):
            return
        if self.before is _Absent.ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


@dataclass
class _Freezing:
    """A linear layer whose weight :func:`fuse` froze."""

    layer: OnProduct
    parameter: torch_nn.Parameter  # emptied while the layer is frozen

    def undo(self) -> None:
        """Give the layer its weight back."""
        if is_frozen(self.layer):
            thaw(self.layer, self.parameter)


@dataclass
class FuseReport:
    """A report of what :func:`fuse` did. ``print(report)`` shows it as a table.

    The report refers to the modules that were changed. Copied or pickled together with the model,
    as in ``copy.deepcopy((model, report))``, it reverts the copied model; copied alone, it reverts
    private copies of the modules. :func:`trifuse.explain` shows what a model runs at present.

    Attributes:
        swapped: the modules that now run fused and did not before.
        left: the modules that were candidates, and why they were left alone.
        notes: the parts of the swapped modules that do not run fused.
        linear: for each dtype among the model's linear layers, the product that serves it, and why.
        unpadded: with ``unpad``, the names of the modules that compute on real tokens only.
        padded: with ``unpad``, the modules that compute padding too, and why.
        frozen: with ``freeze``, the names of the modules whose weights were frozen.
        norms: the norms in modules of transformers that run as before, and why.
        sums: the pre-norm layers of transformers whose sum at the end runs as before, and how many
            of their norms take in the sum before them.
    """

    swapped: list[Swapped] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    linear: dict[torch.dtype, str] = field(default_factory=dict)
    unpadded: list[str] = field(default_factory=list)
    padded: list[Left] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    norms: list[Left] = field(default_factory=list)
    sums: list[Left] = field(default_factory=list)
    _steps: list[_Step | _Freezing] = field(default_factory=list, repr=False)

    def revert(self) -> None:
        """Undo the swaps of this report, the latest first. A second call does nothing.

        A module whose class has been changed again since is left as it is.
        """
        while self._steps:
            self._steps.pop().undo()

    def __str__(self) -> str:
        lines = [f"{len(self.swapped)} swapped, {len(self.left)} left"]
        rows = [swapped for swapped in self.swapped if swapped.after not in _MANY]
        for name in _MANY:  # too many to list
            layers = [swapped for swapped in self.swapped if swapped.after == name]
            if layers:
                count = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
                rows.append(Swapped(f"({count})", layers[0].before, name))
        notes = dict(self.notes)
        rows = [
            Swapped(path, was, f"{now}; {notes[path]}" if path in notes else now)
            for path, was, now in rows
        ]
        rows += [Swapped(path, module, f"left: {reason}") for path, module, reason in self.left]
        rows += [
            Swapped(path, module, f"computes padding too: {reason}")
            for path, module, reason in self.padded
        ]
        # The same norm in all layers is one row, and so are identical layers.
        for kind, left in (("norm", self.norms), ("layer", self.sums)):
            counts = Counter((each.module, each.reason) for each in left)
            for (module, reason), alike in counts.items():
                many = f"1 {kind}" if alike == 1 else f"{alike} {kind}s"
                rows.append(Swapped(f"({many})", module, f"as before: {reason}"))
        lines += table(rows)
        lines += [f"  linear layers: {choice}" for choice in self.linear.values()]
        if self.unpadded:
            names = ", ".join(path or _WHOLE for path in self.unpadded)
            lines.append(f"  without padding: {names}")
        if self.frozen:
            lines.append(f"  frozen: the weights of {len(self.frozen)} modules")
        return "\n".join(lines)


def table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Format rows as aligned lines. The first column is a module's name in the model."""
    rows = [(path or _WHOLE, second, third) for path, second, third in rows]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return [f"  {path:{widths[0]}}  {second:{widths[1]}}  {third}" for path, second, third in rows]


_WHOLE = "(the model)"
_MANY = (
    "trifuse.nn.Linear",
    "trifuse.recipes.conv1d.Conv1D",
    "trifuse.nn.Dropout",
    "trifuse.nn.LayerNorm",
)


def fuse(model: torch_nn.Module, unpad: bool = False, freeze: bool = False) -> FuseReport:
    """Make the modules of ``model`` that trifuse supports run on its operators, in place.

    It supports ``torch.nn.MultiheadAttention``, ``torch.nn``'s Transformer layers (whose inference
    fast path is bypassed), ``trifuse.models``, transformers' BERT, and the attention of every
    Hugging Face transformers model that selects it by ``attn_implementation``. Such a model gets a
    copy of its configuration that selects "trifuse", so that other models built from the same
    configuration object are unaffected; modules around it in ``model`` that hold this object, also
    within another configuration, get the copy too.

    Other modules of transformers are recognised by their code: where dropout, a sum and a norm
    follow each other, they become one operator, even across the boundary between two layers. So do
    a linear layer and its activation, and each remaining RMSNorm and LayerNorm. A bias of relative
    positions stays a table: see :mod:`trifuse.recipes`.

    ``torch.nn.Linear`` on a CPU runs on trifuse's matrix product where that is faster, by a table
    of CPUs: see :mod:`trifuse.ops._linear_choice`.
    ``torch.nn.LSTM``, ``GRU``, ``RNN`` and their cells run fused on a CPU if the extension is
    built, and are not instances of torch's classes while they do: see :mod:`trifuse.nn.lstm`.
    ``torch.nn.Dropout`` on a CPU uses trifuse's random generator instead of torch's: the same seed
    drops different elements.

    Subclasses are left alone, and so are modules whose ``forward`` was replaced on the instance:
    what they compute is unknown. The report says so. A second call changes nothing more.

    Args:
        model: any module; it is changed, not copied.
        unpad: compute on real tokens only, as a boolean mask marks them, in training too: see
            :mod:`trifuse.nn.packing`. This applies to stacks (``torch.nn.TransformerEncoder`` and
            ``TransformerDecoder``, and encoders and encoder-decoders of transformers, recognised
            by their code: see :mod:`trifuse.recipes.stacks`) and to models (both BERTs without the
            heads on top, ``trifuse.models.transformer``'s with their heads). Padded positions then
            get 0, and real tokens get the same results. Otherwise padded positions get whatever
            the layers compute there.
        freeze: pack the weights of linear layers for good, for inference on a CPU. Without it, a
            packed weight is compared with its parameter at every call, so that no change is missed,
            and both are kept. A frozen layer keeps the packed weight alone
            (:class:`trifuse.nn.FrozenLinear`), and ``nn.MultiheadAttention`` keeps both but doesn't
            compare them. Shared weights stay as they are, and so do weights that are not plain
            parameters, as DTensors or after pruning. Loading, moving or changing a frozen weight
            raises a RuntimeError.

    Returns:
        A report of what was swapped, and of what was left and why. Its ``revert()`` undoes it.

    Raises:
        TypeError: ``model`` is not a ``torch.nn.Module``.
        ValueError: the environment variable ``TRIFUSE_LINEAR`` is none of auto, cpp and torch.
            Nothing has changed then, nor after any other error.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
        >>> x = torch.randn(2, 5, 64)
        >>> with torch.no_grad():
        ...     before = layer(x)
        ...     report = fuse(layer)
        ...     torch.testing.assert_close(layer(x), before)
        >>> report.revert()
    """
    if not isinstance(model, torch_nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module; got {type(model).__name__}")
    report = FuseReport()
    try:
        _fuse(model, unpad, freeze, report)
    except BaseException:
        report.revert()
        raise
    return report


def _fuse(model: torch_nn.Module, unpad: bool, freeze: bool, report: FuseReport) -> None:
    """Make the changes of :func:`fuse`, and add them to its report."""
    swaps = _swaps(model, unpad, freeze, report)
    found = stacks.find(model) if unpad else {}
    for path, module in model.named_modules():
        # Base classes first: a transformers model must select its attention before it can unpad.
        chosen = [swaps[cls] for cls in reversed(type(module).__mro__) if cls in swaps]
        of_transformers = sublayers.is_of_transformers(type(module))
        functions = [getattr(swap, "func", swap) for swap in chosen]
        if of_transformers and functions in ([], [_swap_transformers_attention]):
            chosen.append(_swap_by_recipe)
        if embeddings.is_berts(module):
            chosen.append(_swap_embeddings)
        # Written-out attention runs inside a context, together with everything changed in it.
        if own_biases.makes_its_own(module):
            chosen.append(_swap_own_bias)
        if window_biases.picks(module):
            chosen.append(_swap_window_bias)
        if written_out.writes_out(module):
            chosen.append(_swap_written_out)
        if disentangled.is_disentangled(module):
            chosen.append(functools.partial(_swap_disentangled, unpad=unpad))
        if isinstance(stack := found.get(module), stacks.Stack):
            chosen.append(functools.partial(_swap_stack, parts=stack.parts))
        for swap in chosen:
            try:
                change = swap(module)
            except _CannotSwap as reason:
                report.left.append(Left(path, type(module).__name__, str(reason)))
            else:
                if change is not None:
                    _add(report, path, change)
    _swap_norms(model, report)
    _join_layers(model, report)
    if unpad:
        _swap_packed_models(model, report)
    swapped = {each.path for each in report.swapped}
    report.notes += [note for note in notes(model) if note.path in swapped]
    report.left += own_attention(model)
    report.left += torch_attention(model)
    report.norms += norms_apart(model)
    report.sums += sums_apart(model)
    if unpad:
        _report_padding(model, report)
    if freeze:
        _freeze(model, report)


def _add(report: FuseReport, path: str, change: _Change) -> None:
    """Add a change to a report. Merge it with the module's last change if it continues that one."""
    before = change.before
    last = report.swapped[-1] if report.swapped else None
    if last is not None and (last.path, last.after) == (path, before):
        before = report.swapped.pop().before
    report.swapped.append(Swapped(path, before, change.after))
    report._steps += change.steps


class _CannotSwap(Exception):  # noqa: N818 - an answer, not an error
    """Why a module is left alone."""


class _Change(NamedTuple):
    before: str
    after: str
    steps: list[_Step]


# Swaps a module in place and returns the change; None if the module is fused already.
_Swap = Callable[[Any], "_Change | None"]


def _swaps(
    model: torch_nn.Module, unpad: bool, freeze: bool, report: FuseReport
) -> dict[type, _Swap]:
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
    swaps: dict[type, _Swap] = {
        torch_nn.TransformerEncoder: functools.partial(_swap_transformer_encoder, unpad=unpad),
        torch_nn.TransformerDecoder: functools.partial(_swap_transformer_decoder, unpad=unpad),
        torch_nn.Dropout: _swap_dropout,
        torch_nn.Linear: functools.partial(
            _swap_linear,
            source=torch_nn.Linear,
            target=nn.Linear,
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
            _swap_transformers_attention, whole=model, copies={}
        )
    if "transformers.pytorch_utils" in sys.modules:
        from transformers import pytorch_utils

        from trifuse.recipes import conv1d

        swaps[pytorch_utils.Conv1D] = functools.partial(
            _swap_linear,
            source=pytorch_utils.Conv1D,
            target=conv1d.Conv1D,
            report=report,
            freeze=freeze,
        )
    for source, target in classes.items():
        swaps[source] = functools.partial(_retype, source=source, target=target)
    return swaps


def _retype(
    module: torch_nn.Module, source: type[torch_nn.Module], target: type[torch_nn.Module]
) -> _Change | None:
    """Change the class of a module from exactly ``source`` to ``target``."""
    if isinstance(module, target):
        return None
    if parametrize.is_parametrized(module):  # torch has given the module a class of its own
        raise _CannotSwap("a parameter of it is parametrized; do that after fusing")
    if type(module) is not source:
        raise _CannotSwap(f"a subclass of {source.__name__}")
    for name in ("forward", "_sa_block", "_mha_block", "_ff_block"):
        if name in vars(module):
            raise _CannotSwap(f"its {name} was replaced on the instance")
    quantizable = not isinstance(getattr(target, "qconfig", None), Unquantizable)
    if not quantizable and getattr(module, "qconfig", None) is not None:
        raise _CannotSwap("it is prepared for quantization")
    step = _Step(module, "__class__", source, target)
    step.do()
    return _Change(_qualified(source), _qualified(target), [step])


def _swap_by_recipe(module: torch_nn.Module, only_closes: bool = False) -> _Change | None:
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
    if target is source or (target.origin.only_closes and not only_closes):
        return None
    return _retype(module, source, target)


def _swap_embeddings(module: torch_nn.Module) -> _Change | None:
    """Make embeddings run in one call in inference."""
    source = type(module)
    if issubclass(source, embeddings.OneEmbedding) or parametrize.is_parametrized(module):
        return None
    return _retype(module, source, embeddings.one_embedding_class(source))


def _swap_norms(model: torch_nn.Module, report: FuseReport) -> None:
    """Make the standalone LayerNorms in transformers' modules run on the operator."""
    for path, holder in model.named_modules():
        if not sublayers.is_of_transformers(sublayers.original(type(holder))):
            continue
        for name in sublayers.norms_alone(holder):
            norm: Any = getattr(holder, name)
            weight = next(norm.parameters(), torch.empty(0))
            call = backends.Call("dropout_add_layer_norm", weight.device.type, weight.dtype)
            served = weight.device.type == "cpu" and backends.has_kernel(call)
            if not served or len(norm.normalized_shape) != 1:
                continue
            with contextlib.suppress(_CannotSwap):
                change = _retype(norm, torch_nn.LayerNorm, nn.LayerNorm)
                inside = f"{path}.{name}" if path else name
                if change is not None:
                    _add(report, inside, change)


def _join_layers(model: torch_nn.Module, report: FuseReport) -> None:
    """Make each pre-norm layer compute the norm at the beginning of the next one."""
    paths = {module: path for path, module in model.named_modules()}
    for holder, layer, following in list(boundaries.find(model)):
        if not isinstance(type(layer), sublayers.FusedType):
            change = None
            with contextlib.suppress(_CannotSwap):
                change = _swap_by_recipe(layer, only_closes=True)
            if change is None:
                continue
            _add(report, paths[layer], change)
        boundaries.join(layer, following)
        if boundaries.NEXT not in vars(holder):
            joined = boundaries.Joined(holder)
            step = _Step(holder, boundaries.NEXT, _Absent.ABSENT, joined)
            step.do()
            report._steps.append(step)


def _swap_packed_models(model: torch_nn.Module, report: FuseReport) -> None:
    """Make models with BERT's code embed only real tokens, if their encoder leaves padding out."""
    for path, module in model.named_modules():
        source = type(module)
        if hasattr(source, "why_padded") or not packed_models.is_known(module):
            continue
        if module.config.is_decoder:
            continue
        with contextlib.suppress(_CannotSwap):
            change = _retype(module, source, packed_models.packed_class(source))
            if change is not None:
                _add(report, path, change._replace(after=f"{change.after}{_UNPADDED}"))


def _swap_written_out(module: torch_nn.Module) -> _Change | None:
    """Make an attention that computes its own softmax run inside ``trifuse.attention()``."""
    source = type(module)
    if issubclass(source, written_out.WrittenOut) or parametrize.is_parametrized(module):
        return None
    return _retype(module, source, written_out.written_out_class(source))


def _swap_disentangled(module: torch_nn.Module, unpad: bool) -> _Change | None:
    """Make DeBERTa's attention read its terms from tables, and accept packed tokens."""
    source = type(module)
    taken = issubclass(source, disentangled.DisentangledAttention)
    if taken or parametrize.is_parametrized(module):
        return None
    change = _retype(module, source, disentangled.disentangled_class(source))
    packed = ", which takes packed tokens" * unpad
    return change and change._replace(after=f"{change.after}{packed}")


def _swap_own_bias(module: torch_nn.Module) -> _Change | None:
    """Make a module with a bias by distance produce a table instead of a matrix."""
    return _swap_bias(module, own_biases.DistanceBiased, own_biases.own_bias_class)


def _swap_window_bias(module: torch_nn.Module) -> _Change | None:
    """Make a module that picks biases of windows from a table produce no matrix of them."""
    return _swap_bias(module, window_biases.WindowBias, window_biases.window_bias_class)


def _swap_bias(
    module: torch_nn.Module, base: type, class_of: Callable[[Any], type[torch_nn.Module]]
) -> _Change | None:
    source = type(module)
    if issubclass(source, base) or parametrize.is_parametrized(module):
        return None
    target = class_of(source)
    return None if target is source else _retype(module, source, target)


def _swap_stack(module: torch_nn.Module, parts: tuple[str, ...]) -> _Change | None:
    """Make an encoder of transformers leave out the padding, if it runs on trifuse's attention."""
    source = type(module)
    if hasattr(source, "why_padded") or not stacks.has_our_attention(module):
        return None
    target = stacks.unpadded_class(source, parts)
    if target is source:
        raise _CannotSwap("its forward can't be compiled again, which leaving padding out takes")
    change = _retype(module, source, target)
    return change and change._replace(after=f"{change.after}{_UNPADDED}")


_UNPADDED = ", without padding"


def _unpad(module: torch_nn.Module, change: _Change | None) -> _Change | None:
    """Make a fused stack leave out the padding."""
    if module.unpad:
        return change
    step = _Step(module, "unpad", _Absent.ABSENT, True)
    step.do()
    if change is None:
        return _Change(_qualified(type(module)), f"the same{_UNPADDED}", [step])
    return change._replace(steps=[*change.steps, step])


def _swap_linear(
    module: Any,
    source: type[torch_nn.Module],
    target: type[torch_nn.Module],
    report: FuseReport,
    freeze: bool,
) -> _Change | None:
    if isinstance(module, (OnProduct, NonDynamicallyQuantizableLinear)):
        return None  # the latter belongs to torch's MultiheadAttention, which never calls it
    if type(module) is source and module.weight.device.type != "cpu":
        return None
    dtype = module.weight.dtype
    choice = _linear_choice.choose(dtype)
    report.linear[dtype] = f"{choice.product}; {choice.reason}"
    wanted = choice.faster or (freeze and _linear_choice.can_freeze(dtype))
    return _retype(module, source, target) if wanted else None


def _freeze(model: torch_nn.Module, report: FuseReport) -> None:
    """Freeze the weights that trifuse's product reads, except shared ones."""
    uses = Counter(
        _address(t)
        for module in model.modules()
        for t in (*module._parameters.values(), *module._buffers.values())
        if t is not None
    )
    chosen: list[OnProduct] = []
    for path, module in model.named_modules():
        if type(module) is nn.MultiheadAttention and not module.frozen:
            if not _linear_choice.can_freeze(module.out_proj.weight.dtype):
                continue
            if (why := _why_computed(module, _IN_PROJECTIONS)) is not None:
                report.left.append(Left(path, type(module).__name__, f"not frozen: {why}"))
                continue
            step = _Step(module, "frozen", _Absent.ABSENT, True)
            step.do()
            report._steps.append(step)
        elif is_plain(module):
            if (why := _why_not_frozen(module, uses)) is not None:
                report.left.append(Left(path, type(module).__name__, f"not frozen: {why}"))
                continue
            chosen.append(module)
        else:
            continue
        report.frozen.append(path)
    report._steps += map(_Freezing, chosen, freeze_weights(chosen))
    if not report.frozen:
        return
    inside_out = reversed(list(model.named_modules()))  # an encoder after its layers
    for path, module in inside_out:
        if rotary_layers.is_known(module) and (why := rotary_layers.why_not(module)) is not None:
            report.left.append(Left(path, type(module).__name__, f"calls its parts: {why}"))
            continue
        if (change := _swap_frozen_layer(module)) is not None:
            _add(report, path, change)


def _swap_frozen_layer(module: torch_nn.Module) -> _Change | None:
    """Make a layer run as one op, an encoder's layers run in one call, and a model around them skip
    what transformers wraps around its ``forward``.

    The layers of ``torch.nn`` do so by themselves.
    """
    source = type(module)
    made = layers.OneOp, layers.OneCall, models.Direct, rotary_layers.OneRotaryOp
    if issubclass(source, made) or hasattr(source, "why_padded"):
        return None  # a stack that leaves padding out calls its layers itself
    target: type[torch_nn.Module]
    if source is bert.BertLayer:
        target = nn.BertLayer
    elif layers.is_berts(module):
        target = layers.one_op_class(source)
    elif rotary_layers.is_known(module):
        target = rotary_layers.one_op_class(source)
    elif layers.is_berts_encoder(module):
        target = layers.one_call_class(source)
    elif models.is_berts(module):
        target = models.direct_class(source)
    else:
        return None
    with contextlib.suppress(_CannotSwap):
        return _retype(module, source, target)
    return None


def _why_not_frozen(module: torch_nn.Module, uses: Counter[int | None]) -> str | None:
    if (why := _why_computed(module, ["weight"])) is not None:
        return why
    weight = cast(Tensor, module.weight)
    if type(weight) is not torch_nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.numel() == 0:
        return "no product of ours serves it"
    if weight.dim() != 2:  # between calls under FullyShardedDataParallel(use_orig_params=True)
        return "its weight is no matrix"
    if not _linear_choice.can_freeze(weight.dtype):
        return f"torch's product serves it; {_linear_choice.choose(weight.dtype).reason}"
    if uses[_address(weight)] > 1:
        return "its weight is shared"
    return None


_IN_PROJECTIONS = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]


def _why_computed(module: torch_nn.Module, names: Sequence[str]) -> str | None:
    """Return which weight is no parameter: torch's pruning, for example, makes it in each call."""
    computed = [name for name in names if name not in module._parameters]
    return f"its {computed[0]} is no parameter" if computed else None


def _address(t: Tensor) -> int | None:
    """Return where a tensor's memory begins; None if it has none of its own."""
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):  # a DTensor, a sparse tensor, one that a lazy module makes
        return None


def _swap_transformer_encoder(module: torch_nn.TransformerEncoder, unpad: bool) -> _Change | None:
    known = (torch_nn.TransformerEncoderLayer, nn.TransformerEncoderLayer)
    if all(type(layer) in known for layer in module.layers):
        with contextlib.suppress(_CannotSwap):
            change = _retype(module, torch_nn.TransformerEncoder, nn.TransformerEncoder)
            return _unpad(module, change) if unpad else change
    # A subclass, or an encoder whose layers may rely on the float masks that torch's encoder makes.
    # The attention inside is fused anyway, and it takes no NestedTensor.
    if not module.use_nested_tensor:
        return None
    step = _Step(module, "use_nested_tensor", True, False)
    step.do()
    return _Change(_qualified(type(module)), "the same, without NestedTensors", [step])


def _swap_transformer_decoder(module: torch_nn.TransformerDecoder, unpad: bool) -> _Change | None:
    known = (torch_nn.TransformerDecoderLayer, nn.TransformerDecoderLayer)
    if not all(type(layer) in known for layer in module.layers):
        raise _CannotSwap("layers that aren't torch's; what they hold is fused all the same")
    change = _retype(module, torch_nn.TransformerDecoder, nn.TransformerDecoder)
    return _unpad(module, change) if unpad else change


def _swap_dropout(module: torch_nn.Dropout) -> _Change | None:
    ours = 0 < module.p < 1 and not module.inplace  # otherwise ours has nothing to gain
    if not ours or type(module) is not torch_nn.Dropout:
        return None
    return _retype(module, torch_nn.Dropout, nn.Dropout)


def _swap_recurrent(
    module: torch_nn.Module, target: type[torch_nn.Module], operator: str
) -> _Change | None:
    (source,) = (cls for cls in _RECURRENT if isinstance(module, cls))
    weight = next(module.parameters(), None)
    if weight is not None and not isinstance(module, target):
        call = backends.Call(operator, weight.device.type, weight.dtype)
        if call.device == "cuda" and (why := _why_cudnn(module, call)) is not None:
            raise _CannotSwap(f"on a GPU, where torch has cuDNN's kernels for it: {why}")
        choice = backends.choose(call)
        if choice.backend == backends.FALLBACK and choice.refused:  # not on request
            raise _CannotSwap("no fused kernel serves it here")
    return _retype(module, source, target)


_MEASURED_UNITS = 1024  # the smallest layer that has been timed beside cuDNN's


def _why_cudnn(module: torch_nn.Module, call: backends.Call) -> str | None:
    """Returns why a recurrent module on a GPU stays torch's; None if ours has measured faster."""
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


_REGISTRATION = "_trifuse_registration"  # an attribute that is pickled with the model


def _swap_transformers_attention(
    model: Any, whole: torch_nn.Module, copies: dict[int, Any]
) -> _Change | None:
    """Switch a whole transformers model to ``attn_implementation="trifuse"``.

    The models nested in it are switched with it. If one of them cannot be, the outer model is left
    alone, since it may build the mask that they use.

    Args:
        model: the transformers model.
        whole: what it is in. Modules around it that hold its configuration get its copy too, also
            within another configuration.
        copies: deepcopy's memo, of all models in the whole: a configuration is copied once.
    """
    from transformers import PreTrainedModel

    from trifuse import huggingface
    from trifuse._transformers_versions import PreTrainedConfig

    before = model.config._attn_implementation
    if before == huggingface.NAME:
        return None
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            source: Any = sublayers.original(type(part))  # transformers reads the file of a class
            name = source.__name__
            if not _holds_attention(part):
                continue  # a convolutional backbone, for example
            if not source._can_set_attn_implementation():
                if written_out.all_written_out(part):
                    return None  # they are served one by one
                raise _CannotSwap(f"{name} doesn't choose its attention by attn_implementation")
            # "sdpa" has neither caps nor sinks, so models with them don't support it; trifuse has
            # both.
            more = getattr(part.config, "attn_logit_softcapping", None) is not None or any(
                each._parameters.get("sinks") is not None for each in part.modules()
            )
            if not (more or part._supports_sdpa or huggingface.is_plain(source)):
                raise _CannotSwap(f"{name} needs more of attention than a softmax of masked scores")
            if (reason := huggingface.why_not(source)) is not None:
                raise _CannotSwap(reason)
            if part.config.output_attentions:
                raise _CannotSwap(f"{name} returns its attention weights")
    huggingface.register()
    held = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    ]
    steps: dict[int, _Step] = {}
    replaced = []
    # The outermost comes last, so that it is undone first, because setting it also sets nested
    # ones.
    for module, name, config in reversed(held):
        own = copy.deepcopy(config, copies)
        chosen = own._attn_implementation
        steps.setdefault(id(own), _Step(own, "_attn_implementation", chosen, huggingface.NAME))
        replaced.append(_Step(module, name, config, own))
        replaced.append(_Step(module, _REGISTRATION, _Absent.ABSENT, huggingface.Registration()))
    changes = [*steps.values(), *replaced, *_around(model, whole, copies)]
    for step in changes:
        step.do()
    return _Change(f'attn_implementation="{before}"', f'"{huggingface.NAME}"', changes)


def _around(model: torch_nn.Module, whole: torch_nn.Module, copies: dict[int, Any]) -> list[_Step]:
    """Return the steps that give the modules around a model the copies of its configurations.

    Other models and attentions outside of models keep a configuration that has a copy: the former
    choose for themselves, and nobody examined the latter. But a configuration that holds one with a
    copy, as one of text and images holds the text's, becomes one that holds the copy, everywhere.

    Args:
        model, whole, copies: as in :func:`_swap_transformers_attention`.
    """
    models = {part for _, each in _models_of_transformers(whole) for part in each.modules()}
    own = set(model.modules())
    made: dict[int, Any] = {}
    steps = []
    for module in whole.modules():
        if module in own:
            continue
        keeps = module in models or written_out.names_attention(type(module))
        for name, value in vars(module).items():
            if keeps and id(value) in copies:
                continue
            if (copied := _with_copies(value, copies, made)) is not value:
                steps.append(_Step(module, name, value, copied))
    return steps


def _with_copies(value: Any, copies: dict[int, Any], made: dict[int, Any]) -> Any:
    """Return a configuration's copy or, if it holds configurations with copies, one with those.

    Any other value is returned as it is.

    Args:
        copies: deepcopy's memo.
        made: the results of earlier calls, by the value's id.
    """
    from trifuse._transformers_versions import PreTrainedConfig

    if not isinstance(value, PreTrainedConfig):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if id(value) not in made:
        parts = {name: _with_copies(part, copies, made) for name, part in vars(value).items()}
        changed = {name: part for name, part in parts.items() if part is not vars(value)[name]}
        made[id(value)] = copy.copy(value) if changed else value
        vars(made[id(value)]).update(changed)
    return made[id(value)]


def _holds_attention(model: torch_nn.Module) -> bool:
    return any(written_out.names_attention(type(module)) for module in model.modules())


# Reports ----------------------------------------------------------------------------------------


def notes(model: torch_nn.Module) -> Iterator[Note]:
    """Yield the parts of the fused modules in ``model`` that do not run fused at present."""
    held = {
        id(attention)
        for layer in model.modules()
        if type(layer) in _CALL_WITHOUT_WEIGHTS
        for attention in layer.children()
    }
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and id(module) not in held:
            yield Note(path, "by softmax where weights are asked for, torch's default")
        if not all(
            is_fused(dropout, norm) for dropout, norm in _ends_of_sublayers(module)
        ) or sublayers.ends_stay_apart(module):
            yield Note(path, "dropout, sum and norm one by one")
        if (note := written_out.note(module)) is not None:
            yield Note(path, note)


_CALL_WITHOUT_WEIGHTS = (
    torch_nn.TransformerEncoderLayer,
    torch_nn.TransformerDecoderLayer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def _ends_of_sublayers(module: Any) -> Iterator[tuple[torch_nn.Module, torch_nn.Module]]:
    """Yield each dropout with the norm that a fused module can run in the same operator."""
    if isinstance(module, nn.BertSelfOutput):
        yield module.dropout, module.LayerNorm
    elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        for k in (1, 2, 3):
            if hasattr(module, f"norm{k}"):
                yield getattr(module, f"dropout{k}"), getattr(module, f"norm{k}")


def norms_apart(model: torch_nn.Module) -> Iterator[Left]:
    """Yield the norms in modules of transformers that no operator serves, and why."""
    for path, holder in model.named_modules():
        source = sublayers.original(type(holder))
        if not sublayers.is_of_transformers(source):
            continue
        for name, reason in sublayers.norms_apart(holder):
            inside = f"{path}.{name}" if path else name
            yield Left(inside, f"{source.__name__}.{name}", reason)


def sums_apart(model: torch_nn.Module) -> Iterator[Left]:
    """Yield the pre-norm layers of transformers whose sum at the end no operator serves."""
    paths = {module: path for path, module in model.named_modules()}
    for layer, norms, with_sums in boundaries.find_apart(model):
        reason = f"the sum at its end; norms that take in a sum: {with_sums} of {norms}"
        yield Left(paths[layer], sublayers.original(type(layer)).__name__, reason)


def own_attention(model: torch_nn.Module) -> Iterator[Left]:
    """Yield the attentions of models set to "trifuse" that compute their attention themselves."""
    seen = set()
    for root, chosen in attn_implementations(model):
        if chosen != "trifuse":
            continue
        for path, module in model.get_submodule(root).named_modules(prefix=root):
            if module not in seen and _attends_by_itself(module):
                yield Left(path, type(module).__name__, "computes its attention by itself")
            seen.add(module)


def torch_attention(model: torch_nn.Module) -> Iterator[Left]:
    """Yield the modules that call ``F.scaled_dot_product_attention``, or compute a softmax.

    Attentions of transformers models are left out: :func:`own_attention` has them.
    """
    of_transformers = {
        part for _, outermost in _models_of_transformers(model) for part in outermost.modules()
    }
    for path, module in model.named_modules():
        cls = type(module)
        if module in of_transformers or _is_ours_or_torchs(cls):
            continue
        names = code.names_used(cls) | code.names_used_by_helpers(cls)
        if "scaled_dot_product_attention" in names:
            why = "calls F.scaled_dot_product_attention"
        elif "softmax" in names and "attention" in cls.__name__.lower():
            why = "writes its softmax out"
        else:
            continue
        yield Left(path, cls.__name__, f"{why}; run it inside trifuse.attention()")


def _attends_by_itself(module: torch_nn.Module) -> bool:
    """Whether a module named as an attention computes it, bypassing ``ALL_ATTENTION_FUNCTIONS``."""
    cls = type(module)
    by_itself = written_out.computed_by(cls) not in (None, written_out.INTERFACE)
    return by_itself and not _is_ours_or_torchs(cls)


def _is_ours_or_torchs(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("torch", "trifuse")


def _report_padding(model: torch_nn.Module, report: FuseReport) -> None:
    """Report which stacks leave padding out, and which models have no stack that can."""
    found = list(padding(model))
    for path, stack, why in found:
        if why is None:
            report.unpadded.append(path)
        else:
            report.padded.append(Left(path, type(stack).__name__, str(why)))
            packing.warn_padded(stack, why)
    # The rows of stacks claim that they leave padding out. Some stacks may not at present.
    computing = {each.path for each in report.padded}
    report.swapped = [
        each._replace(after=each.after.removesuffix(_UNPADDED)) if each.path in computing else each
        for each in report.swapped
    ]
    refused = {stack: why for stack, why in stacks.find(model).items() if isinstance(why, str)}
    if found:
        for path, module in model.named_modules():
            if (other := refused.get(module)) is not None:
                report.padded.append(Left(path, type(module).__name__, other))
                packing.warn_padded(module, other)
    left = {each.path: each.reason for each in reversed(report.left)}  # the first reason counts
    for path, module in _models_of_transformers(model):
        inside = f"{path}." if path else ""
        if not any(stack == path or stack.startswith(inside) for stack, _, _ in found):
            why = left.get(path) or _why_no_stack(module, path, left)
            report.padded.append(Left(path, type(module).__name__, why))
            packing.warn_padded(module, why)
    if not (found or report.padded):
        why = "nothing in it is known to do without it"
        report.padded.append(Left("", type(model).__name__, why))
        packing.warn_padded(model, why)


def _why_no_stack(model: torch_nn.Module, path: str, left: dict[str, str]) -> str:
    """Say why a model of transformers has no stack, by the stacks that were left alone first."""
    for name, module in model.named_modules(prefix=path):
        if name in left and isinstance(stacks.recognise(module), stacks.Stack):
            return left[name]
    return stacks.why_none(model)


def padding(
    model: torch_nn.Module,
) -> Iterator[tuple[str, torch_nn.Module, packing.Obstacle | str | None]]:
    """Yield each stack in ``model`` set to leave padding out, and why it doesn't, or None."""
    module: Any
    for path, module in model.named_modules():
        # Tests the class, since wrappers such as LoRA's forward the wrapped module's attributes.
        if hasattr(type(module), "why_padded") and module.unpad:
            yield path, module, module.why_padded()


def attn_implementations(model: torch_nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the path and the ``attn_implementation`` of each transformers model in ``model``."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            yield path, module.config._attn_implementation


def _models_of_transformers(model: torch_nn.Module) -> Iterator[tuple[str, torch_nn.Module]]:
    """Yield the outermost transformers models in ``model``, with their paths."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    inside: set[torch_nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            yield path, module
            inside.update(module.modules())


def _qualified(cls: type) -> str:
    """Return a class's public import path, such as ``torch.nn.MultiheadAttention``."""
    package = "torch.nn" if cls.__module__.startswith("torch.nn.") else cls.__module__
    if package.startswith("trifuse.nn."):
        package = "trifuse.nn"
    return f"{package}.{cls.__name__}"
