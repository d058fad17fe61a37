"""``torch.compile`` with trifuse's backend against torch's own, on models written without trifuse.

Counts the attentions and norms of each model's graph that become trifuse's, checks that both
backends compute the same, and times them in turns. Dropout is off. The first call, which compiles,
is not timed; it takes minutes for all models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

from trifuse.benchmarks import command_line, passes, timing
from trifuse.benchmarks.agreement import check_agreement
from trifuse.benchmarks.cases import run_selected
from trifuse.benchmarks.terminal import print_table
from trifuse.benchmarks.timing import Timing
from trifuse.compiler import rewrite
from trifuse.models.bert import BertConfig, BertModel


class Sizes(NamedTuple):
    """The sizes of all models: two layers of base width unless a test makes them smaller."""

    width: int = 768
    heads: int = 12
    layers: int = 2
    batch: int = 4
    length: int = 256


class Encoder(nn.Module):
    """torch's Transformer encoder, as a model is trained: not by its operator for inference."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            sizes.width, sizes.heads, 4 * sizes.width, 0.0, "gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out


class Bert(nn.Module):
    """A BERT without embeddings, with its attention written out or by torch's function."""

    def __init__(self, sizes: Sizes, attention: str) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=1,
            hidden_size=sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            intermediate_size=4 * sizes.width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation=attention,
        )
        self.encoder = BertModel(config).encoder

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out


class Decoder(nn.Module):
    """A causal decoder in the manner of Llama: RMSNorm and attention written out, SiLU gates."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        E, inner = sizes.width, 8 * sizes.width // 3
        self.heads = sizes.heads
        self.layers: Any = nn.ModuleList(
            nn.ParameterDict(
                {
                    "norm_1": torch.ones(E),
                    "norm_2": torch.ones(E),
                    "qkv": torch.randn(3 * E, E) / E**0.5,
                    "out": torch.randn(E, E) / E**0.5,
                    "up": torch.randn(2 * inner, E) / E**0.5,
                    "down": torch.randn(E, inner) / E**0.5,
                }
            )
            for _ in range(sizes.layers)
        )
        self.norm = nn.Parameter(torch.ones(E))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self._attention(layer, _rms_norm(x, layer["norm_1"]))
            gate, up = (_rms_norm(x, layer["norm_2"]) @ layer["up"].T).chunk(2, -1)
            x = x + (nn.functional.silu(gate) * up) @ layer["down"].T
        return _rms_norm(x, self.norm)

    def _attention(self, layer: Any, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (x @ layer["qkv"].T).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        later = x.new_ones(length, length).triu(1) > 0
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ layer["out"].T


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


MODELS: dict[str, Callable[[Sizes], nn.Module]] = {
    "nn.TransformerEncoder": Encoder,
    "BERT, written out": functools.partial(Bert, attention="eager"),
    "BERT, SDPA": functools.partial(Bert, attention="sdpa"),
    "Llama, written out": Decoder,
}


class Case(NamedTuple):
    model: str
    step: str  # "forward" or "forward + backward"
    sizes: Sizes = Sizes()

    @property
    def name(self) -> str:
        return f"{self.model}, {self.step}"


CASES = tuple(Case(model, step) for model in MODELS for step in ("forward", "forward + backward"))


class Outcome(NamedTuple):
    case: Case
    replaced: dict[str, int]  # by the name of a pattern
    left: dict[str, int]
    timings: dict[str, Timing]  # "trifuse", "inductor" and "eager"

    def ratio(self, peer: str) -> float:
        return self.timings[peer].median / self.timings["trifuse"].median

    def record(self) -> dict[str, Any]:
        seconds = {name: timed.median for name, timed in self.timings.items()}
        return {
            "case": self.case.name,
            "replaced": self.replaced,
            "left": self.left,
            "seconds": seconds,
            "ratio": self.ratio("inductor"),
        }


def run(case: Case, seconds: float) -> Outcome:
    """Compile a model by both backends, compare them and time them.

    Raises:
        AssertionError: they don't compute the same.
    """
    torch.manual_seed(0)
    sizes = case.sizes
    model = MODELS[case.model](sizes)
    x = torch.randn(sizes.batch, sizes.length, sizes.width)
    variables = list(model.parameters())

    def step(function: Callable[[Tensor], Tensor]) -> Callable[[], Sequence[Tensor]]:
        if case.step == "forward":
            return passes.forward(lambda: function(x))
        return passes.forward_backward(lambda: function(x), variables)

    torch._dynamo.reset()
    counts = _count(model, x)
    calls = {name: step(torch.compile(model, backend=name)) for name in ("trifuse", "inductor")}
    calls["eager"] = step(model)
    names = ["output", *(name for name, _ in model.named_parameters())]
    # The gradient of a key's bias is 0 except for rounding.
    results = {
        name: [t for t, of in zip(call(), names, strict=False) if not of.endswith("bias")]
        for name, call in calls.items()
    }
    check_agreement("inductor", results["trifuse"], results["inductor"])
    return Outcome(case, *counts, timing.alternate(calls, seconds=seconds))


def _count(model: nn.Module, x: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Count what of the model's graph becomes trifuse's, and what stays torch's."""
    replaced = dict.fromkeys(("attention", "norm"), 0)
    left = dict(replaced)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        report = rewrite(graph)
        for name in replaced:
            replaced[name] += report.replaced[name]
            left[name] += sum(each[0] == name for each in report.left)
        return graph

    torch.compile(model, backend=backend)(x)
    return replaced, left


def table(outcomes: Sequence[Outcome]) -> Table:
    titles = ("attention", "norms", "eager", "inductor", "trifuse", "against inductor")
    out = Table("model", *titles, title='torch.compile: backend="trifuse" against "inductor"')
    for column in out.columns[1:]:
        column.justify = "right"
    for outcome in outcomes:
        served = [
            f"{outcome.replaced[name]} of {outcome.replaced[name] + outcome.left[name]}"
            for name in ("attention", "norm")
        ]
        medians = [outcome.timings[name].median for name in ("eager", "inductor", "trifuse")]
        times = [f"{median * 1e3:.1f} ms" for median in medians]
        out.add_row(outcome.case.name, *served, *times, f"{outcome.ratio('inductor'):.2f}×")
    return out


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table."""
    parser = command_line.parser("compile", __doc__, devices=("cpu",), plots=False)
    options = parser.parse_args(argv)
    call = functools.partial(run, seconds=1.0 if options.quick else 6.0)
    _, outcomes, failed = run_selected(options, CASES, lambda case: case.name, call)
    if outcomes:
        print_table(table(outcomes))
    return bool(failed)
