"""Walks over modules whose result is kept: whatever changes between two calls is noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from model_sizes import DISENTANGLED, PADDED_SIZES, T5_SIZES
from torch import Tensor, nn

import trifuse
from trifuse.models.bert import BertConfig, BertModel, SoftmaxAttention
from trifuse.nn import packing, walks
from trifuse.nn.linear import Linear
from trifuse.recipes import stacks

pytestmark = pytest.mark.usefixtures("layers_call_parts")

L = 7
KEEP = torch.arange(L) < torch.tensor([7, 3, 1])[:, None]
TINY = {
    "vocab_size": 97,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}


def huggingface_bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**TINY)).eval()
    trifuse.fuse(model, unpad=True)
    return model


def our_bert() -> nn.Module:
    torch.manual_seed(0)
    model = BertModel(BertConfig(**TINY)).eval()
    trifuse.fuse(model, unpad=True)
    return model


def torchs_encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    trifuse.fuse(model, unpad=True)
    return model


def run(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, nn.TransformerEncoder):
        return model(torch.randn(3, L, 16, generator=generator), src_key_padding_mask=~KEEP)
    return model(torch.randint(1, 97, (3, L), generator=generator), KEEP.long())[0]


def anew(stack: Any, *args: Any) -> str:
    """Returns the obstacle of a stack; the walk does not use what earlier walks kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walks, "_kept", weakref.WeakKeyDictionary())
        return str(stack.why_padded(*args))


@pytest.fixture
def walked(monkeypatch) -> list[nn.Module]:
    """The stacks whose modules were examined one by one."""
    seen = []
    walk = packing._named_modules

    def spy(stack: nn.Module, inside: Any) -> Iterator[tuple[str, nn.Module]]:
        seen.append(stack)
        return walk(stack, inside)

    monkeypatch.setattr(packing, "_named_modules", spy)
    return seen


MODELS = [huggingface_bert, our_bert, torchs_encoder]


@pytest.mark.parametrize("make", MODELS)
def test_a_second_call_does_not_walk(make, walked, packed):
    model = make()
    walked.clear()
    run(model)
    assert len(walked) == 1 or not walked  # the report has walked
    walked.clear()
    model.train()
    run(model).sum().backward()
    model.eval()
    run(model)
    assert not walked
    assert packed == [int(KEEP.sum())] * 6


# Changes ------------------------------------------------------------------------------------------


def linear_of(model: nn.Module) -> tuple[nn.Module, str, nn.Module]:
    """The last linear layer in a model's stack, with its holder."""
    stack = getattr(model, "encoder", model)
    *_, found = (
        (holder, name, child)
        for holder in stack.modules()
        for name, child in holder.named_children()
        if isinstance(child, Linear)
    )
    return found


@contextmanager
def swapped(model: nn.Module) -> Iterator[None]:
    holder, name, linear = linear_of(model)
    setattr(holder, name, nn.Sequential(linear))
    yield
    setattr(holder, name, linear)


@contextmanager
def swapped_alike(model: nn.Module) -> Iterator[None]:
    holder, name, linear = linear_of(model)
    setattr(holder, name, Linear(linear.in_features, linear.out_features))
    yield
    setattr(holder, name, linear)


@contextmanager
def derived(model: nn.Module) -> Iterator[None]:
    _, _, linear = linear_of(model)
    linear.__class__ = type("Derived", (Linear,), {})
    yield
    linear.__class__ = Linear


@contextmanager
def grown(model: nn.Module) -> Iterator[None]:
    _, _, linear = linear_of(model)
    linear.added = nn.Conv1d(1, 1, 1)
    yield
    del linear.added


@contextmanager
def renamed(model: nn.Module) -> Iterator[None]:
    holder, name, linear = linear_of(model)
    holder.added = linear
    delattr(holder, name)
    yield
    setattr(holder, name, linear)
    del holder.added


@contextmanager
def emptied(model: nn.Module) -> Iterator[None]:
    holder, name, linear = linear_of(model)
    setattr(holder, name, None)
    yield
    setattr(holder, name, linear)


@contextmanager
def hooked(model: nn.Module, kind: str) -> Iterator[None]:
    _, _, linear = linear_of(model)
    hook = getattr(linear, f"register_{kind}_hook")(lambda module, *rest: None)
    yield
    hook.remove()


@contextmanager
def all_hooked(model: nn.Module) -> Iterator[None]:
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    yield
    hook.remove()


@contextmanager
def patched(model: nn.Module) -> Iterator[None]:
    _, _, linear = linear_of(model)
    forward = linear.forward
    linear.forward = lambda x: forward(x)
    yield
    del linear.forward


@contextmanager
def left_its_own(model: nn.Module) -> Iterator[None]:
    """As libraries leave a module that replace its forward for a while."""
    _, _, linear = linear_of(model)
    linear.forward = linear.forward
    yield
    del linear.forward


@contextmanager
def longer(model: nn.Module) -> Iterator[None]:
    stack = getattr(model, "encoder", model)
    layers = stack.layers if hasattr(stack, "layers") else stack.layer
    layers.append(nn.Conv1d(1, 1, 1))
    yield
    del layers[-1]


@contextmanager
def parametrized(model: nn.Module) -> Iterator[None]:
    _, _, linear = linear_of(model)
    nn.utils.parametrizations.weight_norm(linear)
    yield
    nn.utils.parametrize.remove_parametrizations(linear, "weight")


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], bool]] = {  # True: the stack can't pack
    "swapped": (swapped, True),
    "swapped alike": (swapped_alike, False),
    "derived": (derived, True),
    "grown": (grown, True),
    "longer": (longer, True),
    "parametrized": (parametrized, True),
    "patched": (patched, True),
    "left its own": (left_its_own, False),
    "all hooked": (all_hooked, True),
    **{
        kind: (lambda model, kind=kind: hooked(model, kind), True)
        for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")
    },
}


@pytest.mark.parametrize(("change", "obstructs"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make", MODELS)
def test_changes_are_noticed(make, change, obstructs, packed):
    model = make()
    stack: Any = getattr(model, "encoder", model)
    with torch.no_grad():
        wanted = run(model)
    packed.clear()
    with change(model):
        why = str(stack.why_padded())
        assert why == anew(stack)
        assert (why != "None") == obstructs
        if change is not longer:
            with torch.no_grad():
                run(model)
            assert (not packed) == obstructs
    packed.clear()
    assert stack.why_padded() is None
    with torch.no_grad():
        torch.testing.assert_close(run(model)[KEEP], wanted[KEEP])
    assert len(packed) == 2


@pytest.mark.parametrize("change", [renamed, emptied])
def test_missing_modules_are_noticed(change):
    """The code of transformers is followed to the modules that it names."""
    model = huggingface_bert()
    stack: Any = model.encoder
    run(model)
    with change(model):
        assert _asked(stack.why_padded) == _asked(lambda: anew(stack)) != "None"
    assert stack.why_padded() is None


def test_a_parameter_of_a_subclass_is_noticed(packed):
    """The stack still packs, and the linear layer leaves such a weight to torch."""

    class Sub(Tensor):
        seen = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen += func.__name__ == "linear"
            return super().__torch_function__(func, types, args, kwargs)

    model = huggingface_bert()
    wanted = run(model)
    packed.clear()
    _, _, linear = linear_of(model)
    weight = linear.weight.detach().as_subclass(Sub)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        out = run(model)
    torch.testing.assert_close(out.as_subclass(Tensor)[KEEP], wanted[KEEP])
    assert Sub.seen
    assert len(packed) == 2


def test_code_of_classes_is_watched(monkeypatch, packed):
    model = huggingface_bert()
    run(model)
    packed.clear()
    cls: Any = type(model.encoder.layer[0].attention)
    forward = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x, *a, **k: forward(self, x.flip(1), *a, **k))
    run(model)
    assert not packed
    assert str(model.encoder.why_padded()) == anew(model.encoder) != "None"
    monkeypatch.undo()
    assert model.encoder.why_padded() is None


def test_an_adapter_that_gets_a_variant_is_noticed():
    """LoRA's variants may depend on the places of tokens."""
    cls = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    adapted: Any = cls(2, 2)
    adapted.lora_variant = {}
    stack = nn.ModuleList([adapted])
    assert packing.find_obstacle(stack, ()) is None
    adapted.lora_variant["default"] = object()
    assert packing.find_obstacle(stack, ()) is not None
    adapted.lora_variant.clear()
    assert packing.find_obstacle(stack, ()) is None


def test_attention_that_appends_keys_is_noticed(packed):
    model: Any = torchs_encoder()
    run(model)
    for name, value in (("add_zero_attn", True), ("bias_k", nn.Parameter(torch.zeros(1, 1, 16)))):
        attention = model.layers[1].self_attn
        before = getattr(attention, name)
        setattr(attention, name, value)
        assert "appends keys" in str(model.why_padded())
        setattr(attention, name, before)
        assert model.why_padded() is None


def test_attention_that_is_not_fused_any_more_is_noticed():
    model: Any = our_bert()
    run(model)
    holder = model.encoder.layer[1].attention.self
    attention, holder.attention = holder.attention, SoftmaxAttention(0.0)
    assert "isn't fused" in str(model.why_padded())
    holder.attention = attention
    assert model.why_padded() is None


FAMILIES = {
    "Bert": PADDED_SIZES,
    "MPNet": PADDED_SIZES,
    "Albert": PADDED_SIZES | {"embedding_size": 32},
    "ModernBert": PADDED_SIZES | {"local_attention": 4, "pad_token_id": 0},
    "DebertaV2": PADDED_SIZES | DISENTANGLED,
    "T5": T5_SIZES,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_attributes_are_watched(name):
    """Each number, name and flag of each module is changed in turn."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{name}Model"):
        pytest.skip("this version of transformers lacks it")
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    model = getattr(transformers, f"{name}Model")(config).eval()
    trifuse.fuse(model, unpad=True)
    watched = [each for each in model.modules() if isinstance(each, stacks.Unpadded)]
    assert watched
    obstacles = 0
    for stack in watched:
        if stack.why_padded() is not None:
            continue
        for module in stack.modules():
            for key, value in list(vars(module).items()):
                other = _other(value)
                if other is None:
                    continue
                vars(module)[key] = other
                why = _asked(stack.why_padded)
                assert why == _asked(lambda stack=stack: anew(stack)), (type(module), key)
                vars(module)[key] = value
                obstacles += why != "None"
                assert stack.why_padded() is None
    assert obstacles or name not in ("Bert", "Albert")  # others read nothing of this kind


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return f"{value}?" if isinstance(value, str) else None


def _asked(ask: Callable[[], Any]) -> str:
    try:
        return str(ask())
    except Exception as error:
        return type(error).__name__


# Walks that are kept ------------------------------------------------------------------------------


def test_nothing_is_kept_alive():
    model = huggingface_bert()
    # A hook that refers to the model: libraries that shard it, for example.
    model.encoder.layer[0].register_state_dict_post_hook(lambda *args, model=model: None)
    run(model)
    holder, name, linear = linear_of(model)
    setattr(holder, name, Linear(linear.in_features, linear.out_features))
    replaced = weakref.ref(linear)
    del linear
    gc.collect()
    assert replaced() is None
    whole = weakref.ref(model)
    del model, holder
    gc.collect()
    assert whole() is None


def keep(stack: nn.Module, **options: Any) -> Callable[[], bool]:
    walks.keep(stack, "key", options.pop("grounds", walks.Grounds()), **options)
    return lambda: walks.holds(stack, "key")


def test_modules_at_several_places():
    def stack() -> Any:
        shared = nn.ReLU()
        return nn.ModuleDict({"a": shared, "b": nn.ReLU(), "c": shared, "d": nn.ModuleList()})

    first = stack()
    holds = keep(first)
    assert holds()
    first["c"] = first["b"]
    assert not holds()
    first["c"] = nn.ReLU()
    assert not holds()
    first["c"] = first["a"]
    assert holds()
    first["b"] = first["a"]
    assert not holds()
    first["b"] = nn.ReLU()
    first["d"].append(first)  # a module may hold itself
    assert not holds()
    assert keep(first)()


def test_modules_outside_count_by_their_classes():
    shared = nn.ReLU()
    stack = nn.ModuleDict({"other": nn.Sequential(shared, nn.Tanh()), "layers": nn.ModuleList()})
    holds = keep(stack, inside=("layers",))
    hook = shared.register_forward_hook(lambda *args: None)
    assert holds()
    stack["other"][1] = nn.GELU()
    assert not holds()
    stack["other"][1] = nn.Tanh()
    assert holds()
    hook.remove()
    stack["layers"].append(shared)  # it is inside now, wherever else it is
    assert not holds()
    holds = keep(stack, inside=("layers",))
    assert holds()
    shared.register_forward_hook(lambda *args: None)
    assert not holds()


def test_lacks():
    stack = nn.ModuleList([nn.ReLU(), nn.ModuleList([nn.Tanh()])])
    for _ in range(2):
        assert walks.lacks(stack, nn.GELU)
        assert not walks.lacks(stack, nn.Tanh)
    stack[1].append(nn.GELU())
    assert not walks.lacks(stack, nn.GELU)
    stack[1][1] = nn.ReLU()
    assert walks.lacks(stack, nn.GELU)


def test_traits():
    class Read(nn.Module):
        constant, thing, none = 3, object(), None

    def read(module: nn.Module, name: str) -> Any:
        value = getattr(module, name, None)
        return value if value is None or isinstance(value, (int, str)) else type(value)

    module: Any = Read()
    module.own, module.text, module.kind = True, "text", [1]
    grounds = walks.Grounds(read)
    names = ("constant", "thing", "none", "own", "text", "kind")
    grounds.traits[module] = {name: read(module, name) for name in names} | {"no": walks.ABSENT}
    holds = keep(module, grounds=grounds)
    assert holds()
    module.text, module.kind = "".join(["te", "xt"]), [2]  # equal, or of the same class
    assert holds()
    changes = {"constant": 4, "thing": "", "none": 1, "own": False, "text": "", "kind": list}
    for name, value in (changes | {"no": None}).items():
        before = vars(module).copy()
        setattr(module, name, value)
        assert not holds(), name
        vars(module).clear()
        vars(module).update(before)
        assert holds()


def test_a_module_of_torchscript_is_not_kept():
    scripted = torch.jit.script(nn.Sequential(nn.ReLU()))
    holds = keep(nn.ModuleList([scripted]))
    assert not holds()
