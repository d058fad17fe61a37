"""Norms in graphs of Dynamo: the spellings that become trifuse's, and near misses that stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rewritten import Rewritten, check
from torch import nn

import trifuse

B, L, N = 3, 5, 16
W = torch.linspace(0.5, 1.5, N)
BIAS = torch.linspace(-1, 1, N)


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, L, N, generator=generator).requires_grad_() for _ in range(2)]


def llama(x, weight=W):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + 1e-6)
    return weight * x.to(dtype)


def t5(x, weight=W):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + 1e-6)
    return weight * x.to(weight.dtype)


def gemma(x, weight=W):
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normed * (1.0 + weight.float())).type_as(x)


def lit(x, weight=W):
    mean = torch.mean(x * x, dim=-1, keepdim=True)
    return x * torch.rsqrt(mean + 1e-5) * weight


def divided(x, weight=W):
    return x / torch.sqrt(1e-5 + torch.square(x).mean(dim=[2], keepdim=True)) * weight


def imagegpt(x, weight=W):
    x = x / torch.sqrt(torch.mean(torch.square(x), axis=-1, keepdim=True) + 1e-5)
    return x * weight


def deepseek(x):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def olmo(x):
    return F.layer_norm(x.to(torch.float32), (N,), None, None, 1e-5).to(x.dtype)


def powered(x):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).pow(-0.5)


def deberta(x, weight=W, bias=BIAS):
    x = x.float()
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    x = (x - mean) / torch.sqrt(variance + 1e-6)
    return weight * x + bias


def cohere(x, weight=W):
    dtype = x.dtype
    x = x.to(torch.float32)
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    x = (x - mean) * torch.rsqrt(variance + 1e-6)
    return (weight.to(torch.float32) * x).to(dtype)


def xlstm(x, weight=W, bias=BIAS):
    centred = x - x.mean(dim=-1, keepdim=True)
    y = centred * torch.rsqrt(x.var(dim=-1, keepdim=True, unbiased=False) + 1e-6)
    return y * weight + bias


def corrected(x):
    variance = torch.var(x, dim=-1, correction=0, keepdim=True)
    return torch.sub(x, x.mean((-1,), True)).div((variance + 1e-6).sqrt())


SPELLINGS = {
    "layer_norm": lambda x, y: F.layer_norm(x, (N,), W, BIAS, 1e-6),
    "layer_norm without parameters": lambda x, y: F.layer_norm(x, [N]),
    "torch.layer_norm": lambda x, y: torch.layer_norm(x, (N,), W),
    "a sum": lambda x, y: F.layer_norm(x + y, (N,), W, BIAS),
    "a sum by a function": lambda x, y: F.layer_norm(torch.add(x, y), (N,), W, BIAS),
    "a sum in place": lambda x, y: F.layer_norm((x * 2).add_(y), (N,), W, BIAS),
    "a residual that is broadcast": lambda x, y: F.layer_norm(x + y[:1], (N,), W, BIAS),
    "x that is broadcast": lambda x, y: F.layer_norm(y[:, :1] + x, (N,), W, BIAS),
    "rms_norm": lambda x, y: F.rms_norm(x + y, (N,), W, 1e-6),
    "rms_norm without eps": lambda x, y: F.rms_norm(x + y, (N,)),
    "rms_norm, Llama": lambda x, y: llama(x + y),
    "rms_norm, T5": lambda x, y: t5(x + y),
    "rms_norm, Gemma": lambda x, y: gemma(x + y),
    "rms_norm of squares": lambda x, y: lit(x + y),
    "rms_norm by a square root": lambda x, y: divided(x + y),
    "rms_norm, ImageGPT": lambda x, y: imagegpt(x + y),
    "rms_norm, DeepSeek": lambda x, y: deepseek(x + y),
    "rms_norm without a weight": lambda x, y: powered(x + y),
    "layer_norm, DeBERTa": lambda x, y: deberta(x + y),
    "layer_norm, Cohere": lambda x, y: cohere(x + y),
    "layer_norm, xLSTM": lambda x, y: xlstm(x + y),
    "layer_norm by a corrected variance": lambda x, y: corrected(x + y),
    "layer_norm, OLMo": lambda x, y: olmo(x + y),
    "a weight after layer_norm": lambda x, y: F.layer_norm(x + y, (N,)) * W,
    "a weight and a bias after layer_norm": lambda x, y: BIAS + W * F.layer_norm(x + y, (N,)),
    "a bias after layer_norm": lambda x, y: F.layer_norm(x + y, (N,), W) + BIAS,
    "a weight after rms_norm": lambda x, y: F.rms_norm(x + y, (N,), eps=1e-6).mul(W),
    "a bias after rms_norm": lambda x, y: torch.add(llama(x + y), BIAS),
    "strides of x": lambda x, y: F.layer_norm(x.transpose(0, 1), (N,)).view(-1),
    "a sum of other strides": lambda x, y: F.layer_norm(
        x.transpose(0, 1) + y.transpose(0, 1), (N,)
    ),
    "inactive dropout": lambda x, y: F.layer_norm(F.dropout(x, 0.5, False) + y, (N,)),
}


@pytest.mark.parametrize("function", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_spelling_is_served(function):
    ours = check(function, *tensors(), replaced={"norm": 1})
    rest = ("layer_norm", "rms_norm", "rsqrt", "sqrt", "var", "sub", "div", "dropout", "add_")
    assert not any(map(ours.calls, rest))
    assert ours.calls("mul") == (function is SPELLINGS["a sum in place"])  # x * 2
    # Gemma adds 1 to its weight.
    assert ours.calls("add") == (function is SPELLINGS["rms_norm, Gemma"])


def test_the_sum_is_returned_where_it_is_used_later():
    def function(x, y):
        total = x + y
        normed = F.layer_norm(total, (N,), W, BIAS)
        return total + normed.relu(), total

    ours = check(function, *tensors(), replaced={"norm": 1})
    assert ours.calls("add") == 1


def test_the_sum_is_returned_where_it_was_used_before():
    def function(x, y):
        total = x + y
        other = total.sigmoid()
        return llama(total) * other

    ours = check(function, *tensors(), replaced={"norm": 1})
    assert ours.calls("add") == 0


def test_a_sum_used_before_the_weight_exists_stays():
    def function(x, y):
        total = x + y
        weight = total.mean((0, 1)).exp()
        return F.layer_norm(total, (N,), weight)

    ours = check(function, *tensors(), replaced={"norm": 1})
    assert ours.calls("add") == 1


def test_two_norms_of_one_sum_add_once():
    def function(x, y):
        total = x + y
        return F.layer_norm(total, (N,), W), F.layer_norm(total, (N,), BIAS), total

    ours = check(function, *tensors(), replaced={"norm": 2})
    assert ours.calls("add") == 0


def test_residual_stream_of_llama_is_served():
    def function(x, y):
        x = x + torch.tanh(llama(x))
        x = x + torch.tanh(llama(x))
        return llama(x)

    ours = check(function, *tensors(), replaced={"norm": 3})
    assert ours.calls("add") == 0


def in_place_on_input(x, y):
    x += y
    return F.layer_norm(x, (N,)), x


def in_place_seen_by_a_view(x, y):
    x = x * 2
    row = x[0]
    x += y
    return F.layer_norm(x, (N,)), row


def centred_elsewhere(x, y):
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6), centred


def normed_elsewhere(x, y):
    normed = F.layer_norm(x, (N,))
    return normed * W, normed


PARTS = {  # the norm becomes trifuse's, the rest stays
    "a scaled sum": (lambda x, y: F.layer_norm(torch.add(x, y, alpha=2), (N,)), "add"),
    "a number": (lambda x, y: F.layer_norm(x + 1.0, (N,)), "add"),
    "a sum in place of an input": (in_place_on_input, "iadd"),
    "a sum in place, seen by a view": (in_place_seen_by_a_view, "iadd"),
    "another weight": (lambda x, y: lit(x, torch.ones(L, 1)), "mul"),
    "a bias before the weight": (lambda x, y: (F.layer_norm(x, (N,)) + BIAS) * W, "mul"),
    "a second weight": (lambda x, y: F.layer_norm(x, (N,), W) * W, "mul"),
    "a second bias": (lambda x, y: F.layer_norm(x, (N,), W, BIAS) + W, "add"),
    "a weight in place": (lambda x, y: F.layer_norm(x, (N,)).mul_(W), "mul_"),
    "a scaled bias": (lambda x, y: torch.add(F.layer_norm(x, (N,)), BIAS, alpha=2), "add"),
    "a bias for each row": (lambda x, y: F.layer_norm(x, (N,), W) + torch.ones(L, 1), "add"),
    "a norm used elsewhere": (normed_elsewhere, "mul"),
    "deviations used elsewhere": (centred_elsewhere, "sub"),  # RMSNorm of them
    "a sum that widens": (lambda x, y: F.layer_norm(x[:1] + y[:, :1], (N,)), "add"),
}


@pytest.mark.parametrize(("function", "stays"), PARTS.values(), ids=PARTS.keys())
def test_part_that_does_not_fit_stays(function, stays):
    ours = check(function, *(t.detach() for t in tensors()), replaced={"norm": 1})
    assert ours.calls(stays) == 1


def test_dropout_in_place_stays():
    def function(x, y):
        return F.layer_norm(F.dropout(x * 2, 1.0, True, True) + y, (N,))

    ours = check(function, *tensors(), replaced={"norm": 1})
    assert ours.calls("dropout") == 1


NEAR_MISSES = {
    "two dimensions": lambda x, y: F.layer_norm(x, (L, N)),
    "rms_norm of two dimensions": lambda x, y: F.rms_norm(x, (L, N)),
    "mean over another dimension": lambda x, y: (
        x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
    ),
    "mean of the cube": lambda x, y: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-6),
    "mean square of another tensor": lambda x, y: (
        x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    ),
    "eps outside of the root": lambda x, y: (
        x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-6)
    ),
    "a tensor as eps": lambda x, y: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + W[0]),
    "the other root": lambda x, y: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "a quotient that is rounded": lambda x, y: torch.div(
        x, torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), rounding_mode="floor"
    ),
    "an unbiased variance": lambda x, y: (
        (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6)
    ),
    "variance without the mean": lambda x, y: (
        x * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6)
    ),
    "eps outside of the deviation": lambda x, y: (
        (x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + 1e-6)
    ),
    "the mean of another tensor": lambda x, y: (
        (x - y.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6)
    ),
    "deviations from another mean": lambda x, y: (
        (x - x.mean(-1, keepdim=True))
        * torch.rsqrt((x - y.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + 1e-6)
    ),
    "the mean over another dimension": lambda x, y: (
        (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6)
    ),
    "a root that is rounded": lambda x, y: (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).bfloat16()
    ),
    "a length limited from below": lambda x, y: F.normalize(x, dim=-1) * N**0.5 * W,
    "rounded": lambda x, y: (
        x.bfloat16().float() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    ),
}


@pytest.mark.parametrize("function", NEAR_MISSES.values(), ids=NEAR_MISSES.keys())
def test_near_miss_stays(function):
    check(function, *tensors(), replaced={})


WRITES = {
    "inplace by position": lambda t: F.leaky_relu(t, 0.1, True),
    "inplace by position, dropout": lambda t: F.dropout2d(t, 1.0, True, True),
    "input by name": lambda t: F.elu(input=t, inplace=True),
    "input by name, without inplace": lambda t: torch.relu_(input=t),
    "out by position": lambda t: F.normalize(t, 2.0, -1, 1e-12, t),
    "rows that are looked up": lambda t: F.embedding(torch.tensor([0, 1]), t[0], max_norm=0.1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_summand_changed_meanwhile_is_respected(write):
    def function(x, y):
        x = x * 1
        total = x + y
        write(x)
        return F.layer_norm(total, (N,))

    check(function, *(t.detach() for t in tensors()), replaced={"norm": 1})


def test_a_summand_changed_later_is_not_saved_for_the_backward():
    def function(x, y):
        total = x + y
        normed = F.layer_norm(total, (N,))
        y.add_(1)
        return normed, y

    x, y = tensors()
    ours = check(function, x, y.detach(), replaced={"norm": 1}, aot=True)
    assert ours.calls("add") == 1
    ours = check(function, x.detach(), y.detach(), replaced={"norm": 1}, aot=True)
    assert ours.calls("add") == 0


def test_a_cast_that_is_used_elsewhere_is_not_passed_over_a_change():
    """The norm reads x where the graph reads the cast, unless something changes x after it."""

    def function(x):
        x = x * 1
        wide = x.float()
        x.add_(1)
        return (
            wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        ).bfloat16(), wide.sin()

    ours = check(function, tensors()[0].detach().bfloat16(), replaced={})
    assert ours.reasons == ["add_ may change a tensor meanwhile"]


COPIES = {
    "RMSNorm": (llama, {}),
    "LayerNorm": (lambda x: F.layer_norm(x, (N,)), {"norm": 1}),
}


@pytest.mark.parametrize(("norm", "replaced"), COPIES.values(), ids=COPIES.keys())
def test_a_copy_that_changes_is_not_passed_over(norm, replaced):
    def function(x):
        copy = x.clone()
        copy.mul_(W)
        return norm(copy)

    check(function, tensors()[0].detach(), replaced=replaced)


def test_a_cast_without_a_gradient_passes_none():
    def function(x):
        x = x.bfloat16()
        with torch.no_grad():
            wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed.bfloat16(), wide.sin(), x

    ours = check(function, tensors()[0], replaced={})
    assert "may change a mode meanwhile" in ours.reasons[0]


def test_a_root_used_elsewhere_stays():
    def function(x, y):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * root, root

    ours = check(function, *tensors(), replaced={})
    assert ours.reasons == ["root is used elsewhere"]


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("residual", [False, True])
def test_dropout_is_drawn_inside(norm, residual):
    """The returned sum shows which elements were dropped."""
    x, y = torch.randn(40, 50, N), torch.randn(40, 50, N)

    def function(x, y):
        dropped = F.dropout(x, 0.25)
        total = dropped + y if residual else dropped
        return getattr(F, norm)(total, (N,), W), total

    ours = Rewritten(function)
    torch.manual_seed(0)
    out, total = ours(x, y)
    kept = total - y if residual else total
    dropped = kept.abs() < 1e-6
    assert ours.replaced == {"norm": 1}
    if residual:  # without one, the dropped tensor is used by two and is drawn by torch
        assert ours.calls("dropout") == 0
    torch.testing.assert_close(kept[~dropped], (x / 0.75)[~dropped], rtol=1e-4, atol=1e-5)
    assert abs(dropped.float().mean().item() - 0.25) < 0.01  # four standard deviations
    expected = getattr(F, norm)(total, (N,), W)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_dropout_without_a_residual_is_drawn_inside():
    ours = Rewritten(lambda x: F.layer_norm(F.dropout(x, 1.0), (N,), W, BIAS))
    torch.testing.assert_close(ours(torch.randn(B, N)), BIAS.expand(B, N))
    assert ours.calls("dropout") == 0


def test_modules_are_served():
    torch.manual_seed(0)
    for norm in (nn.LayerNorm(N), nn.RMSNorm(N), nn.LayerNorm(N, elementwise_affine=False)):
        check(nn.Sequential(nn.Linear(N, N), norm), *tensors()[:1], replaced={"norm": 1})


@pytest.mark.parametrize("function", [llama, t5, gemma, cohere, lambda x, weight: olmo(x)])
def test_bfloat16_is_served_where_the_result_is_bfloat16(function):
    x = torch.randn(B, N).bfloat16()
    ours = Rewritten(lambda x: function(x, W.bfloat16()))
    out = ours(x)
    assert ours.replaced == {"norm": 1}
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, function(x, W.bfloat16()), rtol=0.02, atol=0.02)
    ours = Rewritten(lambda x: llama(x, W))  # the weight widens the result
    assert ours(x).dtype == torch.float32


def test_one_graph_serves_two_lengths():
    def function(x, y):
        total = x + y
        return F.layer_norm(total, (N,)) * W + llama(total * 2) + deberta(total * 3)

    ours = Rewritten(function, dynamic=True)
    for batch, length in ((3, 5), (4, 9)):
        x, y = torch.randn(2, batch, length, N)
        torch.testing.assert_close(ours(x, y), function(x, y))
    assert ours.replaced == {"norm": 3}
    assert ours.calls("sub") == 0
    assert len(ours.graphs) == 1


def test_the_requested_backend_decides():
    with trifuse.backend("eager"):
        ours = check(SPELLINGS["a sum"], *tensors(), replaced={})
    assert ours.reasons == ["no kernel for torch.float32 on cpu"]
