"""Families of transformers that write their attention out, fused: they compute what they did."""

from __future__ import annotations

import pickle

import pytest
import torch
from model_sizes import DISENTANGLED
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse

transformers = pytest.importorskip("transformers")

V, D, HEADS, LAYERS, B, L = 50, 32, 4, 2, 3, 9
ENCODER = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * D,
}
GPT = {"vocab_size": V, "n_layer": LAYERS, "n_head": HEADS}
FALCON = {key: value for key, value in ENCODER.items() if key != "intermediate_size"}
ROTARY = {"n_embd": D, "n_positions": 32, "rotary_dim": 4}
CAUSAL = {
    "CodeGen": {**GPT, **ROTARY},
    "GPTJ": {**GPT, **ROTARY},
    "Bloom": {**GPT, "hidden_size": D},
    "Mpt": {"vocab_size": V, "d_model": D, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 32},
    "Falcon": {**FALCON, "alibi": True},
    "GPTNeo": {
        "vocab_size": V,
        "hidden_size": D,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "XGLM": {
        "vocab_size": V,
        "d_model": D,
        "ffn_dim": 2 * D,
        "num_layers": LAYERS,
        "attention_heads": HEADS,
        "layerdrop": 0.0,
    },
}
FAMILIES = {
    **CAUSAL,
    "MPNet": ENCODER,
    "Deberta": {**ENCODER, **DISENTANGLED},
    "DebertaV2": {**ENCODER, **DISENTANGLED},
    "RoFormer": {**ENCODER, "embedding_size": D},
    "RemBert": {**ENCODER, "input_embedding_size": D},
    "MegatronBert": ENCODER,
    "ConvBert": {**ENCODER, "embedding_size": D},
    "Luke": {**ENCODER, "entity_vocab_size": 5, "entity_emb_size": 8},
    "IBert": ENCODER,
    "SqueezeBert": {**ENCODER, "embedding_size": D},
    "XLM": {"vocab_size": V, "emb_dim": D, "n_layers": LAYERS, "n_heads": HEADS},
    "Flaubert": {"vocab_size": V, "emb_dim": D, "n_layers": LAYERS, "n_heads": HEADS},
    "XLNet": {"vocab_size": V, "d_model": D, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 2 * D},
    "Tapas": ENCODER,
    "VisualBert": ENCODER,
}
IMAGES = {"image_size": 16, "patch_size": 8, "max_position_embeddings": 16}
# Models whose texts have places on a page, or come with an image or as one.
WITH_MORE = {
    "Bros": {**ENCODER, "hidden_size": 64},
    "Lilt": {**ENCODER, "hidden_size": 48},
    "Vilt": {**ENCODER, **IMAGES},
    "ImageGPT": {**GPT, "n_embd": D, "n_positions": 32},
}
FAMILIES |= WITH_MORE
ATTENTIONS = {"Lilt": 2}  # in each layer, if not one: of the texts and of their layout
OTHER_FORMS = {"Longformer": {**ENCODER, "attention_window": 4}}  # its scores are of windows


class Attentions(TorchDispatchMode):
    """Counts calls of the operator, forward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func).startswith("trifuse.attention_forward")
        return func(*args, **(kwargs or {}))


def make(family, head=False):
    sizes = FAMILIES.get(family) or OTHER_FORMS[family]
    config = getattr(transformers, f"{family}Config")(**sizes)
    config.pad_token_id, config.eos_token_id = 0, None
    auto = transformers.AutoModelForCausalLM if head else transformers.AutoModel
    torch.manual_seed(0)
    return auto.from_config(config).eval()


def more_inputs(family):
    generator = torch.Generator().manual_seed(2)
    if family == "Bros":
        return {"bbox": torch.rand(B, L, 4, generator=generator)}
    if family == "Lilt":
        corners = torch.randint(0, 1000, (B, L, 2, 2), generator=generator).sort(2).values
        return {"bbox": corners.flatten(2)}
    if family == "Vilt":
        return {"pixel_values": torch.randn(B, 3, 16, 16, generator=generator)}
    return {}


def batch(padded, family=None):
    ids = torch.randint(5, V, (B, L), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded == "left":
        mask[0, :4] = 0
    elif padded == "right":
        mask[0, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask, **more_inputs(family)}


def results(model, inputs):
    """The hidden states of real tokens, and all gradients of a function of theirs."""
    model.zero_grad()
    if "pixel_values" in inputs:
        torch.manual_seed(3)  # ViLT draws the order of an image's patches
    hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"]
    patches = hidden.shape[1] - mask.shape[1]
    hidden = hidden * torch.nn.functional.pad(mask, (0, patches), value=1)[..., None]
    hidden.sin().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), {name: grad.clone() for name, grad in grads.items()}


@pytest.mark.parametrize("padded", ["not", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_model_computes_what_it_did(family, padded):
    model, inputs = make(family), batch(padded, family)
    expected, expected_grads = results(model, inputs)
    report = trifuse.fuse(model)
    with Attentions() as attentions:
        hidden, grads = results(model, inputs)
    assert attentions.count == LAYERS * ATTENTIONS.get(family, 1)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        atol = max(1e-5, 1e-6 * float(expected_grads[name].abs().max()))
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-3, atol=atol, msg=name)
    assert not [left for left in report.left if "attention" in left.reason]
    report.revert()
    with Attentions() as attentions:
        assert torch.equal(results(model, inputs)[0], expected)
    assert attentions.count == 0


@pytest.mark.parametrize("family", ["Bloom", "MPNet", "DebertaV2", "MegatronBert"])
def test_training_with_dropout(family):
    """The operator drops weights; which ones depends on the seed alone."""
    model, inputs = make(family).train(), batch("right")
    trifuse.fuse(model)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with Attentions() as attentions:
            draws.append(results(model, inputs))
        assert attentions.count == LAYERS
    assert torch.equal(draws[0][0], draws[1][0])
    for name, grad in draws[0][1].items():
        assert torch.equal(grad, draws[1][1][name])
    if family != "Bloom":  # which drops nothing by default
        assert not torch.equal(draws[0][0], draws[2][0])


@pytest.mark.parametrize("padded", ["not", "left"])
@pytest.mark.parametrize("family", CAUSAL)
def test_generation_with_a_cache(family, padded):
    model, inputs = make(family, head=True), batch(padded)
    options = {"max_new_tokens": 6, "do_sample": False}
    with torch.inference_mode():
        expected = model.generate(**inputs, **options)
        trifuse.fuse(model)
        with Attentions() as attentions:
            assert torch.equal(model.generate(**inputs, **options), expected)
    assert attentions.count == LAYERS * 6


@pytest.mark.parametrize("family", ["Bloom", "MPNet", "DebertaV2", "RemBert"])
def test_attention_weights_are_returned_where_asked_for(family):
    model, inputs = make(family), batch("right")
    expected = model(**inputs, output_attentions=True).attentions
    trifuse.fuse(model)
    with Attentions() as attentions:
        weights = model(**inputs, output_attentions=True).attentions
    assert attentions.count == 0
    assert len(weights) == LAYERS
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_hooked_dropout_is_called():
    model, inputs = make("VisualBert"), batch("right")
    trifuse.fuse(model)
    seen = []
    dropout = model.encoder.layer[0].attention.self.dropout
    dropout.register_forward_hook(lambda module, args, out: seen.append(out.sum(-1)))
    with Attentions() as attentions:
        model(**inputs)
    assert attentions.count == LAYERS - 1
    torch.testing.assert_close(seen, [torch.ones(B, HEADS, L)])
    assert "its last call computed the softmax by its own code" in str(trifuse.explain(model))


@pytest.mark.parametrize("family", ["Bloom", "Mpt", "GPTNeo"])
def test_layers_with_backward_hooks(family):
    """The hooks also get the attention weights that a layer returns, which nothing used."""
    model, inputs = make(family), batch("right")
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    for layer in layers:
        layer.register_full_backward_hook(lambda module, into, out: (into[0] / 2, *into[1:]))
    expected, expected_grads = results(model, inputs)
    trifuse.fuse(model)
    hidden, grads = results(model, inputs)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["Bloom", "Mpt", "MPNet"])
def test_float64(family):
    """MPT's biases stay in float32, whatever the dtype of the model is."""
    model, inputs = make(family).double(), batch("right")
    expected = results(model, inputs)[0]
    trifuse.fuse(model)
    with Attentions() as attentions:
        hidden, _ = results(model, inputs)
    assert attentions.count == LAYERS
    torch.testing.assert_close(hidden, expected, rtol=1e-6, atol=1e-6)  # a softmax in float32


def test_report_says_what_ran():
    model = make("RemBert")
    report = trifuse.fuse(model)
    path = "encoder.layer.0.attention.self"
    assert (
        dict(report.notes)[path]
        == "as far as its products and softmax are recognised when they run"
    )
    model(**batch("not"))
    assert path not in str(trifuse.explain(model)).split("recognised")[0]
    assert "recognised" not in str(trifuse.explain(model))


@pytest.mark.parametrize("family", OTHER_FORMS)
def test_report_says_that_a_form_was_not_recognised(family):
    model, inputs = make(family), batch("right")
    expected = model(**inputs).last_hidden_state
    trifuse.fuse(model)
    with Attentions() as attentions:
        torch.testing.assert_close(model(**inputs).last_hidden_state, expected)
    assert attentions.count == 0
    assert "its last call computed the softmax by its own code" in str(trifuse.explain(model))


def test_fused_model_can_be_pickled():
    model, inputs = make("MPNet"), batch("right")
    trifuse.fuse(model)
    expected = model(**inputs).last_hidden_state
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(**inputs).last_hidden_state, expected)
    with Attentions() as attentions:  # a mode, under which activations are torch's
        torch.testing.assert_close(copied(**inputs).last_hidden_state, expected)
    assert attentions.count == LAYERS
