"""Put trifuse into an existing model, and take it out again.

``fuse`` changes no weights and makes no modules: it gives a module the class of its fused
counterpart, which holds the same parameters under the same names. So the state_dict, tied weights,
hooks, the device, the training flag and every reference to the module stay as they were.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import nn as torch_nn

from trifuse import backends, nn
from trifuse.fusing.attention_choice import swap_transformers_attention
from trifuse.fusing.freezing import freeze_model
from trifuse.fusing.remains import (
    norms_apart,
    notes,
    own_attention,
    report_padding,
    sums_apart,
    torch_attention,
)
from trifuse.fusing.report import UNPADDED, FuseReport, Left, add
from trifuse.fusing.steps import Absent, CannotSwap, Step, retype
from trifuse.fusing.swaps import (
    swap_by_recipe,
    swap_disentangled,
    swap_embeddings,
    swap_own_bias,
    swap_stack,
    swap_window_bias,
    swap_written_out,
    swaps_of,
)
from trifuse.fusing.whole_layers import swap_layers, uncover
from trifuse.recipes import (
    boundaries,
    disentangled,
    embeddings,
    own_biases,
    packed_models,
    stacks,
    sublayers,
    window_biases,
    written_out,
)


def fuse(model: torch_nn.Module, unpad: bool = False, freeze: bool = False) -> FuseReport:
    """Make the modules of ``model`` that trifuse supports run on its operators, in place.

    It supports ``torch.nn``'s MultiheadAttention, Transformer layers (whose inference fast path is
    bypassed), Linear, Dropout, LSTM, GRU, RNN and their cells; ``trifuse.models``; and Hugging Face
    transformers: the attention of every model that selects it by ``attn_implementation``, attention
    that a model writes out, and ``Conv1D``. A model that selects its attention gets a copy of its
    configuration that selects "trifuse", so that other models built from the same configuration
    object are unaffected; modules around it in ``model`` that hold this object, also within another
    configuration, get the copy too.

    Other modules of transformers are recognised by their code: where dropout, a sum and a norm
    follow each other, they become one operator, even across the boundary between two layers. So do
    a linear layer and its activation, and each remaining RMSNorm and LayerNorm. A bias of relative
    positions stays a table: see :mod:`trifuse.recipes`. In inference on a CPU, layers of known code
    are one op: see :mod:`trifuse.nn.encoder_layer`.

    ``torch.nn.Linear`` on a CPU runs on trifuse's matrix product where that is faster, by a table
    of CPUs: see :mod:`trifuse.ops._linear_choice`.
    ``torch.nn.LSTM``, ``GRU``, ``RNN`` and their cells run fused on a CPU if the extension is
    built, and on a GPU in 16 bits from 1024 units on if the CUDA kernels are built. The layers are
    not instances of torch's classes while they do: see :mod:`trifuse.nn.lstm`.
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
        freeze: pack the weights of linear layers for good, for inference on a CPU. Without it,
            inference of 512 rows and more (16 under autocast) keeps a packed copy beside the
            parameter, and compares the two at every such call, so that no change is missed. A
            frozen layer keeps the packed weight alone
            (:class:`trifuse.nn.FrozenLinear`), and so does ``nn.MultiheadAttention``. Shared
            weights stay as they are, and so do weights that are not plain parameters, as DTensors
            or after pruning. Loading, moving or changing a frozen weight raises a RuntimeError,
            before any other part of ``model`` has changed.

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
    covered = uncover(model, report) if unpad else {}
    swaps = swaps_of(model, unpad, freeze, report)
    found = stacks.find(model) if unpad else {}
    for path, module in model.named_modules():
        # Base classes first: a transformers model must select its attention before it can unpad.
        chosen = [swaps[cls] for cls in reversed(type(module).__mro__) if cls in swaps]
        of_transformers = sublayers.is_of_transformers(type(module))
        functions = [getattr(swap, "func", swap) for swap in chosen]
        if of_transformers and functions in ([], [swap_transformers_attention]):
            chosen.append(swap_by_recipe)
        if embeddings.is_berts(module):
            chosen.append(swap_embeddings)
        # Written-out attention runs inside a context, together with everything changed in it.
        if own_biases.makes_its_own(module):
            chosen.append(swap_own_bias)
        if window_biases.picks(module):
            chosen.append(swap_window_bias)
        if written_out.writes_out(module):
            chosen.append(swap_written_out)
        if disentangled.is_disentangled(module):
            chosen.append(functools.partial(swap_disentangled, unpad=unpad))
        if isinstance(stack := found.get(module), stacks.Stack):
            chosen.append(functools.partial(swap_stack, parts=stack.parts))
        for swap in chosen:
            try:
                change = swap(module)
            except CannotSwap as reason:
                report.left.append(Left(path, type(module).__name__, str(reason)))
            else:
                if change is not None:
                    add(report, path, change)
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
        report_padding(model, report)
    if freeze:
        freeze_model(model, report)
    swap_layers(model, report, covered)


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
            with contextlib.suppress(CannotSwap):
                change = retype(norm, torch_nn.LayerNorm, nn.LayerNorm)
                inside = f"{path}.{name}" if path else name
                if change is not None:
                    add(report, inside, change)


def _join_layers(model: torch_nn.Module, report: FuseReport) -> None:
    """Make each pre-norm layer compute the norm at the beginning of the next one."""
    paths = {module: path for path, module in model.named_modules()}
    for holder, layer, following in list(boundaries.find(model)):
        if not isinstance(type(layer), sublayers.FusedType):
            change = None
            with contextlib.suppress(CannotSwap):
                change = swap_by_recipe(layer, only_closes=True)
            if change is None:
                continue
            add(report, paths[layer], change)
        boundaries.join(layer, following)
        if boundaries.NEXT not in vars(holder):
            joined = boundaries.Joined(holder)
            step = Step(holder, boundaries.NEXT, Absent.ABSENT, joined)
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
        with contextlib.suppress(CannotSwap):
            change = retype(module, source, packed_models.packed_class(source))
            if change is not None:
                add(report, path, change._replace(after=f"{change.after}{UNPADDED}"))
