"""The report of trifuse.fuse says why a layer's last sum and the norm after it stay apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

pytest.importorskip("transformers")

import families

import trifuse
from trifuse.recipes import boundaries

pytestmark = pytest.mark.usefixtures("torch_multiplies")

END = "the sum at its end, because "


def ends(model: nn.Module) -> list[tuple[str, str]]:
    """Fuses a model; returns the paths of the layers that end with a sum of torch's, and why."""
    return [
        (left.path, left.reason.replace(END, ""))
        for left in trifuse.fuse(model).sums
        if END in left.reason
    ]


def sums(model: nn.Module) -> int:
    """Returns how many norms of a run take a sum of torch's."""
    return families.count(model)["torch's sums"]


def of_gpt2(change: Any) -> nn.Module:
    """Returns a GPT-2 whose second layer was changed; the sum of its embeddings is torch's."""
    model = families.build("GPT2")
    change(model.h[1])
    return model


def hook(module: nn.Module, args: Any, out: Tensor) -> None:
    """Does nothing."""


class Wrapped(nn.Module):
    """A module of another library around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)


# Devices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "paths"),
    [("GPT2", ["h.0", "h.1"]), ("OPT", ["decoder.layers.0", "decoder.layers.1"]), ("Llama", [])],
)
def test_layer_norms_on_another_device_take_no_sum(family, paths):
    """RMSNorms do."""
    reason = "the next norm is a LayerNorm on meta, where fuse leaves LayerNorm to torch"
    assert ends(families.build(family).to("meta")) == [(path, reason) for path in paths]


def test_the_reason_names_the_device():
    class OnGPU(nn.Parameter):
        device = torch.device("cuda")

    norm = nn.LayerNorm(4)
    norm.weight = OnGPU(torch.ones(4))
    assert boundaries._why_not_taken(norm) == (
        "the next norm is a LayerNorm on cuda, where fuse leaves LayerNorm to torch"
    )


def test_layer_norms_alone_on_another_device():
    report = trifuse.fuse(families.build("GPT2").to("meta"))
    assert {left.reason for left in report.norms} == {"on meta, fuse leaves LayerNorm to torch"}


def test_a_norm_on_another_device_than_its_layer():
    model = families.build("Llama")
    model.layers[1].input_layernorm.to("meta")
    assert ends(model) == [("layers.0", "the next norm is on another device")]


# The norm -----------------------------------------------------------------------------------------


def test_a_hook_on_the_norm():
    model = of_gpt2(lambda layer: layer.ln_1.register_forward_hook(hook))
    assert ends(model) == [("h.0", "the next norm has a hook (hook)")]
    assert sums(model) == 2  # that of the embeddings too


def test_a_norm_whose_forward_was_replaced():
    model = families.build("GPT2")
    model.ln_f.forward = model.ln_f.forward
    assert ends(model) == [("h.1", "the forward of the next norm was replaced")]


def test_a_norm_without_a_weight():
    model = of_gpt2(lambda layer: setattr(layer, "ln_1", nn.LayerNorm(32, bias=False)))
    assert ends(model) == []
    model.h[1].ln_1 = nn.LayerNorm(32, elementwise_affine=False)
    assert ends(model) == [("h.0", "the next norm has no weight")]
    assert sums(model) == 2


def test_a_pruned_norm():
    model = of_gpt2(lambda layer: prune.identity(layer.ln_1, "weight"))
    assert ends(model) == [
        ("h.0", "the next norm's weight is sharded, or made only when the norm runs")
    ]


def test_a_norm_of_another_dtype():
    model = families.build("Llama")
    model.layers[1].input_layernorm.double()
    assert ends(model) == [("layers.0", "the next norm's weight has another dtype")]


def test_norms_without_kernels():
    """RMSNorm in float64 is the module's own."""
    assert ends(families.build("Llama").double()) == [
        ("layers.0", "no kernel of ours serves the next norm"),
        ("layers.1", "no kernel of ours serves the next norm"),
    ]


def test_sums_that_are_clamped_in_float16():
    found = ends(families.build("T5").half())
    assert len(found) == 10
    assert {reason for _, reason in found} == {"its code clamps it in float16"}
    assert ends(families.build("T5").bfloat16()) == []


# The layer ----------------------------------------------------------------------------------------


def test_a_layer_inside_a_module_of_another_library():
    model = families.build("GPT2")
    model.h[0] = Wrapped(model.h[0])
    assert ends(model) == [("h.0", "Wrapped isn't a class of transformers")]
    assert sums(model) == 2


def test_the_norm_of_a_layer_inside_such_a_module():
    model = families.build("GPT2")
    model.h[1] = Wrapped(model.h[1])
    assert ends(model) == [
        ("h.1", "Wrapped isn't a class of transformers"),
        ("h.0", "no norm was found that takes it"),
    ]


# In some calls ------------------------------------------------------------------------------------


def test_a_hook_on_a_layer():
    """With gradients, it might change the sum that the backward needs."""
    model = of_gpt2(lambda layer: layer.register_forward_hook(hook))
    assert ends(model) == [
        ("h.0", "with gradients, GPT2Block has a hook (hook)"),
        ("h.1", "with gradients, GPT2Block has a hook (hook)"),
    ]
    assert sums(model) == 1


def test_checkpoints():
    model = families.build("Llama")
    model.gradient_checkpointing_enable()
    assert ends(model) == [
        ("layers.0", "in training, gradient checkpointing is on"),
        ("layers.1", "in training, gradient checkpointing is on"),
    ]


def test_a_stack_alone():
    """The norm after DINOv2's stack belongs to the model."""
    model = families.build("Dinov2")
    assert ends(model.encoder) == [("layer.1", "no norm was found that takes it")]
    assert ends(model) == [
        (
            "encoder.layer.1",
            "with gradients, the next norm is Dinov2Model's, and the layers may be called "
            "without it",
        )
    ]


# Sums before the first layer ----------------------------------------------------------------------


def test_sums_that_only_some_calls_have_are_left_out():
    """GPT-J adds embeddings of kinds of tokens if a caller gives them."""
    assert not trifuse.fuse(families.build("GPTJ")).sums


@pytest.mark.parametrize("has_positions", [False, True])
def test_conditions_on_attributes_are_known(has_positions):
    sizes = families.FAMILIES["Beit"] | {"use_absolute_position_embeddings": has_positions}
    model = families.build("Beit", sizes)
    found = [left.module for left in trifuse.fuse(model).sums]
    assert found == ["BeitLayer", "BeitEmbeddings"][: 1 + has_positions]
    assert sums(model) == has_positions


class Part(nn.Module):
    """A sublayer that ends with a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x):
        y = self.dropout(self.linear(x))
        return y + x


class Whole(nn.Module):
    """A module with the norm of a sublayer's sum."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.norm = Part(), nn.LayerNorm(8)

    def forward(self, x):
        x = self.part(x)
        return self.norm(x)


def test_the_sum_of_a_sublayer_is_reported_once(monkeypatch):
    """If the norm in the module around it can't take it; otherwise not at all."""
    for cls in (Part, Whole):
        monkeypatch.setattr(cls, "__module__", "transformers_modules.parts")
    assert not trifuse.fuse(Whole()).sums
    model = Whole()
    model.part.forward = model.part.forward
    assert trifuse.fuse(model).sums == [
        ("part", "Part", "the sum at its end, because the forward of this Part was replaced")
    ]
