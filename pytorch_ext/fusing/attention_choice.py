"""The switch of models of transformers to ``attn_implementation="trifuse"``."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn as torch_nn

from trifuse.fusing.remains import models_of_transformers
from trifuse.fusing.steps import Absent, CannotSwap, Change, Step
from trifuse.recipes import sublayers, written_out

_REGISTRATION = "_trifuse_registration"  # an attribute that is pickled with the model


def swap_transformers_attention(
    model: Any, whole: torch_nn.Module, copies: dict[int, Any]
) -> Change | None:
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
    from trifuse.recipes import attention_interface

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
                raise CannotSwap(f"{name} doesn't choose its attention by attn_implementation")
            # "sdpa" has neither caps nor sinks, so models with them don't support it; trifuse has
            # both.
            more = getattr(part.config, "attn_logit_softcapping", None) is not None or any(
                each._parameters.get("sinks") is not None for each in part.modules()
            )
            if not (more or part._supports_sdpa or attention_interface.is_plain(source)):
                raise CannotSwap(f"{name} needs more of attention than a softmax of masked scores")
            if (reason := attention_interface.why_not(source)) is not None:
                raise CannotSwap(reason)
            if part.config.output_attentions:
                raise CannotSwap(f"{name} returns its attention weights")
    huggingface.register()
    held = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig)
    ]
    steps: dict[int, Step] = {}
    replaced = []
    # The outermost comes last, so that it is undone first, because setting it also sets nested
    # ones.
    for module, name, config in reversed(held):
        own = copy.deepcopy(config, copies)
        chosen = own._attn_implementation
        steps.setdefault(id(own), Step(own, "_attn_implementation", chosen, huggingface.NAME))
        replaced.append(Step(module, name, config, own))
        replaced.append(Step(module, _REGISTRATION, Absent.ABSENT, huggingface.Registration()))
    changes = [*steps.values(), *replaced, *_around(model, whole, copies)]
    for step in changes:
        step.do()
    return Change(f'attn_implementation="{before}"', f'"{huggingface.NAME}"', changes)


def _around(model: torch_nn.Module, whole: torch_nn.Module, copies: dict[int, Any]) -> list[Step]:
    """Return the steps that give the modules around a model the copies of its configurations.

    Other models and attentions outside of models keep a configuration that has a copy: the former
    choose for themselves, and nobody examined the latter. But a configuration that holds one with a
    copy, as one of text and images holds the text's, becomes one that holds the copy, everywhere.

    Args:
        model, whole, copies: as in :func:`swap_transformers_attention`.
    """
    models = {part for _, each in models_of_transformers(whole) for part in each.modules()}
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
                steps.append(Step(module, name, value, copied))
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
