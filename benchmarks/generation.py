"""Generation: how fast language models read a prompt and write what follows it.

Two models with random weights. "GPT-2" has 12 layers of 768 features: ours is
:class:`trifuse.models.transformer.LanguageModel`, with the weights of transformers' GPT-2. "Llama"
has 2 layers as wide as those of Llama 3 8B: 4096 features, 32 heads over 8 key heads; ours is
transformers' model, fused. Its vocabulary is cut to 8192 words, so that all engines fit in memory
side by side. "eager" is ours before it is fused; for Llama, transformers' model with its eager
formula of attention.

Every engine reads the same prompts of random words and takes the likeliest word each time; in
float32 all must write the same words. Each runs in its own process, and they take turns. The time
to the first word counts for the prompt, and that of further words for decoding. The table of a case
appears as soon as it is measured.

A full run takes about eight minutes on two cores. Slow cases have fewer rounds, three at least.
torch.compile takes part in one case of each model, because it compiles for up to a minute.
``--quick`` takes less than two minutes: one round of the cases with one text, or of ``--cases``,
without torch.compile.

The ceiling of a prompt is its operations at the matrix rate. That of decoding is the larger of two
times: this, and the bytes of the weights and the cache at the copy rate.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

import trifuse
from trifuse.benchmarks import ceilings, command_line, engines, processes
from trifuse.benchmarks.cases import run_selected, select
from trifuse.benchmarks.terminal import print_missing, print_table
from trifuse.models import decoding
from trifuse.models.transformer import LanguageModel, LanguageModelConfig

try:
    import transformers
except ImportError:
    transformers = None

OURS = ("fused", "fused, frozen")
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

Generator = Callable[[Tensor, int], Tensor]
"""From prompts (B, L) and a number n to the next n words of each, (B, n)."""


class Sizes(NamedTuple):
    """The sizes of a model."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int
    gated: bool

    @property
    def layer_weights(self) -> int:
        """Numbers in the weights of a layer's linear layers."""
        keys_and_values = 2 * self.hidden * self.hidden * self.key_heads // self.heads
        feed_forward = (3 if self.gated else 2) * self.hidden * self.intermediate
        return 2 * self.hidden * self.hidden + keys_and_values + feed_forward

    def flops(self, batch: int, past: int, words: int) -> float:
        """Operations of reading further words after ``past`` of them, with logits of the last."""
        pairs = words * past + words * (words + 1) / 2
        weights = words * self.layers * self.layer_weights + self.hidden * self.vocabulary
        return batch * (2.0 * weights + 4.0 * pairs * self.layers * self.hidden)

    def bytes(self, batch: int, past: int, itemsize: int) -> float:
        """Bytes that writing one word reads: all weights, and the keys and values of ``past``."""
        weights = self.layers * self.layer_weights + self.hidden * self.vocabulary
        cache = 2 * batch * past * self.layers * self.hidden * self.key_heads // self.heads
        return float(itemsize) * (weights + cache)


class Words(NamedTuple):
    """How many words a text has."""

    prompt: int
    new: int


WORDS = {"GPT-2": Words(64, 16), "Llama": Words(32, 8)}  # a word of Llama takes longer
MODELS = {
    "GPT-2": Sizes(12, 768, 12, 12, 3072, 50257, gated=False),
    "Llama": Sizes(2, 4096, 32, 8, 14336, 8192, gated=True),
}


class Case(NamedTuple):
    model: str
    dtype: torch.dtype
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model}, {_NAMES[self.dtype]}, batch {self.batch}"

    @property
    def words(self) -> Words:
        return WORDS[self.model]


CASES = tuple(Case(model, dtype, batch) for model in MODELS for dtype in _NAMES for batch in (1, 8))
COMPILED = tuple(Case(model, torch.float32, 1) for model in MODELS)
"""The cases in which torch.compile takes part."""
ROUNDS, SECONDS = (3, 5), 10.0
"""The least and the most rounds, and the seconds after which only the least are completed."""


# The models -------------------------------------------------------------------------------------


def write_weights(model: str, sizes: Sizes, directory: Path) -> None:
    """Save random weights and a vocabulary as transformers does."""
    torch.manual_seed(0)
    if model == "GPT-2":
        config = transformers.GPT2Config(
            vocab_size=sizes.vocabulary,
            n_positions=sum(WORDS[model]) + 1,
            n_embd=sizes.hidden,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            n_inner=sizes.intermediate,
            activation_function="gelu",
            bos_token_id=1,
            eos_token_id=2,
        )
    else:
        config = transformers.LlamaConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.key_heads,
        )
    with engines.quiet_transformers():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        tokenizers = importlib.import_module("tokenizers")
        words = {_word(index): index for index in range(sizes.vocabulary)}
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, _word(0))),
            unk_token=_word(0),
            bos_token=_word(1),
            eos_token=_word(2),
        ).save_pretrained(directory)


def _word(index: int) -> str:
    return f"word{index}"


def language_model(theirs: Any) -> LanguageModel:
    """Return our model with the weights of transformers' GPT-2.

    Raises:
        ValueError: its activation is not the exact GELU or ReLU.
    """
    config = theirs.config
    if config.activation_function not in ("gelu", "relu"):
        raise ValueError(f"activation_function: got {config.activation_function!r}")
    model = LanguageModel(
        LanguageModelConfig(
            vocab_size=config.vocab_size,
            d_model=config.n_embd,
            nhead=config.n_head,
            num_layers=config.n_layer,
            dim_feedforward=config.n_inner or 4 * config.n_embd,
            activation=config.activation_function,
            layer_norm_eps=config.layer_norm_epsilon,
            max_length=config.n_positions,
        )
    )
    weights = {}
    for name, value in theirs.transformer.state_dict().items():
        layer = name.startswith("h.")
        # GPT-2 stores matrices as (inputs, outputs).
        matrix = layer and value.dim() == 2
        for part, ours in _PARTS.items():
            name = name.replace(part, ours)
        weights[f"decoder.layers.{name}" if layer else name] = value.t() if matrix else value
    weights["output.weight"] = weights["embedding.weight"]
    model.load_state_dict(weights)
    return model.to(theirs.dtype)


_PARTS = {
    "h.": "",
    "wte.": "embedding.",
    "wpe.": "positions.",
    "ln_f.": "decoder.norm.",
    "ln_1.": "norm1.",
    "ln_2.": "norm2.",
    "attn.c_attn.": "self_attn.in_proj_",
    "attn.c_proj.": "self_attn.out_proj.",
    "mlp.c_fc.": "linear1.",
    "mlp.c_proj.": "linear2.",
}


# A process of an engine -------------------------------------------------------------------------

_generate: Generator


def _start(name: str, model: str, directory: Path, dtype: torch.dtype, threads: int) -> None:
    global _generate
    torch.set_num_threads(threads)
    _generate = load(name, model, directory, dtype)


def load(name: str, model: str, directory: Path, dtype: torch.dtype) -> Generator:
    """Load one engine.

    Args:
        name: one of those that :func:`names` returns.
        model: "GPT-2" or "Llama".
        directory: what :func:`write_weights` wrote.
    """
    if name == "CTranslate2":
        return _load_ctranslate2(directory, dtype)
    formula = "eager" if name == "eager" else "sdpa"
    with engines.quiet_transformers():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation=formula, dtype=dtype
        ).eval()
    ours = model == "GPT-2" and name != "transformers"
    served = language_model(theirs).eval() if ours else theirs
    if name in OURS:
        trifuse.fuse(served, freeze=name == "fused, frozen")
    compiles = name == "torch.compile"
    if isinstance(served, LanguageModel):
        if compiles:
            served.step = torch.compile(served.step, dynamic=True)  # type: ignore[method-assign]
        return functools.partial(_search, served)
    if compiles:
        served.forward = torch.compile(served.forward)
    # A cache of a fixed size keeps the shapes, so that nothing is compiled again.
    return functools.partial(_generate_by_transformers, served, "static" if compiles else None)


@torch.inference_mode()
def _search(model: LanguageModel, prompt: Tensor, words: int) -> Tensor:
    return decoding.greedy_search(model, prompt, max_length=words).tokens


@torch.inference_mode()
def _generate_by_transformers(model: Any, cache: str | None, prompt: Tensor, words: int) -> Tensor:
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=words,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation=cache,
    )
    return out[:, prompt.shape[1] :]


def _load_ctranslate2(directory: Path, dtype: torch.dtype) -> Generator:
    generator = engines.load_ctranslate2("Generator", directory, directory, dtype)

    def generate(prompt: Tensor, words: int) -> Tensor:
        results = generator.generate_batch(
            [[_word(index) for index in row] for row in prompt.tolist()],
            max_length=words,
            min_length=words,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return torch.tensor([result.sequences_ids[0] for result in results])

    return generate


def _written(prompt: Tensor, new: int) -> Tensor:
    _generate(prompt, 1)  # the second long prompt packs weights that aren't frozen
    return _generate(prompt, 1 + new)


def _time(prompt: Tensor, new: int) -> tuple[float, float]:
    """Return the seconds of the prompt, and of each word after the first."""
    begin = time.perf_counter()
    _generate(prompt, 1)
    first = time.perf_counter()
    _generate(prompt, 1 + new)
    end = time.perf_counter()
    return first - begin, (end - first - (first - begin)) / new


# The comparison ---------------------------------------------------------------------------------


def names(case: Case, compiled: bool) -> tuple[str, ...]:
    """Return the engines that are compared."""
    found = ["transformers", "eager", *OURS]
    if compiled:
        found.append("torch.compile")
    served = {engine.name: engine for engine in engines.ENGINES}["CTranslate2"]
    if served.serves(case.dtype):
        found.append(served.name)
    return tuple(found)


class Outcome(NamedTuple):
    case: Case
    sizes: Sizes
    prompt: dict[str, float]  # seconds by engine, medians
    step: dict[str, float]  # seconds of one word of every text
    copy_rate: float
    matrix_rate: float

    def of_ceiling(self, engine: str) -> tuple[float, float]:
        """Return the fractions that the prompt and decoding reach."""
        case, sizes, words = self.case, self.sizes, self.case.words
        prompt = sizes.flops(case.batch, 0, words.prompt) / self.matrix_rate
        past = words.prompt + words.new // 2
        step = max(
            sizes.bytes(case.batch, past, case.dtype.itemsize) / self.copy_rate,
            sizes.flops(case.batch, past, 1) / self.matrix_rate,
        )
        return prompt / self.prompt[engine], step / self.step[engine]

    def rates(self, engine: str) -> tuple[float, float]:
        """Return words a second, of the prompt and of decoding."""
        batch = self.case.batch
        return batch * self.case.words.prompt / self.prompt[engine], batch / self.step[engine]

    def record(self) -> dict[str, Any]:
        figures = {
            engine: {
                "prompt, words a second": self.rates(engine)[0],
                "decoding, words a second": self.rates(engine)[1],
                "fractions of the ceilings": self.of_ceiling(engine),
            }
            for engine in self.prompt
        }
        return {"case": self.case.name, **self.case.words._asdict(), "engines": figures}


def run(case: Case, scratch: Path, quick: bool = False) -> Outcome:
    """Time the engines in turns.

    Raises:
        AssertionError: in float32, an engine writes other words than transformers' model.
    """
    directory, sizes, (length, new) = scratch / case.model, MODELS[case.model], case.words
    if not directory.exists():
        write_weights(case.model, sizes, directory)
    prompt = torch.randint(
        sizes.vocabulary, (case.batch, length), generator=torch.Generator().manual_seed(case.batch)
    )
    served = names(case, compiled=not quick and case in COMPILED)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in served}
    job = case.model, directory, case.dtype, torch.get_num_threads()
    with processes.each_in_a_process(served, _start, *job) as calls:
        expected = calls[served[0]](_written, prompt, new)
        for name in served[1:]:
            actual = calls[name](_written, prompt, new)
            if case.dtype == torch.float32 and not torch.equal(actual, expected):
                raise AssertionError(f"{name} writes other words than {served[0]}")
        if "torch.compile" in calls:
            calls["torch.compile"](_written, prompt, new)  # it compiles again at the second text
        least, most = (1, 1) if quick else ROUNDS
        begin = time.perf_counter()
        for done in range(most):
            if done >= least and time.perf_counter() - begin > SECONDS:
                break
            for name, call in calls.items():
                seconds[name].append(call(_time, prompt, new))
    prompts, steps = (
        {name: statistics.median(pair[part] for pair in of) for name, of in seconds.items()}
        for part in (0, 1)
    )
    rates = ceilings.copy_rate().value, ceilings.matrix_rate(case.dtype).value
    return Outcome(case, sizes, prompts, steps, *rates)


def table(outcome: Outcome) -> Table:
    """A row for each engine; the last columns compare ours with transformers and CTranslate2."""
    out = Table("engine", "prompt", "of the ceiling", "decoding", "of the ceiling")
    out.title = outcome.case.name
    peers = ("transformers", "CTranslate2")
    for peer in peers:
        out.add_column(f"{peer} / this: prompt, decoding")
    for column in out.columns[1:]:
        column.justify = "right"
    for engine in outcome.prompt:
        (prompt, step), fractions = outcome.rates(engine), outcome.of_ceiling(engine)
        ratios = [
            f"{outcome.prompt[peer] / outcome.prompt[engine]:.2f}×, "
            f"{outcome.step[peer] / outcome.step[engine]:.2f}×"
            if engine in OURS and peer in outcome.prompt
            else ""
            for peer in peers
        ]
        out.add_row(
            engine,
            f"{prompt:.0f} words/s",
            f"{fractions[0]:.0%}",
            f"{step:.1f} words/s",
            f"{fractions[1]:.0%}",
            *ratios,
        )
    return out


def main(argv: Sequence[str]) -> int:
    """Run the cases, and print the table of each."""
    parser = command_line.parser("generation", __doc__, devices=("cpu",), plots=False)
    options = parser.parse_args(argv)
    if transformers is None:
        print_missing("transformers")
        return 1
    chosen = select(CASES, lambda case: case.name, options.cases)
    if options.quick and options.cases is None:
        chosen = [case for case in chosen if case.batch == 1]
    engines.print_left_out([case.dtype for case in chosen], "CTranslate2")
    with tempfile.TemporaryDirectory() as scratch:

        def run_and_print(case: Case) -> Outcome:
            outcome = run(case, Path(scratch), options.quick)
            print_table(table(outcome))
            return outcome

        done = run_selected(options, chosen, lambda case: case.name, run_and_print)
    return bool(done.failed)
