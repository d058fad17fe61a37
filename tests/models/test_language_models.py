"""Language models of every kind: what they compute, and how they continue a prompt."""

from __future__ import annotations

import copy
import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformer_formulas import attended, fed_forward, gelu, normalised, with_residual

import trifuse
from trifuse.models.convolutional import (
    ConvolutionalLanguageModel,
    ConvolutionalLanguageModelConfig,
    GatedBlock,
)
from trifuse.models.decoding import Decoded, beam_search, greedy_search, sample
from trifuse.models.recurrent import (
    RecurrentLanguageModel,
    RecurrentLanguageModelConfig,
    VariationalDropout,
    detach_state,
)
from trifuse.models.transformer import (
    KeyValueCache,
    LanguageModel,
    LanguageModelConfig,
    LanguageModelOutput,
    Transformer,
    TransformerConfig,
    log_likelihood,
)

V = 11
CELLS = ("rnn", "gru", "lstm")


def recurrent(cell: str = "lstm", **changed) -> RecurrentLanguageModel:
    torch.manual_seed(0)
    sizes = {"embedding_dim": 6, "hidden_size": 10, "num_layers": 2, "dropout": 0.0}
    config = RecurrentLanguageModelConfig(V, cell=cell, **{**sizes, **changed})
    return RecurrentLanguageModel(config).double().eval()


def convolutional(**changed) -> ConvolutionalLanguageModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_blocks": 2, "kernel_size": 3, "dropout": 0.0}
    config = ConvolutionalLanguageModelConfig(V, **{**sizes, **changed})
    return ConvolutionalLanguageModel(config).double().eval()


def texts(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


# Recurrent --------------------------------------------------------------------------------------


def step(cell: str, layer: nn.RNNBase, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step by the papers' equations."""
    to_x = x @ layer.weight_ih_l0.T + layer.bias_ih_l0
    to_h = h @ layer.weight_hh_l0.T + layer.bias_hh_l0
    if cell == "rnn":
        return (to_x + to_h).tanh(), c
    if cell == "gru":
        (r_x, z_x, n_x), (r_h, z_h, n_h) = to_x.chunk(3, -1), to_h.chunk(3, -1)
        r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
        return (1 - z) * (n_x + r * n_h).tanh() + z * h, c
    i, f, g, o = (to_x + to_h).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_recurrent_model_is_its_equations(cell, tie_weights):
    model = recurrent(cell, tie_weights=tie_weights)
    tokens = texts(3, 5)
    x = F.embedding(tokens, model.embedding.weight)
    for layer in model.layers:
        h = c = x.new_zeros(3, layer.hidden_size)
        steps = []
        for t in range(5):
            h, c = step(cell, layer, x[:, t], h, c)
            steps.append(h)
        x = torch.stack(steps, 1)
    weight = model.embedding.weight if tie_weights else model.output.weight
    assert_close(model(tokens)[0], x @ weight.T + model.output.bias)


def test_tied_weights_are_one_parameter():
    model = recurrent()
    assert model.output.weight is model.embedding.weight
    assert sum(p.shape == (V, 6) for p in model.parameters()) == 1
    untied = recurrent(tie_weights=False)
    assert untied.output.weight.shape == (V, 10)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_carried_state_continues_a_text(cell, fused):
    model = recurrent(cell)
    if fused:
        trifuse.fuse(model)
    tokens = texts(3, 12)
    whole, end = model(tokens)
    parts, state = [], None
    for piece in tokens.split(5, 1):
        logits, state = model(piece, state)
        parts.append(logits)
    assert_close(torch.cat(parts, 1), whole)
    for one, other in zip(state, end, strict=True):
        pairs = zip(one, other, strict=True) if cell == "lstm" else [(one, other)]
        for a, b in pairs:
            assert_close(a, b)


@pytest.mark.parametrize("cell", CELLS)
def test_detached_state_ends_backpropagation(cell):
    model = recurrent(cell)
    tokens = texts(2, 6)
    _, state = model(tokens[:, :3])
    _, detached = model(tokens[:, :3])
    for given, reaches in ((state, True), (detach_state(detached), False)):
        model.zero_grad()
        logits, _ = model(tokens[:, 3:], given)
        embedded = torch.autograd.grad(logits.sum(), model.embedding.weight)[0]
        early = set(tokens[:, :3].flatten().tolist()) - set(tokens[:, 3:].flatten().tolist())
        assert early
        # The projection's share of a tied gradient is the same for all words.
        shares = embedded - model_output_share(model, tokens[:, 3:], given)
        assert any(shares[word].abs().max() > 1e-9 for word in early) == reaches


def model_output_share(model: RecurrentLanguageModel, tokens: Tensor, state) -> Tensor:
    """The gradient that reaches the tied weight through the projection."""
    hidden = []
    hook = model.output.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    with torch.no_grad():
        model(tokens, detach_state(state))
    hook.remove()
    return hidden[0].sum((0, 1)).expand(V, -1)


def test_variational_masks_are_the_same_at_every_step():
    torch.manual_seed(0)
    dropout = VariationalDropout(0.4)
    x = torch.ones(50, 7, 40)
    y = dropout(x)
    assert torch.equal(y, y[:, :1].expand_as(y))
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.6).item()}
    assert (y == 0).double().mean().item() == pytest.approx(0.4, abs=0.03)
    assert not torch.equal(y[0, 0], y[1, 0])
    assert dropout.eval()(x) is x


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_row_drops_the_same_features_at_every_step(cell, fused):
    """In the embeddings, between the layers and in the output, anew for each of them."""
    model = recurrent(cell, dropout=0.5, embedding_dim=40, hidden_size=40).train()
    if fused:
        trifuse.fuse(model)
    hidden = model(texts(3, 7), output_hidden_states=True).hidden_states
    masks = []
    for x in hidden:
        dropped = x == 0
        assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
        assert 0.3 < dropped.double().mean() < 0.7
        masks += dropped[:, 0].unbind()
    assert len(masks) == 9
    assert len({tuple(mask.tolist()) for mask in masks}) == 9


def test_recurrent_configuration_is_checked():
    with pytest.raises(ValueError, match="cell: expected one of rnn, gru, lstm; got 'gpu'"):
        RecurrentLanguageModelConfig(V, cell="gpu")
    with pytest.raises(ValueError, match="num_layers: expected at least 1; got 0"):
        RecurrentLanguageModelConfig(V, num_layers=0)
    model = recurrent()
    _, state = model(texts(1, 2))
    with pytest.raises(ValueError, match="state: expected 2 layers; got 1"):
        model(texts(1, 2), state[:1])


# Convolutional ----------------------------------------------------------------------------------


def gated(block: GatedBlock, x: Tensor) -> Tensor:
    """A block's result for (B, D, L) by the paper's equation 1, from one product for each tap."""
    y = x
    for convolution in block.convolutions:
        weight, bias = convolution.weight, convolution.bias
        width, half = weight.shape[2], weight.shape[0] // 2
        out = y.new_zeros(y.shape[0], 2 * half, y.shape[2])
        for t in range(y.shape[2]):
            for k in range(width):
                if (place := t - (width - 1) + k) >= 0:
                    out[:, :, t] += y[:, :, place] @ weight[:, :, k].T
            out[:, :, t] += bias
        y = out[:, :half] * out[:, half:].sigmoid()
    return x + y


@pytest.mark.parametrize("bottleneck", [None, 3])
def test_gated_block_is_its_equation(bottleneck):
    torch.manual_seed(0)
    block = GatedBlock(4, 3, bottleneck).double().eval()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    assert_close(block(x), gated(block, x))


@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("bottleneck", [None, 3])
@torch.no_grad()
def test_convolutional_model_is_its_equations(bottleneck, tie_weights):
    model = convolutional(bottleneck=bottleneck, tie_weights=tie_weights)
    for parameter in model.parameters():  # so that biases matter
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    tokens = texts(3, 7)
    x = model.embedding.weight[tokens].mT
    for block in model.blocks:
        x = gated(block, x)
    weight = model.embedding.weight if tie_weights else model.output.weight
    assert_close(model(tokens), x.mT @ weight.T + model.output.bias)


def test_receptive_field():
    model = convolutional()
    tokens = texts(1, 12)
    reach = 2 * (3 - 1) + 1
    for place in range(12):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % V
        differs = (model(changed) != model(tokens)).any(-1)[0].nonzero().flatten().tolist()
        assert differs == list(range(place, min(place + reach, 12)))


def test_convolutional_configuration_is_checked():
    for name in ("num_blocks", "kernel_size", "bottleneck"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1; got 0"):
            ConvolutionalLanguageModelConfig(V, **{name: 0})
    model = convolutional()
    assert model.output.weight is model.embedding.weight
    assert convolutional(tie_weights=False).output.weight.shape == (V, 8)


# Transformer ------------------------------------------------------------------------------------

norms = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])


def attend_causally(attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return attended(attention, x, x, causal=True)


def hidden_states(model: LanguageModel, tokens: Tensor) -> list[Tensor]:
    """The hidden states of one text (L,), by the papers' equations."""
    x = model.embedding.weight[tokens] + model.positions.weight[: len(tokens)]
    states = [x]
    norm_first = model.config.norm_first
    for layer in model.decoder.layers:
        attend = functools.partial(attend_causally, layer.self_attn)
        x = with_residual(attend, x, layer.norm1, norm_first)
        feed = functools.partial(fed_forward, layer, activation=gelu)
        x = with_residual(feed, x, layer.norm2, norm_first)
        states.append(x)
    if norm_first:
        states[-1] = normalised(x, model.decoder.norm)
    return states


@pytest.mark.parametrize("fused", [False, True])
@norms
def test_hidden_states_are_the_papers_equations(norm_first, fused):
    model = transformer(norm_first)
    tokens, mask = texts(3, 7), torch.arange(7) < torch.tensor([[7], [4], [1]])
    expected = [hidden_states(model, row[real]) for row, real in zip(tokens, mask, strict=True)]
    if fused:
        trifuse.fuse(model)
    output = model(tokens, mask, output_hidden_states=True)
    assert isinstance(output, LanguageModelOutput)
    assert len(output.hidden_states) == 3
    for row, states in enumerate(expected):
        for got, wanted in zip(output.hidden_states, states, strict=True):
            assert_close(got[row][mask[row]], wanted)
        assert_close(output.logits[row][mask[row]], states[-1] @ model.embedding.weight.T)
    assert_close(model(tokens, mask)[mask], output.logits[mask])
    assert_close(model.features(tokens, mask)[mask], output.hidden_states[-1][mask])


def test_post_norm_is_torchs_encoder_with_a_causal_mask():
    model = transformer(norm_first=False)
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=False, dtype=torch.float64
    )
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    encoder.load_state_dict(model.decoder.state_dict())
    tokens = texts(3, 9)
    x = model.embedding(tokens) + model.positions.weight[:9]
    causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    assert_close(model(tokens), encoder(x, causal, is_causal=True) @ model.embedding.weight.T)


def test_gpt_has_as_many_parameters_as_published():
    with torch.device("meta"):
        model = LanguageModel(LanguageModelConfig(40478, max_length=512, norm_first=False))
    assert sum(p.numel() for p in model.parameters()) == 116_534_784


def test_post_norm_weights_begin_alike():
    torch.manual_seed(0)
    config = LanguageModelConfig(64, 128, 4, num_layers=8, dim_feedforward=512, norm_first=False)
    layer = LanguageModel(config).decoder.layers[3]
    for weight in (layer.linear1.weight, layer.self_attn.out_proj.weight, layer.linear2.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)


@norms
def test_hugging_face_computes_the_same(norm_first):
    """GPT-2 before, GPT after the sublayers; both store matrices as (inputs, outputs)."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "n_positions": 20, "n_embd": 8, "n_layer": 2, "n_head": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    if norm_first:
        config = transformers.GPT2Config(**sizes, **drops, n_inner=32, activation_function="relu")
        theirs = transformers.GPT2LMHeadModel(config)
        stack = theirs.transformer
        embeddings = stack.wte, stack.wpe
    else:
        theirs = transformers.OpenAIGPTLMHeadModel(
            transformers.OpenAIGPTConfig(**sizes, **drops, afn="relu")
        )
        stack = theirs.transformer
        embeddings = stack.tokens_embed, stack.positions_embed
    theirs = theirs.double().eval()
    model = transformer(norm_first, dim_feedforward=32, activation="relu")
    with torch.no_grad():
        copies = [
            (embeddings[0].weight, model.embedding.weight),
            (embeddings[1].weight, model.positions.weight),
        ]
        for block, layer in zip(stack.h, model.decoder.layers, strict=True):
            copies += [
                (block.ln_1.weight, layer.norm1.weight),
                (block.ln_1.bias, layer.norm1.bias),
                (block.ln_2.weight, layer.norm2.weight),
                (block.ln_2.bias, layer.norm2.bias),
                (block.attn.c_attn.weight, layer.self_attn.in_proj_weight.T),
                (block.attn.c_attn.bias, layer.self_attn.in_proj_bias),
                (block.attn.c_proj.weight, layer.self_attn.out_proj.weight.T),
                (block.attn.c_proj.bias, layer.self_attn.out_proj.bias),
                (block.mlp.c_fc.weight, layer.linear1.weight.T),
                (block.mlp.c_fc.bias, layer.linear1.bias),
                (block.mlp.c_proj.weight, layer.linear2.weight.T),
                (block.mlp.c_proj.bias, layer.linear2.bias),
            ]
        if norm_first:
            copies.append((stack.ln_f.weight, model.decoder.norm.weight))
            copies.append((stack.ln_f.bias, model.decoder.norm.bias))
        for to, value in copies:
            to.copy_(value)
    tokens = texts(3, 9)
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, output_hidden_states=True)
        got = model(tokens, output_hidden_states=True)
    assert_close(got.logits, wanted.logits)
    assert len(got.hidden_states) == len(wanted.hidden_states)
    for ours, other in zip(got.hidden_states, wanted.hidden_states, strict=True):
        assert_close(ours, other)


def test_weights_saved_before_still_load():
    """A checkpoint of this layout was written before ``norm_first`` was an option."""
    layer = [
        "self_attn.in_proj_weight",
        "self_attn.in_proj_bias",
        "self_attn.out_proj.weight",
        "self_attn.out_proj.bias",
        "linear1.weight",
        "linear1.bias",
        "linear2.weight",
        "linear2.bias",
        "norm1.weight",
        "norm1.bias",
        "norm2.weight",
        "norm2.bias",
    ]
    names = ["embedding.weight", "positions.weight"]
    names += [f"decoder.layers.{n}.{name}" for n in range(2) for name in layer]
    names += ["decoder.norm.weight", "decoder.norm.bias", "output.weight"]
    assert list(LanguageModel(LanguageModelConfig(V, 8, 2, 2, 16)).state_dict()) == names
    assert not any(name.startswith("decoder.norm") for name in transformer(False).state_dict())


# All of them ------------------------------------------------------------------------------------


@torch.no_grad()
def transformer(norm_first: bool = True, **changed) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "d_model": 8, "nhead": 2, "num_layers": 2, "dim_feedforward": 16}
    sizes |= {"dropout": 0.0, "max_length": 20, "norm_first": norm_first, **changed}
    model = LanguageModel(LanguageModelConfig(**sizes)).double().eval()
    for parameter in model.parameters():  # so that biases and norms matter
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


# The models that continue a prompt.
WRITERS = {
    **{cell: (lambda cell=cell, **changed: recurrent(cell, **changed)) for cell in CELLS},
    "transformer": transformer,
    "post-norm": lambda **changed: transformer(False, **changed),
}
MODELS = {**WRITERS, "convolutional": convolutional}


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model(tokens)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_no_position_sees_the_next_nor_padding(make):
    model = make()
    tokens = texts(3, 9)
    whole = logits_of(model, tokens)
    for length in range(1, 9):
        assert_close(logits_of(model, tokens[:, :length]), whole[:, :length])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_no_texts_may_have_a_mask(norm_first, fused):
    model = transformer(norm_first)
    if fused:
        trifuse.fuse(model, unpad=True)
    tokens, mask = texts(0, 4), torch.ones(0, 4, dtype=torch.bool)
    for training in (False, True):
        output = model.train(training)(tokens, mask, output_hidden_states=True)
        assert output.logits.shape == (0, 4, V)
        assert [state.shape for state in output.hidden_states] == [(0, 4, 8)] * 3
        assert model.features(tokens, mask).shape == (0, 4, 8)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_likelihood_is_the_product_of_the_predictions(make):
    model = make()
    tokens, mask = texts(3, 7), torch.arange(7) < torch.tensor([[7], [4], [1]])
    got = log_likelihood(logits_of(model, tokens), tokens, mask)
    for row, length in enumerate((7, 4, 1)):
        total = 0.0
        for place in range(1, length):
            scores = logits_of(model, tokens[row : row + 1, :place])[0, -1]
            total += math.log(scores.softmax(0)[tokens[row, place]].item())
        assert got[row].item() == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_state_dict_goes_round(make, tmp_path):
    model, other = make(), make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    tokens = texts(2, 5)
    assert torch.equal(logits_of(model, tokens), logits_of(other, tokens))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_fused_model_trains_alike(make, dtype, rounding):
    """From one seed: the loss of each of five steps, and the gradients of the last one."""
    tokens = texts(4, 9)
    losses, gradients = [], []
    for fuse in (False, True):
        model = make().to(dtype).train()
        if fuse:
            trifuse.fuse(model)
        if fuse and isinstance(model, RecurrentLanguageModel):
            assert all(type(layer).__module__.startswith("trifuse") for layer in model.layers)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            logits = logits_of(model, tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert losses[1] == pytest.approx(losses[0], rel=rounding)
    assert losses[0][-1] < losses[0][0]
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_learns_a_text(make):
    model = make().float().train()
    trifuse.fuse(model)
    tokens = texts(1, 15)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(400):
        optimizer.zero_grad()
        loss = -log_likelihood(logits_of(model, tokens), tokens).sum() / 14
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2 < math.log(V)


# Continuing a prompt ----------------------------------------------------------------------------

writers = pytest.mark.parametrize("make", WRITERS.values(), ids=WRITERS)
EOS = 2


def ragged(*lengths: int) -> tuple[Tensor, Tensor]:
    """Prompts with arbitrary padding, and their mask."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return texts(*mask.shape, seed=3), mask


def talkative(model: nn.Module) -> nn.Module:
    """Makes the model's predictions differ enough for texts to end at different lengths."""
    with torch.no_grad():
        model.embedding.weight.mul_(4)
    return model


@pytest.mark.parametrize("fused", [False, True])
@writers
def test_greedy_is_the_argmax_of_the_full_forward(make, fused):
    model = talkative(make())
    if fused:
        trifuse.fuse(model)
    prompt, mask = ragged(5, 1, 3, 4)
    found = greedy_search(model, prompt, mask, max_length=9)
    assert found.lengths.tolist() == [9] * 4
    ends = found.tokens[0, 4].item()
    for eos_id in (None, ends):
        found = greedy_search(model, prompt, mask, eos_id=eos_id, max_length=9)
        for row, (text, real) in enumerate(zip(prompt, mask, strict=True)):
            text, total, place = text[real][None], 0.0, 0
            for place in range(9):
                log_probs = logits_of(model, text)[0, -1].log_softmax(0)
                best = log_probs.argmax()
                assert found.tokens[row, place] == best
                total += log_probs[best].item()
                text = torch.cat((text, best[None, None]), 1)
                if best == eos_id:
                    break
            assert found.lengths[row] == place + 1
            assert (found.tokens[row, place + 1 :] == ends).all()
            assert found.scores[row].item() == pytest.approx(total, abs=1e-9)
    assert found.lengths[0] <= 5


@pytest.mark.parametrize("eos_id", [None, EOS])
@writers
def test_beams_that_prune_nothing_find_everything(make, eos_id):
    size, longest = 4, 3
    model = make(vocab_size=size) if make in (transformer, WRITERS["post-norm"]) else None
    if model is None:
        cell = next(name for name, other in WRITERS.items() if other is make)
        torch.manual_seed(0)
        config = RecurrentLanguageModelConfig(size, 6, 10, 2, cell, 0.0)
        model = RecurrentLanguageModel(config).double().eval()
    model = talkative(model)
    prompts = [[3, 0, 1], [1]]
    going_on = [token for token in range(size) if token != eos_id]
    everything = list(itertools.product(going_on, repeat=longest))
    if eos_id is not None:
        everything += [
            (*begun, eos_id)
            for n in range(longest)
            for begun in itertools.product(going_on, repeat=n)
        ]
    width = len(everything)
    prompt, mask = torch.tensor([[3, 0, 1], [1, 2, 3]]), torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    found = beam_search(
        model, prompt, mask, eos_id=eos_id, max_length=longest, beam_width=width, length_penalty=0.6
    )
    for row, begin in enumerate(prompts):
        scores = {}
        for target in everything:
            text = torch.tensor([[*begin, *target]])
            log_probs = logits_of(model, text[:, :-1]).log_softmax(-1)[0, len(begin) - 1 :]
            total = sum(log_probs[n, token].item() for n, token in enumerate(target))
            scores[target] = total / ((5 + len(target)) / 6) ** 0.6
        wanted = sorted(scores, key=scores.__getitem__, reverse=True)
        lengths = found.lengths[row].tolist()
        got = [
            tuple(tokens[:length])
            for tokens, length in zip(found.tokens[row].tolist(), lengths, strict=True)
        ]
        assert got == wanted
        assert found.scores[row].tolist() == pytest.approx([scores[each] for each in wanted])


@pytest.mark.parametrize("fused", [False, True])
@writers
def test_prompts_of_different_lengths_are_continued_as_if_alone(make, fused):
    model = talkative(make())
    if fused:
        trifuse.fuse(model)
    lengths = (5, 1, 3, 4)
    prompt, mask = ragged(*lengths)

    def search(*given: Tensor, **options) -> list[Decoded]:
        greedy = greedy_search(model, *given, eos_id=EOS, max_length=8, **options)
        beams = beam_search(model, *given, eos_id=EOS, max_length=8, beam_width=3, **options)
        return [greedy, beams]

    for options in ({}, {"bos_id": 7}):
        together = search(prompt, mask, **options)
        for row, length in enumerate(lengths):
            alone = search(prompt[row : row + 1, :length], **options)
            for one, all_ in zip(alone, together, strict=True):
                assert torch.equal(one.tokens[0], all_.tokens[row])
                assert torch.equal(one.lengths[0], all_.lengths[row])
                assert_close(one.scores[0], all_.scores[row])
    followed = torch.cat((prompt[:1], torch.full((1, 1), 7)), 1)
    for with_bos, without in zip(search(prompt[:1], bos_id=7), search(followed), strict=True):
        assert torch.equal(with_bos.tokens, without.tokens)
        assert_close(with_bos.scores, without.scores)


@writers
def test_steps_go_on_from_ragged_prompts(make):
    """In chunks, with rows repeated and reordered."""
    model, (prompt, mask) = make(), ragged(2, 6)
    state = model.start(prompt, mask)
    for row, length in enumerate((2, 6)):
        assert_close(state.logits[row], logits_of(model, prompt[row : row + 1, :length])[0, -1])
    begun, going_on = texts(6, 3, seed=1), texts(6, 2, seed=2)
    model.step(begun, state)
    rows = torch.tensor([2, 2, 0, 4, 3, 5])
    state.reorder(rows)
    got = torch.cat([model.step(chunk, state) for chunk in going_on.split(1, 1)], 1)
    for row, before in enumerate(rows.tolist()):
        text = prompt[row // 3][mask[row // 3]]
        text = torch.cat((text, begun[before], going_on[row]))[None]
        assert_close(got[row], logits_of(model, text)[0, -2:])


@pytest.mark.parametrize("n", [1, 3, 70])
def test_a_cache_grows_in_place(n):
    """It returns what joining all parts does, and moves only when its room is used up."""
    generator = torch.Generator().manual_seed(0)
    parts = [[torch.randn(2, 3, n, 4, generator=generator) for _ in range(2)] for _ in range(60)]
    cache, places = KeyValueCache(), set()
    for count, (key, value) in enumerate(parts, 1):
        keys, values = cache.append(0, key, value)
        places.add(keys.data_ptr())
        assert cache.length == count * n
        for i, whole in enumerate((keys, values)):
            assert torch.equal(whole, torch.cat([part[i] for part in parts[:count]], 2))
    assert len(places) <= 14
    cache.reorder(torch.tensor([1, 1, 0]))
    more = torch.randn(3, 3, n, 4, generator=generator)
    keys, _ = cache.append(0, more, more)
    joined = torch.cat([key for key, _ in parts], 2)[[1, 1, 0]]
    assert torch.equal(keys, torch.cat((joined, more), 2))


def test_a_cache_that_records_gradients():
    """Steps keep what an earlier step's backward reads."""
    first, second = (torch.randn(1, 1, 2, 3, requires_grad=True) for _ in range(2))
    cache = KeyValueCache()
    one = cache.append(0, first, first)[0].exp().sum()
    two = cache.append(0, second, second)[0].exp().sum()
    (one + two).backward()
    assert_close(first.grad, 2 * first.detach().exp())
    assert_close(second.grad, second.detach().exp())


def test_a_cache_from_inference_mode_goes_on_elsewhere():
    x, cache = torch.ones(1, 1, 2, 3), KeyValueCache()
    with torch.inference_mode():
        for _ in range(3):
            cache.append(0, x, x)
    for count in (4, 5, 6):
        keys, _ = cache.append(0, x, x)
        assert torch.equal(keys, x.repeat(1, 1, count, 1))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_with_a_cache_traces_without_a_break(monkeypatch, fused):
    """The prompt and the steps after it take a few graphs, however many tokens are written."""
    model, prompt = transformer(num_layers=9, max_length=90), texts(2, 6)
    if fused:
        trifuse.fuse(model)
    graphs = []

    def compile_graph(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    with torch.inference_mode():
        wanted = greedy_search(model, prompt, max_length=80).tokens
        torch.compiler.reset()
        step = torch.compile(model.step, backend=compile_graph, fullgraph=True, dynamic=True)
        monkeypatch.setattr(model, "step", step)
        assert torch.equal(greedy_search(model, prompt, max_length=80).tokens, wanted)
    assert len(graphs) <= 3


@writers
def test_samples_end_and_continue_ragged_prompts(make):
    model, (prompt, mask) = make(), ragged(2, 6, 1)
    drawn = sample(model, prompt, 5, prompt_mask=mask, top_k=1)
    wanted = greedy_search(model, prompt, mask, max_length=5).tokens
    assert torch.equal(drawn, torch.cat((prompt, wanted), 1))
    many = prompt[:1, :2].expand(400, -1)
    drawn = sample(model, many, 6, eos_id=EOS, generator=torch.Generator().manual_seed(0))
    assert drawn.shape == (400, 8)
    ended = (drawn[:, 2:] == EOS).cummax(1).values
    assert ended.any(1).double().mean() > 0.1
    assert not ended.all()
    assert (drawn[:, 2:][ended] == EOS).all()
    free = sample(model, many, 6, generator=torch.Generator().manual_seed(0))
    first = free[:, 2]
    assert torch.equal(first, drawn[:, 2])
    certain = copy.deepcopy(model)
    with torch.no_grad():
        certain.output.weight = nn.Parameter(certain.output.weight.clone())
        certain.output.weight.zero_()
        certain.output.bias = nn.Parameter(torch.full((V,), -1e9, dtype=torch.float64))
        certain.output.bias[EOS] = 0
    assert (sample(certain, many[:3], 4, eos_id=EOS)[:, 2:] == EOS).all()


def test_a_transformer_stops_at_its_last_position():
    model, (prompt, mask) = transformer(), ragged(5, 12)
    assert greedy_search(model, prompt, mask, max_length=8).tokens.shape == (2, 8)
    with pytest.raises(ValueError, match="from 1 to what the prompt leaves, 8; got 9"):
        greedy_search(model, prompt, mask, max_length=9)
    assert greedy_search(model, prompt[:1], mask[:1], max_length=15).tokens.shape == (1, 15)
    with pytest.raises(ValueError, match="from 1 to what the prompt leaves, 15; got 16"):
        beam_search(model, prompt[:1], mask[:1], max_length=16)
    with pytest.raises(ValueError, match="new_tokens: expected at most 8 after the prompt; got 9"):
        sample(model, prompt, 9, prompt_mask=mask)
    state = model.start(prompt[:1], mask[:1])
    model.step(texts(1, 15), state)
    with pytest.raises(ValueError, match="at most max_length=20 positions; got 21"):
        model.step(texts(1, 1), state)


@writers
def test_bad_prompts_are_named(make):
    model = make()
    with pytest.raises(ValueError, match=r"prompt: expected .* got \(1, 0\)"):
        greedy_search(model, texts(1, 0), max_length=2)
    mask = torch.tensor([[True, True], [False, False]])
    with pytest.raises(ValueError, match=r"prompt_mask: .* at least one real token .* in row 1"):
        greedy_search(model, texts(2, 2), mask, max_length=2)
    with pytest.raises(ValueError, match=r"prompt_mask: .* before its padding; not so in row 1"):
        beam_search(model, texts(2, 2), torch.tensor([[True, True], [False, True]]), max_length=2)
    with pytest.raises(ValueError, match=r"prompt_mask: expected torch.bool of shape \(2, 2\)"):
        sample(model, texts(2, 2), 2, prompt_mask=mask.long())
    with pytest.raises(ValueError, match="tokens: expected 2 rows or a multiple; got 3"):
        model.step(texts(3, 1), model.start(texts(2, 2)))
    assert greedy_search(model, texts(0, 3), max_length=4).tokens.shape == (0, 4)
    empty = torch.ones(0, 3, dtype=torch.bool)
    assert beam_search(model, texts(0, 3), empty, max_length=4).tokens.shape == (0, 4, 4)
    with pytest.raises(ValueError, match=r"after model\.eval\(\)"):
        greedy_search(model.train(), texts(1, 2), max_length=2)


def test_an_encoder_decoder_needs_its_first_token():
    model = Transformer(TransformerConfig(V, 8, 2, 1, 1, 16)).eval()
    with pytest.raises(ValueError, match="bos_id: expected a token"):
        greedy_search(model, texts(1, 2), eos_id=EOS, max_length=2)
    with pytest.raises(ValueError, match="model: expected a language model; got Transformer"):
        sample(model, texts(1, 2), 3)


def test_an_empty_cache_reads_a_text():
    model, tokens = transformer(False), texts(2, 6)
    assert_close(model.step(tokens, KeyValueCache()), model(tokens))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_no_texts_may_have_a_mask_in_a_recurrent_model(cell, fused):
    model = recurrent(cell)
    if fused:
        trifuse.fuse(model)
    tokens, mask = texts(0, 4), torch.ones(0, 4, dtype=torch.bool)
    logits, state = model(tokens, mask=mask)
    assert logits.shape == (0, 4, V)
    for each in zip(state, model(tokens)[1], strict=True):
        parts = zip(*each, strict=True) if cell == "lstm" else [each]
        assert all(a.shape == b.shape for a, b in parts)
    row = texts(1, 4)[0]
    for call in (
        lambda: model(row),
        lambda: model(row, mask=row >= 0),
        lambda: model.features(row),
        lambda: model.step(row, model.start(row[None])),
    ):
        with pytest.raises(ValueError, match=r"tokens: expected \(batch, length\); got \(4,\)"):
            call()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_mask_ends_the_state_at_the_last_real_token(cell, fused):
    model = recurrent(cell)
    if fused:
        trifuse.fuse(model)
    tokens, mask = ragged(3, 7, 1)
    output = model(tokens, mask=mask, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert_close(output.logits, model.output(output.hidden_states[-1]))
    for row, length in enumerate((3, 7, 1)):
        logits, state = model(tokens[row : row + 1, :length])
        assert_close(output.logits[row, :length], logits[0])
        assert_close(
            model.features(tokens, mask)[row],
            model(tokens[row : row + 1], output_hidden_states=True).hidden_states[-1][0],
        )
        for one, all_ in zip(state, output.state, strict=True):
            pairs = zip(one, all_, strict=True) if cell == "lstm" else [(one, all_)]
            for a, b in pairs:
                assert_close(b[:, row], a[:, 0])
    with pytest.raises(ValueError, match="mask: expected each row's real tokens before"):
        model(tokens, mask=mask.flip(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_likelihood_is_summed_in_float32(dtype):
    logits, tokens = torch.randn(3, 500, V).to(dtype), texts(3, 500)
    got = log_likelihood(logits, tokens)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, log_likelihood(logits.float(), tokens))
    for narrow in (torch.uint8, torch.int32):
        assert torch.equal(log_likelihood(logits, tokens.to(narrow)), got)


def test_likelihood_of_padding_at_the_front_counts_no_first_token():
    logits, tokens = torch.randn(1, 4, V), texts(1, 4)
    mask = torch.tensor([[False, True, True, True]])
    wanted = log_likelihood(logits[:, 1:], tokens[:, 1:])
    assert torch.equal(log_likelihood(logits, tokens, mask), wanted)
    with pytest.raises(ValueError, match=r"mask: expected torch.bool of shape \(1, 4\)"):
        log_likelihood(logits, tokens, mask[:, 1:])
