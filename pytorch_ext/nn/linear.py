"""``torch.nn.Linear`` on the faster of trifuse's and torch's matrix products."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from trifuse.nn import sizes
from trifuse.nn.plans import RECORDER, has_global_hooks
from trifuse.nn.quantization import Unquantizable
from trifuse.ops import activations
from trifuse.ops import linear as ops
from trifuse.ops._linear_weights import FrozenWeight, PackedWeight, frozen_message
from trifuse.ops._modes import is_exporting
from trifuse.ops.activations import Activation

# Kept outside the modules, so that packed weights are neither copied nor saved with them.
_packed: WeakKeyDictionary[nn.Module, dict[str, PackedWeight]] = WeakKeyDictionary()


class OnProduct(nn.Module):
    """A linear layer that runs on trifuse's product, however it stores its weight."""

    weight: Tensor
    bias: Any  # a tensor, or None
    frozen = False  # whether the weight is kept only in its packed form: see trifuse.fuse
    transposed = False  # whether the weight is stored as (in_features, out_features)

    def _product_weight(self) -> Tensor:
        """Returns the weight as (out_features, in_features)."""
        return self.weight.t() if self.transposed else self.weight


@sizes.checked("in_features", "out_features")
class Linear(OnProduct, nn.Linear):
    """``torch.nn.Linear`` on trifuse's product where that is faster (CPU only).

    The constructor, the parameters and their initialisation are torch's own. If nothing needs a
    gradient, calls of 512 rows and more (16 under autocast) keep a packed copy of the weight, of
    about the same size, until the parameter's bits change: see
    :class:`trifuse.ops._linear_weights.PackedWeight`. Calls of fewer rows keep nothing.

    Raises:
        ValueError: a size is above 2^60.
    """

    qconfig = Unquantizable(nn.Linear)
    weight: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b, from (..., in_features) to (..., out_features)."""
        return project(self, "weight", input, self.weight, self.bias)


class HoldsFrozen(nn.Module):
    """A module that keeps weights only in their packed form, for inference.

    :func:`trifuse.fuse` makes it, and ``revert()`` undoes that. Reading a weight unpacks a copy,
    which can't be changed in place. ``state_dict()`` holds copies too, and ``parameters()`` leaves
    the weights out.

    Raises:
        RuntimeError: by ``load_state_dict``, by ``.to()`` another dtype or device, or if a weight
            is set or changed.
    """

    frozen = True

    @staticmethod
    def weight_names(module: nn.Module) -> tuple[str, ...]:
        """Returns which parameters of a module are frozen."""
        raise NotImplementedError

    def frozen_weights(self) -> dict[str, FrozenWeight]:
        """Returns the weights by the names of their parameters."""
        raise NotImplementedError

    def _keep(self, weights: dict[str, FrozenWeight]) -> None:
        """Stores the weights."""
        raise NotImplementedError

    def _release(self) -> None:
        """Undoes :meth:`_keep`."""
        raise NotImplementedError

    def _stored(self, name: str) -> Tensor:
        """Returns a copy of a weight, laid out as the module stores it."""
        weight = self.frozen_weights()[name].unpack()
        return weight.t().contiguous() if _is_transposed(self) else weight

    def _unpacked(self, name: str, weight: FrozenWeight) -> Tensor:
        """Returns what reading the attribute of a weight gives: a copy."""
        if is_exporting():
            constant = weight.as_constant()
            return constant.t() if _is_transposed(self) else constant
        if torch.compiler.is_compiling():  # Dynamo doesn't trace _ReadOnly
            return self._stored(name)
        return self._stored(name).as_subclass(_ReadOnly)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch's own; a new weight is refused, and so is ``weight_orig`` of torch's pruning."""
        if name.startswith(tuple(self.frozen_weights())):
            raise RuntimeError(frozen_message("setting a weight"))
        super().register_parameter(name, param)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name in self.frozen_weights():
            destination[f"{prefix}{name}"] = self._stored(name)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        refuse_loading(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HoldsFrozen:
        refuse_moving(self, fn)
        super()._apply(fn, recurse)
        return self


def _is_transposed(module: nn.Module) -> bool:
    return isinstance(module, OnProduct) and module.transposed


def refuse_loading(module: nn.Module, *_: Any, **__: Any) -> None:
    """Raises if a module in this one is frozen; takes the arguments of _load_from_state_dict."""
    if any(isinstance(each, HoldsFrozen) for each in module.modules()):
        raise RuntimeError(frozen_message("load_state_dict"))


def refuse_moving(module: nn.Module, fn: Callable[[Tensor], Tensor], *_: Any, **__: Any) -> None:
    """Raises if a function would give a frozen weight another dtype or device; as for _apply."""
    kinds = {
        (weight.dtype, weight.device)
        for each in module.modules()
        if isinstance(each, HoldsFrozen)
        for weight in each.frozen_weights().values()
    }
    for dtype, device in kinds:
        moved = fn(torch.empty(0, dtype=dtype, device=device))
        if moved.dtype != dtype or moved.device != device:
            raise RuntimeError(frozen_message(f"moving a weight to {moved.device}, {moved.dtype}"))


class Frozen(HoldsFrozen, OnProduct):
    """A linear layer whose weight is kept only in its packed form: see :class:`HoldsFrozen`."""

    _frozen: FrozenWeight

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b, from (..., in_features) to (..., out_features)."""
        return ops.linear_frozen(input, self._frozen, self.bias)

    @staticmethod
    def weight_names(module: nn.Module) -> tuple[str, ...]:
        """As :meth:`HoldsFrozen.weight_names`."""
        return ("weight",)

    def frozen_weights(self) -> dict[str, FrozenWeight]:
        """As :meth:`HoldsFrozen.frozen_weights`."""
        return {"weight": self._frozen}

    def _keep(self, weights: dict[str, FrozenWeight]) -> None:
        """As :meth:`HoldsFrozen._keep`."""
        vars(self)["_frozen"] = weights["weight"]

    def _release(self) -> None:
        """As :meth:`HoldsFrozen._release`."""
        del vars(self)["_frozen"]

    @property
    def weight(self) -> Tensor:
        """A copy."""
        return self._unpacked("weight", self._frozen)

    @weight.setter
    def weight(self, value: Any) -> None:
        raise RuntimeError(frozen_message("setting a weight"))


class FrozenLinear(Frozen, Linear):  # type: ignore[misc]
    """A :class:`Linear` whose weight is kept only in its packed form: see :class:`Frozen`."""


class FrozenOutput(Frozen, NonDynamicallyQuantizableLinear):
    """The last product of an ``nn.MultiheadAttention``, frozen with it."""


# The frozen class of each class of linear layers. Modules of these two kinds run on the product.
FROZEN: dict[type[nn.Module], type[Frozen]] = {Linear: FrozenLinear}

# The frozen classes of nn.MultiheadAttention and of its output. They are frozen together, because
# the attention reads the weight of its output without calling it.
FROZEN_ATTENTION: dict[type[nn.Module], type[HoldsFrozen]] = {
    NonDynamicallyQuantizableLinear: FrozenOutput
}

ATTENTION_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


class _WithoutWeights(dict[str, Any]):
    """The parameters of a frozen module.

    Torch's weight norm and spectral norm take the weight from here, and put another in its place.
    """

    def __missing__(self, name: str) -> Any:
        if name == "weight" or name in ATTENTION_WEIGHTS:
            raise RuntimeError(frozen_message("replacing a weight"))
        raise KeyError(name)

    def __delitem__(self, name: str) -> None:
        if name not in self:
            self.__missing__(name)
        super().__delitem__(name)


class _ReadOnly(Tensor):
    """A copy of a frozen weight. In-place changes would be lost, so they raise."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, _ReadOnly)]
        first = next(iter((*args, *kwargs.values())), None)
        changed = first if isinstance(first, (list, tuple)) else [first]
        if isinstance(kwargs.get("out"), _ReadOnly) or (
            _writes(func) and any(isinstance(each, _ReadOnly) for each in changed)
        ):
            raise RuntimeError(frozen_message("changing a weight"))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if type(result) in (tuple, list):  # as by chunk
                return type(result)(_read_only_view(each, given) for each in result)
            return _read_only_view(result, given)


def _read_only_view(result: Any, given: list[_ReadOnly]) -> Any:
    """Returns a tensor that shares the memory of one of those given as read-only, else itself."""
    if isinstance(result, Tensor) and any(
        result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in given
    ):
        return result.as_subclass(_ReadOnly)
    return result


def _writes(func: Any) -> bool:
    """Returns whether a function of torch changes its first argument."""
    name = func.__name__
    if name.startswith("__"):
        return name in _WRITING
    return name.endswith("_")


# __set__ sets an attribute, such as ``data``.
_WRITING = {
    "__set__",
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
    "__iand__",
    "__ior__",
    "__ixor__",
    "__ilshift__",
    "__irshift__",
}


def freeze(modules: Sequence[nn.Module]) -> list[dict[str, nn.Parameter]]:
    """Gives each module its frozen class, of ``FROZEN`` or ``FROZEN_ATTENTION``.

    Packed weights lie next to each other in blocks of about 64 MiB, so that only that much memory
    is held twice at any time. After an error, such as a lack of memory, no module is frozen.

    Returns:
        The parameters that were the weights of each, by name, now empty, for :func:`thaw`.
    """
    parameters: list[dict[str, nn.Parameter]] = []
    try:
        for block in _blocks(modules):
            packed = iter(FrozenWeight.pack_all([t for each in block for t in _weights(each)]))
            parameters += [_freeze(each, packed) for each in block]
    except BaseException:
        for module, kept in zip(modules, parameters, strict=False):
            thaw(module, kept)
        raise
    return parameters


def _blocks(modules: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Yields modules that follow each other, of one dtype and about 64 MiB of weights."""
    block: list[nn.Module] = []
    size, dtype = 0, None
    for module in modules:
        weights = _weights(module)
        nbytes, own = sum(weight.nbytes for weight in weights), weights[0].dtype
        del weights  # views would keep the memory of weights that are frozen next
        if block and (own != dtype or size >= 64 << 20):
            yield block
            block, size = [], 0
        block.append(module)
        size, dtype = size + nbytes, own
    if block:
        yield block


def frozen_class(module: nn.Module) -> type[HoldsFrozen]:
    """Returns the class that a module gets when it is frozen."""
    cls = type(module)
    return FROZEN[cls] if cls in FROZEN else FROZEN_ATTENTION[cls]


def _weights(module: Any) -> list[Tensor]:
    """Returns the weights to be frozen as (out_features, in_features)."""
    found = [module._parameters[name] for name in frozen_class(module).weight_names(module)]
    return [weight.t() for weight in found] if _is_transposed(module) else found


def _freeze(module: Any, packed: Iterator[FrozenWeight]) -> dict[str, nn.Parameter]:
    cls = frozen_class(module)
    names = cls.weight_names(module)
    parameters = {name: module._parameters.pop(name) for name in names}
    module._parameters = _WithoutWeights(module._parameters)
    module.__class__ = cls
    module._keep({name: next(packed) for name in names})
    for parameter in parameters.values():
        parameter.data = parameter.data.new_empty(0)
    _packed.pop(module, None)
    return parameters


def thaw(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Undoes :func:`freeze`."""
    if not isinstance(module, HoldsFrozen):
        raise TypeError(f"module: expected a frozen module; got {type(module).__name__}")
    plain = {frozen: cls for cls, frozen in (*FROZEN.items(), *FROZEN_ATTENTION.items())}
    for name, parameter in parameters.items():
        parameter.data = module._stored(name)
    module._release()
    module.__class__ = plain[type(module)]  # type: ignore[assignment]
    module._parameters = {**parameters, **module._parameters}


def project(owner: nn.Module, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x weightᵀ + bias; ``name`` identifies the weight among its owner's weights."""
    if ops.is_elsewhere(x, weight):
        return nn.functional.linear(x, weight, bias)
    return ops.linear(x, weight, bias, packed=packed_weight(owner, name))


def linear_activation(module: nn.Module, x: Tensor, activation: Activation) -> Tensor:
    """Returns activation(module(x)), fused as in :func:`trifuse.ops.linear.linear`.

    A module of a class that isn't in ``FROZEN``, or with hooks, is called as it is.
    """
    if is_intercepted(module):
        return activations.activate(module(x), activation)
    if is_frozen(module):
        return ops.linear_frozen(x, module._frozen, module.bias, activation=activation)
    if is_plain(module):
        weight = module._product_weight()
        packed = None if ops.is_elsewhere(x, weight) else packed_weight(module, "weight")
        return ops.linear(x, weight, module.bias, activation=activation, packed=packed)
    return activations.activate(module(x), activation)


def is_plain(module: nn.Module) -> TypeGuard[OnProduct]:
    """Returns whether a module is a linear layer on the product, and not of a derived class."""
    return type(module) in FROZEN


def is_frozen(module: nn.Module) -> TypeGuard[Frozen]:
    """As :func:`is_plain`, for a frozen layer."""
    return type(module) in FROZEN.values() or type(module) is FrozenOutput


def gated_linear(gate: nn.Module, up: nn.Module, x: Tensor, activation: Activation) -> Tensor:
    """Returns activation(gate(x)) * up(x), as one product in inference.

    Modules of classes that aren't in ``FROZEN``, or with hooks, are called as they are.
    """
    out = None
    if not (is_intercepted(gate) or is_intercepted(up)):
        if is_frozen(gate) and is_frozen(up):
            out = ops.gated_linear_frozen(
                x, (gate._frozen, up._frozen), (gate.bias, up.bias), activation=activation
            )
        elif is_plain(gate) and is_plain(up):
            out = ops.gated_linear(
                x,
                (gate._product_weight(), up._product_weight()),
                (gate.bias, up.bias),
                activation=activation,
                packed=(packed_weight(gate, "weight"), packed_weight(up, "weight")),
            )
    return activations.gate(gate(x), up(x), activation) if out is None else out


def gated_halves(both: nn.Module, x: Tensor, activation: Activation, gate: int) -> Tensor:
    """Returns activation(g) * u for the two halves of both(x), as one product in inference.

    Args:
        both: a module as in :func:`gated_linear`.
        x: (..., in_features).
        activation: as in :func:`trifuse.ops.linear.linear`.
        gate: which half is g: 0, the first, or 1.
    """
    out = None
    if not is_intercepted(both):
        if is_frozen(both):
            # A trace holds the parts, because it can't read what is kept beside the weight.
            halves = None if torch.compiler.is_compiling() else both._frozen.halves
            if halves is not None:
                biases = _halves(both.bias, gate)
                out = ops.gated_linear_frozen(
                    x, (halves[gate], halves[1 - gate]), biases, activation=activation
                )
        elif is_plain(both):
            first, last = packed_weight(both, "first half"), packed_weight(both, "last half")
            out = ops.gated_linear(
                x,
                _halves(both._product_weight(), gate),
                _halves(both.bias, gate),
                activation=activation,
                packed=(last, first) if gate else (first, last),
            )
    return activations.gate_halves(both(x), activation, gate) if out is None else out


def _halves(whole: Any, first: int) -> tuple[Any, Any]:
    """Returns two halves of a tensor, the second one first if ``first`` is 1; or two Nones."""
    if whole is None:
        return None, None
    halves = whole.chunk(2)
    return halves[first], halves[1 - first]


def activation_name(activation: nn.Module) -> Activation | None:
    """Returns the activation that a module of torch's computes, or None if a product can't."""
    if type(activation) is nn.ReLU:
        return "relu"
    if isinstance(activation, nn.SiLU) and type(activation).forward is nn.SiLU.forward:
        return "silu"
    if isinstance(activation, nn.GELU) and type(activation).forward is nn.GELU.forward:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    return None


# The attributes of activations, torch's and transformers', on which their name depends.
ACTIVATION_OPTIONS = ("approximate", "act")


def packed_weight(owner: nn.Module, name: str) -> PackedWeight | None:
    """Returns the object that keeps one of a module's weights packed; None under torch.compile."""
    if torch.compiler.is_compiling():
        return None
    packed = _packed.get(owner)
    if packed is None:
        packed = _packed[owner] = {}
    kept = packed.get(name)
    if kept is None:
        kept = packed[name] = PackedWeight()
    return kept


def is_intercepted(module: nn.Module) -> bool:
    """Returns whether a call of the module runs anything besides its class's ``forward``."""
    return why_intercepted(module) is not None


def why_intercepted(module: nn.Module, harmless: str | None = None) -> str | None:
    """Returns what a call runs besides the class's ``forward``, worded to follow "has", or None.

    Args:
        module: any.
        harmless: the name of a Python package whose hooks don't count.
    """
    if has_global_hooks():
        return "hooks that torch runs for all modules"
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ) and (why := _why_hooked(module, harmless)) is not None:
        return why
    if "forward" in vars(module):
        forward = vars(module)["forward"]
        # Libraries that replace a forward temporarily leave the class's own method there.
        own = getattr(forward, "__func__", None) is type(module).forward
        if not own or forward.__self__ is not module:
            return "a forward of its own"
    return None


def _why_hooked(module: nn.Module, harmless: str | None) -> str | None:
    for hooks in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        for hook in hooks.values():
            if harmless and (getattr(hook, "__module__", None) or "").startswith(harmless):
                continue
            recording = _recording(hook)
            if recording:
                return "a hook that records its output, which the caller asks for"
            if recording is None:
                return f"a hook ({getattr(hook, '__qualname__', type(hook).__qualname__)})"
    return None


def _recording(hook: Callable[..., Any]) -> bool | None:
    """Returns whether a hook of transformers is recording outputs now; None for any other hook.

    The first call that requests hidden states or attentions installs such hooks permanently.
    """
    module = getattr(hook, "__module__", None)
    if module != RECORDER:
        return None
    active = getattr(sys.modules[module], "_active_collector", None)
    return None if active is None else bool(active.get())
