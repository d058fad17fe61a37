"""BERT on ragged text: fused, against torch, its compiler and the inference engines.

Inference reads paragraphs of the language reference with a pretrained MiniLM-L6, in one batch that
is padded as a server would pad it. transformers' own BertModel runs with its eager formula, with
torch's attention, compiled, and fused without its padding; ONNX Runtime, OpenVINO and CTranslate2
run the same weights where they are installed, with the same number of threads. Before timing, the
hidden states of real tokens are compared with those of a float64 run, and with ours.

A training step runs two layers of BERT-base forward and backward, on a batch that is half padding.
The optimizer, which is the same for all, is left out.

On a GPU a training step runs a whole model with random weights, at the size of MiniLM-L6 or
BERT-large. The peer is transformers' BertModel on torch's attention, or, if transformers is not
installed, ours. The batches have the lengths of real texts in words and punctuation marks:
paragraphs of the language reference, or its topics. The time is how long a caller waits. Our model
is also timed on the GPU backends that are not chosen for its attention.

In bfloat16 the engines' models with weights of 8 bits are timed too. Their results differ by more
than rounding in 16 bits explains, so the table's errors show how far they are from float64. A batch
without any padding shows what is left where there is none to leave out.

Rates count the operations that real tokens need: 2 for each weight of a linear layer, and 4 for
each pair of tokens in a sequence and each feature; the backward counts twice.

With ``--latency`` the model reads one sentence at a time: see ``trifuse.benchmarks.latency``.
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

import trifuse
from trifuse import backends
from trifuse.benchmarks import (
    ceilings,
    command_line,
    demo,
    engines,
    latency,
    machine,
    report,
    timing,
)
from trifuse.benchmarks.agreement import check_accuracy, check_agreement
from trifuse.benchmarks.cases import run_all, select
from trifuse.benchmarks.comparison import Result
from trifuse.benchmarks.other_kernels import other_kernels
from trifuse.benchmarks.terminal import console, print_missing, print_table, progress_bars
from trifuse.benchmarks.text import count_tokens
from trifuse.benchmarks.timing import Timing
from trifuse.models.bert import BertConfig, BertEncoder, BertModel

try:
    import transformers
except ImportError:
    transformers = None

# Cases ------------------------------------------------------------------------------------------

TORCH = ("eager", "sdpa", "torch.compile")
ENGINES = tuple(engine.name for engine in engines.ENGINES)
INT8 = tuple(f"{name}, int8" for name in ENGINES)
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Target:
    """Peers to compare with.

    ``at_least`` is a target for the fastest peer's time over ours, ``at_least_fraction`` for our
    fraction of the ceiling.
    """

    peers: tuple[str, ...]
    at_least: float | None = None
    at_least_fraction: float | None = None


@dataclass(frozen=True)
class Inference:
    """A batch of real text; about the fraction ``valid`` of it, or with 1 all, is real tokens."""

    dtype: torch.dtype
    targets: tuple[Target, ...]
    batch_size: int = 32
    length: int = 128
    valid: float = 0.56
    peers: tuple[str, ...] = TORCH + ENGINES

    @property
    def name(self) -> str:
        padding = " without padding" if self.valid == 1 else ""
        return f"inference{padding}, {_NAMES[self.dtype]}"


@dataclass(frozen=True)
class Training:
    """A step of an encoder on sequences from a quarter to three quarters of ``length``."""

    config: BertConfig
    targets: tuple[Target, ...]
    batch_size: int = 4
    length: int = 512
    peers: tuple[str, ...] = ("eager", "torch.compile")

    @property
    def name(self) -> str:
        return "training step, fp32"


@dataclass(frozen=True)
class Step:
    """A step of a whole model on a batch of texts, padded to the longest.

    ``at_least`` is a target for the peer's time over ours.
    """

    model: str
    config: BertConfig
    texts: Callable[[], Sequence[str]]
    batch_size: int
    length: int  # where texts are cut
    at_least: float | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"training step, {self.model}, {_NAMES[self.dtype]}"

    def lengths(self) -> list[int]:
        """Lengths of random texts: their words and punctuation marks, and a token at either end."""
        drawn = random.Random(0).sample(self.texts(), self.batch_size)
        return [min(count_tokens(text) + 2, self.length) for text in drawn]


def _paragraphs() -> list[str]:
    return [passage.text for passage in demo.passages()]


def _topics() -> list[str]:
    return list(topics.topics.values())


MINILM = BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)
BERT_LARGE = BertConfig(
    hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
)
CASES: dict[str, tuple[Inference | Training | Step, ...]] = {
    "cpu": (
        Inference(torch.float32, (Target(("sdpa",), 4.0), Target(ENGINES, 1.5))),
        Inference(
            torch.bfloat16,
            (Target(("sdpa",), 2.0), Target(("torch.compile", "OpenVINO"), 1.4)),
            peers=TORCH + ENGINES + INT8,
        ),
        Inference(torch.float32, (Target(ENGINES, 1.0, 0.9),), valid=1.0, peers=("sdpa", *ENGINES)),
        Inference(
            torch.bfloat16,
            (Target(ENGINES, 1.0, 0.87),),
            valid=1.0,
            peers=("sdpa", *ENGINES, *INT8),
        ),
        Training(
            BertConfig(num_hidden_layers=2),
            (Target(("eager",), 3.0, 0.88), Target(("torch.compile",))),
        ),
    ),
    "cuda": (
        Step("MiniLM-L6", MINILM, _paragraphs, 128, 128, 1.8),
        Step("BERT-large", BERT_LARGE, _topics, 16, 512, 1.8),
    ),
}


# Inference --------------------------------------------------------------------------------------


def choose(directory: Path, case: Inference) -> demo.Batch:
    """Shuffle real paragraphs into batches; return the one whose padding is closest to the case's.

    Paragraphs under a quarter of the length, or for a batch without padding under the length, are
    left out; those over the length are cut.
    """
    shortest = 1.0 if case.valid == 1 else 0.25
    tokenizer = demo.load_tokenizer(directory, case.length)
    texts = [passage.text for passage in demo.passages()]
    filled = [len(encoding.ids) / case.length for encoding in tokenizer.encode_batch(texts)]
    texts = [text for text, fraction in zip(texts, filled, strict=True) if fraction >= shortest]
    random.Random(0).shuffle(texts)
    texts = texts[: len(texts) // case.batch_size * case.batch_size]
    batches = demo.to_batches(tokenizer, texts, case.batch_size)
    full = [batch for batch in batches if batch.mask.shape[1] == case.length]
    return min(full, key=lambda batch: abs(batch.mask.double().mean().item() - case.valid))


def load(directory: Path, case: Inference) -> dict[str, engines.Reader]:
    """Ours, as "fused" and "frozen", and the peers that are installed.

    The engines keep their weights frozen too.
    """

    def model(attn_implementation: str) -> Any:
        with engines.quiet_transformers():
            return transformers.BertModel.from_pretrained(
                directory, attn_implementation=attn_implementation, dtype=case.dtype
            )

    ours = {"fused": model("sdpa"), "frozen": model("sdpa")}
    for name, each in ours.items():
        trifuse.fuse(each, unpad=True, freeze=name == "frozen")
    readers = {}
    for peer in case.peers:
        if peer == "torch.compile":
            torch.compiler.reset()
            readers[peer] = demo.reader(torch.compile(model("sdpa")))
        elif peer in TORCH:
            readers[peer] = demo.reader(model(peer))
    served = engines.load(directory, case.dtype)
    if set(INT8) & set(case.peers):
        quantized = engines.load(directory, torch.int8)
        served |= {f"{name}, int8": read for name, read in quantized.items()}
    readers |= {name: read for name, read in served.items() if name in case.peers}
    return readers | {name: demo.reader(each) for name, each in ours.items()}


@dataclass(frozen=True)
class Read:
    """The results of all variants on one batch."""

    heading: str
    variants: list[demo.Result]
    targets: list[Result] = field(repr=False)

    def record(self) -> dict[str, Any]:
        return {"heading": self.heading, "results": [one.record() for one in self.variants]}


@torch.inference_mode()
def read(case: Inference, directory: Path, rounds: int, progress: Progress) -> Read:
    task = progress.add_task("loading", total=1)
    batch = choose(directory, case)
    readers = load(directory, case)
    exact = demo.reader(BertModel.from_pretrained(directory, attn_implementation="sdpa").double())
    progress.advance(task)
    ours = readers["frozen"](*batch)[batch.mask]
    for peer, peer_reads in readers.items():
        if peer in INT8:
            continue
        check_agreement(peer, [ours], [peer_reads(*batch)[batch.mask].to(case.dtype)])
    variants = demo.compare(readers, exact, [batch], rounds, progress)

    lengths = batch.mask.sum(1).tolist()
    config = BertConfig.from_json(directory / "config.json")
    size = f"{case.batch_size} × {case.length}"
    heading = f"{_NAMES[case.dtype]}, {size}, {sum(lengths) / batch.mask.numel():.0%} valid"
    timings = {variant.variant: variant.timing for variant in variants}
    results = _against(
        case.targets,
        "MiniLM-L6",
        "forward",
        heading,
        timings,
        engines.flops(config, lengths),
        case.dtype,
    )
    return Read(heading, variants, results)


def _against(
    targets: Sequence[Target],
    name: str,
    step: str,
    shape: str,
    timings: Mapping[str, Timing],
    work: float,
    dtype: torch.dtype,
) -> list[Result]:
    """A row for each target that has a timed peer."""
    ceiling = ceilings.matrix_rate(dtype)
    timed = [
        ({peer: timings[peer] for peer in target.peers if peer in timings}, target)
        for target in targets
    ]
    return [
        Result(
            case=name,
            step=step,
            shape=shape,
            ours=timings.get("frozen") or timings["fused"],
            peers=peers,
            refused={},
            work=work,
            ceiling=ceiling,
            at_least=target.at_least,
            at_least_fraction=target.at_least_fraction,
        )
        for peers, target in timed
        if peers
    ]


# Training ---------------------------------------------------------------------------------------


def train(case: Training, seconds: float) -> list[Result]:
    torch.manual_seed(0)
    B, L, config = case.batch_size, case.length, case.config
    eager = BertEncoder(config)
    x, grad_out = (torch.randn(B, L, config.hidden_size) for _ in range(2))
    lengths = torch.linspace(L / 4, 3 * L / 4, B).round().long()
    mask = torch.arange(L) < lengths[:, None]
    grad_out[~mask] = 0  # padding has no part in a loss
    x.requires_grad_()

    models: dict[str, BertEncoder] = {"fused": copy.deepcopy(eager), "eager": eager}
    trifuse.fuse(models["fused"], unpad=True)

    def step(model: Callable[..., Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        out = model(x, mask)
        return [out.detach(), *torch.autograd.grad(out, [x, *parameters], grad_out)]

    def compared(step: Callable[[], list[Tensor]]) -> list[Tensor]:
        # All parameters' gradients as one vector: a key bias's gradient is 0 except for rounding.
        out, grad_x, *grads = step()
        return [out[mask], grad_x[mask], torch.cat([grad.flatten() for grad in grads])]

    steps = {
        name: functools.partial(step, model.eval(), list(model.parameters()))
        for name, model in models.items()
    }
    check_agreement("eager", compared(steps["fused"]), compared(steps["eager"]))
    for model in models.values():
        model.train()
    if "torch.compile" in case.peers:
        torch.compiler.reset()
        compiled = torch.compile(eager)
        steps["torch.compile"] = functools.partial(step, compiled, list(eager.parameters()))
    timings = timing.alternate(steps, seconds=seconds, min_rounds=3)
    shape = f"fp32, {B} × {L}, half valid, dropout {config.hidden_dropout_prob}"
    return _against(
        case.targets,
        f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}",
        "forward + backward",
        shape,
        timings,
        3 * engines.flops(config, lengths.tolist()),
        torch.float32,
    )


def random_model(config: BertConfig) -> tuple[str, torch.nn.Module]:
    """The peer's name and model: transformers' on torch's attention or, without it, ours."""
    if transformers is None:
        model = BertModel(replace(config, attn_implementation="sdpa"), add_pooling_layer=False)
        return "trifuse.models on sdpa", model
    theirs = transformers.BertConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        attn_implementation="sdpa",
    )
    return "transformers on sdpa", transformers.BertModel(theirs, add_pooling_layer=False)


def step(case: Step, device: str, seconds: float) -> Result:
    torch.manual_seed(0)
    config, lengths = case.config, torch.tensor(case.lengths(), device=device)
    peer, model = random_model(config)
    model = model.to(device).eval()
    exact = torch.float64 if case.dtype == torch.float32 else torch.float32
    dtypes = {"fused": case.dtype, peer: case.dtype, "exact": exact}
    models = {name: copy.deepcopy(model).to(dtype) for name, dtype in dtypes.items()}
    trifuse.fuse(models["fused"], unpad=True)

    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    input_ids = torch.randint(1, config.vocab_size, mask.shape, device=device) * mask
    grad_out = torch.randn(*mask.shape, config.hidden_size, device=device) * mask[..., None]

    def function(name: str) -> Callable[[], Sequence[Tensor]]:
        model = models[name]
        parameters = list(model.parameters())

        def forward_backward() -> list[Tensor]:
            out = model(input_ids, mask).last_hidden_state
            return [out.detach(), *torch.autograd.grad(out, parameters, grad_out.to(out.dtype))]

        return forward_backward

    def compared(results: Sequence[Tensor]) -> list[Tensor]:
        # All parameters' gradients as one vector: a key bias's gradient is 0 except for rounding.
        out, *grads = results
        return [out[mask], torch.cat([grad.flatten() for grad in grads])]

    functions = {name: function(name) for name in models}
    theirs, expected = compared(functions[peer]()), compared(functions.pop("exact")())
    del models["exact"]

    def check(step: Callable[[], Sequence[Tensor]]) -> None:
        check_accuracy(peer, compared(step()), theirs, expected)

    check(functions["fused"])
    head_dim = config.hidden_size // config.num_attention_heads
    also, refused = other_kernels(
        backends.Call("attention", device, case.dtype, head_dim),
        lambda: functions["fused"],
        check,
    )
    for model in models.values():
        model.train()
    timings = timing.alternate(functions | also, device=device, waited=True, seconds=seconds)
    valid = mask.double().mean().item()
    return Result(
        case=f"{case.model}, {config.num_hidden_layers} layers of {config.hidden_size}",
        step="forward + backward",
        shape=f"{_NAMES[case.dtype]}, {' × '.join(map(str, mask.shape))}, {valid:.0%} valid",
        ours=timings.pop("fused"),
        also={name: timings.pop(name) for name in also},
        peers=timings,
        refused=refused,
        work=3 * engines.flops(config, lengths.tolist()),
        ceiling=ceilings.matrix_rate(case.dtype, device=device),
        at_least=case.at_least,
    )


# The command ------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Read, train and print the tables."""
    parser = command_line.parser("bert", __doc__)
    parser.add_argument(
        "--latency", action="store_true", help="read one sentence at a time instead, on a CPU"
    )
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if options.latency:
        return read_one_sentence(options)
    device: str = options.device
    cases = select(CASES[device], lambda case: case.name, options.cases)
    if device == "cuda":
        return train_on_a_gpu([case for case in cases if isinstance(case, Step)], options)
    return read_and_train(cases, options)


def machine_facts(device: str) -> dict[str, Any]:
    facts = machine.facts(device)
    facts["transformers"] = None if transformers is None else transformers.__version__
    return facts


def read_one_sentence(options: argparse.Namespace) -> int:
    directory, facts, caption = _prepare()
    if directory is None:
        return 1
    records = []
    for dtype, name in _NAMES.items():
        found = latency.compare(directory, dtype, options.threads, 2 if options.quick else 12)
        print_table(latency.table(found, f"MiniLM-L6, one sentence, {name}", caption))
        records += [{"dtype": name, **one.record()} for one in found]
    if options.json is not None:
        report.write_json(options.json, {"machine": facts, "latency": records})
    return 0


def _prepare() -> tuple[Path | None, dict[str, Any], str]:
    """Return the weights' directory, or None if something is missing; the machine, and a caption.

    Prints what is missing.
    """
    facts = machine_facts("cpu")
    facts["engines"] = {e.name: e.version for e in engines.ENGINES if e.installed}
    versions = "".join(f", {name} {version}" for name, version in facts["engines"].items())
    caption = f"{machine.describe(facts)}\ntransformers {facts['transformers']}{versions}"
    if transformers is None:
        print_missing("transformers")
        return None, facts, caption
    try:
        return demo.model_directory(), facts, caption
    except FileNotFoundError as missing:
        console.print(str(missing), style="red", markup=False)
        return None, facts, caption


def train_on_a_gpu(cases: Sequence[Step], options: argparse.Namespace) -> int:
    facts = machine_facts("cuda")
    console.print(machine.describe(facts), soft_wrap=True, markup=False)
    if transformers is None:
        console.print("transformers is not installed: trifuse.models stands in for it")
    seconds = 0.6 if options.quick else 12.0
    with trifuse.backend(options.backend):
        results, failed = run_all(
            cases,
            lambda case: case.name,
            lambda case: step(case, options.device, seconds),
            lambda some: report.save(options, facts, some),
        )
    report.write("bert", options, facts, results, failed=failed, fastest_only=True)
    return bool(failed)


def read_and_train(
    cases: Sequence[Inference | Training | Step], options: argparse.Namespace
) -> int:
    directory, facts, caption = _prepare()
    if directory is None:
        return 1
    console.print(caption, soft_wrap=True, markup=False)

    reads, results = [], []
    with trifuse.backend(options.backend), progress_bars() as progress:
        for case in cases:
            if isinstance(case, Inference):
                reads.append(read(case, directory, 3 if options.quick else 9, progress))
                results += reads[-1].targets
            elif isinstance(case, Training):
                task = progress.add_task("training", total=None)
                results += train(case, 0.6 if options.quick else 12.0)
                progress.remove_task(task)
    for one in reads:
        title = f"MiniLM-L6 on paragraphs of the language reference, {one.heading}"
        console.print(demo.result_table(one.variants, title, caption))
    print_table(report.table("bert", results, fastest_only=True))
    inferences = [case for case in cases if isinstance(case, Inference)]
    quantized = [torch.int8 for case in inferences if set(INT8) & set(case.peers)]
    engines.print_left_out([*(case.dtype for case in inferences), *quantized])
    if options.json is not None:
        content = {
            "machine": facts,
            "times": [result.record() for result in results],
            "inference": [one.record() for one in reads],
        }
        report.write_json(options.json, content)
    if options.plot is not None and reads:
        panels = {one.heading: one.variants for one in reads}
        demo.plot(panels, "MiniLM-L6 on real text", caption, options.plot)
        console.print(f"wrote {options.plot}", markup=False)
    return 0
