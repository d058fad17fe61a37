"""One request at a time: families of transformers' models, fused and frozen, against transformers.

A sentence, a second of sound or an image goes through an encoder; a generator continues a prompt,
translates a sentence or transcribes a sound. Such a request computes so little that the bytes of
the weights and Python between the products decide. The models have their published sizes, except
that vocabularies are cut to 32,000 words and Qwen3 to 8 layers, and random weights.

An encoder reads 28 tokens. A generator takes the likeliest word each time, with its own
``generate`` and default cache; in float32 all must write the same words. The time per word is that
of 25 words less that of one. transformers' own model uses torch's attention.

The ceiling is the larger of two times: the operations of a forward, or of a word, at the matrix
rate, and the bytes of the numbers that it multiplies, each read once, at the copy rate.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import trifuse
from trifuse.benchmarks import ceilings, command_line, engines, timing
from trifuse.benchmarks.agreement import check_agreement
from trifuse.benchmarks.cases import run_selected
from trifuse.benchmarks.terminal import print_missing, print_table
from trifuse.benchmarks.timing import Timing

try:
    import transformers
except ImportError:
    transformers = None

THEIRS, OURS = "transformers", ("fused", "frozen")
WORDS = 25
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_VOCABULARY = 32000


class Model(NamedTuple):
    """A model of transformers, and its published sizes."""

    name: str
    config: str  # the class's name without "Config"
    kind: str  # that of the model, after the name of the family
    reads: str  # tokens, sound, spectrum or image
    options: Mapping[str, Any]  # of the configuration

    @property
    def generates(self) -> bool:
        return self.kind not in ("Model", "EncoderModel")


_TRANSLATOR = {
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
}
_BART = {
    "encoder_layers": 6,
    "decoder_layers": 6,
    "d_model": 768,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
}
_ALBERT = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_PYTHIA = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_GEMMA = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
_QWEN = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MODELS = (
    Model("BERT base", "Bert", "Model", "tokens", {}),
    Model("DistilBERT", "DistilBert", "Model", "tokens", {}),
    Model("ALBERT base", "Albert", "Model", "tokens", _ALBERT),
    Model("MPNet base", "MPNet", "Model", "tokens", {}),
    Model("ModernBERT base", "ModernBert", "Model", "tokens", {}),
    Model("T5 small, encoder", "T5", "EncoderModel", "tokens", {}),
    Model("wav2vec2 base, 1 s", "Wav2Vec2", "Model", "sound", {}),
    Model("ViT base, 224 × 224", "ViT", "Model", "image", {}),
    Model("T5 small", "T5", "ForConditionalGeneration", "tokens", {}),
    Model("Marian base", "Marian", "MTModel", "tokens", _TRANSLATOR),
    Model("BART base", "Bart", "ForConditionalGeneration", "tokens", _BART),
    Model("Whisper tiny", "Whisper", "ForConditionalGeneration", "spectrum", {}),
    Model("GPT-2", "GPT2", "LMHeadModel", "tokens", {}),
    Model("OPT 125M", "OPT", "ForCausalLM", "tokens", {}),
    Model("Pythia 160M", "GPTNeoX", "ForCausalLM", "tokens", _PYTHIA),
    Model("Gemma 3 270M", "Gemma3Text", "ForCausalLM", "tokens", _GEMMA),
    Model("Qwen3 0.6B, 8 layers", "Qwen3", "ForCausalLM", "tokens", _QWEN),
)


class Case(NamedTuple):
    model: Model
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.model.name}, {_NAMES[self.dtype]}"


CASES = tuple(Case(model, dtype) for dtype in _NAMES for model in MODELS)


class Outcome(NamedTuple):
    """Seconds by contender: of a forward, or of a word."""

    case: Case
    timings: dict[str, Timing]
    first: dict[str, Timing]  # up to the first word, the prompt included; of generators
    floor: float  # the least seconds, by the machine's rates

    def ratio(self, name: str) -> float:
        """How many times as fast as transformers a contender is."""
        return statistics.median(self.timings[name].ratios(self.timings[THEIRS]))

    def record(self) -> dict[str, Any]:
        def medians(timings: Mapping[str, Timing]) -> dict[str, float]:
            return {name: each.median for name, each in timings.items()}

        return {
            "case": self.case.name,
            "seconds": medians(self.timings),
            "first word": medians(self.first),
            "ratios": {name: self.ratio(name) for name in OURS},
            "floor": self.floor,
        }


def build(model: Model) -> Any:
    """Return a model with random weights, in evaluation mode, that writes any number of words."""
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    given = {"vocab_size": _VOCABULARY, **tokens, **model.options}
    if model.reads == "spectrum":
        given |= {"suppress_tokens": None, "begin_suppress_tokens": None}
    with engines.quiet_transformers():
        config = getattr(transformers, f"{model.config}Config")(**given)
        family = model.config.removesuffix("Text") if model.generates else model.config
        made = getattr(transformers, f"{family}{model.kind}")(config).eval()
    if model.generates:
        made.generation_config.eos_token_id = None
        made.generation_config.pad_token_id = 0
    return made


def draw(model: Model, dtype: torch.dtype, config: Any) -> dict[str, Tensor]:
    """Return one request."""
    generator = torch.Generator().manual_seed(0)
    if model.reads == "sound":
        return {"input_values": torch.randn(1, 16000, generator=generator).to(dtype)}
    if model.reads == "image":
        size = config.image_size
        image = torch.randn(1, 3, size, size, generator=generator)
        return {"pixel_values": image.to(dtype)}
    if model.reads == "spectrum":
        bands, frames = config.num_mel_bins, 2 * config.max_source_positions
        spectrum = torch.randn(1, bands, frames, generator=generator)
        return {"input_features": spectrum.to(dtype)}
    ids = torch.randint(5, _VOCABULARY, (1, 28), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def run(case: Case, seconds: float) -> Outcome:
    """Time the contenders in turns.

    Raises:
        AssertionError: the results differ.
    """
    theirs = build(case.model).to(case.dtype)
    models = {THEIRS: theirs, **{name: copy.deepcopy(theirs) for name in OURS}}
    for name in OURS:
        trifuse.fuse(models[name], freeze=name == "frozen")
    inputs = draw(case.model, case.dtype, theirs.config)
    time = functools.partial(timing.alternate, seconds=seconds, min_rounds=3)
    with torch.no_grad():
        if not case.model.generates:
            calls = {
                name: functools.partial(_forward, each, inputs) for name, each in models.items()
            }
            for name in OURS:
                check_agreement(THEIRS, [calls[name]()], [calls[THEIRS]()])
            return Outcome(case, time(calls), {}, _floor(calls[THEIRS], case.dtype))
        write = {name: functools.partial(_write, each, inputs) for name, each in models.items()}
        for name in OURS:
            _check_words(case.dtype, write[name], write[THEIRS])
        calls = {
            f"{name}, {words}": functools.partial(each, words)
            for name, each in write.items()
            for words in (1, WORDS)
        }
        taken = time(calls)
        floor = _floor(lambda: write[THEIRS](2), case.dtype, without=lambda: write[THEIRS](1))
    first = {name: taken[f"{name}, 1"] for name in models}
    further = {name: _per_word(taken[f"{name}, {WORDS}"], first[name]) for name in models}
    return Outcome(case, further, first, floor)


def _per_word(whole: Timing, first: Timing) -> Timing:
    pairs = zip(whole.seconds, first.seconds, strict=True)
    return Timing(tuple((both - one) / (WORDS - 1) for both, one in pairs))


def _forward(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    out: Tensor = model(**inputs).last_hidden_state
    return out


def _write(model: Any, inputs: Mapping[str, Tensor], words: int, **options: Any) -> Any:
    return model.generate(
        **inputs,
        max_new_tokens=words,
        min_new_tokens=words,
        do_sample=False,
        num_beams=1,
        **options,
    )


def _check_words(dtype: torch.dtype, ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """Check the scores of the first word, and in float32 all words."""
    options = {"return_dict_in_generate": True, "output_logits": True}
    logits = ([each(1, **options).logits[0].to(dtype)] for each in (ours, theirs))
    check_agreement(THEIRS, *logits)
    if dtype == torch.float32 and not torch.equal(ours(WORDS), theirs(WORDS)):
        raise AssertionError(f"we wrote other words than {THEIRS}")


def _floor(
    call: Callable[[], object], dtype: torch.dtype, without: Callable[[], object] | None = None
) -> float:
    """Return the least seconds of a call, less those of another, by the machine's rates."""
    flops = _flops(call) - (0 if without is None else _flops(without))
    numbers = flops / 2 / (1 if without is not None else 28)
    of_products = flops / ceilings.matrix_rate(dtype).value
    return max(of_products, numbers * dtype.itemsize / ceilings.copy_rate().value)


def _flops(call: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops())


def table(outcomes: Sequence[Outcome]) -> Table:
    out = Table("case", title="milliseconds of a request, or of a generator's further words")
    for column in (THEIRS, *OURS, "fused", "frozen", "of the ceiling", "first word"):
        out.add_column(column, justify="right")
    for outcome in outcomes:
        medians = {name: each.median for name, each in outcome.timings.items()}
        first = [f"{each.median * 1e3:.1f}" for each in outcome.first.values()]
        out.add_row(
            outcome.case.name,
            *(f"{medians[name] * 1e3:.2f}" for name in (THEIRS, *OURS)),
            *(f"{outcome.ratio(name):.2f}×" for name in OURS),
            f"{outcome.floor / medians['frozen']:.0%}",
            " / ".join(first),
        )
    return out


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table."""
    parser = command_line.parser("one_request", __doc__, devices=("cpu",), plots=False)
    options = parser.parse_args(argv)
    if transformers is None:
        print_missing("transformers")
        return 1
    call = functools.partial(run, seconds=0.5 if options.quick else 3)
    with engines.quiet_transformers():
        _, outcomes, failed = run_selected(options, CASES, lambda case: case.name, call)
    if outcomes:
        print_table(table(outcomes))
    return bool(failed)
