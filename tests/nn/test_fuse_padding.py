"""Stacks fused with unpad=True: where they compute padding too, a warning and reports say why."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from model_sizes import BERT_SIZES
from torch import Tensor, nn

import trifuse
from trifuse.recipes import stacks

pytestmark = pytest.mark.usefixtures("layers_call_parts")

B, L = 3, 10
LENGTHS = torch.tensor([10, 6, 1])[:, None]
KEEP = torch.arange(L) < LENGTHS


def ids() -> Tensor:
    return torch.randint(1, 97, (B, L), generator=torch.Generator().manual_seed(1))


def bert() -> transformers.BertModel:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**BERT_SIZES)).eval()


def encoder(**options: bool) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    if options:
        layer.self_attn = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@torch.no_grad()
def packs(model: nn.Module, calls: list[str], **options: object) -> bool:
    """Returns whether a padded batch is computed without its padding."""
    calls.clear()
    model(input_ids=ids(), attention_mask=KEEP.long(), **options)
    return calls == ["varlen_attention"] * 2


class LoRA(nn.Module):
    """Stands for peft's replacement of a Linear: a class of its own that wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_what_leaves_padding_out_is_reported(calls, warned):
    model = bert()
    report = trifuse.fuse(model, unpad=True)
    assert report.unpadded == ["", "encoder"]
    assert not report.padded
    assert "without padding: (the model), encoder" in str(report)
    account = trifuse.explain(model)
    assert account.unpadded == ["", "encoder"]
    assert not account.padded
    assert "leaves padding out" in str(account)
    assert packs(model, calls)
    assert not warned


@pytest.mark.parametrize("freeze", [False, True])
def test_padding_is_left_out_of_a_model_that_was_fused_before(calls, warned, freeze):
    model = bert()
    first = trifuse.fuse(model, freeze=freeze)
    fused = [type(module) for module in model.modules()]
    second = trifuse.fuse(model, unpad=True)
    assert second.unpadded == ["", "encoder"]
    assert packs(model, calls)
    assert not warned
    second.revert()
    assert [type(module) for module in model.modules()] == fused
    assert not packs(model, calls)
    first.revert()
    assert [type(module) for module in model.modules()] == [type(each) for each in bert().modules()]


def test_a_model_whose_padding_stays_is_no_change(monkeypatch):
    model = bert()
    trifuse.fuse(model)
    fused = [type(module) for module in model.modules()]
    monkeypatch.setattr(stacks, "find", lambda model: {})
    report = trifuse.fuse(model, unpad=True)
    assert report.swapped == []
    assert [type(module) for module in model.modules()] == fused
    report.revert()
    assert [type(module) for module in model.modules()] == fused


def test_lora(calls, warned):
    model = bert()
    trifuse.fuse(model, unpad=True)
    attention = model.encoder.layer[0].attention.self
    base, attention.query = attention.query, LoRA(attention.query)
    assert not packs(model, calls)
    assert not packs(model, calls)
    place = "encoder.layer.0.attention.self.query is a test_fuse_padding.LoRA"
    (said,) = warned
    assert said.startswith(f"BertModel computes padding too, because {place}, which isn't known")
    account = trifuse.explain(model)
    assert [row.path for row in account.padded] == ["", "encoder"]
    assert account.padded[0].reason.startswith(place)
    assert not account.unpadded
    assert f"computes padding too: {place}" in str(account)

    attention.query = base  # as peft's unload does
    assert packs(model, calls)
    assert trifuse.explain(model).unpadded == ["", "encoder"]


def test_lora_before_fusing(calls, warned):
    model = bert()
    attention = model.encoder.layer[0].attention.self
    attention.query = LoRA(attention.query)
    report = trifuse.fuse(model, unpad=True)
    assert [row.path for row in report.padded] == ["", "encoder"]
    assert not report.unpadded
    assert "computes padding too: encoder.layer.0.attention.self.query is a" in str(report)
    assert len(warned) == 1
    assert not packs(model, calls)
    assert len(warned) == 1


@pytest.mark.usefixtures("one_process")
def test_fsdp(calls, warned):
    """``fully_shard`` changes the classes of modules, and its hooks don't count."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = bert()
    trifuse.fuse(model, unpad=True)
    wanted = model(ids(), KEEP.long())[0]
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert packs(model, calls)
    assert not warned
    assert trifuse.explain(model).unpadded == ["", "encoder"]
    hook = model.encoder.layer[0].register_forward_hook(lambda *_: None)
    assert not packs(model, calls)
    hook.remove()
    torch.testing.assert_close(model(ids(), KEEP.long())[0][KEEP], wanted[KEEP])


def test_hidden_states_are_asked_for_once(calls, warned):
    """transformers leaves its hooks in place; they do nothing in calls without hidden states."""
    model = bert()
    trifuse.fuse(model, unpad=True)
    wanted = model(ids(), KEEP.long())[0]
    assert not packs(model, calls, output_hidden_states=True)
    assert warned == [
        "BertEncoder computes padding too, because layer.0 has a hook that records its output, "
        "which the caller asks for"
    ]
    assert any(layer._forward_hooks for layer in model.encoder.layer)
    assert packs(model, calls)
    assert not trifuse.explain(model).padded
    assert torch.equal(model(ids(), KEEP.long())[0], wanted)
    out = model(ids(), KEEP.long(), output_hidden_states=True)
    assert [tuple(x.shape) for x in out.hidden_states] == [(B, L, 32)] * 3
    assert len(warned) == 1


def test_hidden_states_recorded_from_outside(calls):
    """While an outer model records hidden states, the encoder doesn't pack: hooks need padding."""
    from transformers.utils import output_capturing

    model = bert()
    trifuse.fuse(model, unpad=True)
    model(ids(), KEEP.long(), output_hidden_states=True)
    active = output_capturing._active_collector
    collected: dict[str, list[Tensor]] = {"hidden_states": []}
    token = active.set(collected)
    calls.clear()
    states = torch.randn(B, L, 32)
    model.encoder(states, attention_mask=KEEP[:, None, None])
    active.reset(token)
    assert calls == []
    assert [tuple(x.shape) for x in collected["hidden_states"]] == [(B, L, 32)] * 3
    model.encoder(states, attention_mask=KEEP[:, None, None])
    assert calls == ["varlen_attention"] * 2


def test_hooks_come_and_go(calls, warned):
    model = bert()
    trifuse.fuse(model, unpad=True)
    handle = model.encoder.layer[1].register_forward_hook(lambda *_: None)
    assert not packs(model, calls)
    assert len(warned) == 1
    assert "encoder.layer.1 has a hook (test_hooks_come_and_go" in warned[0]
    handle.remove()
    assert packs(model, calls)
    twin = copy.deepcopy(model)
    for each in (model, twin):  # warns again for another model, not for the same
        each.encoder.layer[1].register_forward_hook(lambda *_: None)
        assert not packs(each, calls)
    assert len(warned) == 2


def test_a_forward_that_was_put_back(calls):
    model = bert()
    trifuse.fuse(model, unpad=True)
    layer = model.encoder.layer[0]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    assert not packs(model, calls)
    assert "layer.0 has a forward of its own" in trifuse.explain(model).padded[0].reason
    layer.forward = own
    assert packs(model, calls)


def test_another_attention(calls, warned):
    model = bert()
    trifuse.fuse(model, unpad=True)
    model.set_attn_implementation("sdpa")
    assert not packs(model, calls)
    assert warned == [
        'BertEncoder computes padding too, because its attention runs by attn_implementation="sdpa"'
    ]
    model.set_attn_implementation("trifuse")
    assert packs(model, calls)


def test_models_that_never_do(warned):
    sizes = {"vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    model = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))
    report = trifuse.fuse(model, unpad=True)
    reason = "its attention is causal"
    assert report.padded == [("", "BloomForCausalLM", reason)]
    assert warned == [f"BloomForCausalLM computes padding too, because {reason}"]
    assert f"computes padding too: {reason}" in str(report)
    assert not trifuse.fuse(model).padded  # nothing to report without unpad

    plain = trifuse.fuse(nn.Sequential(nn.ReLU()), unpad=True)
    assert plain.padded == [("", "Sequential", "nothing in it is known to do without it")]
    wanting = bert()
    wanting.set_attn_implementation("eager")
    wanting.config.output_attentions = True
    (padded,) = trifuse.fuse(wanting, unpad=True).padded
    assert padded == ("", "BertModel", "BertModel returns its attention weights")


def test_masks_that_torchs_encoder_cannot_follow(calls, warned):
    model = encoder()
    assert trifuse.fuse(model, unpad=True).unpadded == [""]
    x = torch.randn(B, L, 16)
    for mask, padding, why in (
        (None, (~KEEP).float(), "src_key_padding_mask isn't boolean"),
        (torch.eye(L, dtype=torch.bool), ~KEEP, "mask is neither None nor causal"),
    ):
        for _ in range(2):
            model(x, mask, padding)
        assert warned == [f"TransformerEncoder computes padding too, because {why}"]
        warned.clear()
    assert set(calls) == {"scaled_dot_product_attention"}


def test_appended_keys(warned):
    model = encoder(add_bias_kv=True)
    (padded,) = trifuse.fuse(model, unpad=True).padded
    assert "appends keys" in padded.reason
    model(torch.randn(B, L, 16), src_key_padding_mask=~KEEP)
    assert len(warned) == 1


@pytest.mark.parametrize("make", [encoder, bert])
def test_compiled(make, calls, warned):
    """The mask's values aren't known while tracing; the warning about it breaks no graph."""
    model = make()
    trifuse.fuse(model, unpad=True)
    compiled = torch.compile(model, backend="eager", fullgraph=make is encoder)
    if make is encoder:
        compiled(torch.randn(B, L, 16), src_key_padding_mask=~KEEP)
    else:
        assert not packs(compiled, calls)
    assert any("because torch.compile can't read its mask" in said for said in warned)


def test_explain_of_models():
    model = nn.ModuleDict(
        {
            "lstm": nn.LSTM(8, 8),
            "attention": nn.MultiheadAttention(8, 2),
            "encoder": encoder(),
            "norm": nn.LayerNorm(8),
        }
    )
    before = {row.path: row.runs for row in trifuse.explain(model).modules}
    assert before["lstm"] == before["attention"] == before["encoder"] == "not fused"
    assert "norm" not in before
    report = trifuse.fuse(model)
    after = {row.path: row.runs for row in trifuse.explain(model).modules}
    with_weights = "by softmax where weights are asked for, torch's default"
    assert after["attention"].startswith("attention by ")
    assert after["attention"].endswith(with_weights)
    assert with_weights not in after["encoder.layers.0.self_attn"]  # its layer requests none
    assert after["lstm"].startswith("lstm by ")
    model["encoder"].layers[0].norm1.register_forward_hook(lambda *_: None)
    now = {row.path: row.runs for row in trifuse.explain(model).modules}
    assert now["encoder.layers.0"] == "fused; dropout, sum and norm one by one"
    assert now["encoder.layers.1"] == "fused"
    report.revert()
    assert {row.path: row.runs for row in trifuse.explain(model).modules} == before
    assert str(trifuse.explain(nn.ReLU())) == "  nothing that trifuse can serve"
    with pytest.raises(TypeError, match="args: expected nothing beside a module"):
        trifuse.explain(model, torch.ones(2))
