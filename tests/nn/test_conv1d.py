"""transformers' Conv1D, GPT-2's linear layer, on our product."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trifuse
from trifuse.backends import _C

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.pytorch_utils")

from transformers.pytorch_utils import Conv1D as Theirs  # noqa: E402

from trifuse.ops import _linear_choice  # noqa: E402
from trifuse.ops._linear_choice import is_available  # noqa: E402
from trifuse.recipes.conv1d import Conv1D, FrozenConv1D  # noqa: E402

pytestmark = pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension")

SIZES = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
B, L = 2, 40
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _ours(monkeypatch) -> None:
    """Makes our product serve every call that it can, fast or not."""
    monkeypatch.setenv("TRIFUSE_LINEAR", "cpp")
    monkeypatch.setattr(_linear_choice, "_made", {})


def layer(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    module = Theirs(outputs, inputs)
    nn.init.normal_(module.weight, std=inputs**-0.5)
    nn.init.normal_(module.bias)
    return module.to(dtype)


def fused(theirs: Any, **options: Any) -> Any:
    ours = copy.deepcopy(theirs)
    report = trifuse.fuse(ours, **options)
    assert [swapped.after for swapped in report.swapped] == ["trifuse.recipes.conv1d.Conv1D"]
    return ours


def gpt2(name: str = "GPT2LMHeadModel", **options: Any) -> Any:
    torch.manual_seed(0)
    without_dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    config = transformers.GPT2Config(**SIZES, **without_dropout, **options)
    config.bos_token_id = config.eos_token_id = 1
    return getattr(transformers, name)(config).eval()


def close(got: Tensor, wanted: Tensor) -> None:
    loose = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, wanted, rtol=loose, atol=loose)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 64), (65, 257), (1, 5), (5, 1), (700, 300)])
def test_one_layer(cpp_kernel, dtype, outputs, inputs):
    """Few and many rows, packed or not, frozen: each row has the same bits."""
    theirs = layer(outputs, inputs, dtype)
    ours = fused(theirs)
    assert isinstance(ours, Theirs)
    x = torch.randn(70, inputs).to(dtype)
    with torch.no_grad():
        whole = ours(x)
        close(whole, theirs(x))
        for rows in (1, 2, 5, 12, 15, 16, 33, 63):
            for _ in range(3):
                assert torch.equal(ours(x[:rows]), whole[:rows])
        frozen = fused(theirs, freeze=True)
        assert type(frozen) is FrozenConv1D
        for rows in (1, 15, 64):
            assert torch.equal(frozen(x[:rows]), whole[:rows])


def test_shapes():
    theirs = layer(6, 4)
    ours = fused(theirs)
    for shape in ((3, 4), (2, 3, 4), (2, 0, 4), (1, 4)):
        x = torch.randn(shape)
        with torch.no_grad():
            assert ours(x).shape == theirs(x).shape
            close(ours(x), theirs(x))


@pytest.mark.parametrize("rows", [3, 130])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(rows, dtype):
    """In the layout of the parameter, so that no copy of them is made; and second ones."""
    theirs = layer(96, 64, dtype)
    ours = fused(theirs)
    grads = []
    for module in (ours, theirs):
        x = torch.linspace(-1, 1, rows * 64).view(rows, 64).to(dtype).requires_grad_()
        out = module(x)
        inputs = (x, module.weight, module.bias)
        first = torch.autograd.grad(out.float().square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.float().square().sum() for g in first), inputs)
        grads.append((*first, *second))
        if module is ours and rows >= 64:
            assert first[1].is_contiguous()
    for got, wanted in zip(*grads, strict=True):
        scale = wanted.abs().max().item()
        loose = 3e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got, wanted, rtol=loose, atol=loose * scale)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.weight.mul_(1.5),
        lambda m: m.weight.data.mul_(1.5),
        lambda m: m.weight[3].neg_(),
        lambda m: m.weight.data.copy_(m.weight.data.flip(1)),
        lambda m: setattr(m, "weight", nn.Parameter(torch.randn_like(m.weight))),
        lambda m: m.load_state_dict(layer(8, 16).state_dict()),
    ],
)
def test_a_changed_weight_is_never_stale(change):
    module, x = fused(layer(8, 16)), torch.randn(20, 16)
    with torch.no_grad():
        module.weight.normal_()
        for _ in range(2):
            for _ in range(3):
                module(x)
            change(module)
            close(module(x), torch.addmm(module.bias, x, module.weight))


def test_no_transposed_copy_is_kept():
    """The parameter and its packed form alone."""
    module = fused(layer(192, 64))
    with torch.no_grad():
        for _ in range(3):
            module(torch.randn(512, 64))
    kept = trifuse.nn.linear._packed[module]
    assert list(kept) == ["weight"]
    assert kept["weight"]._kept.packed.nbytes == 4 * 192 * 64
    assert set(vars(module)) == set(vars(layer(2, 2)))


# Models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freeze", [False, True])
def test_gpt2(freeze):
    theirs = gpt2()
    ours = copy.deepcopy(theirs)
    keys = list(theirs.state_dict())
    report = trifuse.fuse(ours, freeze=freeze)
    layers = 4 * SIZES["n_layer"]
    assert f"({layers} layers)" in str(report)
    assert "trifuse.recipes.conv1d.Conv1D" in str(report)
    assert sum(type(m) in (Conv1D, FrozenConv1D) for m in ours.modules()) == layers
    assert (len(report.frozen) == layers) == freeze
    assert list(ours.state_dict()) == keys
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
        assert ours.state_dict()[key].is_contiguous()
    ids = torch.randint(2, 97, (B, L))
    with torch.no_grad():
        close(ours(ids).logits, theirs(ids).logits)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))
    runs = [each.runs for each in trifuse.explain(ours).modules if each.module.endswith("Conv1D")]
    assert runs == ["cpp, its weight frozen" if freeze else "cpp"] * layers
    report.revert()
    assert {type(m) for m in ours.modules()} == {type(m) for m in theirs.modules()}
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)


def test_gpt2_trains():
    theirs = gpt2().train()
    ours = copy.deepcopy(theirs)
    trifuse.fuse(ours, unpad=True)
    ids = torch.randint(2, 97, (B, L))
    mask = (torch.arange(L) < torch.tensor([[L], [25]])).long()
    labels = ids.masked_fill(mask == 0, -100)
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, wanted[name], rtol=1e-4, atol=1e-5)


def test_gpt2_without_padding(packed):
    model = gpt2("GPT2Model")
    theirs = copy.deepcopy(model)
    assert trifuse.fuse(model, unpad=True).unpadded == [""]
    ids = torch.randint(2, 97, (B, L))
    keep = torch.arange(L) < torch.tensor([[L], [25]])
    given = {"input_ids": ids, "attention_mask": keep.long()}
    close(model(**given).last_hidden_state[keep], theirs(**given).last_hidden_state[keep])
    assert packed == [L + 25] * SIZES["n_layer"]


@pytest.mark.usefixtures("layers_call_parts")
def test_its_activation_is_part_of_the_product(monkeypatch):
    from trifuse.recipes import sublayers

    seen: list[Any] = []
    real = sublayers.linear_activation

    def counted(module, x, activation):
        seen.append((type(module), activation))
        return real(module, x, activation)

    monkeypatch.setattr(sublayers, "linear_activation", counted)
    model = gpt2("GPT2Model")
    trifuse.fuse(model)
    with torch.no_grad():
        model(torch.randint(2, 97, (B, L)))
    assert seen == [(Conv1D, "gelu_tanh")] * SIZES["n_layer"]


def test_tied_weights():
    """A weight that two layers share is served, and stays as it is where others are frozen."""
    model = nn.Sequential(layer(16, 16), layer(16, 16), layer(16, 16))
    model[1].weight = model[0].weight
    theirs, x = copy.deepcopy(model), torch.randn(70, 16)
    report = trifuse.fuse(model, freeze=True)
    assert report.frozen == ["2"]
    assert model[1].weight is model[0].weight
    with torch.no_grad():
        close(model(x), theirs(x))
        for each in (model, theirs):
            each[0].weight.mul_(2)
        close(model(x), theirs(x))


def test_frozen_weights_refuse_changes():
    module = fused(layer(64, 32), freeze=True)
    message = r"frozen.*call revert\(\) first"
    assert module.weight.shape == (32, 64)
    assert [name for name, _ in module.named_parameters()] == ["bias"]
    for change in (
        lambda: setattr(module, "weight", nn.Parameter(torch.zeros(32, 64))),
        lambda: module.weight.mul_(2),
        lambda: module.load_state_dict(layer(64, 32).state_dict()),
        lambda: module.double(),
    ):
        with pytest.raises(RuntimeError, match=message):
            change()


@pytest.mark.parametrize("freeze", [False, True])
def test_copies_and_files(freeze):
    theirs = layer(64, 32)
    ours, x = fused(theirs, freeze=freeze), torch.randn(5, 32)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    twins = (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)))
    for twin in (*twins, torch.load(file, weights_only=False)):
        assert type(twin) is type(ours)
        with torch.no_grad():
            assert torch.equal(twin(x), ours(x))
    plain = layer(64, 32)
    plain.load_state_dict(ours.state_dict())
    assert torch.equal(plain.weight, theirs.weight)


def test_subclasses_and_replaced_forwards_are_left():
    class Own(Theirs):
        pass

    replaced = layer(4, 4)
    replaced.forward = lambda x: x
    report = trifuse.fuse(nn.Sequential(Own(4, 4), replaced))
    assert [(each.path, each.reason) for each in report.left] == [
        ("0", "a subclass of Conv1D"),
        ("1", "its forward was replaced on the instance"),
    ]


def test_compiled():
    theirs = layer(96, 64)
    for options in ({}, {"freeze": True}):
        ours, x = fused(theirs, **options), torch.randn(70, 64)
        with torch.no_grad():
            compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
            close(compiled(x), theirs(x))


@pytest.mark.parametrize("order", ["fused first", "adapted first"])
def test_peft(order):
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["c_attn"], r=4, fan_in_fan_out=True, lora_dropout=0.0)

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        made = peft.get_peft_model(model, options)
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        return made.eval()

    theirs, ours = adapted(gpt2()), gpt2()
    if order == "fused first":
        trifuse.fuse(ours)
        ours = adapted(ours)
    else:
        ours = adapted(ours)
        trifuse.fuse(ours)
    ids = torch.randint(2, 97, (B, L))
    close(ours(ids).logits, theirs(ids).logits)
    close(ours.merge_and_unload()(ids).logits, theirs(ids).logits)


def test_another_instruction_set():
    module, x = fused(layer(96, 64)), torch.randn(70, 64)
    with torch.no_grad():
        wanted = module(x)
        before = _C.set_cpu_capability("DEFAULT")
        try:
            close(module(x), wanted)
        finally:
            _C.set_cpu_capability(before)
