"""The recurrent and the convolutional language model, and the likelihood of a text."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trifuse
from trifuse.models.convolutional import (
    ConvolutionalLanguageModel,
    ConvolutionalLanguageModelConfig,
    GatedBlock,
)
from trifuse.models.recurrent import (
    RecurrentLanguageModel,
    RecurrentLanguageModelConfig,
    VariationalDropout,
    detach_state,
)
from trifuse.models.transformer import LanguageModel, LanguageModelConfig, log_likelihood

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


@pytest.mark.parametrize("cell", CELLS)
def test_fused_recurrent_model_trains_alike(cell):
    tokens = texts(4, 9)
    gradients = []
    for fuse in (False, True):
        model = recurrent(cell).train()
        if fuse:
            trifuse.fuse(model)
            assert all(type(layer).__module__.startswith("trifuse") for layer in model.layers)
        logits, _ = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in gradients[0].items():
        assert_close(gradients[1][name], grad)


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


@pytest.mark.parametrize("bottleneck", [None, 3])
def test_gated_block_is_its_equation(bottleneck):
    torch.manual_seed(0)
    block = GatedBlock(4, 3, bottleneck).double().eval()
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    y = x
    for convolution in block.convolutions:
        weight, bias = convolution.weight, convolution.bias
        width, half = weight.shape[2], weight.shape[0] // 2
        out = y.new_zeros(2, 2 * half, 6)
        for t in range(6):
            for k in range(width):
                if (place := t - (width - 1) + k) >= 0:
                    out[:, :, t] += y[:, :, place] @ weight[:, :, k].T
            out[:, :, t] += bias
        y = out[:, :half] * out[:, half:].sigmoid()
    assert_close(block(x), x + y)


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


# All of them ------------------------------------------------------------------------------------


def transformer() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(V, 8, 2, 2, 16, 0.0, max_length=20)).double().eval()


MODELS = {
    **{cell: (lambda cell=cell: recurrent(cell)) for cell in CELLS},
    "convolutional": convolutional,
    "transformer": transformer,
}


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
