"""Leaving out padding: the same results from fewer tokens, but not where user code could notice."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from torch import Tensor, nn

import trifuse
from trifuse.models.bert import BertConfig, BertModel
from trifuse.nn import packing

D, H, L = 16, 4, 7
TINY = {
    "vocab_size": 97,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "intermediate_size": 24,
}
KEEP = {
    "padded right": torch.arange(L) < torch.tensor([7, 3, 1])[:, None],
    "padded left": (torch.arange(L) < torch.tensor([2, 7, 5])[:, None]).flip(1),
    "with holes": torch.tensor([[1, 0, 1, 1, 0, 0, 1], [0, 1] * 3 + [0], [1] * 7]).bool(),
    "one is empty": torch.arange(L) < torch.tensor([4, 0, 6])[:, None],
}


def encoder(*, fused: bool, batch_first: bool = True, norm_first: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        D, H, 24, 0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    if fused:
        trifuse.fuse(model, unpad=True)
    return model


def bert_model(*, fused: bool) -> nn.Module:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**TINY)).double().eval()
    if fused:
        trifuse.fuse(model, unpad=True)
    return model


def huggingface_bert(*, fused: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**TINY)).double().eval()
    if fused:
        trifuse.fuse(model, unpad=True)
    return model


def bert_encoder(model: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
    if isinstance(model, BertModel):
        return model.encoder(x, keep)
    return model.encoder(x, attention_mask=keep[:, None, None]).last_hidden_state


@pytest.fixture
def tokens_seen(monkeypatch) -> list[int]:
    """Numbers of tokens, one for each call of a linear layer."""
    seen = []
    linear = nn.Linear.forward

    def forward(self, x):
        seen.append(x[..., 0].numel())
        return linear(self, x)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    return seen


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_pack(keep):
    packed = packing.pack(nn.Identity(), keep)
    lengths = keep.sum(1).tolist()
    assert packed.cu_seqlens.dtype == torch.int64
    assert packed.cu_seqlens.diff().tolist() == lengths
    assert packed.cu_seqlens[0] == 0
    assert packed.max_seqlen == max(lengths)

    x = torch.randn(3, L, D, requires_grad=True)
    tokens = packing.gather(x, packed)
    assert torch.equal(tokens[0], x[keep])
    back = packing.scatter(tokens, packed, x.shape)
    assert torch.equal(back, x.masked_fill(~keep[..., None], 0))
    back.sum().backward()
    assert torch.equal(x.grad, keep[..., None].expand_as(x).float())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", [name for name in KEEP if "empty" not in name])
def test_transformer_encoder(name, batch_first, norm_first, causal, tokens_seen, calls):
    options = {"batch_first": batch_first, "norm_first": norm_first}
    theirs, ours = encoder(fused=False, **options), encoder(fused=True, **options)
    keep = KEEP[name]
    if causal and name != "padded right":
        keep = keep.clone()
        keep[:, 0] = True  # torch returns NaN for a query without keys
    mask = torch.ones(L, L, dtype=torch.bool).triu(1) if causal else None
    x = torch.randn(3, L, D, dtype=torch.float64)
    results = []
    for model in (theirs, ours):
        tokens_seen.clear()
        leaf = x.clone().requires_grad_()
        src = leaf if batch_first else leaf.transpose(0, 1)
        out = model(src, mask=mask, src_key_padding_mask=~keep)
        out = (out if batch_first else out.transpose(0, 1))[keep]
        out.square().sum().backward()
        results.append([out, leaf.grad[keep], *(p.grad for p in model.parameters())])
    for mine, their in zip(*reversed(results), strict=True):
        torch.testing.assert_close(mine, their)
    assert set(tokens_seen) == {int(keep.sum())}
    assert calls == ["varlen_attention"] * 2


@pytest.mark.parametrize("make", [bert_model, huggingface_bert])
@pytest.mark.parametrize("name", [name for name in KEEP if "empty" not in name])
def test_bert(make, name, tokens_seen):
    keep = KEEP[name]
    ids = torch.randint(1, 97, (3, L), generator=torch.Generator().manual_seed(1))
    results = []
    for fused in (False, True):
        model = make(fused=fused)
        tokens_seen.clear()
        out = model(ids, attention_mask=keep.long())[0]
        seen = set(tokens_seen)
        assert torch.equal(out[~keep], torch.zeros_like(out[~keep])) == fused
        out[keep].square().sum().backward()
        results.append([out[keep], *(p.grad for p in model.parameters() if p.grad is not None)])
    for mine, their in zip(*reversed(results), strict=True):
        torch.testing.assert_close(mine, their)
    assert seen == {int(keep.sum()), 3}  # the pooler gets one token of each sequence


@pytest.mark.parametrize("make", [bert_model, huggingface_bert])
def test_positions_and_token_types_are_packed_too(make):
    keep = KEEP["with holes"]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 97, (3, L), generator=generator)
    types = torch.randint(2, (3, L), generator=generator)
    mask = {"attention_mask": keep.long()}
    for positions in (torch.arange(L).flip(0)[None], torch.randint(30, (3, L))):
        results = [
            make(fused=fused)(ids, **mask, token_type_ids=types, position_ids=positions)
            for fused in (False, True)
        ]
        torch.testing.assert_close(results[1][0][keep], results[0][0][keep])


@pytest.mark.parametrize("make", [bert_model, huggingface_bert])
def test_bert_embeds_real_tokens_only(make):
    keep, model = KEEP["padded right"], make(fused=True)
    seen = []
    table = model.embeddings.word_embeddings
    table.__class__ = type("Embedding", (nn.Embedding,), {"__module__": nn.Embedding.__module__})
    assert packing.pack(model, keep, "trifuse", model.__class__.__module__) is None  # unknown part
    table.__class__ = nn.Embedding
    forward = nn.Embedding.forward

    def watch(self: nn.Embedding, ids: Tensor) -> Tensor:
        if self is table:
            seen.append(ids.numel())
        return forward(self, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Embedding, "forward", watch)
        model(torch.randint(1, 97, (3, L)), attention_mask=keep.long())
    assert seen == [int(keep.sum())]


def test_too_many_positions_raise_as_without_unpad():
    model = BertModel(BertConfig(**TINY, max_position_embeddings=5)).eval()
    trifuse.fuse(model, unpad=True)
    with pytest.raises(ValueError, match="input_ids: expected at most 5 positions; got 7"):
        model(torch.ones(3, L, dtype=torch.long), KEEP["padded right"])


def test_transformers_bert_as_a_tuple():
    model, keep = huggingface_bert(fused=True), KEEP["padded right"]
    ids = torch.randint(1, 97, (3, L), generator=torch.Generator().manual_seed(1))
    wanted = model(ids, attention_mask=keep)
    got = model(ids, attention_mask=keep, return_dict=False)
    assert isinstance(got, tuple)
    assert torch.equal(got[0], wanted.last_hidden_state)
    assert torch.equal(got[1], wanted.pooler_output)


@pytest.mark.parametrize("make", [encoder, bert_model, huggingface_bert])
def test_without_unpad_padded_positions_are_as_without_fuse(make, calls):
    plain, fused = make(fused=False), make(fused=False)
    trifuse.fuse(fused)
    keep = KEEP["padded right"]
    ids = torch.randint(1, 97, (3, L), generator=torch.Generator().manual_seed(1))
    x = torch.randn(3, L, D, dtype=torch.float64)
    for training in (False, True):
        results = []
        for model in (plain, fused):
            model.train(training)
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
                for name in ("dropout_p", "dropout_prob"):  # of ours, and of transformers 4.57's
                    if hasattr(module, name):
                        setattr(module, name, 0.0)
            if make is encoder:  # with gradients, so that torch doesn't pack either
                results.append(model(x.clone().requires_grad_(), src_key_padding_mask=~keep))
            elif make is huggingface_bert:
                for attention in model.encoder.layer:
                    attention.attention.self.dropout.p = 0.0
                results.append(model(ids, attention_mask=keep.long())[0])
            else:
                results.append(model(ids, keep)[0])
        torch.testing.assert_close(results[1], results[0])
    assert set(calls) <= {"scaled_dot_product_attention"}


@pytest.mark.parametrize("make", [bert_model, huggingface_bert])
def test_sequences_without_a_token(make):
    keep = KEEP["one is empty"]
    model = make(fused=True)
    x = torch.randn(3, L, D, dtype=torch.float64, requires_grad=True)
    out = bert_encoder(model, x, keep)
    assert not out[~keep].any()
    torch.testing.assert_close(out[:1], bert_encoder(model, x[:1], keep[:1]))
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert not x.grad[~keep].any()


@pytest.mark.parametrize("make", [bert_model, huggingface_bert])
def test_a_batch_without_a_token(make, calls):
    x = torch.randn(3, L, D, dtype=torch.float64)
    out = bert_encoder(make(fused=True), x, torch.zeros(3, L, dtype=torch.bool))
    assert out.isfinite().all()
    assert "varlen_attention" not in calls


@pytest.mark.parametrize("make", [encoder, bert_model, huggingface_bert])
def test_what_is_in_the_padding_does_not_matter(make):
    model, keep = make(fused=True), KEEP["padded right"]
    x = torch.randn(3, L, D, dtype=torch.float64)
    spoilt = x.masked_fill(~keep[..., None], torch.nan)
    if make is encoder:
        results = [model(src, src_key_padding_mask=~keep) for src in (x, spoilt)]
    else:
        results = [bert_encoder(model, src, keep) for src in (x, spoilt)]
    assert torch.equal(*results)


def test_without_padding_nothing_is_packed(calls):
    model = encoder(fused=True)
    x = torch.randn(3, L, D, dtype=torch.float64)
    model(x, src_key_padding_mask=torch.zeros(3, L, dtype=torch.bool))
    assert calls == ["scaled_dot_product_attention"] * 2


def test_masks_that_packing_cannot_follow(calls):
    """A mask that isn't causal, and padding as a mask that is added to the scores."""
    theirs, ours = encoder(fused=False), encoder(fused=True)
    x, keep = torch.randn(3, L, D, dtype=torch.float64), KEEP["padded right"]
    banded = torch.ones(L, L, dtype=torch.bool).triu(2)
    added = torch.zeros(3, L).double().masked_fill_(~keep, -torch.inf)
    for arguments in (
        {"mask": banded, "src_key_padding_mask": ~keep},
        {"src_key_padding_mask": added},
    ):
        torch.testing.assert_close(ours(x, **arguments)[keep], theirs(x, **arguments)[keep])
    assert calls == ["scaled_dot_product_attention"] * 4


def watched(model: nn.Module) -> None:
    model.get_submodule(DEEP[type(model)]).register_forward_hook(lambda *_: None)


def watched_before(model: nn.Module) -> None:
    model.get_submodule(DEEP[type(model)]).register_forward_pre_hook(lambda *_: None)


def watched_backward(model: nn.Module) -> None:
    model.get_submodule(DEEP[type(model)]).register_full_backward_hook(lambda *_: None)


def watched_before_backward(model: nn.Module) -> None:
    model.get_submodule(DEEP[type(model)]).register_full_backward_pre_hook(lambda *_: None)


def replaced(model: nn.Module) -> None:
    module = model.get_submodule(DEEP[type(model)])
    module.forward = functools.partial(type(module).forward, module)


class Own(nn.Linear):
    pass


def unknown(model: nn.Module) -> None:
    model.get_submodule(DEEP[type(model)]).__class__ = Own


DEEP = {
    trifuse.nn.TransformerEncoder: "layers.1.linear2",
    trifuse.nn.BertModel: "encoder.layer.1.intermediate.dense",
}


@pytest.mark.parametrize(
    "change",
    [watched, watched_before, watched_backward, watched_before_backward, replaced, unknown],
)
@pytest.mark.parametrize("make", [encoder, bert_model])
def test_where_it_could_be_noticed_nothing_is_packed(make, change, calls):
    model, keep = make(fused=True), KEEP["padded right"]
    x = torch.randn(3, L, D, dtype=torch.float64)

    def run() -> Tensor:
        if make is encoder:
            return model(x, src_key_padding_mask=~keep)
        return bert_encoder(model, x, keep)

    wanted = run()
    assert calls == ["varlen_attention"] * 2
    calls.clear()
    change(model)
    torch.testing.assert_close(run()[keep], wanted[keep])
    assert calls == ["scaled_dot_product_attention"] * 2


def test_appended_keys_are_not_packed(calls):
    model = encoder(fused=True)
    torch.manual_seed(0)
    for layer in model.layers:
        layer.self_attn = trifuse.nn.MultiheadAttention(
            D, H, add_zero_attn=True, batch_first=True, dtype=torch.float64
        )
    x, keep = torch.randn(3, L, D, dtype=torch.float64), KEEP["padded right"]
    alone = model(x[1:2, :3])
    torch.testing.assert_close(model(x, src_key_padding_mask=~keep)[1:2, :3], alone)
    assert set(calls) == {"scaled_dot_product_attention"}


def test_hidden_states_of_transformers_keep_their_shape():
    model = huggingface_bert(fused=True)
    keep = KEEP["padded right"]
    ids = torch.randint(1, 97, (3, L), generator=torch.Generator().manual_seed(1))
    wanted = model(ids, attention_mask=keep.long())[0]
    out = model(ids, attention_mask=keep.long(), output_hidden_states=True)
    assert [tuple(x.shape) for x in out.hidden_states] == [(3, L, D)] * 3
    torch.testing.assert_close(out.last_hidden_state[keep], wanted[keep])


def test_transformers_encoder_alone_and_after_revert():
    """With another attention implementation, a fused encoder computes what transformers' does."""
    model = huggingface_bert(fused=True)
    plain = huggingface_bert(fused=False)
    model.config._attn_implementation = "sdpa"
    x, keep = torch.randn(3, L, D, dtype=torch.float64), KEEP["padded right"]
    torch.testing.assert_close(bert_encoder(model, x, keep), bert_encoder(plain, x, keep))


@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("use_cache", [True, False])
def test_transformers_decoders_are_not_packed(cross, use_cache, calls):
    """A bidirectional decoder has an encoder's mask, but its cache and memory are not packed."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **TINY, is_decoder=True, add_cross_attention=True, attn_implementation="sdpa"
    )
    config.is_causal = False
    model = transformers.BertModel(config).double().eval()
    keep = KEEP["padded right"]
    ids = torch.randint(1, 97, (3, L), generator=torch.Generator().manual_seed(1))
    arguments = {"attention_mask": keep.long(), "use_cache": use_cache}
    if cross:
        arguments["encoder_hidden_states"] = torch.randn(3, 4, D, dtype=torch.float64)
    wanted = model(ids, **arguments)
    trifuse.fuse(model, unpad=True)
    got = model(ids, **arguments)
    torch.testing.assert_close(got[0][keep], wanted[0][keep])
    if use_cache:
        assert got.past_key_values.get_seq_length() == L
        assert not calls


def test_an_encoder_with_eager_attention_is_not_packed():
    torch.manual_seed(0)
    plain = BertModel(BertConfig(**TINY)).double().eval().encoder
    ours = trifuse.nn.BertEncoder(BertConfig(**TINY)).double().eval()
    ours.load_state_dict(plain.state_dict())
    x, keep = torch.randn(3, L, D, dtype=torch.float64), KEEP["padded right"]
    assert torch.equal(ours(x, keep), plain(x, keep))


def test_under_compile_and_transforms():
    """The mask's values can't be read there; results on real tokens are the same."""
    model, keep = encoder(fused=True), KEEP["padded right"]
    x = torch.randn(3, L, D, dtype=torch.float64)

    def run(src: Tensor, mask: Tensor) -> Tensor:
        return model(src, src_key_padding_mask=mask)

    wanted = run(x, ~keep)[keep]
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, ~keep)[keep], wanted)
    mapped = torch.vmap(run)(x[:, None], ~keep[:, None]).squeeze(1)
    torch.testing.assert_close(mapped[keep], wanted)


def test_dropout_applies_to_packed_tokens_of_bert():
    config = BertConfig(**TINY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    model = BertModel(config).train()
    trifuse.fuse(model, unpad=True)
    x, keep = torch.randn(3, L, D), KEEP["padded right"]
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model.encoder(x, keep))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_dropout_applies_to_packed_tokens():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 24, 0.5, batch_first=True)
    for module in layer.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # leaves the dropout of the attention weights
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        model = nn.TransformerEncoder(layer, 1)
    trifuse.fuse(model, unpad=True)
    x, keep = torch.randn(3, L, D), KEEP["padded right"]
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(model(x, src_key_padding_mask=~keep))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0][keep], draws[2][keep])
    model.eval()
    still = copy.deepcopy(model)
    assert torch.equal(model(x, src_key_padding_mask=~keep), still(x, src_key_padding_mask=~keep))


# Decoders ---------------------------------------------------------------------------------------

MEMORY_KEEP = torch.arange(5) < torch.tensor([3, 5, 1])[:, None]


def encoder_decoder(*, fused: bool, batch_first: bool, norm_first: bool) -> nn.Transformer:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        model = nn.Transformer(
            D, H, 2, 2, 24, 0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
        )
    if fused:
        trifuse.fuse(model, unpad=True)
    return model


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("padded", ["target", "memory", "both"])
def test_transformer_decoder(padded, batch_first, norm_first, causal, calls):
    """Outputs at real positions and every gradient agree; only real tokens are computed."""
    keep, torch_model, fused = (
        KEEP["padded right"],
        *(
            encoder_decoder(fused=fused, batch_first=batch_first, norm_first=norm_first)
            for fused in (False, True)
        ),
    )
    torch.manual_seed(1)
    tgt, memory = (torch.randn(3, n, D, dtype=torch.float64) for n in (L, 5))
    masks = {}
    if padded != "memory":
        masks["tgt_key_padding_mask"] = ~keep
    if padded != "target":
        masks["memory_key_padding_mask"] = ~MEMORY_KEEP
    if causal:
        masks["tgt_mask"] = torch.ones(L, L, dtype=torch.bool).triu(1)
    real = keep if padded != "memory" else torch.ones_like(keep)
    upstream = torch.randn_like(tgt) * real[..., None]
    results = []
    for model in (torch_model, fused):
        inputs = [(x if batch_first else x.transpose(0, 1)).requires_grad_() for x in (tgt, memory)]
        out = model.decoder(*inputs, **masks)
        out = out if batch_first else out.transpose(0, 1)
        wanted = [*inputs, *model.decoder.parameters()]
        results.append((out, torch.autograd.grad(out, wanted, upstream)))
    (expected, expected_grads), (actual, grads) = results
    torch.testing.assert_close(actual[real], expected[real])
    torch.testing.assert_close(grads, expected_grads)
    assert calls == ["varlen_attention"] * 4  # two layers that attend twice


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", ["padded right", "with holes"])
def test_reference_language_model(name, norm_first, training, tokens_seen):
    from trifuse.models.transformer import LanguageModel, LanguageModelConfig

    torch.manual_seed(0)
    config = LanguageModelConfig(
        31, D, H, 2, dim_feedforward=24, dropout=0.0, max_length=L, norm_first=norm_first
    )
    model = LanguageModel(config).double().train(training)
    tokens, real = torch.randint(1, 31, (3, L)), KEEP[name].clone()
    real[:, 0] = True  # torch returns NaN for a query without keys
    expected = model(tokens, real)[real]
    expected_grads = gradients(model, expected)
    expected_states = model(tokens, real, output_hidden_states=True).hidden_states
    trifuse.fuse(model, unpad=True)
    tokens_seen.clear()
    output = model(tokens, real, output_hidden_states=True)
    for ours, theirs in zip(output.hidden_states, expected_states, strict=True):
        assert ours[~real].eq(0).all()
        torch.testing.assert_close(ours[real], theirs[real])
    torch.testing.assert_close(output.logits[real], expected)
    features = model.features(tokens, real)
    assert features[~real].eq(0).all()
    torch.testing.assert_close(features[real], expected_states[-1][real])
    assert set(tokens_seen) == {int(real.sum())}
    tokens_seen.clear()
    logits = model(tokens, real)
    assert set(tokens_seen) == {int(real.sum())}
    assert logits[~real].eq(0).all()
    torch.testing.assert_close(logits[real], expected)
    torch.testing.assert_close(gradients(model, logits[real]), expected_grads)
    with pytest.raises(ValueError, match=r"mask: expected torch\.bool"):
        model(tokens, real.long())
    with pytest.raises(ValueError, match="tokens: expected at most max_length=7"):
        model(torch.ones(3, L + 1, dtype=torch.long), torch.ones(3, L + 1, dtype=torch.bool).tril())


@pytest.mark.parametrize("padded", [False, True])
def test_a_causal_hint_without_its_mask_is_refused(padded):
    """With and without padding."""
    keep = KEEP["padded right"] if padded else torch.ones(3, L, dtype=torch.bool)
    x = torch.randn(3, L, D, dtype=torch.float64)
    for stack in (
        encoder(fused=fused)
        if kind == "encoder"
        else encoder_decoder(fused=fused, batch_first=True, norm_first=False).decoder
        for fused in (False, True)
        for kind in ("encoder", "decoder")
    ):
        given, of = ((x,), "src") if isinstance(stack, nn.TransformerEncoder) else ((x, x), "tgt")
        hint = "is_causal" if of == "src" else "tgt_is_causal"
        with pytest.raises(RuntimeError, match="attn_mask"):
            stack(*given, **{f"{of}_key_padding_mask": ~keep, hint: True})


def test_decoder_masks_that_packing_cannot_follow(calls):
    model = encoder_decoder(fused=True, batch_first=True, norm_first=False)
    plain = encoder_decoder(fused=False, batch_first=True, norm_first=False)
    torch.manual_seed(1)
    tgt, memory = (torch.randn(3, n, D, dtype=torch.float64) for n in (L, 5))
    padding = {"tgt_key_padding_mask": ~KEEP["padded right"]}
    for masks in (
        {"tgt_mask": torch.randn(L, L, dtype=torch.float64)},
        {"memory_mask": torch.zeros(L, 5, dtype=torch.bool)},
        {"memory_key_padding_mask": torch.where(MEMORY_KEEP, 0.0, -1e9).double()},
    ):
        expected = plain.decoder(tgt, memory, **padding, **masks)
        actual = model.decoder(tgt, memory, **padding, **masks)
        torch.testing.assert_close(actual, expected)
    assert "varlen_attention" not in calls


def gradients(model: nn.Module, logits: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(logits.square().sum(), list(model.parameters()))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", ["source", "target", "both"])
def test_reference_transformer(padded, norm_first, training, tokens_seen):
    """Only the embedding computes padding; even the output projection gets real tokens only."""
    from trifuse.models.transformer import Transformer, TransformerConfig

    config = TransformerConfig(
        vocab_size=31,
        d_model=D,
        nhead=H,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=24,
        dropout=0.0,
        norm_first=norm_first,
        max_length=L,
    )
    torch.manual_seed(0)
    model = Transformer(config).double().train(training)
    source, target = torch.randint(1, 31, (2, 3, L))
    source_mask = None if padded == "target" else KEEP["with holes"]
    target_mask = None if padded == "source" else KEEP["padded right"]
    masks = (source_mask, target_mask)
    counts = [3 * L if mask is None else int(mask.sum()) for mask in masks]
    real = torch.ones(3, L, dtype=torch.bool) if target_mask is None else target_mask
    expected = model(source, target, *masks)[real]
    expected_grads = gradients(model, expected)
    report = trifuse.fuse(model, unpad=True)
    tokens_seen.clear()
    logits = model(source, target, *masks)
    assert set(tokens_seen) == set(counts)
    assert tokens_seen[-1] == counts[1]  # the output projection
    assert logits[~real].eq(0).all()
    torch.testing.assert_close(logits[real], expected)
    torch.testing.assert_close(gradients(model, logits[real]), expected_grads)
    assert torch.equal(model(source, target), model(source, target, None, torch.ones_like(real)))
    report.revert()
    assert type(model) is Transformer
    assert type(model.decoder) is nn.TransformerDecoder
