"""Gates in transformers' feed-forward networks: which code is recognised, and its results."""

from __future__ import annotations

import ast
import copy
from typing import Any

import pytest
import torch
from model_sizes import GROUPED_QUERIES, PADDED_SIZES, SIZES, SPECIAL_TOKENS, T5_SIZES
from torch import Tensor, nn

import trifuse
from trifuse.nn import Linear, encoder_layer
from trifuse.ops import _linear_choice
from trifuse.ops import linear as ops
from trifuse.ops._linear_choice import is_available
from trifuse.ops.activations import ACTIVATIONS
from trifuse.recipes import gates, sublayers

transformers = pytest.importorskip("transformers")

GROUPED = SIZES | GROUPED_QUERIES | {"pad_token_id": 0}
# By model: its configuration and its activation.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Llama": (GROUPED, "silu"),
    "Mistral": (GROUPED, "silu"),
    "Qwen2": (GROUPED, "silu"),
    "Qwen3": (GROUPED | {"head_dim": 8}, "silu"),
    "Gemma": (GROUPED | {"head_dim": 8}, "gelu_tanh"),
    "Gemma2": (GROUPED | {"head_dim": 8}, "gelu_tanh"),
    "Gemma3Text": (GROUPED | {"head_dim": 8}, "gelu_tanh"),
    "Phi3": (GROUPED, "silu"),
    "Glm": (GROUPED | {"head_dim": 8}, "silu"),
    "ModernBert": (PADDED_SIZES | SPECIAL_TOKENS, "gelu"),
    "T5Encoder": (T5_SIZES | {"feed_forward_proj": "gated-gelu"}, "gelu_tanh"),
    "UMT5Encoder": (T5_SIZES | {"feed_forward_proj": "gated-gelu"}, "gelu_tanh"),
}
B, L = 3, 10


@pytest.fixture(params=["ours", "torch's"])
def gated(request, monkeypatch) -> list[str]:
    """Returns the activations of gates, whichever product serves them."""
    monkeypatch.setenv("TRIFUSE_LINEAR", "cpp" if request.param == "ours" else "torch")
    monkeypatch.setattr(_linear_choice, "_made", {})
    found: list[str] = []
    for name in ("gated_linear", "gated_halves"):
        real = getattr(sublayers, name)

        def counted(*args, real=real):
            found.extend(x for x in args if isinstance(x, str))
            return real(*args)

        monkeypatch.setattr(sublayers, name, counted)
    return found


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    options, _ = MODELS[name]
    config = getattr(transformers, f"{name.removesuffix('Encoder')}Config")(**options)
    return getattr(transformers, f"{name}Model")(config).eval()


@pytest.mark.usefixtures("layers_call_parts")
@pytest.mark.parametrize("name", MODELS)
def test_models(name, gated):
    theirs = build(name)
    ours = copy.deepcopy(theirs)
    trifuse.fuse(ours)
    ids = torch.randint(5, 97, (B, L))
    with torch.no_grad():
        wanted = theirs(ids).last_hidden_state
        for _ in range(3):
            got = ours(ids).last_hidden_state
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert len(gated) == 3 * theirs.config.num_hidden_layers
    assert set(gated) == {MODELS[name][1]}
    for model in (theirs, ours):
        model(ids).last_hidden_state.square().sum().backward()
    grads = dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, grads[key].grad, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension")
@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_decoding_with_frozen_weights(name, monkeypatch):
    """Greedy decoding, step by step, gives the same tokens."""
    monkeypatch.setenv("TRIFUSE_LINEAR", "cpp")
    monkeypatch.setattr(_linear_choice, "_made", {})
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name][0] | {"intermediate_size": 64})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.randint(5, 97, (1, 4))
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    wanted = model.generate(ids, **options)
    served = []
    real = ops.gated_linear_frozen

    def counted(*args: Any, **kwargs: Any) -> Tensor | None:
        served.append(real(*args, **kwargs))
        return served[-1]

    monkeypatch.setattr(ops, "gated_linear_frozen", counted)
    monkeypatch.setattr(encoder_layer, "run", lambda *args, **kwargs: None)  # but the parts
    report = trifuse.fuse(model, freeze=True)
    assert torch.equal(model.generate(ids, **options), wanted)
    assert len(served) >= 6 * config.num_hidden_layers
    assert all(out is not None for out in served)
    report.revert()
    assert torch.equal(model.generate(ids, **options), wanted)


# Code ---------------------------------------------------------------------------------------------

ROLES = {"gate": "linear", "up": "linear", "both": "linear", "act": "activation"}
TWO = "self._trifuse_gate(x, self.gate, self.up, self.act)"
FIRST = "self._trifuse_gate_halves(x, self.both, self.act, 0)"
LAST = "self._trifuse_gate_halves(x, self.both, self.act, 1)"
RECOGNISED = {
    "return self.down(self.act(self.gate(x)) * self.up(x))": f"return self.down({TWO})",
    "x = self.up(x) * self.act(self.gate(x))": f"x = {TWO}",
    "g = self.act(self.gate(x))\nu = self.up(x)\nx = g * u": f"x = {TWO}",
    "u = self.up(x)\ng = self.gate(x)\ng = self.act(g)\nx = g * u": f"x = {TWO}",
    "g, u = self.both(x).chunk(2, dim=-1)\ny = self.act(g) * u": f"y = {FIRST}",
    "g, u = self.both(x).chunk(2, -1)\ny = g * self.act(u)": f"y = {LAST}",
    "y = self.both(x)\ng, y = y.chunk(2, dim=-1)\ny = y * self.act(g)": f"y = {FIRST}",
    "y = self.both(x)\nu, g = y.chunk(2, dim=-1)\ny = u * self.act(g)\nreturn y": (
        f"y = {LAST}\nreturn y"
    ),
    "a, g = self.both(x).chunk(2, dim=-1)\nreturn self.down(self.drop(self.act(a) * g))": (
        f"return self.down(self.drop({FIRST}))"
    ),
}


def rewritten(statements: str) -> str:
    source = "def forward(self, x, other):\n" + "\n".join(
        f"    {line}" for line in statements.split("\n")
    )
    (method,) = ast.parse(source).body
    assert isinstance(method, ast.FunctionDef)
    body, out = method.body, []
    while body:
        gate = gates.find(body, ROLES, method)
        out.append(body[0] if gate is None else gate.statement)
        body = body[1 if gate is None else gate.consumed :]
    return "\n".join(ast.unparse(ast.fix_missing_locations(each)) for each in out)


@pytest.mark.parametrize("statements", RECOGNISED)
def test_code_that_is_recognised(statements):
    assert rewritten(statements) == RECOGNISED[statements]


@pytest.mark.parametrize(
    "statements",
    [
        "y = self.act(self.gate(x)) * self.up(other)",
        "y = self.act(self.gate(x)) * self.gate(x)",
        "y = self.gate(x) * self.up(x)",
        "y = self.act(self.gate(x)) + self.up(x)",
        "y = self.act(self.gate(x)) * self.unknown(x)",
        "y = self.act(self.gate(x + 1)) * self.up(x + 1)",
        "y = self.act(self.gate(x), other) * self.up(x)",
        "y = lambda: self.act(self.gate(x)) * self.up(x)",
        "y = other and self.act(self.gate(x)) * self.up(x)",
        "x = self.gate(x)\ny = self.act(x) * self.up(x)",
        "g = self.act(self.gate(x))\ny = g * self.up(x)\nreturn y + g",
        "g = self.act(self.gate(x))\ny = g * self.up(x)\ng *= 2",
        "g = h = self.act(self.gate(x))\ny = g * self.up(x)",
        "g = self.act(self.gate(x))\nx = x + 1\ny = g * self.up(x)",
        "g = self.act(self.gate(x))\nprint(x)\ny = g * self.up(x)",
        "g, u = self.both(x).chunk(2, dim=1)\ny = self.act(g) * u",
        "g, u = self.both(x).chunk(3, dim=-1)\ny = self.act(g) * u",
        "g, u, v = self.both(x).chunk(2, dim=-1)\ny = self.act(g) * u",
        "g, self.kept = self.both(x).chunk(2, dim=-1)\ny = self.act(g) * u",
        "g, u = self.both(x).chunk(2, dim=-1)\ny = self.act(g) * g",
        "g, u = self.both(x).split(2, dim=-1)\ny = self.act(g) * u",
        "g, u = self.both(x).chunk(2, dim=-1)\ny = self.act(g) * u\nreturn y * u",
        "g, u = self.gate(x), self.up(x)\ny = self.act(g) * u",
        "g = self.act(self.gate(x))\nu = self.up(x)\nreturn self.down(g * u + u)",
        "g, u = self.both(x).chunk(2, dim=-1)\nreturn self.act(g) * u, g",
        "g = self.act(self.gate(x))\nother[g] = g * self.up(x)",
        "g = self.act(self.gate(x))\ng = g * self.up(x) + g",
    ],
)
def test_code_that_is_left(statements):
    assert rewritten(statements) == ast.unparse(ast.parse(statements))


def test_the_roles_of_an_activation():
    """SiLU and GPT-2's and CLIP's GELUs count as activations of the product; others don't."""
    module = nn.Module()
    for name, child in {
        "silu": nn.SiLU(),
        "swish": transformers.activations.ACT2FN["silu"],
        "new": transformers.activations.ACT2FN["gelu_new"],
        "fast": transformers.activations.ACT2FN["gelu_fast"],
        "quick": transformers.activations.ACT2FN["quick_gelu"],
        "clipped": transformers.activations.ACT2FN["gelu_10"],
        "linear": Linear(2, 2),
    }.items():
        setattr(module, name, child)
    kinds = dict(sublayers.roles(module))
    assert {name for name, kind in kinds.items() if kind == "activation"} == {
        "silu", "swish", "new", "fast", "quick",
    }  # fmt: skip
    x = torch.linspace(-4, 4, 41)
    for name in ("silu", "swish", "new", "fast", "quick"):
        activation = getattr(module, name)
        ours = ACTIVATIONS[sublayers.name_of(activation)]
        torch.testing.assert_close(ours(x), activation(x))
