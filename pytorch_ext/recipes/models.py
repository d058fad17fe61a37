"""Models of transformers with BERT's code, which run in one call, or in few steps.

transformers wraps a model's ``forward`` in functions that look up options in the configuration,
and makes its mask through several others. With one short sentence these take as long as the
computation of a layer. A call that requests only the result of the model needs none of them. A
model is recognised if its ``forward``, and the method that makes its masks, have the statements of
BERT's, in the installed version of transformers.

In inference embeddings, layers and pooler run in one call (:mod:`trifuse.ops.encoder_model`). If a
hook watches one of them, or one of them has other code, they are called one after another.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trifuse._transformers import NAME
from trifuse.nn import plans
from trifuse.nn.linear import FrozenLinear, Linear, is_intercepted
from trifuse.ops import _modes
from trifuse.ops._linear_choice import choose
from trifuse.ops.encoder_model import Embeddings, Parts, Pooler, encoder_model
from trifuse.ops.linear import ROWS_WORTH_CHECKING
from trifuse.recipes import code, embeddings, layers, sublayers


class Direct(nn.Module):
    """Mixin for fused classes of such models, before the original class in their bases."""

    # The methods that a plain call skips, as they were read.
    _trifuse_replaces: tuple[Any, Any] | None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Same signature as the original class's forward."""
        given = input_ids, attention_mask, token_type_ids, position_ids
        if may_skip_forward(args, kwargs):
            out = in_one_call(self, *given)
            if out is not None:
                return out
            if _is_plain(self, input_ids, attention_mask):
                return _run(self, *given)
        return super().forward(*given, *args, **kwargs)


def may_skip_forward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call's further arguments request only the usual result, and nothing traces it."""
    if torch.compiler.is_compiling():
        return False
    for value in args:
        if value is not None:
            return False
    return all(value is None or value is (name == "return_dict") for name, value in kwargs.items())


def _is_plain(model: Any, words: Any, mask: Any) -> bool:
    """Whether a call in inference has words, and at most a mask of padding."""
    if model.training or not isinstance(words, Tensor) or words.dim() != 2:
        return False
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == words.shape):
        return False
    return _is_usual(model)


def _is_usual(model: Any) -> bool:
    """Whether a model has the code that was recognised, and returns only its usual result."""
    cls = type(model)
    if cls._trifuse_replaces != (cls._trifuse_origin.source.forward, getattr(cls, _MASKS, None)):
        return False
    if _MASKS in vars(model):
        return False
    # Read as a dictionary, because each access of a configuration's attribute runs Python code.
    config = model.config.__dict__
    for name, expected in _CONFIG:
        if config.get(name, expected) is not expected:
            return False
    return config.get(_ATTENTION) == NAME and _CAUSAL not in config


# A model with this configuration returns only its last hidden state and pooled output.
_CONFIG = (
    ("is_decoder", False),
    ("output_hidden_states", False),
    ("_output_attentions", False),
    ("return_dict", True),
)


_ATTENTION = "_attn_implementation_internal"
_CAUSAL = "is_causal"


class _Plan:
    """A plan holds what all calls of a model share while its code and its parts stay as they are.

    It does not hold ``vars(model)``, which may refer to the model.
    """

    def __init__(self, checks: plans.Checks, config: Any, parts: Parts) -> None:
        self.checks = checks
        self.config = config
        self.token_type = parts.ids.token_type
        self.leaves_pooler = parts.pooler is None  # whether the call leaves it out, if there is one
        self.parts = parts.as_tuple()
        self.has_served = False  # whether a call has used it
        self.is_recorded = False  # whether transformers' hooks that record outputs are there


_plans: WeakKeyDictionary[nn.Module, _Plan] = plans.kept_outside()


def in_one_call(model: Any, words: Any, padding: Any, types: Any, positions: Any) -> Any:
    """Return the result of a model that has a plan; None if it must be computed in another way.

    Args:
        model: a :class:`Direct` model, or one that leaves padding out.
        words, padding, types, positions: as its ``forward`` takes them.
    """
    plan, own = _plans.get(model), vars(model)
    if plan is None or own["training"] or own.get("config") is not plan.config or _MASKS in own:
        return None
    idle = plans.idle_recorder() if plan.is_recorded else None
    out = encoder_model(plan.parts, idle, words, padding, types, positions)
    if out is None:
        return None
    plan.has_served = True
    hidden, pooled = out
    if plan.leaves_pooler and model.pooler is not None:
        pooled = model.pooler(hidden)
    return _output(model._trifuse_result, last_hidden_state=hidden, pooler_output=pooled)


def prepare(model: Any, words: Any) -> None:
    """Make a plan for the next calls of a model, unless it has one that still holds.

    Args:
        model: as in :func:`in_one_call`.
        words: those of the present call.
    """
    if model.training or not plans.may_run() or _modes.transform_active():
        return
    if not isinstance(words, Tensor) or not words.is_cpu:
        return
    plan = _plans.get(model)
    if plan is not None:
        if plan.has_served:
            _pauses.pop(model, None)
        embedding = model._modules.get("embeddings")
        if (
            vars(model).get("config") is not plan.config
            or not isinstance(embedding, embeddings.OneEmbedding)
            or embeddings.only_zero(embedding) is not plan.token_type
        ):
            _plans.pop(model, None)
    plan = plans.plan_of(model, _plans, lambda: _attempt(model))
    if plan is not None:
        plan.is_recorded = plans.have_hooks(plan.checks)


class _Pause(NamedTuple):
    """How many calls of a model must pass before the next attempt to plan, and how many have."""

    calls: int
    passed: int = 0


_LONGEST_PAUSE = 1023


# Making a plan takes longer than a call. If it fails, or if the plan serves no call before the
# model changes, twice as many calls as before wait for the next attempt.
_pauses: WeakKeyDictionary[nn.Module, _Pause] = plans.kept_outside()


def _attempt(model: Any) -> _Plan | None:
    pause = _pauses.get(model, _Pause(0))
    if pause.passed < pause.calls:
        _pauses[model] = _Pause(pause.calls, pause.passed + 1)
        return None
    _pauses[model] = _Pause(min(2 * pause.calls + 1, _LONGEST_PAUSE))
    return _make_plan(model)


def _make_plan(model: Any) -> _Plan | None:
    """Return the plan of a model in evaluation mode; None if it can't run in one call."""
    if not _is_usual(model):
        return None
    own = model._modules
    embedding = embeddings.fixed(own.get("embeddings"))
    encoder = None if embedding is None else layers.fixed(own.get("encoder"))
    forwards = None if encoder is None else plans.forwards_of(model)
    if embedding is None or encoder is None or forwards is None:
        return None
    pooler = None if own.get("pooler") is None else _pooler(own["pooler"])
    config = vars(model.config)
    options = [(config, name) for name in (*dict(_CONFIG), _ATTENTION, _CAUSAL)]
    read = [(type(model), _MASKS), (own, "pooler"), *options]
    values = (
        *embedding.plan.checks.values,
        *embedding.values,
        *encoder.layers.checks.values,
        *encoder.values,
        *(() if pooler is None else pooler.values),
        *plans.present_values(read),
        *plans.no_global_hooks(),
        *forwards,
    )
    checks = plans.checks(plans.modules_in(model), plans.once(values))
    found = embedding.plan
    capabilities = encoder.layers.capability, None if pooler is None else pooler.capability
    parts = Parts(
        checks.compiled,
        Embeddings(found.tables, found.weight, found.bias, found.eps, found.last_is_residual),
        embedding.ids,
        encoder.layers.arguments,
        None if pooler is None else pooler.parts,
        encoder.layers.rows,
        isinstance(model, Direct),
        tuple({each for each in capabilities if each is not None}),
    )
    return _Plan(checks, model.config, parts)


class _PlannedPooler(NamedTuple):
    parts: Pooler
    capability: str | None  # for which its weight is packed
    values: tuple[plans.PlannedValue, ...]  # from which they were read


def _pooler(pooler: Any) -> _PlannedPooler | None:
    """Return the parts of a pooler with BERT's code, or None."""
    cls: Any = sublayers.original(type(pooler))
    berts = code.modeling("bert").BertPooler
    if not sublayers.is_of_transformers(cls) or not code.same_methods(cls, berts, "forward"):
        return None
    dense, activation = pooler._modules.get("dense"), pooler._modules.get("activation")
    if type(activation) is not nn.Tanh:
        return None
    if type(dense) is FrozenLinear:
        frozen = dense._frozen
        weight, shape, capability, rows = frozen.packed, frozen.shape, frozen.capability, 0
        place = vars(dense), "_frozen"
    elif type(dense) is Linear and "weight" in dense._parameters:
        weight, capability, rows = dense.weight, None, ROWS_WORTH_CHECKING
        shape, place = weight.shape, (dense._parameters, "weight")
        if not choose(weight.dtype).inference:
            return None
    else:
        return None
    if shape[0] != shape[1] or "bias" not in dense._parameters:
        return None
    values = plans.present_values([place, (dense._parameters, "bias")])
    return _PlannedPooler(Pooler(weight, dense.bias, shape[0], rows), capability, values)


def _run(model: Any, words: Any, padding: Any, types: Any, positions: Any) -> Any:
    prepare(model, words)  # for the next call
    mask = None if padding is None else _mask(padding, words.device)
    embedded = model.embeddings(input_ids=words, token_type_ids=types, position_ids=positions)
    # The encoder would wrap its result in an object.
    encoder = model.encoder
    hidden = None if is_intercepted(encoder) else layers.run_all(encoder, embedded, mask)
    if hidden is None:
        hidden = encoder(embedded, attention_mask=mask).last_hidden_state
    pooled = None if model.pooler is None else model.pooler(hidden)
    return _output(model._trifuse_result, last_hidden_state=hidden, pooler_output=pooled)


def _mask(padding: Tensor, device: torch.device) -> Tensor | None:
    """Return what :func:`trifuse.huggingface.attention_mask` returns for the padding of a model."""
    padding = padding.to(device)
    return None if _modes.is_known_nonzero(padding) else padding.bool()[:, None, None, :]


def _output(cls: Any, **values: Tensor | None) -> Any:
    """Return ``cls(**values)``, a ModelOutput, without its checks of each field.

    The first object of a class is made by ``cls`` itself, and decides whether the quick way gives
    an equal one.
    """
    fields = _fields.get(cls)
    if fields is None:
        made = cls(**values)
        names = tuple(vars(made))
        quick = _made_quickly(cls, names, values)
        same = _are_same(vars(quick), vars(made)) and _are_same(dict(quick), dict(made))
        _fields[cls] = names if same else ()
        return made
    return _made_quickly(cls, fields, values) if fields else cls(**values)


# By class, the names of all its fields; none if its objects must be made by the class.
_fields: dict[type, tuple[str, ...]] = {}


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two dictionaries have the same keys, in one order, and hold the same objects."""
    return list(one) == list(other) and all(one[name] is other[name] for name in one)


def _made_quickly(cls: Any, fields: tuple[str, ...], values: dict[str, Tensor | None]) -> Any:
    out = cls.__new__(cls)
    attributes = vars(out)
    for name in fields:
        value = attributes[name] = values.get(name)
        if value is not None:
            OrderedDict.__setitem__(out, name, value)
    return out


def is_berts(model: nn.Module) -> bool:
    """Whether a model has BERT's code, and layers that run in one call."""
    cls: Any = sublayers.original(type(model))
    return isinstance(getattr(model, "encoder", None), layers.OneCall) and _has_berts_code(cls)


def _has_berts_code(cls: Any) -> bool:
    if not sublayers.is_of_transformers(cls) or not hasattr(cls, _MASKS):
        return False
    berts = code.modeling("bert").BertModel
    # In versions whose `forward` takes these options, it reads them itself.
    options = inspect.signature(inspect.unwrap(berts.forward)).parameters
    if not hasattr(berts, _MASKS) or "output_hidden_states" in options:
        return False
    if list(inspect.signature(inspect.unwrap(cls.forward)).parameters)[:5] != _ARGUMENTS:
        return False
    return code.same_methods(cls, berts, "forward", _MASKS)


def replaced_by_calls(source: Any) -> tuple[Any, Any] | None:
    """Return the methods of a model's class that a plain call skips; None if it can't."""
    known = _has_berts_code(sublayers.original(source))
    return (source.forward, getattr(source, _MASKS, None)) if known else None


_ARGUMENTS = ["self", "input_ids", "attention_mask", "token_type_ids", "position_ids"]


_MASKS = "_create_attention_masks"


def direct_class(source: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a model's class that serves plain calls in few steps."""
    if source not in _classes:
        origin = sublayers.origin_of(source, (direct_class, (source,)))
        forward: Any = source.forward
        members = {
            "_trifuse_result": code.returned_class(forward),
            "_trifuse_replaces": replaced_by_calls(source),
        }
        _classes[source] = sublayers.subclass(Direct, origin, members)
    return _classes[source]


_classes: dict[type[nn.Module], type[nn.Module]] = {}
