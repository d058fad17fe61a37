"""trifuse.nn against torch.nn: every option, every mask, every error."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import trifuse
from trifuse.nn import attention as nn_attention

B, L, S, E, H = 3, 5, 7, 12, 4


def pair(**options) -> tuple[nn.MultiheadAttention, trifuse.nn.MultiheadAttention]:
    """The same module twice, torch's and ours, in float64 and with biases that aren't zero."""
    options = {"embed_dim": E, "num_heads": H, "dtype": torch.float64} | options
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(**options)
    torch.manual_seed(0)
    ours = trifuse.nn.MultiheadAttention(**options)
    with torch.no_grad():
        for mine, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, their)
            if mine.dim() == 1:
                their.normal_()
                mine.copy_(their)
    return theirs, ours


def inputs(
    *, batched: bool = True, batch_first: bool = False, kdim: int = E, vdim: int = E, dtype=None
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((L, E), (S, kdim), (S, vdim))
    if batched and batch_first:
        shapes = tuple((B, *shape) for shape in shapes)
    elif batched:
        shapes = tuple((shape[0], B, shape[1]) for shape in shapes)
    dtype = torch.float64 if dtype is None else dtype
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


def boolean(*shape: int, seed: int = 2) -> Tensor:
    """A random mask, True at masked keys as in torch.nn; never at the last, so no row is empty."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[..., -1] = False
    return mask


def floating(*shape: int, seed: int = 3) -> Tensor:
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return mask.masked_fill(boolean(*shape), -math.inf)


def masks(batch: int = B) -> dict[str, dict[str, Tensor]]:
    lead = (batch,) if batch > 1 else ()
    padding = {"bool": boolean(*lead, S), "float": floating(*lead, S)}
    attn = {
        "bool": boolean(L, S, seed=4),
        "float": floating(L, S, seed=5),
        "bool per head": boolean(batch * H, L, S, seed=6),
        "float per head": floating(batch * H, L, S, seed=7),
    }
    found: dict[str, dict[str, Tensor]] = {"none": {}}
    found |= {f"padding {name}": {"key_padding_mask": mask} for name, mask in padding.items()}
    found |= {f"attn {name}": {"attn_mask": mask} for name, mask in attn.items()}
    for (p, a), (q, b) in itertools.product(padding.items(), attn.items()):
        found[f"padding {p}, attn {q}"] = {"key_padding_mask": a, "attn_mask": b}
    return found


def run(module: nn.Module, tensors: tuple[Tensor, ...], **arguments) -> list[Tensor | None]:
    """Outputs, then gradients of the inputs, the parameters and the float masks."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    arguments = {
        name: value.clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in arguments.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")
        out, weights = module(*leaves, **arguments)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    if weights is not None:
        loss = loss + weights.square().sum()
    wanted = leaves + list(module.parameters())
    wanted += [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    return [out, weights, *torch.autograd.grad(loss, wanted, allow_unused=True)]


def assert_same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for mine, their in zip(ours, theirs, strict=True):
        if their is None:
            assert mine is None
        else:
            assert mine is not None
            torch.testing.assert_close(mine, their, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch", [B, 1])
@pytest.mark.parametrize("name", masks())
def test_masks(name, batch, need_weights):
    """Outputs, weights and gradients, batched and unbatched."""
    theirs, ours = pair()
    tensors = inputs(batched=batch > 1)
    arguments = {"need_weights": need_weights, **masks(batch)[name]}
    assert_same(run(ours, tensors, **arguments), run(theirs, tensors, **arguments))


OPTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv and zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim and vdim": {"kdim": 6, "vdim": 10},
    "kdim, no bias": {"kdim": 6, "bias": False},
    "kdim, all added": {"kdim": 6, "add_bias_kv": True, "add_zero_attn": True},
    "one head": {"num_heads": 1},
}


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options, batch_first, need_weights, average):
    theirs, ours = pair(batch_first=batch_first, **options)
    widths = {name: width for name, width in options.items() if name in ("kdim", "vdim")}
    for batched in (True, False):
        tensors = inputs(batched=batched, batch_first=batch_first, **widths)
        for mask in (None, boolean(*((B, S) if batched else (S,)))):
            arguments = {
                "key_padding_mask": mask,
                "attn_mask": boolean(L, S, seed=4),
                "need_weights": need_weights,
                "average_attn_weights": average,
            }
            assert_same(run(ours, tensors, **arguments), run(theirs, tensors, **arguments))


@pytest.mark.parametrize("batch_first", [True, False])
def test_tensors_given_twice(batch_first):
    """Self-attention and key = value project with one matrix product; the result is the same."""
    theirs, ours = pair(batch_first=batch_first)
    query, key, _ = inputs(batch_first=batch_first)
    for tensors in ((query, query, query), (query, key, key), (query[0], query[0], query[0])):
        for need_weights in (True, False):
            got, got_weights = ours(*tensors, need_weights=need_weights)
            wanted, weights = theirs(*tensors, need_weights=need_weights)
            torch.testing.assert_close((got, got_weights), (wanted, weights))


class Counted(nn.Module):
    """A parametrization that changes nothing."""

    count = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.count += 1
        return weight


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("which", ["self", "key is value", "all differ"])
def test_parametrized_projections_are_computed_once(which, need_weights):
    _, ours = pair(add_bias_kv=True)
    counted = {}
    for name in ("in_proj_weight", "in_proj_bias", "bias_k", "bias_v"):
        parametrize.register_parametrization(ours, name, counted.setdefault(name, Counted()))
        counted[name].count = 0
    query, key, value = inputs()
    tensors = {
        "self": (query, query, query),
        "key is value": (query, key, key),
        "all differ": (query, key, value),
    }
    ours(*tensors[which], need_weights=need_weights)
    assert {name: each.count for name, each in counted.items()} == dict.fromkeys(counted, 1)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("added", [{}, {"add_zero_attn": True}])
def test_causal_hint(padded, need_weights, added):
    """The hint changes nothing; without padding torch drops the mask and the appended key."""
    theirs, ours = pair(**added)
    query = inputs()[0]
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    padding = {"key_padding_mask": boolean(B, L)} if padded else {}
    arguments = {"attn_mask": causal, "need_weights": need_weights, **padding}
    got = ours(query, query, query, is_causal=True, **arguments)
    torch.testing.assert_close(got, theirs(query, query, query, **arguments))


@pytest.mark.parametrize("training", [True, False])
def test_module_info_samples(training):
    """torch's samples for nn.MultiheadAttention, against it and the samples' own reference."""
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_modules import module_db

    info = next(info for info in module_db if info.module_cls is nn.MultiheadAttention)
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
    )
    assert len(samples) >= 64
    for sample in samples:
        options = {"dtype": torch.float64, **sample.constructor_input.kwargs}
        ours = trifuse.nn.MultiheadAttention(**options).train(training)
        theirs = nn.MultiheadAttention(**options).train(training)
        theirs.load_state_dict(ours.state_dict())
        arguments, masks_ = sample.forward_input.args, sample.forward_input.kwargs
        got = ours(*arguments, **masks_)
        torch.testing.assert_close(got, theirs(*arguments, **masks_))
        torch.testing.assert_close(got, sample.reference_fn(ours, *arguments, **masks_))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_that_of_torch(dtype):
    exact, ours = pair(embed_dim=48, batch_first=True, bias=False)
    theirs, ours = copy.deepcopy(exact).to(dtype), ours.to(dtype)
    exact = copy.deepcopy(theirs).double()
    torch.manual_seed(0)
    tensors = tuple(torch.randn(3, 2, 33, 48).to(dtype))
    mask = torch.arange(33) >= torch.tensor([33, 20])[:, None]
    arguments = {"key_padding_mask": mask, "need_weights": False}
    wanted = run(exact, tuple(x.double() for x in tensors), **arguments)
    for double, mine, peer in zip(
        wanted, run(ours, tensors, **arguments), run(theirs, tensors, **arguments), strict=True
    ):
        if double is not None:
            mine, peer = mine.double() - double, peer.double() - double
            assert mine.abs().max() <= 2 * peer.abs().max()
            assert mine.square().mean() <= 4 * peer.square().mean()


@pytest.mark.parametrize("need_weights", [True, False])
def test_rows_without_keys_attend_to_nothing(need_weights):
    _, ours = pair(batch_first=True)
    query, key, value = (x.requires_grad_() for x in inputs(batch_first=True))
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1] = True
    for mask in (padding, torch.zeros(B, S).double().masked_fill_(padding, -math.inf)):
        out, weights = ours(query, key, value, mask, need_weights=need_weights)
        torch.testing.assert_close(out[1], ours.out_proj.bias.expand(L, E))
        if weights is not None:
            assert not weights[1].any()
        out.sum().backward()
        for tensor in (query, key, value):
            assert tensor.grad.isfinite().all()
            tensor.grad = None


def test_what_is_masked_does_not_exist():
    _, ours = pair(batch_first=True)
    query, key, value = inputs(batch_first=True)
    padding = torch.arange(S).expand(B, S) >= 4
    wanted, _ = ours(query, key, value, padding, need_weights=False)
    key[:, 4:], value[:, 4:] = math.nan, math.inf
    assert torch.equal(ours(query, key, value, padding, need_weights=False)[0], wanted)


def test_masks_are_combined_without_a_matrix_for_each_head(monkeypatch):
    _, ours = pair()
    seen = []

    def spy(query, key, value, mask, *rest):
        seen.append((None if mask is None else tuple(mask.shape), *rest))
        return trifuse.scaled_dot_product_attention(query, key, value, mask, *rest)

    monkeypatch.setattr(nn_attention, "scaled_dot_product_attention", spy)
    query, key, value = inputs()
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    ours(query, key, value, need_weights=False)
    ours(query, key, value, boolean(B, S), need_weights=False)
    ours(query, key, value, attn_mask=boolean(L, S), need_weights=False)
    ours(query, key, value, boolean(B, S), attn_mask=boolean(L, S), need_weights=False)
    ours(query, query, query, boolean(B, L), False, causal, is_causal=True)
    assert seen == [
        (None, 0.0, False),
        ((B, 1, 1, S), 0.0, False),
        ((L, S), 0.0, False),
        ((B, 1, L, S), 0.0, False),
        ((B, 1, 1, L), 0.0, True),
    ]


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_is_for_training(need_weights):
    _, ours = pair(dropout=0.5, batch_first=True)
    torch.manual_seed(0)
    x = torch.randn(2, 64, E, dtype=torch.float64)
    kept = ours.eval()(x, x, x, need_weights=need_weights)[0]
    assert torch.equal(ours(x, x, x, need_weights=need_weights)[0], kept)
    ours.train()
    draws = []
    for seed in (1, 1, *range(2, 30)):
        torch.manual_seed(seed)
        draws.append(ours(x, x, x, need_weights=need_weights)[0])
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
    # The kept weights are scaled up, so that the draws average to the result without dropout.
    deviations = torch.stack(draws[1:]) - kept
    spread = deviations.square().mean().sqrt()
    assert deviations.mean(0).square().mean().sqrt() < 1.5 * spread / len(deviations) ** 0.5


def test_state_goes_both_ways():
    theirs, ours = pair(add_bias_kv=True, kdim=6)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert isinstance(ours, nn.MultiheadAttention)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    tensors = inputs(kdim=6)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(other(*tensors), ours(*tensors))


BAD = {
    "4-D query": ({"query": (1, 2, 3, E)}, AssertionError, "query: expected 2 or 3"),
    "2-D key": ({"key": (S, E)}, AssertionError, "key: expected 3 dimensions; got 2"),
    "features": ({"query": (L, B, E + 1)}, AssertionError, "query: expected 12 features"),
    "key features": ({"key": (S, B, E + 1)}, AssertionError, "key: expected 12 features"),
    "value features": ({"value": (S, B, 1)}, AssertionError, "value: expected 12 features"),
    "value length": ({"value": (S + 1, B, E)}, AssertionError, r"value: expected \(7, 3\)"),
    "batch": ({"query": (L, B + 1, E)}, AssertionError, "key: expected batch 4, as query; got 3"),
    "padding shape": (
        {"key_padding_mask": torch.zeros(B, L, dtype=torch.bool)},
        AssertionError,
        r"key_padding_mask: expected shape \(3, 7\); got \(3, 5\)",
    ),
    "padding dtype": (
        {"key_padding_mask": torch.zeros(B, S, dtype=torch.int64)},
        AssertionError,
        "key_padding_mask: expected bool or a floating dtype; got torch.int64",
    ),
    "attn shape": (
        {"attn_mask": torch.zeros(B, L, S)},
        RuntimeError,
        r"attn_mask: expected shape \(5, 7\) or \(12, 5, 7\); got \(3, 5, 7\)",
    ),
    "attn dtype": (
        {"attn_mask": torch.zeros(L, S, dtype=torch.uint8)},
        AssertionError,
        "attn_mask: expected bool or a floating dtype; got torch.uint8",
    ),
    "causal without mask": ({"is_causal": True}, RuntimeError, "expected attn_mask"),
}


@pytest.mark.parametrize(("bad", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(bad, error, message):
    """The same exceptions as torch; messages state what was expected and what was given."""
    theirs, ours = pair()
    arguments = {
        "query": torch.zeros(L, B, E, dtype=torch.float64),
        "key": torch.zeros(S, B, E, dtype=torch.float64),
        "value": torch.zeros(S, B, E, dtype=torch.float64),
        "need_weights": False,
    }
    for name, value in bad.items():
        arguments[name] = (
            torch.zeros(value, dtype=torch.float64) if isinstance(value, tuple) else value
        )
    with pytest.raises(error, match=message):
        ours(**arguments)
    with pytest.raises((AssertionError, RuntimeError)):
        theirs(**arguments)


def test_nested_tensors_are_refused():
    _, ours = pair(batch_first=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        nested = torch.nested.nested_tensor(list(inputs(batch_first=True)[0]))
    with pytest.raises(AssertionError, match="expected padded tensors"):
        ours(nested, nested, nested, need_weights=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("masked", ["attn_mask", "key_padding_mask"])
def test_weights_beside_a_float32_mask_have_the_dtype_of_the_call(masked, dtype):
    """The weights have the module's dtype, or autocast's where ``dtype`` is None, as in torch."""
    _, ours = pair(dtype=torch.float32)
    x = torch.randn(L, B, E)
    left_out = boolean(*((L, L) if masked == "attn_mask" else (B, L)))
    mask = torch.zeros(left_out.shape).masked_fill(left_out, float("-inf"))
    wanted = ours(x, x, x, **{masked: mask})
    ours = ours if dtype is None else ours.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        got = ours(*[x if dtype is None else x.to(dtype)] * 3, **{masked: mask})
    for actual, expected in zip(got, wanted, strict=True):
        assert actual.dtype == (dtype or torch.bfloat16)
        torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.05)


def test_autocast():
    _, ours = pair(batch_first=True, dtype=torch.float32)
    x = torch.randn(2, 9, E)
    mask = torch.arange(9) >= torch.tensor([9, 4])[:, None]
    wanted = ours(x, x, x, mask, need_weights=False)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(x, x, x, mask, need_weights=False)[0]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), wanted, rtol=0.05, atol=0.05)


def test_compiles_whole():
    _, ours = pair(batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    query, key, value = inputs(batch_first=True)
    for mask in (None, boolean(B, S)):
        got, wanted = (m(query, key, value, mask, need_weights=False)[0] for m in (compiled, ours))
        torch.testing.assert_close(got, wanted)


# The encoder ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_module_with_a_learnt_key_serves_every_batch(strict):
    module = trifuse.nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True).eval()
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},) * 3
    program = torch.export.export(
        module, (torch.randn(3, 5, 8),) * 3, dynamic_shapes=shapes, strict=strict
    )
    x = torch.randn(4, 5, 8)
    torch.testing.assert_close(program.module()(x, x, x), module(x, x, x))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer_agrees_with_torch(norm_first, batch_first, calls):
    options = {"dim_feedforward": 16, "norm_first": norm_first, "batch_first": batch_first}
    options |= {"dropout": 0.0, "dtype": torch.float64, "activation": "gelu"}
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(E, H, **options)
    torch.manual_seed(0)
    ours = trifuse.nn.TransformerEncoderLayer(E, H, **options)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    x = inputs(batch_first=batch_first)[0]
    padding = torch.arange(L) >= torch.tensor([5, 3, 1])[:, None]
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    for arguments in (
        {},
        {"src_key_padding_mask": padding},
        {"src_mask": causal},
        {"src_mask": causal, "src_key_padding_mask": padding},
        {"src_mask": causal, "is_causal": True},
    ):
        wanted = theirs(x, **arguments)
        for module in (ours.train(), ours.eval()):
            with torch.no_grad():
                torch.testing.assert_close(module(x, **arguments), wanted)
    assert len(calls) == 10


@pytest.mark.parametrize("enable_nested_tensor", [True, False])
def test_encoder_agrees_with_torch(enable_nested_tensor, calls):
    torch.manual_seed(0)
    layer = trifuse.nn.TransformerEncoderLayer(
        E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64
    )
    norm = nn.LayerNorm(E, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        ours = trifuse.nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor)
    peer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    theirs = nn.TransformerEncoder(peer, 2, norm, enable_nested_tensor=False)
    theirs.load_state_dict(ours.state_dict())
    x = inputs(batch_first=True)[0]
    padding = torch.arange(L) >= torch.tensor([5, 3, 1])[:, None]
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    causal_float = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for arguments in (
        {},
        {"src_key_padding_mask": padding},
        {"mask": causal},
        {"mask": causal, "src_key_padding_mask": padding},
        {"mask": causal_float},
        {"mask": causal_float, "is_causal": True},
        {"mask": boolean(L, L), "is_causal": False},
    ):
        wanted = theirs(x, **arguments)
        real = ~arguments.get("src_key_padding_mask", torch.zeros(B, L, dtype=torch.bool))
        for module in (ours.train(), ours.eval()):
            with torch.no_grad():
                torch.testing.assert_close(module(x, **arguments)[real], wanted[real])
    assert len(calls) == 2 * 2 * 7


def test_causal_masks_are_recognised(monkeypatch):
    """Causal masks, boolean or float, become is_causal; other masks go to the operator."""
    seen = []

    def spy(query, key, value, mask, dropout_p, is_causal):
        seen.append((mask is None, is_causal))
        return trifuse.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal)

    monkeypatch.setattr(nn_attention, "scaled_dot_product_attention", spy)
    layer = trifuse.nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dtype=torch.float64)
    encoder = trifuse.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    almost = causal.clone()
    almost[0, 1] = False
    shifted = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64) + 1
    x = inputs(batch_first=True)[0]
    for mask in (causal, torch.zeros(L, L).double().masked_fill(causal, -math.inf)):
        encoder(x, mask)
    for mask in (almost, shifted, boolean(B * H, L, L)):
        encoder(x, mask)
    assert seen == [(True, True)] * 2 + [(False, False)] * 3


def test_torch_layers_do_not_pass_our_attention_by(calls):
    """Put into torch's own encoder layer, our module is called in evaluation too."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dtype=torch.float64).eval()
    x = inputs(batch_first=True)[0]
    padding = torch.arange(L) >= torch.tensor([5, 3, 1])[:, None]
    with torch.no_grad():
        wanted = layer(x, src_key_padding_mask=padding)
        ours = trifuse.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
        ours.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = ours
        layer.eval()
        got = layer(x, src_key_padding_mask=padding)
        assert len(calls) == 1
        torch.testing.assert_close(got[~padding], wanted[~padding])
        with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
            encoder = nn.TransformerEncoder(layer, 2).eval()
        encoder(x, src_key_padding_mask=padding)
        assert len(calls) == 3


@pytest.mark.parametrize("options", [{}, {"kdim": 8, "vdim": 12}, {"add_bias_kv": True}])
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_private_in_torch_and_used(fused, options):
    """``_reset_parameters``, and calls of torch's function that read ``_qkv_same_embed_dim``."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, **options)
    ours = trifuse.nn.MultiheadAttention(E, H, **options)
    if fused:
        ours = nn.MultiheadAttention(E, H, **options)
        trifuse.fuse(ours)
    for module in (theirs, ours):
        torch.manual_seed(1)
        module._reset_parameters()
        if module.out_proj.bias is not None:
            nn.init.ones_(module.out_proj.bias)
        nn.init.ones_(module.out_proj.weight)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert ours._qkv_same_embed_dim is theirs._qkv_same_embed_dim is ("kdim" not in options)
    query = torch.randn(L, B, E)
    key, value = (torch.randn(L, B, options.get(n, E)) for n in ("kdim", "vdim"))
    separate = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    got, wanted = (
        torch.nn.functional.multi_head_attention_forward(
            query,
            key,
            value,
            m.embed_dim,
            m.num_heads,
            m.in_proj_weight,
            m.in_proj_bias,
            m.bias_k,
            m.bias_v,
            m.add_zero_attn,
            m.dropout,
            m.out_proj.weight,
            m.out_proj.bias,
            use_separate_proj_weight=not m._qkv_same_embed_dim,
            **{name: getattr(m, name) for name in separate},
        )[0]
        for m in (ours, theirs)
    )
    assert torch.equal(got, wanted)
    module = copy.deepcopy(ours)
    module.__class__ = nn.MultiheadAttention
    assert torch.equal(module(query, key, value)[0], theirs(query, key, value)[0])


def test_softmax_attention_agrees_with_the_eager_module():
    from trifuse.models import bert

    torch.manual_seed(0)
    query, key, value = torch.randn(3, B, H, L, 8, dtype=torch.float64)
    padding = torch.arange(L) < torch.tensor([5, 3, 1])[:, None]
    ours, theirs = trifuse.nn.SoftmaxAttention(), bert.SoftmaxAttention()
    general = (padding[:, None, None], ~boolean(B, 1, L, L), floating(B, H, L, L))
    for mask in (None, padding, *general):
        got, wanted = ours(query, key, value, mask), theirs(query, key, value, mask)
        torch.testing.assert_close(got, wanted)
    dropping = trifuse.nn.SoftmaxAttention(0.5)
    assert not torch.equal(dropping(query, key, value, None), ours(query, key, value, None))
    dropping.eval()
    assert torch.equal(dropping(query, key, value, None), ours(query, key, value, None))
