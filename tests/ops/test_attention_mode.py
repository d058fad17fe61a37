"""``with trifuse.attention()``: torch's attention function on trifuse's kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import trifuse


class Ops(TorchDispatchMode):
    """Records the names of the attention ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def ours(self):
        return [name for name in self.names if name.startswith("trifuse")]


class Block(nn.Module):
    """Self-attention written as in nanoGPT and timm."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x, mask=None, is_causal=False):
        B, L, _ = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, 4, 8).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        return self.proj(out.transpose(1, 2).flatten(2))


def tensors(Lq=5, Lk=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(Lq)
    shapes = ((2, 4, Lq, 8), (2, 4, Lk, 8), (2, 4, Lk, 8))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, imported_by_name])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.tensor([[True, False, True, True, False, True, True]])},
        {"attn_mask": torch.linspace(-1, 1, 35).view(5, 7)},
        {"attn_mask": causal_lower_right(5, 7)},
    ],
    ids=["plain", "causal", "scale", "boolean mask", "float mask", "lower right"],
)
def test_torch_attention_is_served(function, options):
    q, k, v = (t.requires_grad_() for t in tensors())
    expected = function(q, k, v, **options)
    expected_grads = torch.autograd.grad(expected.square().sum(), (q, k, v))
    with trifuse.attention(), Ops() as ops:
        out = function(q, k, v, **options)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert len(ops.ours()) == 2  # forward and backward
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, expected_grads)


def test_arguments_by_position_are_served():
    q, k, v = tensors()
    mask = torch.rand(5, 7) < 0.7
    mask[:, 0] = True
    with trifuse.attention(), Ops() as ops:
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, False)
    assert ops.ours()
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, mask))


def test_it_ends_with_the_context_and_nests():
    q, k, v = tensors()
    with trifuse.attention():
        with trifuse.attention(), Ops() as inner:
            F.scaled_dot_product_attention(q, k, v)
        with Ops() as outer:
            F.scaled_dot_product_attention(q, k, v)
    with Ops() as after:
        F.scaled_dot_product_attention(q, k, v)
    assert inner.ours()
    assert outer.ours()
    assert not after.ours()


def test_a_nested_context_adds_no_mode():
    def depth():
        return len(_get_current_function_mode_stack())

    with trifuse.attention(), DeviceContext("cpu"), trifuse.attention():
        assert depth() == 2
    assert depth() == 0
    with pytest.raises(KeyError), trifuse.attention(), trifuse.attention():
        raise KeyError
    assert depth() == 0


def test_it_ends_with_an_error():
    q, k, v = tensors()
    with pytest.raises(trifuse.ArgumentError, match="key"), trifuse.attention():
        F.scaled_dot_product_attention(q, k[..., :3], v)
    with Ops() as after:
        F.scaled_dot_product_attention(q, k, v)
    assert not after.ours()


def test_models_that_call_it_are_served_eager_and_compiled():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(3, 6, 32)
    expected = block(x, is_causal=True)
    with trifuse.attention():
        with Ops() as ops:
            out = block(x, is_causal=True)
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        compiled = torch.compile(block, backend=backend, fullgraph=True)(x, is_causal=True)
    assert ops.ours()
    assert len(graphs) == 1
    assert any("trifuse" in str(node.target) for node in graphs[0].graph.nodes)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(compiled, expected)


def test_nested_tensors_stay_on_torch():
    rows = [torch.randn(length, 4, 8) for length in (3, 5)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    expected = F.scaled_dot_product_attention(x, x, x)
    with trifuse.attention():
        out = F.scaled_dot_product_attention(x, x, x)
    for one, other in zip(out.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(one, other)


def written(q, k, v):
    return F.dropout((q @ k.mT).softmax(-1), 0.5) @ v


def called(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("attend", [called, written])
def test_checkpoints_recompute_inside_it(attend, inside, use_reentrant):
    """A backward that drops other elements than its forward has another gradient."""
    q, k, v = (t.requires_grad_() for t in tensors())
    results = []
    for run in (lambda f, *args: f(*args), checkpoint):
        torch.manual_seed(0)
        with trifuse.attention():
            options = {"use_reentrant": use_reentrant} if run is checkpoint else {}
            out = run(attend, q, k, v, **options)
            if inside:
                out.square().sum().backward()
        if not inside:
            out.square().sum().backward()
        results.append([out, *(t.grad for t in (q, k, v))])
        q.grad = k.grad = v.grad = None
    for actual, exact in zip(*results, strict=True):
        assert torch.equal(actual, exact)


def test_a_checkpoint_of_scores_saves_the_same_again():
    q, k, v = (t.requires_grad_() for t in tensors())

    def run(q, k, v):
        return called(q, k, v), q @ k.mT

    with torch.utils.checkpoint.set_checkpoint_early_stop(False), trifuse.attention():
        out, scores = checkpoint(run, q, k, v, use_reentrant=False)
        loss = out.square().sum() + scores.sum()
    loss.backward()
    assert q.grad.isfinite().all()


def test_checkpoints_outside_it_are_torchs():
    q, k, v = (t.requires_grad_() for t in tensors())
    with trifuse.attention():
        pass
    with Ops() as ops:
        checkpoint(called, q, k, v, use_reentrant=False).sum().backward()
        checkpoint(called, q, k, v, use_reentrant=True).sum().backward()
    assert not ops.ours()


def test_a_scale_that_is_a_tensor_stays_on_torch():
    q, k, v = tensors()
    with trifuse.attention():
        out = F.scaled_dot_product_attention(q, k, v, scale=torch.tensor(0.3))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, scale=0.3))


def test_a_row_without_keys_is_zero():
    q, k, v = tensors()
    mask = torch.zeros(5, 7, dtype=torch.bool)
    with trifuse.attention():
        assert not F.scaled_dot_product_attention(q, k, v, mask).any()


def test_fused_modules_run_inside_it():
    """``fuse`` and the context serve different parts of one model; the report names the context."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)).eval()
    x = torch.randn(2, 6, 32)
    expected = model(x)
    report = trifuse.fuse(model)
    (left,) = report.left
    assert left.path == "0"
    assert "trifuse.attention()" in left.reason
    with trifuse.attention(), Ops() as ops:
        out = model(x)
    assert len(ops.ours()) == 2 == len(ops.names)
    torch.testing.assert_close(out, expected)
