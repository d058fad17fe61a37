"""Reports which backend a call would get, or what a model's modules run on, but runs nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.rnn import PackedSequence

from trifuse import backends
from trifuse.fusing.remains import attn_implementations, notes, own_attention, padding
from trifuse.fusing.report import Left, table
from trifuse.nn.attention import MultiheadAttention
from trifuse.nn.gru import GRU, GRUCell
from trifuse.nn.linear import Frozen, HoldsFrozen, OnProduct
from trifuse.nn.lstm import LSTM, LSTMCell
from trifuse.nn.rnn import RNN, RNNCell
from trifuse.ops._explained import EXPLAINED
from trifuse.ops._linear_choice import choose


class Runs(NamedTuple):
    """A module of a model, and the kernels that it runs on."""

    path: str  # its name in the model; "" is the model itself
    module: str  # its class
    runs: str


@dataclass
class Account:
    """A list of what each module of a model runs on. ``print(account)`` shows it as a table.

    Attributes:
        modules: the modules that trifuse can serve, fused or not.
        unpadded: names of the modules that skip padding.
        padded: the modules that should skip padding but compute it too, and why.
    """

    modules: list[Runs] = field(default_factory=list)
    unpadded: list[str] = field(default_factory=list)
    padded: list[Left] = field(default_factory=list)

    def __str__(self) -> str:
        rows: dict[tuple[str, str], list[str]] = {}  # modules that run alike share a line
        for path, module, runs in self.modules:
            rows.setdefault((module, runs), []).append(path)
        lines = [
            (paths[0] if len(paths) == 1 else f"({len(paths)} modules)", module, runs)
            for (module, runs), paths in rows.items()
        ]
        return "\n".join(table(lines)) or "  nothing that trifuse can serve"


@overload
def explain(
    function: LSTM, input: Tensor | PackedSequence, *args: Any, **kwargs: Any
) -> backends.Choice: ...
@overload
def explain(function: nn.Module) -> Account: ...  # type: ignore[overload-overlap]
@overload
def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> backends.Choice: ...
def explain(
    function: Callable[..., Any] | nn.Module, *args: Any, **kwargs: Any
) -> backends.Choice | Account:
    """Reports which backend would serve ``function(*args, **kwargs)`` and why not the others, or
    what the modules of a model run on.

    For an LSTM, a GRU or an RNN on CUDA kernels, it also reports whether one launch covers the
    whole sequence or each step is a launch, and why. One launch loads the recurrent weights onto
    the chip only once. For a ``trifuse.nn.LSTM``, it also reports how many layers run side by side.

    For a model, fused or not, reports which modules run fused and on which backend, which parts of
    them are not fused, and which modules skip padding or why they compute it. The report describes
    the model as it is now, including anything wrapped, hooked or moved since it was fused.

    Args:
        function: an operator of trifuse, such as ``trifuse.scaled_dot_product_attention``; a
            ``trifuse.nn.LSTM``, with tensors; or any ``torch.nn.Module``, alone.
        args, kwargs: as for the call itself; they are checked in the same way.

    Returns:
        A :class:`trifuse.backends.Choice` for a call, an :class:`Account` for a module alone. Both
        print as a short report.

    Raises:
        TypeError: ``function`` is neither an operator of trifuse nor a module; or a module other
            than a ``trifuse.nn.LSTM`` came with arguments.
        Whatever the call would raise for bad arguments.

    Example:
        >>> import torch, trifuse
        >>> query = torch.randn(1, 2, 5, 64)
        >>> with trifuse.backend("eager"):
        ...     explain(trifuse.scaled_dot_product_attention, query, query, query).backend
        'eager'
    """
    if isinstance(function, LSTM) and (args or kwargs):
        return function._explain(*args, **kwargs)
    if isinstance(function, nn.Module):
        if args or kwargs:
            raise TypeError(
                "args: expected nothing beside a module, unless it is a trifuse.nn.LSTM; got "
                f"arguments for {type(function).__name__}"
            )
        return _explain_model(function)
    explained = EXPLAINED.get(function)
    if explained is None:
        names = ", ".join(f.__name__ for f in EXPLAINED)
        raise TypeError(f"function: expected one of {names}, or a module; got {function!r}")
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    taken = inspect.signature(explained.prepare).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    given = {k: v for k, v in bound.arguments.items() if takes_all or k in taken}
    call = explained.prepare(**given)
    choice: backends.Choice = call.choice
    return choice._replace(notes=explained.notes(call))


def _explain_model(model: nn.Module) -> Account:
    account = Account()
    said: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        said[path] = [] if (runs := _runs(module)) is None else [runs]
    for path, chosen in attn_implementations(model):
        said[path].insert(0, f'attention by attn_implementation="{chosen}"')
    for path, note in notes(model):
        said[path].append(note)
    for path, _, reason in own_attention(model):
        said[path].append(reason)
    for path, stack, why in padding(model):
        if why is None:
            account.unpadded.append(path)
            said[path].append("leaves padding out")
        else:
            account.padded.append(Left(path, type(stack).__name__, str(why)))
            said[path].append(f"computes padding too: {why}")
    for path, module in model.named_modules():
        if said[path]:
            name = type(module).__name__
            account.modules.append(Runs(path, name, "; ".join(said[path])))
    return account


def _runs(module: nn.Module) -> str | None:
    """Returns what a module by itself runs on, or None if trifuse can't serve it."""
    cls = type(module)
    if isinstance(module, Frozen):
        return "cpp, its weight frozen"
    if isinstance(module, OnProduct):
        weight = module.weight
        return "torch's" if weight.device.type != "cpu" else choose(weight.dtype).product
    for ours, operator in _OPERATORS.items():
        if isinstance(module, ours):
            return f"{operator} by {_backend(operator, module)}"
    if isinstance(module, _OF_TORCH) and not _is_ours(cls):
        return None if isinstance(module, NonDynamicallyQuantizableLinear) else "not fused"
    return "fused" if _is_ours(cls) else None


_OPERATORS = {
    MultiheadAttention: "attention",
    LSTM: "lstm",
    LSTMCell: "lstm",
    GRU: "gru",
    GRUCell: "gru",
    RNN: "rnn",
    RNNCell: "rnn",
}

_OF_TORCH = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.LSTM,
    nn.LSTMCell,
    nn.GRU,
    nn.GRUCell,
    nn.RNN,
    nn.RNNCell,
    nn.Linear,
)


def _is_ours(cls: type) -> bool:
    """Returns whether the class is trifuse's, or another library's subclass of such a class."""
    return any(
        base.__module__.startswith("trifuse.nn.")
        or base.__module__ in ("trifuse.huggingface", "trifuse.recipes")
        for base in cls.__mro__
    )


def _backend(operator: str, module: nn.Module) -> str:
    frozen = module.frozen_weights() if isinstance(module, HoldsFrozen) else {}
    weight = next(module.parameters(), next(iter(frozen.values()), None))
    if weight is None:
        return "none: it has no parameters"
    head_dim = module.head_dim if isinstance(module, MultiheadAttention) else 0
    call = backends.Call(operator, weight.device.type, weight.dtype, head_dim)
    try:
        return backends.choose(call).backend
    except RuntimeError as error:  # the backend requested by name can't serve it
        return f"none: {error}"
