"""models/elmo.py against published vectors, NumPy, torch's own LSTM and formulas in float64."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable, Sequence
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import elmo_files
import h5py
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trifuse
from trifuse.models.elmo import (
    BiLM,
    BiLMForPreTraining,
    CarriedState,
    CharacterEncoder,
    Elmo,
    ElmoConfig,
    Highway,
    LogUniformSampler,
    ProjectedLSTM,
    ScalarMix,
    VocabularySoftmax,
    batch_to_char_ids,
    word_to_char_ids,
)

# Outputs of the code that wrote the published weights, where they are kept beside the repository.
PUBLISHED = Path(__file__).parents[3] / "shared/data/elmo_bilm"

TINY = {
    "char_embedding_dim": 3,
    "filters": ((1, 4), (2, 5), (3, 6)),
    "n_highway": 1,
    "max_characters_per_token": 8,
    "lstm_dim": 7,
    "projection_dim": 4,
    "cell_clip": 0.4,
    "proj_clip": 0.3,
    "dropout": 0.0,
}
SENTENCES = [
    ["the", "cat", "sat", "on", "the", "mat"],
    ["a", "dog"],
    ["it", "ran", "into", "the", "unfathomable"],
]


def perturbed(model: nn.Module) -> nn.Module:
    """Converts a model to float64 and perturbs it, so that clips take effect and biases matter."""
    generator = torch.Generator().manual_seed(1)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(drawn, alpha=0.4)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight[0].zero_()
    return model


def tiny(**sizes: object) -> BiLM:
    torch.manual_seed(0)
    return perturbed(BiLM(ElmoConfig(**{**TINY, **sizes}))).eval()


def char_ids(sentences: Sequence[Sequence[str]] = SENTENCES) -> Tensor:
    return batch_to_char_ids(sentences, TINY["max_characters_per_token"])


def layer(**options: object) -> ProjectedLSTM:
    torch.manual_seed(0)
    sizes = {"proj_size": 4, "cell_clip": 0.4, "proj_clip": 0.3} | options
    return perturbed(ProjectedLSTM(5, 7, **sizes))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


# Characters -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "ids"),
    [
        ("a", [259, 98, 260, 261, 261, 261]),
        ("", [259, 260, 261, 261, 261, 261]),
        ("abcd", [259, 98, 99, 100, 101, 260]),
        ("abcde", [259, 98, 99, 100, 101, 260]),
        ("é", [259, 0xC3 + 1, 0xA9 + 1, 260, 261, 261]),
        ("abcé", [259, 98, 99, 100, 0xC3 + 1, 260]),
        ("a\udc80b", [259, 98, 99, 260, 261, 261]),
    ],
    ids=["short", "empty", "full", "cut", "two bytes", "cut within a character", "no UTF-8"],
)
def test_a_word_is_its_bytes_between_marks(word, ids):
    assert word_to_char_ids(word, 6) == ids


def test_a_batch_is_padded_with_zeros():
    ids = batch_to_char_ids([["a", "bc"], []], 5)
    assert ids.dtype == torch.long
    assert ids.tolist() == [[[259, 98, 260, 261, 261], [259, 99, 100, 260, 261]], [[0] * 5] * 2]
    assert batch_to_char_ids([]).shape == (0, 0, 50)


def test_a_word_needs_three_characters():
    with pytest.raises(ValueError, match="max_characters: expected at least 3; got 2"):
        word_to_char_ids("a", 2)


# Published vectors ------------------------------------------------------------------------------


class Published(NamedTuple):
    options: Path
    weights: Path
    batches: list[list[list[str]]]
    wanted: list[list[Tensor]]  # by batch and sentence: the top layer, (2, tokens, P)


@pytest.fixture(
    scope="module", params=["generated", *(["published"] if PUBLISHED.is_dir() else [])]
)
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    """Weights in the published layout with their vectors: from NumPy, and those published."""
    if request.param == "generated":
        return generated(tmp_path_factory.mktemp("elmo"))
    lists = json.loads((PUBLISHED / "lm_embeddings_sentences.json").read_text(encoding="utf-8"))
    batches = [[line.split() for line in lines] for lines in zip(*lists, strict=True)]
    rows = []
    for row in range(len(lists)):
        with h5py.File(PUBLISHED / f"lm_embeddings_{row}.hdf5") as file:
            rows.append([torch.from_numpy(file[str(n)][()]) for n in range(len(batches))])
    wanted = [list(batch) for batch in zip(*rows, strict=True)]
    return Published(PUBLISHED / "options.json", PUBLISHED / "lm_weights.hdf5", batches, wanted)


def generated(folder: Path, **lstm: object) -> Published:
    sizes = elmo_files.OPTIONS | {"lstm": elmo_files.OPTIONS["lstm"] | lstm}
    options, weights = elmo_files.write(folder, sizes)
    vectors = elmo_files.Vectors(options, weights)
    batches = [SENTENCES, [["naïve", "강물이", "."], ["a"], ["rains", "fall"]], SENTENCES[::-1]]
    wanted = [[torch.from_numpy(each) for each in vectors(batch)] for batch in batches]
    return Published(options, weights, batches, wanted)


def furthest(
    published: Published,
    state: CarriedState | None,
    change: Callable[[BiLM], object],
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> float:
    """Returns the largest difference from the published vectors, in millionths."""
    model = BiLM.from_pretrained(published.options, published.weights, **options).to(dtype)
    change(model)
    worst = 0.0
    for sentences, wanted in zip(published.batches, published.wanted, strict=True):
        with torch.no_grad():
            size = model.config.max_characters_per_token
            layers, mask = model(batch_to_char_ids(sentences, size), state)
        assert mask.sum(1).tolist() == [len(sentence) for sentence in sentences]
        for got, both in zip(layers[-1], wanted, strict=True):
            mine = torch.stack(got[: both.shape[1]].chunk(2, -1))
            worst = max(worst, (mine - both).abs().max().item())
    return worst * 1e6


def unchanged(model: BiLM) -> None:
    pass


def without(name: str, value: float | None) -> Callable[[BiLM], None]:
    def change(model: BiLM) -> None:
        for lstm in (*model.forward_layers, *model.backward_layers):
            assert getattr(lstm, name) != value
            setattr(lstm, name, value)

    return change


# The published vectors were computed in float32 and are 0.7 millionths from float64.
PRECISIONS = pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1), (torch.float32, 2)])


@PRECISIONS
def test_published_vectors(published, dtype, allowed):
    assert furthest(published, CarriedState(), unchanged, dtype) <= allowed


@pytest.mark.parametrize(
    ("name", "value"), [("cell_clip", None), ("forget_bias", 0.0)], ids=["cell clip", "forget bias"]
)
def test_published_vectors_need(published, name, value):
    assert furthest(published, CarriedState(), without(name, value)) > 30


def test_published_vectors_are_of_carried_state(published):
    assert furthest(published, None, unchanged) > 10_000


def test_published_vectors_are_of_a_model_without_residuals(published):
    assert furthest(published, CarriedState(), unchanged, use_skip_connections=True) > 10_000


@PRECISIONS
def test_residuals_are_those_of_numpy(tmp_path, dtype, allowed):
    """The published model of full size has them; the published vectors are of one without."""
    written = generated(tmp_path, use_skip_connections=True)
    assert furthest(written, CarriedState(), unchanged, dtype) <= allowed
    assert furthest(written, CarriedState(), trifuse.fuse, dtype) <= allowed


def test_published_weights_are_saved_as_they_were(published, tmp_path):
    model = BiLM.from_pretrained(published.options, published.weights)
    model.save_pretrained(tmp_path / "options.json", tmp_path / "weights.hdf5")
    assert ElmoConfig.from_json(tmp_path / "options.json") == model.config
    assert stored(tmp_path / "weights.hdf5") == stored(published.weights)


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything in a weight file, bit for bit."""
    found = {}

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = (item.dtype.str, item.shape, item[()].tobytes())

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


# Files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"n_highway": 0, "n_layers": 3, "activation": "tanh", "use_skip_connections": False},
        {"projection_dim": 15, "lstm_dim": 15, "cell_clip": None, "dropout": 0.25},
    ],
    ids=["all", "three layers", "no projections"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saved_weights_load_bit_for_bit(tmp_path, sizes, dtype):
    saved = tiny(**sizes).to(dtype)
    files = tmp_path / "options.json", tmp_path / "weights.hdf5"
    saved.save_pretrained(*files)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    try:
        loaded = BiLM.from_pretrained(*files)
    finally:
        torch.set_default_dtype(before)
    assert loaded.config == saved.config
    assert not loaded.training
    assert loaded.state_dict().keys() == saved.state_dict().keys()
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(loaded.begin.device)), name
    loaded.save_pretrained(tmp_path / "again.json", tmp_path / "again.hdf5")
    assert stored(tmp_path / "again.hdf5") == stored(files[1])


def test_elmo_loads_with_its_own_arguments(tmp_path):
    files = tmp_path / "options.json", tmp_path / "weights.hdf5"
    tiny().float().save_pretrained(*files)
    model = Elmo.from_pretrained(*files, num_output_representations=2, layer_norm=True)
    assert [mix.layer_norm for mix in model.mixes] == [True, True]
    assert not any(module.training for module in model.modules())


def test_published_options_say_nothing_of_dropout(tmp_path):
    path = tmp_path / "options.json"
    ElmoConfig(dropout=0.1).to_json(path)
    assert ElmoConfig.from_json(path).dropout == 0.1
    options = json.loads(path.read_text())
    del options["dropout"]
    path.write_text(json.dumps(options))
    assert ElmoConfig.from_json(path) == ElmoConfig(dropout=0.0)
    assert ElmoConfig.from_json(path, dropout=0.3).dropout == 0.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda options: options.pop("char_cnn"), "char_cnn: expected a model that reads"),
        (lambda options: options.update(bidirectional=False), "bidirectional: expected true"),
        (
            lambda options: options["char_cnn"].update(n_characters=261),
            "n_characters: expected 262",
        ),
    ],
    ids=["words", "one direction", "characters of training"],
)
def test_options_of_other_models_are_refused(tmp_path, change, message):
    path = tmp_path / "options.json"
    ElmoConfig().to_json(path)
    options = json.loads(path.read_text())
    change(options)
    path.write_text(json.dumps(options))
    with pytest.raises(ValueError, match=message):
        ElmoConfig.from_json(path)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"activation": "gelu"}, 'activation: expected "relu" or "tanh"; got \'gelu\''),
        ({"filters": ()}, "filters: expected some"),
        ({"filters": ((9, 4),)}, "filters: expected some, of widths from 1 to"),
        ({"filters": ((1, 1),), "max_characters_per_token": 2}, "max_characters_per_token: exp"),
        ({"projection_dim": 8}, "projection_dim: expected at most lstm_dim=7; got 8"),
        ({"cell_clip": 0.0}, "cell_clip: expected None or a number above 0; got 0.0"),
        ({"proj_clip": -1.0}, "proj_clip: expected None or a number above 0; got -1.0"),
        ({"n_layers": 0}, "n_layers: expected at least 1; got 0"),
    ],
)
def test_sizes_are_checked(sizes, message):
    with pytest.raises(ValueError, match=message):
        ElmoConfig(**{**TINY, **sizes})


def test_weight_files_are_checked(tmp_path):
    files = tmp_path / "options.json", tmp_path / "weights.hdf5"
    tiny().save_pretrained(*files)
    with h5py.File(files[1], "a") as file:
        del file["CNN_proj/b_proj"]
    with pytest.raises(ValueError, match="expected a biLM's weights; it lacks CNN_proj/b_proj"):
        BiLM.from_pretrained(*files)
    message = r"char_embed: expected shape \(261, 2\); got \(261, 3\)"
    with pytest.raises(ValueError, match=message):
        BiLM.from_pretrained(*files, char_embedding_dim=2)


def test_without_h5py_the_error_says_what_to_install(tmp_path, monkeypatch):
    files = tmp_path / "options.json", tmp_path / "weights.hdf5"
    tiny().save_pretrained(*files)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match="pip install h5py"):
        BiLM.from_pretrained(*files)
    with pytest.raises(ImportError, match="pip install h5py"):
        tiny().save_pretrained(*files)


# The recurrence ---------------------------------------------------------------------------------


def formula(lstm: ProjectedLSTM, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one sequence x (T, input_size), one unit at a time."""

    def clip(value: float, bound: float | None) -> float:
        return value if bound is None else max(-bound, min(bound, value))

    def sigmoid(value: float) -> float:
        return 1 / (1 + math.exp(-value))

    inputs, recurrent = lstm.weight_ih.tolist(), lstm.weight_hh.tolist()
    biases = lstm.bias.tolist()
    cells, size = c.tolist(), lstm.hidden_size
    hidden = h.tolist()
    outputs = []
    for token in reversed(x.tolist()) if lstm.reverse else x.tolist():
        gates = [
            math.fsum([bias, *map(mul, row, token), *map(mul, other, hidden)])
            for bias, row, other in zip(biases, inputs, recurrent, strict=True)
        ]
        unprojected = []
        for unit in range(size):
            i, f, g, o = gates[unit::size]
            forgotten = sigmoid(f + lstm.forget_bias) * cells[unit]
            cells[unit] = clip(forgotten + sigmoid(i) * math.tanh(g), lstm.cell_clip)
            unprojected.append(sigmoid(o) * math.tanh(cells[unit]))
        hidden = unprojected
        if lstm.weight_hr is not None:
            hidden = [
                clip(math.fsum(map(mul, row, unprojected)), lstm.proj_clip)
                for row in lstm.weight_hr.tolist()
            ]
        outputs.append(hidden)
    ordered = outputs[::-1] if lstm.reverse else outputs
    return tuple(torch.tensor(values, dtype=torch.float64) for values in (ordered, hidden, cells))


OPTIONS = [
    {},
    {"reverse": True},
    {"cell_clip": None},
    {"proj_clip": None},
    {"forget_bias": 0.0},
    {"proj_size": 0, "proj_clip": None},
]
IDS = ["all", "reverse", "no cell clip", "no projection clip", "no forget bias", "no projection"]
LENGTHS = [6, 1, 4]


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_layers_are_the_formula(options):
    lstm = layer(**options)
    x = draw(len(LENGTHS), max(LENGTHS), 5)
    h, c = draw(len(LENGTHS), lstm.output_size, seed=1), draw(len(LENGTHS), 7, seed=2)
    output, (h_n, c_n) = lstm(x, torch.tensor(LENGTHS), (h, c))
    for row, length in enumerate(LENGTHS):
        wanted = formula(lstm, x[row, :length], h[row], c[row])
        assert_close(output[row, :length], wanted[0])
        assert_close(h_n[row], wanted[1])
        assert_close(c_n[row], wanted[2])
        assert not output[row, length:].any()


@pytest.mark.parametrize(
    "name", ["cell_clip", "proj_clip", "forget_bias"], ids=["cell clip", "proj clip", "forget bias"]
)
def test_every_part_of_the_formula_matters(name):
    """Each option changes the result, so the agreement above does test it."""
    lstm, x = layer(), draw(2, 6, 5)
    exact, _ = lstm(x)
    setattr(lstm, name, 0.0 if name == "forget_bias" else None)
    changed, _ = lstm(x)
    assert (exact - changed).abs().max() > 1e-2


@pytest.mark.parametrize("proj_size", [0, 4], ids=["plain", "projected"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_without_clips_and_forget_bias_it_is_torchs(proj_size, reverse):
    lstm = layer(
        proj_size=proj_size, cell_clip=None, proj_clip=None, forget_bias=0.0, reverse=reverse
    )
    peer = nn.LSTM(5, 7, proj_size=proj_size, batch_first=True, bidirectional=True).double()
    suffix = "_l0_reverse" if reverse else "_l0"
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.zero_()
            if name.endswith(suffix) and "bias_hh" not in name:
                own = name.removesuffix(suffix).replace("bias_ih", "bias")
                parameter.copy_(getattr(lstm, own))
    x, lengths = draw(3, 6, 5), torch.tensor(LENGTHS)
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
    wanted, states = peer(packed)
    wanted, _ = nn.utils.rnn.pad_packed_sequence(wanted, True)
    output, state = lstm(x, lengths)
    half = slice(lstm.output_size, None) if reverse else slice(lstm.output_size)
    assert_close(output, wanted[..., half])
    for got, both in zip(state, states, strict=True):
        assert_close(got, both[int(reverse)])


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_state_carries_a_sequence_over_a_cut(reverse):
    lstm, x = layer(reverse=reverse), draw(2, 9, 5)
    whole, last = lstm(x)
    first, second = (x[:, 4:], x[:, :4]) if reverse else (x[:, :4], x[:, 4:])
    one, state = lstm(first)
    two, state = lstm(second, None, state)
    assert_close(torch.cat((two, one) if reverse else (one, two), 1), whole)
    for got, wanted in zip(state, last, strict=True):
        assert_close(got, wanted)


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_padding_does_not_exist(reverse):
    lstm, lengths = layer(reverse=reverse), torch.tensor(LENGTHS)
    mask = torch.arange(max(LENGTHS)) < lengths[:, None]
    clean = draw(3, 6, 5).masked_fill(~mask[..., None], 0)
    results = []
    for garbage in (0.0, math.nan, math.inf):
        x = clean.masked_fill(~mask[..., None], garbage).requires_grad_()
        output, (h, c) = lstm(x, lengths)
        loss = output.square().sum() + h.sum() + c.sum()
        results.append((output, h, c, *torch.autograd.grad(loss, (x, *lstm.parameters()))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert not results[0][3][~mask].any()


def test_a_row_without_tokens_keeps_its_state():
    lstm, state = layer(), (draw(2, 4, seed=1), draw(2, 7, seed=2))
    output, (h, c) = lstm(draw(2, 3, 5), torch.tensor([3, 0]), state)
    assert not output[1].any()
    assert torch.equal(h[1], state[0][1])
    assert torch.equal(c[1], state[1][1])
    assert not torch.equal(h[0], state[0][0])
    output, (h, c) = lstm(draw(2, 0, 5), None, state)
    assert output.shape == (2, 0, 4)
    assert torch.equal(h, state[0])
    assert torch.equal(c, state[1])


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
@pytest.mark.covering(1)
def test_gradients_of_the_recurrence(reverse, ragged):
    torch.manual_seed(0)
    lstm = perturbed(ProjectedLSTM(2, 3, 2, cell_clip=0.3, proj_clip=0.3, reverse=reverse))
    lengths = torch.tensor([3, 2]) if ragged else None
    names = [name for name, _ in lstm.named_parameters()]
    given = [draw(2, 3, 2), draw(2, 2, seed=1), draw(2, 3, seed=2), *lstm.parameters()]
    inputs = [x.detach().requires_grad_() for x in given]

    def run(x: Tensor, h: Tensor, c: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(names, parameters, strict=True))
        output, state = torch.func.functional_call(lstm, named, (x, lengths, (h, c)))
        return output, *state

    output, _, c = run(*inputs)
    for values in (output, c):  # some clipped and some not, so that both are tested
        assert set((values.abs() == 0.3).flatten().tolist()) == {True, False}
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_as_exact_as_torchs_lstm(dtype):
    lstm = layer(cell_clip=None, proj_clip=None, forget_bias=0.0)
    peer = nn.LSTM(5, 7, proj_size=4, batch_first=True).double()
    names = {"weight_ih_l0": "weight_ih", "weight_hh_l0": "weight_hh", "weight_hr_l0": "weight_hr"}
    with torch.no_grad():
        for theirs, ours in (*names.items(), ("bias_ih_l0", "bias")):
            getattr(peer, theirs).copy_(getattr(lstm, ours))
        peer.bias_hh_l0.zero_()
    lstm, peer = lstm.to(dtype), peer.to(dtype)
    x = draw(64, 40, 5).to(dtype)
    exact, _ = copy.deepcopy(lstm).double()(x.double())
    output, (h, c) = lstm(x)
    assert output.dtype == h.dtype == dtype
    assert c.dtype == torch.float32
    error, theirs = ((y.double() - exact).square().mean().sqrt() for y in (output, peer(x)[0]))
    assert error <= 2 * theirs
    output.sum().backward()
    assert {parameter.grad.dtype for parameter in lstm.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 5),), r"x: expected \(B, T, 5\); got \(2, 5\)"),
        ((torch.ones(2, 3, 4),), r"x: expected \(B, T, 5\); got \(2, 3, 4\)"),
        ((torch.ones(2, 3, 5), torch.ones(3)), r"lengths: expected shape \(2,\); got \(3,\)"),
        (
            (torch.ones(2, 3, 5), None, (torch.ones(2, 7), torch.ones(2, 7))),
            r"state: expected shapes \(\(2, 4\), \(2, 7\)\); got \(\(2, 7\), \(2, 7\)\)",
        ),
    ],
    ids=["dimensions", "features", "lengths", "state"],
)
def test_arguments_of_the_recurrence_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer()(*arguments)


def test_a_clip_of_nothing_is_refused():
    with pytest.raises(ValueError, match="proj_clip: expected None without a projection; got 3"):
        ProjectedLSTM(5, 7, proj_clip=3)
    with pytest.raises(ValueError, match="cell_clip: expected None or a number above 0; got 0"):
        ProjectedLSTM(5, 7, cell_clip=0)


# Words from characters --------------------------------------------------------------------------


def test_highways_are_the_papers():
    highway, x = perturbed(Highway(6)), draw(3, 6)
    for row, got in zip(x, highway(x), strict=True):
        carry = 1 / (1 + (-(highway.carry.weight @ row + highway.carry.bias)).exp())
        transformed = (highway.transform.weight @ row + highway.transform.bias).clamp(min=0)
        assert_close(got, carry * transformed + (1 - carry) * row)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_filters_see_whole_windows_and_padding(activation):
    sizes = {"n_highway": 0, "activation": activation, "projection_dim": 15, "lstm_dim": 15}
    config = ElmoConfig(**{**TINY, **sizes})
    encoder = perturbed(CharacterEncoder(config))
    assert encoder.projection is None
    word = torch.tensor(word_to_char_ids("cat", 8))
    embedded = encoder.embedding.weight[word]
    wanted = []
    for convolution in encoder.convolutions:
        width = convolution.kernel_size[0]
        windows = [embedded[start : start + width] for start in range(8 - width + 1)]
        for weight, bias in zip(convolution.weight, convolution.bias, strict=True):
            wanted.append(max((weight.T * window).sum() + bias for window in windows))
    function = {"relu": torch.relu, "tanh": torch.tanh}[activation]
    assert_close(encoder(word[None, None])[0, 0], function(torch.stack(wanted)))


def test_the_mask_character_is_not_learnt():
    encoder = CharacterEncoder(ElmoConfig(**TINY))
    assert not encoder.embedding.weight[0].any()
    encoder(char_ids()).sum().backward()
    assert not encoder.embedding.weight.grad[0].any()
    assert encoder.embedding.weight.grad[261].any()


# The two language models ------------------------------------------------------------------------


def layers_of(model: BiLM, sentence: Sequence[str], skip: bool) -> list[Tensor]:
    """One sentence's layers (T, 2 · P), by the formula above."""
    begin = [259, 257, 260] + [261] * 5
    end = [259, 258, 260] + [261] * 5
    marked = [begin, *(word_to_char_ids(word, 8) for word in sentence), end]
    words = model.characters(torch.tensor([marked]))[0]
    both = [[words], [words]]
    for outputs, layers in zip(both, (model.forward_layers, model.backward_layers), strict=True):
        for depth, lstm in enumerate(layers):
            state = torch.zeros(lstm.output_size), torch.zeros(lstm.hidden_size)
            output, _, _ = formula(lstm, outputs[-1], *state)
            outputs.append(output + outputs[-1] if skip and depth else output)
    return [torch.cat(pair, -1)[1:-1] for pair in zip(*both, strict=True)]


@pytest.mark.parametrize("skip", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_layers_of_the_bilm_are_the_formula(skip, n_layers):
    model = tiny(n_layers=n_layers, use_skip_connections=skip)
    layers, mask = model(char_ids())
    assert layers.shape == (n_layers + 1, 3, 6, 8)
    assert mask.sum(1).tolist() == [len(sentence) for sentence in SENTENCES]
    for row, sentence in enumerate(SENTENCES):
        for got, wanted in zip(layers, layers_of(model, sentence, skip), strict=True):
            assert_close(got[row, : len(sentence)], wanted)
            assert not got[row, len(sentence) :].any()
    if n_layers > 1:  # a missing or a superfluous residual would show
        other = layers_of(model, SENTENCES[0], not skip)[-1]
        assert (layers[-1, 0] - other).abs().max() > 1e-2


def test_the_first_layer_is_the_word_twice():
    layers, _ = tiny()(char_ids())
    assert torch.equal(*layers[0].chunk(2, -1))
    assert torch.equal(layers[0, 0, 0], layers[0, 0, 4])  # "the", whatever is around it
    assert not torch.equal(layers[1, 0, 0], layers[1, 0, 4])


def test_each_direction_reads_its_own_side():
    model = tiny()
    changed = [list(sentence) for sentence in SENTENCES]
    changed[0][3] = "under"
    (before, _), (after, _) = model(char_ids()), model(char_ids(changed))
    same = (before == after).all(-1)  # both directions; the next line has each alone
    forward, backward = ((before == after).unflatten(-1, (2, -1)).all(-1)[1:, 0]).unbind(-1)
    assert forward.tolist() == [[True] * 3 + [False] * 3] * 2
    assert backward.tolist() == [[False] * 4 + [True] * 2] * 2
    assert same[:, 1:].all()


def test_sentences_do_not_see_each_other():
    model = tiny()
    layers, _ = model(char_ids())
    for row, sentence in enumerate(SENTENCES):
        alone, mask = model(char_ids([sentence]))
        assert mask.all()
        assert_close(layers[:, row, : len(sentence)], alone[:, 0])


def test_empty_sentences_and_batches():
    model = tiny()
    layers, mask = model(char_ids([["a"], []]))
    assert mask.tolist() == [[True], [False]]
    assert not layers[:, 1].any()
    assert model(torch.zeros(2, 0, 8, dtype=torch.long)).layers.shape == (3, 2, 0, 8)
    assert model(torch.zeros(0, 4, 8, dtype=torch.long)).layers.shape == (3, 0, 4, 8)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.ones(2, 3, dtype=torch.long), r"char_ids: expected \(B, T, 8\); got \(2, 3\)"),
        (torch.ones(2, 3, 9, dtype=torch.long), r"char_ids: expected \(B, T, 8\); got \(2, 3, 9\)"),
        (
            char_ids([["a", "b", "c"]]).index_fill(1, torch.tensor([1]), 0),
            "char_ids: expected no word after one",
        ),
    ],
    ids=["dimensions", "characters", "hole"],
)
def test_char_ids_are_checked(ids, message):
    with pytest.raises(ValueError, match=message):
        tiny()(ids)


# State ------------------------------------------------------------------------------------------


def test_without_a_state_calls_are_alike():
    model = tiny()
    assert torch.equal(model(char_ids()).layers, model(char_ids()).layers)


def test_state_is_carried_by_row():
    """A row missing from a batch keeps its state until it returns; a new row starts from zeros."""
    model, state = tiny(), CarriedState()
    texts = [["one two", "three", "four five"], ["six"], ["a", "b c", "d", "e"]]
    alone = [CarriedState() for _ in range(4)]
    for batch in texts:
        sentences = [line.split() for line in batch]
        layers, _ = model(char_ids(sentences), state)
        for row, sentence in enumerate(sentences):
            wanted, _ = model(char_ids([sentence]), alone[row])
            assert_close(layers[:, row, : len(sentence)], wanted[:, 0])
    assert state.rows == 4


def test_state_resets():
    model, state = tiny(), CarriedState()
    fresh, _ = model(char_ids(), state)
    later, _ = model(char_ids(), state)
    assert not torch.equal(fresh[1:], later[1:])
    assert torch.equal(fresh[0], later[0])  # layer 0, the words, has no state
    state.reset(torch.tensor([1]))
    part, _ = model(char_ids(), state)
    assert torch.equal(part[:, 1], fresh[:, 1])
    assert not torch.equal(part[1:, 0], fresh[1:, 0])
    state.reset()
    assert state.rows == 0
    assert torch.equal(model(char_ids(), state).layers, fresh)


def test_no_gradient_flows_into_an_earlier_call():
    model, state = tiny(), CarriedState()
    model(char_ids(), state)
    carried = CarriedState()
    for place in (("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)):
        h, c = state.read(place, 3)
        assert not h.requires_grad
        assert not c.requires_grad
        carried.write(place, (h.clone(), c.clone()))
    gradients = []
    for given in (state, carried):
        model.zero_grad()
        model(char_ids(), given).layers.sum().backward()  # would raise if graphs were joined
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# Numbers, modes and names -----------------------------------------------------------------------


def test_gradients_of_a_whole_model():
    torch.manual_seed(0)
    config = ElmoConfig(
        char_embedding_dim=2,
        filters=((1, 2), (2, 2)),
        n_highway=1,
        max_characters_per_token=4,
        activation="tanh",  # smooth; the highway's ReLU stays
        lstm_dim=3,
        projection_dim=2,
        dropout=0.0,
    )
    model = perturbed(BiLMForPreTraining(config, 5, 0, 1))
    ids = batch_to_char_ids([["a", "b"], ["c"]], 4)
    tokens = torch.tensor([[2, 3], [4, 0]])
    names, values = zip(*model.named_parameters(), strict=True)

    def run(*parameters: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(names, parameters, strict=True))
        return tuple(torch.func.functional_call(model, named, (ids, tokens)))

    inputs = [value.detach().requires_grad_() for value in values]
    # The fast mode, because the embeddings alone have hundreds of elements.
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_run_in_narrow_dtypes(dtype):
    exact = tiny()
    model = Elmo(copy.deepcopy(exact).to(dtype), layer_norm=True, dropout=0.0).to(dtype)
    (mixed,), _ = model(char_ids())
    wanted = ScalarMix(3, layer_norm=True).double()(*exact(char_ids()))
    assert mixed.dtype == dtype
    rounding = torch.finfo(dtype).eps
    assert (mixed.double() - wanted).square().mean().sqrt() < 4 * rounding
    mixed.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_autocast():
    model = tiny().float()
    with torch.autocast("cpu", torch.bfloat16):
        layers, _ = model(char_ids(), state := CarriedState())
        model(char_ids(), state)
    assert (layers.double() - tiny()(char_ids()).layers).abs().max() < 0.1


def test_parameters_are_laid_out_as_torchs():
    shapes = {name: tuple(value.shape) for name, value in tiny().state_dict().items()}
    for direction in ("forward", "backward"):
        for depth in range(2):
            prefix = f"{direction}_layers.{depth}."
            found = {
                name.removeprefix(prefix): shape
                for name, shape in shapes.items()
                if name.startswith(prefix)
            }
            assert found == {
                "weight_ih": (28, 4),
                "weight_hh": (28, 4),
                "bias": (28,),
                "weight_hr": (4, 7),
            }
    others = {name.partition(".")[0] for name in shapes}
    assert others == {"characters", "forward_layers", "backward_layers"}


def test_defaults_are_the_published_model():
    with torch.device("meta"):
        model = BiLM()
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert shapes["characters.projection.weight"] == (512, 2048)
    assert shapes["forward_layers.1.weight_ih"] == (16384, 512)
    assert shapes["backward_layers.1.weight_hr"] == (512, 4096)
    # Peters et al. count 93.6 million.
    assert sum(map(math.prod, shapes.values())) == pytest.approx(93.6e6, rel=1e-3)


class Doubled(nn.Module):
    """Replaces dropout: records its input and doubles it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return 2 * x


def test_dropout_is_on_the_inputs_of_the_layers():
    model = tiny()
    plain, _ = model(char_ids(SENTENCES[:1]))
    model.dropout = doubled = Doubled()
    layers, _ = model(char_ids(SENTENCES[:1]))
    assert len(doubled.seen) == 4
    assert_close(layers[0], plain[0])
    inside = slice(1, -1)
    for direction, own in ((0, model.forward_layers), (1, model.backward_layers)):
        words, first = doubled.seen[2 * direction : 2 * direction + 2]
        assert_close(first, own[0](2 * words)[0])
        second = own[1](2 * first)[0] + 2 * first  # the residual adds the input after dropout
        assert_close(layers[2].chunk(2, -1)[direction], second[:, inside])


def test_dropout_of_the_rate_in_training_alone():
    torch.manual_seed(0)
    model = tiny(dropout=0.1)
    assert model.dropout.p == 0.1
    assert torch.equal(model(char_ids()).layers, model(char_ids()).layers)
    model.train()
    assert not torch.equal(model(char_ids()).layers, model(char_ids()).layers)
    elmo = Elmo(tiny(), dropout=0.5).double()
    ((mixed,), _), ((again,), _) = elmo(char_ids()), elmo.eval()(char_ids())
    kept = (mixed != 0) | (again == 0)
    assert_close(mixed[kept], 2 * again[kept])
    assert not kept.all()


# The mix ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_norm", [False, True])
def test_the_mix_is_the_papers(layer_norm):
    layers = draw(3, 2, 4, 5)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    mix = ScalarMix(3, layer_norm).double()
    with torch.no_grad():
        mix.weights.copy_(torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64))
        mix.gamma.fill_(0.7)
    total = math.exp(0.3) + math.exp(-1.0) + math.exp(2.0)
    wanted = torch.zeros(2, 4, 5, dtype=torch.float64)
    for values, weight in zip(layers, (0.3, -1.0, 2.0), strict=True):
        real = values[mask]
        if layer_norm:
            real = (real - real.mean()) / real.var(correction=0).sqrt()
        wanted[mask] += 0.7 * math.exp(weight) / total * real
    assert_close(mix(layers, mask), wanted)
    hidden = layers.masked_fill(~mask[..., None], math.nan).requires_grad_()
    mixed = mix(hidden, mask)
    assert_close(mixed, wanted)
    mixed.square().sum().backward()
    assert hidden.grad.isfinite().all()
    assert not hidden.grad[:, ~mask].any()
    if not layer_norm:
        assert_close(mix(layers)[mask], wanted[mask])


@pytest.mark.parametrize("layer_norm", [False, True])
def test_gradients_of_the_mix(layer_norm):
    mix = ScalarMix(2, layer_norm).double()
    mask = torch.tensor([[True, True], [True, False]])

    def run(layers: Tensor, weights: Tensor, gamma: Tensor) -> Tensor:
        named = {"weights": weights, "gamma": gamma}
        return torch.func.functional_call(mix, named, (layers, mask))

    inputs = [draw(2, 2, 2, 3), draw(2, seed=1), draw(1, seed=2)[0]]
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])


def test_a_mix_of_nothing_is_nothing():
    layers = draw(2, 1, 3, 4).requires_grad_()
    mixed = ScalarMix(2, layer_norm=True).double()(layers, torch.zeros(1, 3, dtype=torch.bool))
    mixed.sum().backward()
    assert not mixed.any()
    assert not layers.grad.any()


def test_arguments_of_the_mix_are_checked():
    mix = ScalarMix(3)
    with pytest.raises(ValueError, match=r"layers: expected \(3, B, T, D\); got \(2, 1, 1, 4\)"):
        mix(torch.ones(2, 1, 1, 4))
    with pytest.raises(ValueError, match=r"mask: expected \(1, 2\); got \(2, 1\)"):
        mix(torch.ones(3, 1, 2, 4), torch.ones(2, 1, dtype=torch.bool))


def test_elmo_learns_its_mixes_alone_over_a_frozen_bilm():
    model = Elmo(tiny(), num_output_representations=2, dropout=0.0).double()
    model.bilm.requires_grad_(False)
    (one, two), mask = model(char_ids())
    assert torch.equal(one, two)
    layers, wanted_mask = model.bilm(char_ids())
    assert torch.equal(mask, wanted_mask)
    assert_close(one, layers.mean(0))  # a fresh mix is the mean of the layers
    one.square().sum().backward()
    learnt = {name for name, value in model.named_parameters() if value.grad is not None}
    assert learnt == {"mixes.0.weights", "mixes.0.gamma"}


# Training the language models -------------------------------------------------------------------


def test_sampled_words_are_distinct_and_zipfian():
    sampler = LogUniformSampler(vocab_size=30, num_sampled=8)
    words = torch.arange(30)
    assert_close(sampler.expected_count(words, 1).sum(), torch.tensor(1.0, dtype=torch.float64))
    assert_close(
        sampler.expected_count(torch.tensor([4]), 3),
        torch.tensor([1 - (1 - math.log(6 / 5) / math.log(31)) ** 3], dtype=torch.float64),
    )
    generator = torch.Generator().manual_seed(0)
    rounds = 4000
    counts, expected = torch.zeros(30), torch.zeros(30, dtype=torch.float64)
    for _ in range(rounds):
        drawn, draws = sampler.draw(generator)
        assert len(drawn.unique()) == len(drawn) == 8
        assert draws >= 8
        counts[drawn] += 1
        expected += sampler.expected_count(words, draws)
    # Drawing stops at eight distinct words, which biases the counts given the number of draws.
    # TensorFlow's sampler ignores this too.
    assert (counts / rounds - expected / rounds).abs().max() < 0.03
    assert (expected / rounds).sum().item() == pytest.approx(8, rel=0.03)


def test_draws_are_counted_as_if_one_by_one():
    generator = torch.Generator().manual_seed(3)
    drawn, draws = LogUniformSampler(20, 12).draw(generator)
    uniform = torch.rand(
        4096, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    ).tolist()
    found: list[int] = []
    for value in uniform[:draws]:
        word = int(math.exp(value * math.log(21))) - 1
        if word not in found:
            found.append(word)
            latest = value
    assert drawn.tolist() == found
    assert uniform[draws - 1] == latest  # and the last draw was needed


def test_all_words_can_be_sampled():
    drawn, draws = LogUniformSampler(40, 40).draw(torch.Generator().manual_seed(0))
    assert sorted(drawn.tolist()) == list(range(40))
    assert draws > 40


@pytest.mark.parametrize("num_sampled", [0, 11])
def test_sample_sizes_are_checked(num_sampled):
    with pytest.raises(ValueError, match=f"num_sampled: expected from 1 to 10; got {num_sampled}"):
        LogUniformSampler(10, num_sampled)


def test_the_sampled_loss_is_the_formula():
    head = perturbed(VocabularySoftmax(3, 20, num_sampled=6))
    hidden, targets = draw(5, 3), torch.tensor([0, 7, 1, 0, 19])
    torch.manual_seed(5)
    loss = head(hidden, targets)
    torch.manual_seed(5)
    words, draws = head.sampler.draw()
    assert set(words.tolist()) & set(targets.tolist())

    def logit(row: int, word: int) -> float:
        chance = math.log((word + 2) / (word + 1)) / math.log(21)
        value = hidden[row] @ head.output.weight[word] + head.output.bias[word]
        return value.item() - math.log(1 - (1 - chance) ** draws)

    losses = []
    for row, target in enumerate(targets.tolist()):
        others = [logit(row, word) for word in words.tolist() if word != target]
        own = logit(row, target)
        losses.append(math.log(sum(map(math.exp, [own, *others]))) - own)
    assert loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-10)


def test_the_softmax_is_full_in_evaluation_or_when_nothing_is_sampled():
    sampled, full = VocabularySoftmax(3, 20, num_sampled=6), VocabularySoftmax(3, 20)
    full.load_state_dict(sampled.state_dict())
    hidden, targets = torch.randn(5, 3), torch.randint(20, (5,))
    wanted = F.cross_entropy(sampled.output(hidden), targets)
    for dtype in (torch.int64, torch.int32):
        assert torch.equal(full(hidden, targets.to(dtype)), wanted)
    assert not torch.equal(sampled(hidden, targets), wanted)
    assert torch.equal(sampled.eval()(hidden, targets), wanted)


@pytest.mark.parametrize("corrected", [True, False])
def test_a_sample_teaches_the_full_softmax(corrected, monkeypatch):
    """The bias learns the words' frequencies, but only if expected counts correct the loss."""
    if not corrected:
        monkeypatch.setattr(
            LogUniformSampler, "expected_count", lambda self, words, draws: torch.ones_like(words)
        )
    frequency = torch.arange(1, 31).double().pow(-0.5)
    frequency /= frequency.sum()
    torch.manual_seed(0)
    head = VocabularySoftmax(1, 30, num_sampled=10).double()
    optimizer = torch.optim.Adam([head.output.bias], 0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 400)
    for _ in range(400):
        targets = torch.multinomial(frequency, 256, replacement=True)
        optimizer.zero_grad()
        head(torch.zeros(256, 1, dtype=torch.float64), targets).backward()
        optimizer.step()
        schedule.step()
    divergence = F.kl_div(head.output.bias.log_softmax(0), frequency, reduction="sum").item()
    assert (divergence < 0.01) == corrected


def test_losses_are_those_of_each_word():
    torch.manual_seed(0)
    model = perturbed(BiLMForPreTraining(ElmoConfig(**TINY), 12, begin_id=1, end_id=0)).eval()
    ids = char_ids()
    tokens = torch.randint(2, 12, ids.shape[:2])
    losses = model(ids, tokens)
    read = model.bilm._read(ids)
    forward, backward = [], []
    for row, sentence in enumerate(SENTENCES):
        words = [1, *tokens[row, : len(sentence)].tolist(), 0]
        for place, word in enumerate(words):
            if place > 0:
                logits = model.softmax.output(read.forward[-1][row, place - 1])
                forward.append(-logits.log_softmax(0)[word])
            if place < len(words) - 1:
                logits = model.softmax.output(read.backward[-1][row, place + 1])
                backward.append(-logits.log_softmax(0)[word])
    assert len(forward) == len(backward) == sum(len(sentence) + 1 for sentence in SENTENCES)
    assert_close(losses.forward, torch.stack(forward).mean())
    assert_close(losses.backward, torch.stack(backward).mean())
    assert_close(losses.loss, (losses.forward + losses.backward) / 2)
    assert losses.forward_perplexity == losses.forward.exp()
    assert losses.backward_perplexity == losses.backward.exp()
    past = torch.ones_like(tokens, dtype=torch.bool)
    for row, sentence in enumerate(SENTENCES):
        past[row, : len(sentence)] = False
    assert model(ids, tokens.masked_fill(past, -1)) == losses


def test_dropout_is_on_what_the_softmax_reads():
    torch.manual_seed(0)
    model = perturbed(BiLMForPreTraining(ElmoConfig(**TINY), 12, 0, 1)).eval()
    model.bilm.dropout = doubled = Doubled()
    hidden = []
    model.softmax.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    model(char_ids(), torch.full((3, 6), 2))
    assert len(doubled.seen) == 6
    for x, seen in zip(hidden, doubled.seen[4:], strict=True):
        assert torch.equal(x, 2 * seen)


@pytest.mark.parametrize("num_sampled", [None, 5], ids=["full", "sampled"])
@pytest.mark.parametrize("carried", [False, True], ids=["stateless", "carried"])
@pytest.mark.covering(1)
def test_both_directions_learn(num_sampled, carried):
    torch.manual_seed(0)
    words = sorted({word for sentence in SENTENCES for word in sentence})
    places = {word: 2 + n for n, word in enumerate(words)}
    tokens = torch.zeros(3, 6, dtype=torch.long)
    for row, sentence in enumerate(SENTENCES):
        tokens[row, : len(sentence)] = torch.tensor([places[word] for word in sentence])
    config = ElmoConfig(
        **{**TINY, "lstm_dim": 16, "projection_dim": 8, "cell_clip": 3.0, "proj_clip": 3.0}
    )
    model = BiLMForPreTraining(config, 2 + len(words), 0, 1, num_sampled)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    state = CarriedState() if carried else None
    with torch.no_grad():
        before = model.eval()(char_ids(), tokens)
    model.train()
    for _ in range(80):
        optimizer.zero_grad()
        model(char_ids(), tokens, state).loss.backward()
        optimizer.step()
    with torch.no_grad():
        after = model.eval()(char_ids(), tokens, state)
    assert after.forward_perplexity < before.forward_perplexity / 4
    assert after.backward_perplexity < before.backward_perplexity / 4


def test_token_ids_are_checked():
    model = BiLMForPreTraining(ElmoConfig(**TINY), 12, 0, 1)
    with pytest.raises(ValueError, match=r"token_ids: expected \(3, 6\); got \(3, 5\)"):
        model(char_ids(), torch.ones(3, 5, dtype=torch.long))


# Fused ------------------------------------------------------------------------------------------


@PRECISIONS
def test_published_vectors_fused(published, dtype, allowed):
    assert furthest(published, CarriedState(), trifuse.fuse, dtype) <= allowed


@pytest.mark.parametrize("skip", [False, True])
def test_fused_computes_the_same(skip):
    """Layers, carried state and gradients agree, with repeated words and a smaller second batch."""
    eager = tiny(use_skip_connections=skip)
    fused = copy.deepcopy(eager)
    report = trifuse.fuse(fused)
    after = {swap.path: swap.after for swap in report.swapped}
    assert after["characters"] == "trifuse.nn.CharacterEncoder"
    assert after["characters.highways.0"] == "trifuse.nn.Highway"
    assert after["backward_layers.1"] == "trifuse.nn.ProjectedLSTM"
    outputs = []
    for model in (eager, fused):
        state = CarriedState()
        layers = [model(char_ids(part), state).layers for part in (SENTENCES, SENTENCES[1:])]
        sum(x.pow(3).sum() for x in layers).backward()
        outputs.append(layers)
    for got, wanted in zip(*reversed(outputs), strict=True):
        assert_close(got, wanted)
    for got, wanted in zip(fused.parameters(), eager.parameters(), strict=True):
        assert_close(got.grad, wanted.grad)
    report.revert()
    assert type(fused.backward_layers[1]) is ProjectedLSTM
    assert torch.equal(fused(char_ids()).layers, eager(char_ids()).layers)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_fused_highways_have_the_dtype_of_eager_ones_under_autocast(x_dtype):
    eager = perturbed(Highway(6)).float()
    fused = copy.deepcopy(eager)
    assert trifuse.fuse(fused).swapped
    x = draw(3, 6).to(x_dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = fused(x), eager(x)
    assert got.dtype == wanted.dtype == x_dtype
    torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_fused_takes_lengths_of_any_integers(dtype):
    eager, x = layer(), draw(2, 4, 5)
    fused = copy.deepcopy(eager)
    assert trifuse.fuse(fused).swapped
    lengths = torch.tensor([4, 2], dtype=dtype)
    assert_close(fused(x, lengths)[0], eager(x, lengths)[0])


def test_fused_reads_each_word_once():
    model = tiny()
    trifuse.fuse(model)
    wanted = model.characters(char_ids())
    seen = []
    hook = model.characters.embedding.register_forward_hook(lambda *args: seen.append(args[1][0]))
    assert_close(model.characters(char_ids()), wanted)
    assert len(seen[0]) == 18  # a module with a hook gets the input it would get unfused
    hook.remove()
    for ids in (char_ids()[:, :0], char_ids()[:0]):
        assert model.characters(ids).shape == (*ids.shape[:2], 4)


@pytest.mark.parametrize(
    ("words", "read"),
    [(["a", "cats"], 6 + 4), (["a", "c" * 30], 20), ([], 3 + 4)],
    ids=["short", "as long as can be", "marks alone"],
)
def test_fused_reads_no_more_padding_than_a_filter_sees(words, read, monkeypatch):
    """Padding past a word's marks and the widest filter changes no maximum and no gradient."""
    torch.manual_seed(0)
    sizes = {"max_characters_per_token": 20, "filters": ((1, 3), (2, 4), (4, 6))}
    eager = perturbed(BiLM(ElmoConfig(**{**TINY, **sizes})))
    fused = copy.deepcopy(eager)
    trifuse.fuse(fused)
    widths = []
    forward = nn.Conv1d.forward

    def watch(convolution: nn.Conv1d, x: Tensor) -> Tensor:
        widths.append(x.shape[-1])
        return forward(convolution, x)

    monkeypatch.setattr(nn.Conv1d, "forward", watch)
    ids = batch_to_char_ids([words, words[:1]], 20)
    results = []
    for model, wanted in ((eager, 20), (fused, read)):
        results.append(model._read(ids).words)
        results[-1].pow(3).sum().backward()
        assert set(widths) == {wanted}
        widths.clear()
    assert_close(results[1], results[0])
    for got, wanted in zip(
        fused.characters.parameters(), eager.characters.parameters(), strict=True
    ):
        assert_close(got.grad, wanted.grad)


@pytest.mark.parametrize("recompute", [False, True])
def test_fused_keeps_the_gates_unless_told_otherwise(recompute):
    """With recompute, gradients are the same and the forward saves fewer bytes."""
    torch.manual_seed(0)
    model = perturbed(BiLM(ElmoConfig(**TINY)))
    trifuse.fuse(model)
    lstm = model.forward_layers[0]
    x = draw(3, 6, lstm.input_size).requires_grad_()
    results = []
    for lstm.recompute in (False, recompute):
        kept: dict[int, int] = {}

        def keep(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            output, _ = lstm(x)
        results.append((sum(kept.values()), *torch.autograd.grad(output.sum(), (x, lstm.bias))))
    (before, *wanted), (after, *got) = results
    assert before - after == (3 * 6 * 4 * lstm.hidden_size * x.element_size() if recompute else 0)
    for ours, theirs in zip(got, wanted, strict=True):
        assert_close(ours, theirs)


def test_fused_loss():
    torch.manual_seed(0)
    eager = perturbed(BiLMForPreTraining(ElmoConfig(**TINY), 11, 9, 10)).train()
    fused = copy.deepcopy(eager)
    trifuse.fuse(fused)
    targets = torch.randint(11, (3, 6))
    losses = [model(char_ids(), targets) for model in (eager, fused)]
    for got, wanted in zip(*reversed(losses), strict=True):
        assert_close(got, wanted)
