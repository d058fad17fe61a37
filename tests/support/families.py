"""The table of docs/transformers.md: how much of each family of transformers runs fused.

    python tests/support/families.py docs/transformers.md    # writes the table into the page

Every family is built at a tiny size, with random weights, fused and run. The numbers count the
calls of the run. A test compares them with the page.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from model_sizes import (
    BLOOM_SIZES,
    DEEPSEEK_SIZES,
    DISENTANGLED,
    DISTILBERT_SIZES,
    ERNIE_EXPERTS,
    EXPERTS,
    GEMMA4_SIZES,
    GPT_SIZES,
    GROUPED_QUERIES,
    GROWING_SCORES,
    MPT_SIZES,
    OPT_SIZES,
    PADDED_SIZES,
    SECTIONS,
    SIZES,
    SPECIAL_TOKENS,
    SPEECH_SIZES,
    SWIN_SIZES,
    T5_SIZES,
    TRANSLATION_SIZES,
    VIT_SIZES,
    WHISPER_SIZES,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse
from trifuse.recipes import rotary_functions, sublayers

EMBEDDED = PADDED_SIZES | {"embedding_size": 32}
GROUPED = SIZES | GROUPED_QUERIES | {"pad_token_id": 0}
# Without dropping layers or masking spectra at random, as these models do in training.
SPEECH = SPEECH_SIZES | {"layerdrop": 0.0, "apply_spec_augment": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": PADDED_SIZES,
    "Roberta": PADDED_SIZES,
    "XLMRoberta": PADDED_SIZES,
    "Camembert": PADDED_SIZES,
    "Electra": EMBEDDED,
    "DistilBert": DISTILBERT_SIZES,
    "Albert": EMBEDDED,
    "MPNet": PADDED_SIZES,
    "ModernBert": PADDED_SIZES | SPECIAL_TOKENS | {"local_attention": 4},
    "Esm": PADDED_SIZES | {"mask_token_id": 4},
    "LayoutLM": PADDED_SIZES,
    "Bart": TRANSLATION_SIZES,
    "MBart": TRANSLATION_SIZES,
    "Marian": TRANSLATION_SIZES,
    "Pegasus": TRANSLATION_SIZES,
    "T5": T5_SIZES,
    "UMT5": T5_SIZES,
    "GPT2": GPT_SIZES | {"n_layer": 2},
    "OPT": OPT_SIZES,
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": 4},
    "Qwen3": GROUPED | {"head_dim": 8},
    "Gemma3Text": GROUPED | {"head_dim": 8, "sliding_window": 4},
    "Qwen2": GROUPED,
    "Gemma2": GROUPED | {"head_dim": 8, "sliding_window": 4},
    "Phi3": GROUPED,
    "Glm4": GROUPED | {"head_dim": 8},
    "GPTNeoX": PADDED_SIZES,
    "StableLm": GROUPED,
    "Cohere": GROUPED,
    "Olmo": GROUPED,
    "Nemotron": GROUPED,
    "Persimmon": PADDED_SIZES,
    "GPTBigCode": GPT_SIZES | {"n_layer": 2},
    "Mixtral": GROUPED | EXPERTS,
    "Qwen2Moe": GROUPED | EXPERTS | {"shared_expert_intermediate_size": 16},
    "Qwen3Moe": GROUPED | EXPERTS | {"head_dim": 8},
    "Olmoe": GROUPED | EXPERTS,
    "GraniteMoe": GROUPED | EXPERTS,
    "GptOss": GROUPED | EXPERTS | {"head_dim": 8, "sliding_window": 4},
    "DeepseekV2": DEEPSEEK_SIZES | {"topk_method": "group_limited_greedy"},
    "DeepseekV3": DEEPSEEK_SIZES,
    "Phimoe": GROUPED | EXPERTS,
    "Ernie4_5_Moe": GROUPED | ERNIE_EXPERTS,
    "Mistral4": DEEPSEEK_SIZES | GROWING_SCORES,
    "Gemma4Text": GROUPED | GEMMA4_SIZES,
    "Qwen3VLText": GROUPED | SECTIONS | {"head_dim": 8},
    "NanoChat": GROUPED,
    "ViT": VIT_SIZES,
    "DeiT": VIT_SIZES,
    "Dinov2": VIT_SIZES,
    "DINOv3ViT": VIT_SIZES,
    "Swin": SWIN_SIZES,
    "Swinv2": SWIN_SIZES,
    "Beit": VIT_SIZES | {"use_relative_position_bias": True},
    "Data2VecVision": VIT_SIZES | {"use_relative_position_bias": True, "drop_path_rate": 0.0},
    "SiglipVision": VIT_SIZES,
    "SiglipText": PADDED_SIZES,
    "CLIPVision": VIT_SIZES,
    "CLIPText": PADDED_SIZES | {"eos_token_id": 2},
    "Whisper": WHISPER_SIZES,
    "Wav2Vec2": SPEECH,
    "Hubert": SPEECH | {"do_stable_layer_norm": True},
    "MegatronBert": PADDED_SIZES,
    "RemBert": PADDED_SIZES | {"input_embedding_size": 16},
    "RoFormer": EMBEDDED,
    "DebertaV2": PADDED_SIZES | DISENTANGLED,
    # With "sdpa" transformers adds its ALiBi once; with all other implementations, twice.
    "Falcon": SIZES | {"alibi": True, "attn_implementation": "eager"},
    "Bloom": BLOOM_SIZES,
    "Mpt": MPT_SIZES,
    "CodeGen": GPT_SIZES | {"n_layer": 2, "rotary_dim": 4},
    "GPTJ": GPT_SIZES | {"n_layer": 2, "rotary_dim": 4},
}
B, L = 3, 10
SAMPLES = 4  # samples of a sound for each token of a text
KEEP = torch.arange(L) < torch.tensor([L, 6, 3])[:, None]


def build(name: str, options: dict[str, Any] | None = None) -> Any:
    """Returns a tiny model of a family, in evaluation mode."""
    torch.manual_seed(0)
    options = FAMILIES[name] if options is None else options
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}Model")(config).eval()


def inputs(model: Any, keep: Tensor = KEEP) -> dict[str, Tensor]:
    """Returns inputs of a model: padded texts or sounds, images, or spectra and texts."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 97, (B, L), generator=generator)
    given: dict[str, Any]
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(B, 3, 16, 16, generator=generator)}
    if model.main_input_name == "input_values":
        sound = torch.randn(B, SAMPLES * L, generator=generator)
        return {"input_values": sound, "attention_mask": keep.repeat_interleave(SAMPLES, 1).long()}
    if model.main_input_name == "input_features":
        given = {"input_features": torch.randn(B, 8, 2 * L, generator=generator)}
    else:
        given = {"input_ids": ids, "attention_mask": keep.long()}
    if model.config.is_encoder_decoder:
        given |= {"decoder_input_ids": ids, "use_cache": False}
    return given


def drop_nothing(model: nn.Module) -> None:
    """Sets the probabilities of dropout to 0 in all modules of a model."""
    for module in model.modules():
        own = vars(module)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        own.update({k: 0.0 for k, v in own.items() if "drop" in k and isinstance(v, float)})


def is_of_norm(name: str, args: Any) -> bool:
    """Whether an operation of torch is a norm, or the root of one: Gemma 4's is a power."""
    is_root = name.startswith("aten.pow.Tensor_Scalar") and args[1] == -0.5
    return is_root or name.startswith(("aten.native_layer_norm", "aten.rsqrt"))


class Calls(TorchDispatchMode):
    """Counts calls of torch's norms or their parts, and of trifuse's operators and sums.

    A sum of torch's counts if a norm takes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.totals: list[Tensor] = []  # torch's sums

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.counts["torch's norms"] += is_of_norm(name, args)
        for operator in ("attention", "dropout_add_layer_norm"):
            self.counts[operator] += name.startswith(f"trifuse.{operator}")
        if name.startswith("trifuse.dropout_add_layer_norm_forward"):
            takes_sum = args[1] is not None
            self.counts["sums"] += takes_sum
            apart = not takes_sum and any(args[0] is total for total in self.totals)
            self.counts["torch's sums"] += apart
        out = func(*args, **(kwargs or {}))
        if name.startswith("aten.add") and out.dim() == 3:  # not heads, which are rotated by sums
            self.totals.append(out)
        return out


@contextlib.contextmanager
def recognised(counts: Counter[str]) -> Iterator[None]:
    """Counts the products with an activation, gates included, and the calls of known rotations."""

    def counting(real: Any) -> Any:
        def count(*args: Any) -> Tensor:
            counts["activations"] += 1
            return real(*args)

        return count

    def rotate(known: Any, *args: Any, **options: Any) -> Any:
        counts["rotations"] += 1
        return real_rotate(known, *args, **options)

    real_rotate = rotary_functions._rotate

    with contextlib.ExitStack() as stack:
        for module, name in (
            (sublayers, "linear_activation"),
            (sublayers, "gated_linear"),
            (sublayers, "gated_halves"),
        ):
            counted = counting(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, counted))
        stack.enter_context(mock.patch.object(rotary_functions, "_rotate", rotate))
        yield


@torch.no_grad()
def count(model: nn.Module) -> Counter[str]:
    """Returns how often one run calls each operator."""
    with Calls() as calls, recognised(calls.counts):
        model(**inputs(model))
    return calls.counts


def row(name: str) -> str:
    """Returns a family's row of the table."""
    model = build(name)
    trifuse.fuse(model)
    counts = count(model)
    unpadded = trifuse.fuse(build(name), unpad=True).unpadded
    ours, torchs = counts["dropout_add_layer_norm"], counts["torch's norms"]
    stacks = ", ".join(f"`{path}`" if path else "the model" for path in unpadded)
    return (
        f"| {name} | {counts['attention']} | {ours} of {ours + torchs} | {counts['sums']} "
        f"| {counts['activations']} | {counts['rotations']} | {stacks or '–'} |"
    )


def table() -> str:
    """Returns the table."""
    logging.getLogger("trifuse").setLevel(logging.ERROR)
    head = (
        "| family | attentions | norms | with sums | activations | rotations | without padding |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(map(row, FAMILIES)) + "\n"


BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"


def main(page: Path) -> None:
    """Writes the table into a page, between its marks."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
