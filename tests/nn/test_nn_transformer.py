"""The fused layers against torch.nn's, for every mask and option, in float64."""

from __future__ import annotations

import copy
import types
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trifuse
from trifuse.reference import philox

D, H, FF, B, L, M = 16, 4, 24, 3, 7, 5

CAUSAL = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
PADDED = torch.arange(L) >= torch.tensor([7, 4, 2])[:, None]
MEMORY_PADDED = torch.arange(M) >= torch.tensor([1, 5, 3])[:, None]
BIAS = torch.randn(L, L, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
CROSS = torch.rand(B * H, L, M, generator=torch.Generator().manual_seed(2)) < 0.3
CROSS[..., 0] = False

ENCODER_MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"src_mask": CAUSAL},
    "causal hint": {"src_mask": CAUSAL, "is_causal": True},
    "boolean causal": {"src_mask": CAUSAL.isinf()},
    "float": {"src_mask": BIAS},
    "padding": {"src_key_padding_mask": PADDED},
    "causal, padding": {"src_mask": CAUSAL.isinf(), "src_key_padding_mask": PADDED},
    "causal hint, padding": {
        "src_mask": CAUSAL,
        "is_causal": True,
        "src_key_padding_mask": PADDED.double() * -1e9,
    },
    "float mask for each head": {
        "src_mask": BIAS.expand(B * H, L, L) + torch.arange(B * H)[:, None, None]
    },
    "float, padding": {
        "src_mask": BIAS,
        "src_key_padding_mask": torch.where(PADDED, -1e9, 0.0).double(),
    },
}
DECODER_MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"tgt_mask": CAUSAL},
    "causal hint": {"tgt_mask": CAUSAL, "tgt_is_causal": True},
    "boolean causal": {"tgt_mask": CAUSAL.isinf()},
    "padding": {"tgt_key_padding_mask": PADDED, "memory_key_padding_mask": MEMORY_PADDED},
    "memory": {"memory_mask": CROSS},
    "float": {
        "tgt_mask": BIAS,
        "memory_mask": torch.where(CROSS, -2.0, 0.5).double(),
        "tgt_key_padding_mask": torch.where(PADDED, -1e9, 0.0).double(),
        "memory_key_padding_mask": torch.where(MEMORY_PADDED, -1e9, 0.0).double(),
    },
    "mask for each head": {"tgt_mask": CAUSAL.isinf().expand(B * H, L, L)},
    "memory causal": {
        "memory_mask": torch.ones(L, M, dtype=torch.bool).triu(1),
        "memory_is_causal": True,
    },
    "all": {
        "tgt_mask": CAUSAL.isinf(),
        "memory_mask": CROSS,
        "tgt_key_padding_mask": PADDED,
        "memory_key_padding_mask": MEMORY_PADDED,
    },
}
OPTIONS = [
    {"activation": activation, "batch_first": batch_first, "norm_first": norm_first}
    for activation, batch_first, norm_first in product(
        ("relu", "gelu"), (False, True), (False, True)
    )
]
KINDS = {
    "encoder": (nn.TransformerEncoderLayer, trifuse.nn.TransformerEncoderLayer, ENCODER_MASKS),
    "decoder": (nn.TransformerDecoderLayer, trifuse.nn.TransformerDecoderLayer, DECODER_MASKS),
}
CASES = [
    (kind, name, options)
    for kind, (_, _, masks) in KINDS.items()
    for name, options in product(masks, OPTIONS)
]


def tensors(kind: str, batch_first: bool) -> list[Tensor]:
    torch.manual_seed(3)
    lengths = (L,) if kind == "encoder" else (L, M)
    inputs = [torch.randn(B, n, D, dtype=torch.float64) for n in lengths]
    return [(x if batch_first else x.transpose(0, 1)).requires_grad_() for x in inputs]


def assert_same(theirs: nn.Module, ours: nn.Module, inputs: list[Tensor], masks: Any) -> None:
    """Checks outputs and every gradient."""
    expected, actual = theirs(*inputs, **masks), ours(*inputs, **masks)
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn_like(expected)
    for mine, model, out in ((False, theirs, expected), (True, ours, actual)):
        wanted = [*inputs, *model.parameters()]
        grads = torch.autograd.grad(out, wanted, upstream)
        if not mine:
            expected_grads = grads
    torch.testing.assert_close(grads, expected_grads, rtol=1e-7, atol=1e-10)


def pair(kind: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    theirs, ours, _ = KINDS[kind]
    torch.manual_seed(0)
    reference = theirs(D, H, FF, 0.0, dtype=torch.float64, **options)
    for parameter in reference.parameters():  # biases and norms start at 0 and 1
        nn.init.normal_(parameter, std=0.5)
    fused = ours(D, H, FF, 0.0, dtype=torch.float64, **options)
    fused.load_state_dict(reference.state_dict())
    return reference, fused


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    CASES,
    ids=[f"{k} {n} {'-'.join(map(str, o.values()))}" for k, n, o in CASES],
)
def test_layer(kind, name, options):
    masks = KINDS[kind][2][name]
    theirs, ours = pair(kind, **options)
    assert_same(theirs, ours, tensors(kind, options["batch_first"]), masks)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("options", OPTIONS[::3], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_stack(kind, options, norm, training):
    theirs, ours = pair(kind, **options)
    last = nn.LayerNorm(D, dtype=torch.float64) if norm else None
    stacks = {
        "encoder": (nn.TransformerEncoder, trifuse.nn.TransformerEncoder),
        "decoder": (nn.TransformerDecoder, trifuse.nn.TransformerDecoder),
    }
    masks, extra = KINDS[kind][2]["causal"], {}
    if kind == "encoder":
        masks, extra = {"mask": CAUSAL}, {"enable_nested_tensor": False}
    plain, fused = (
        cls(layer, 3, norm=copy.deepcopy(last), **extra).train(training)
        for cls, layer in zip(stacks[kind], (theirs, ours), strict=True)
    )
    assert_same(plain, fused, tensors(kind, options["batch_first"]), masks)


@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_without_a_batch(kind):
    theirs, ours = pair(kind)
    inputs = [x[:, 0].detach().requires_grad_() for x in tensors(kind, False)]
    assert_same(theirs, ours, inputs, {})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_without_biases(kind, bias):
    theirs, ours = pair(kind, bias=bias)
    assert (ours.norm1.bias is None) == (not bias)
    assert_same(theirs, ours, tensors(kind, False), {})


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ends_of_sublayers_are_fused(kind, norm_first, monkeypatch):
    """Every LayerNorm is one call of the operator, with the dropout and the residual before it."""
    ran = []
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: ran.append("norm") or x)
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: ran.append("dropout") or x)
    _, ours = pair(kind, norm_first=norm_first)
    ours(*tensors(kind, False))
    # The feed-forward's inner dropout; in a lone pre-norm layer, its last dropout.
    assert ran == (["dropout", "dropout"] if norm_first else ["dropout"])
    ran.clear()
    stack = {"encoder": trifuse.nn.TransformerEncoder, "decoder": trifuse.nn.TransformerDecoder}
    model = stack[kind](ours, 3, norm=nn.LayerNorm(D, dtype=torch.float64))
    model(*tensors(kind, False))
    assert ran == ["dropout"] * 3


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_watched_parts_are_called(kind, norm_first):
    theirs, ours = pair(kind, norm_first=norm_first)
    seen = []
    for name in ("norm1", "dropout2"):
        module = getattr(ours, name)
        module.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    assert_same(theirs, ours, tensors(kind, False), {})
    assert sorted(seen) == ["Dropout", "LayerNorm"]


def test_a_watched_layer_in_a_stack_is_called():
    theirs, ours = pair("encoder", norm_first=True)
    plain = nn.TransformerEncoder(theirs, 2, enable_nested_tensor=False)
    fused = trifuse.nn.TransformerEncoder(ours, 2, enable_nested_tensor=False)
    seen = []
    fused.layers[1].register_forward_hook(lambda *_: seen.append(1))
    assert_same(plain, fused, tensors("encoder", False), {})
    assert seen == [1]


def halved(block: Any) -> Any:
    """A block of a layer that gives half of what torch's gives."""

    def half(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return 0.5 * block(self, *args, **kwargs)

    return half


BLOCKS = [("encoder", "_sa_block"), ("encoder", "_ff_block")]
BLOCKS += [("decoder", name) for name in ("_sa_block", "_mha_block", "_ff_block")]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("of_instance", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("kind", "block"), BLOCKS)
def test_a_block_of_its_own_is_called(kind, block, norm_first, of_instance, stacked):
    layers = pair(kind, norm_first=norm_first, batch_first=True)
    for layer in layers:
        half = halved(getattr(KINDS[kind][0], block))
        if not of_instance:
            layer.__class__ = type("Halved", (type(layer),), {block: half})
    models: tuple[Any, ...] = layers
    if stacked:
        extra = {"enable_nested_tensor": False} if kind == "encoder" else {}
        name = "TransformerEncoder" if kind == "encoder" else "TransformerDecoder"
        models = tuple(
            getattr(module, name)(layer, 2, **extra)
            for module, layer in zip((nn, trifuse.nn), layers, strict=True)
        )
        layers = tuple(model.layers[1] for model in models)
    inputs = tensors(kind, True)
    if of_instance:
        before = models[1](*inputs)
        for layer in layers:
            setattr(layer, block, types.MethodType(half, layer))
        assert not torch.allclose(models[1](*inputs), before)
    assert_same(*models, inputs, {})


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_blocks_of_instances_run_in_fused_models(late, unpad, freeze):
    """Replaced before or after fusing. Their layers get padding too."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 64, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    fused, x = copy.deepcopy(model), torch.randn(B, L, 64)
    half = halved(nn.TransformerEncoderLayer._ff_block)

    def replace(stack: nn.TransformerEncoder) -> None:
        last = stack.layers[1]
        last._ff_block = types.MethodType(half, last)

    if not late:
        replace(fused)
    report = trifuse.fuse(fused.eval(), unpad=unpad, freeze=freeze)
    if late:
        fused(x, src_key_padding_mask=PADDED)
        replace(fused)
    else:
        reasons = [left.reason for left in report.left if left.path == "layers.1"]
        assert reasons == ["its _ff_block was replaced on the instance"]
    replace(model)
    with torch.no_grad():
        got = fused(x, src_key_padding_mask=PADDED)[~PADDED]
        expected = model.train()(x, src_key_padding_mask=PADDED)[~PADDED]
    torch.testing.assert_close(got, expected)
    assert not unpad or fused.why_padded() is not None
    if late and unpad:
        assert "block of its own" in str(fused.why_padded())
        del fused.layers[1]._ff_block
        assert fused.why_padded() is None


def test_dropout_in_training_only():
    torch.manual_seed(0)
    layer = trifuse.nn.TransformerEncoderLayer(D, H, FF, 0.5, batch_first=True)
    x = torch.randn(B, L, D)
    assert not torch.equal(layer(x), layer(x))
    torch.manual_seed(5)
    first = layer(x)
    torch.manual_seed(5)
    assert torch.equal(layer(x), first)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_autocast_has_the_dtypes_of_torch():
    torch.manual_seed(0)
    x = torch.randn(B, L, D)
    for norm_first in (False, True):
        theirs = nn.TransformerEncoderLayer(D, H, FF, 0.0, norm_first=norm_first, batch_first=True)
        ours = trifuse.nn.TransformerEncoderLayer(
            D, H, FF, 0.0, norm_first=norm_first, batch_first=True
        )
        ours.load_state_dict(theirs.state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            expected, actual = theirs(x), ours(x)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


def test_compiles_whole():
    for kind in KINDS:
        _, ours = pair(kind, norm_first=True)
        inputs = tensors(kind, False)
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs), ours(*inputs))


# DropoutAddLayerNorm ----------------------------------------------------------------------------


def test_module_is_layer_norm_without_residual():
    torch.manual_seed(0)
    theirs = nn.LayerNorm(D, 1e-3)
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    ours = trifuse.nn.DropoutAddLayerNorm(D, 1e-3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, L, D)
    torch.testing.assert_close(ours(x), theirs(x))


def test_module_drops_while_training():
    module = trifuse.nn.DropoutAddLayerNorm(D, p=0.25, prenorm=True)
    x, residual = torch.randn(B, L, D), torch.randn(B, L, D)
    torch.manual_seed(7)
    seed = torch.randint(torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max, (1,))
    keep = philox.dropout_keep(seed, torch.tensor(0), B * L, D, 0.25).view(B, L, D)
    torch.manual_seed(7)
    out, total = module(x, residual)
    torch.testing.assert_close(total, residual + torch.where(keep, x * philox.keep_scale(0.25), 0))
    torch.testing.assert_close(out, F.layer_norm(total, (D,)))
    module.eval()
    torch.testing.assert_close(module(x, residual)[1], residual + x)


def test_module_options():
    module = trifuse.nn.DropoutAddLayerNorm(
        [D], bias=False, dtype=torch.bfloat16, prenorm=True, rms_norm=True, residual_in_fp32=True
    )
    x, residual = torch.randn(2, B, D, dtype=torch.bfloat16)
    out, total = module(x, residual)
    assert (out.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, x.float() + residual.float())
    expected = F.rms_norm(total, (D,), eps=1e-5).bfloat16()
    torch.testing.assert_close(out, expected)
    assert list(module.state_dict()) == ["weight"]
    assert "p=0.0, prenorm=True, rms_norm=True, residual_in_fp32=True" in repr(module)


def test_module_has_the_state_of_rms_norm():
    theirs = nn.RMSNorm(D, 1e-3)
    nn.init.normal_(theirs.weight)
    ours = trifuse.nn.DropoutAddLayerNorm(D, 1e-3, bias=False, rms_norm=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, L, D)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"normalized_shape": [2, 3]}, ValueError, r"normalized_shape: .* size ≥ 0; got \[2, 3\]"),
        ({"normalized_shape": []}, ValueError, r"normalized_shape: .* size ≥ 0; got \[\]"),
        ({"normalized_shape": -1}, ValueError, "normalized_shape: .* size ≥ 0; got -1"),
        ({"normalized_shape": 2**63}, ValueError, "normalized_shape: .* size ≥ 0; got 9223"),
        ({"normalized_shape": 1.5}, ValueError, "normalized_shape: .* size ≥ 0; got 1.5"),
        ({"normalized_shape": "x"}, ValueError, "normalized_shape: .* size ≥ 0; got 'x'"),
        ({"eps": "x"}, TypeError, "eps: expected a number; got str"),
        ({"eps": -1.0}, ValueError, "eps: expected a number ≥ 0; got -1.0"),
        ({"bias": 3}, TypeError, "bias: expected True or False; got int"),
        ({"prenorm": None}, TypeError, "prenorm: expected True or False; got NoneType"),
        ({"p": 1.5}, ValueError, r"p: expected a probability in \[0, 1\]; got 1.5"),
        ({"p": "a"}, TypeError, "p: expected a number; got str"),
    ],
)
def test_module_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        trifuse.nn.DropoutAddLayerNorm(**{"normalized_shape": 4, **arguments})
