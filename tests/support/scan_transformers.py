"""Checks that attn_implementation="trifuse" is right or raises, for every model of transformers.

    python tests/support/scan_transformers.py                      # all of them: about half an hour
    python tests/support/scan_transformers.py bert bloom t5        # only these
    python tests/support/scan_transformers.py --page docs/transformers.md    # also writes the page

Every base model that the installed transformers knows (``MODEL_MAPPING``) is built at a tiny size
with random weights, in a process of its own with limits on memory and time. It runs under "eager"
and under "trifuse", both in float64: on whole batches, on padded batches and, if it has a cache, on
a text in three pieces. Results are compared at real tokens, and may differ by no more than a few
times the error of "eager" in float32.

A model that the script can't build or feed is listed as not tried, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

GIB = 2**30
MEMORY = 8 * GIB
SECONDS = 60
LARGEST = 200_000_000  # parameters; larger models are not tried

BATCH, LENGTH = 3, 12
LENGTHS = (LENGTH, 8, 5)
PIECES = (6, 5, 1)  # lengths of the pieces of a text that goes through a cache

CACHE_NAMES = ("cache", "past_key_values")  # the second before transformers 5.24

# Largest error against eager in float64, as a multiple of eager's own error in float32.
FACTOR = 4


DEBUG = bool(os.environ.get("SCAN_DEBUG"))


def debug() -> None:
    """Prints the exception that is being handled, if SCAN_DEBUG is set."""
    if DEBUG:
        traceback.print_exc()


class Verdict(NamedTuple):
    """The outcome of one model."""

    model_type: str
    name: str
    outcome: str  # "right", "raises", "WRONG", "not tried"
    detail: str = ""


# Small models -----------------------------------------------------------------------------------

# The sizes that options of a configuration get, by the option's name.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(num_)?(key_value|kv)_heads|(n|num)(_attention)?_(kv|key_value)_heads?|n_head_kv", 2),
    (r"num_global_key_value_heads|swa_num_key_value_heads|.*num_key_value_heads", 2),
    (r"(.*_)?(n|num)_(attention_|self_attention_|cross_attention_)?heads?|.*attention_heads", 4),
    (r"rotary_dim", 8),
    (r"(.*_)?head_dim|d_kv|d_head|kv_channels|attention_head_size|.*head_size", 16),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|.*lora_rank", 16),
    (r"(.*_)?(intermediate|ffn|inner|mlp|ff|feed_forward)(_size|_dim|_hidden_size)?", 96),
    (r"n_inner|d_ff|ffn_hidden_size|dim_feedforward|.*_ffn_dim|.*intermediate_size", 96),
    (r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|model_dim|embedding_size)", 64),
    (r"dim|d_embed|width|projection_dim|.*_embed_dim|.*proj_dim|hidden_features", 64),
    (r"(.*_)?(num|n)_?(hidden_)?layers?|(.*_)?depth|num_blocks|.*_layers", 2),
    (r"(.*_)?(num|n)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"(num_experts_per_tok|moe_topk|moe_k|top_k|num_experts_per_token|topk_group|n_group)", 1),
    (r"(.*_)?vocab_size(_per_layer_input)?", 120),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length", 128),
    (r"sliding_window|attention_window_size|local_attention|attention_chunk_size", 4),
    (r"image_embedding_size", 4),
    (r"(.*_)?image_size", 32),
    (r"(.*_)?patch_size", 8),
)
_SIZES_OF_LAYERS = ("layers?", "depth", "vocab", "image_size", "position", "n_ctx", "sliding")


def _small(options: dict[str, Any], wanted: Callable[[str], int | None]) -> dict[str, Any]:
    """Returns a configuration's options with smaller sizes, also in nested configurations."""
    small: dict[str, Any] = {}
    layers = options.get("num_hidden_layers")
    kinds = options.get("layer_types") or options.get("mlp_layer_types")
    keep: list[int] = [0, -1]  # items kept of a list with one item per layer
    if isinstance(kinds, (list, tuple)) and len(set(kinds)) > 1:
        keep = sorted(kinds.index(kind) for kind in set(kinds))
    for name, value in options.items():
        if isinstance(value, dict) and name.endswith("config"):
            small[name] = _small(value, wanted)
        elif name in ("out_features", "out_indices", "stage_names"):
            continue  # they name layers
        elif isinstance(value, (list, tuple)) and len(value) == layers:
            small[name] = [value[i] for i in keep]
        elif name == "attention_types" and wanted("num_layers"):  # GPT-Neo: kinds and repetitions
            small[name] = [[kinds, 1] for kinds, _ in value]
        elif name == "attention_layers" and "attention_types" in options:
            continue  # made from the kinds
        elif name in ("depths", "num_layers_per_stage") and isinstance(value, (list, tuple)):
            small[name] = [1 for _ in value]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            size = wanted(name)
            small[name] = value if size is None else min(size, value)
        elif isinstance(value, dict) and "mrope_section" in value:
            small[name] = value | {"mrope_section": [4, 2, 2]}
        else:
            small[name] = value
    if layers is not None:
        small["num_hidden_layers"] = len(keep)
    vocabulary = small.get("vocab_size")
    if isinstance(vocabulary, int):
        tokens = [name for name in small if re.fullmatch(r".*_token_(id|index)", name)]
        for spare, name in enumerate(tokens):
            if isinstance(small[name], int) and small[name] >= vocabulary:
                small[name] = vocabulary - 1 - spare % 20
    return small


def _size(name: str) -> int | None:
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)


def _fewer_layers(name: str) -> int | None:
    few = any(re.search(pattern, name) for pattern in _SIZES_OF_LAYERS)
    return _size(name) if few else None


def configurations(config_class: type, problems: list[str]) -> Iterator[Any]:
    """Yields configurations from small to large: all sizes small, only fewer layers, unchanged."""
    default = config_class()
    options = default.to_dict()
    for name in ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype"):
        options.pop(name, None)
    for wanted in (_size, _fewer_layers):
        try:
            config = config_class(**_small(options, wanted))
        except Exception as error:  # incompatible sizes
            problems.append(f"not built: {_line(error)}")
            debug()
        else:
            yield config
    yield default


def build(model_class: type, config: Any, implementation: str) -> Any:
    """Returns the model with random weights, the same for every implementation."""
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    with contextlib.suppress(AttributeError):
        config._experts_implementation = "eager"  # the others do not support float64
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters, at the smallest that was tried")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(dict(model.named_parameters()).items()):
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:  # spreads attention unevenly, which the default hardly does
                weight.copy_(noise / max(weight[0].numel(), 1) ** 0.5)
            else:
                ones = name.endswith("weight") or ("norm" in name.lower() and "bias" not in name)
                weight.copy_(0.2 * noise + (1.0 if ones else 0.0))
    return model


# Inputs -----------------------------------------------------------------------------------------


def _find(config: Any, *names: str, default: Any = None) -> Any:
    """Returns the first of these options that is set, here or in a nested configuration."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for part in getattr(config, "sub_configs", {}):
        inner = getattr(config, part, None)
        if inner is not None and (value := _find(inner, *names)) is not None:
            return value
    return default


def padding(length: int = LENGTH, left: bool = False) -> Tensor:
    """Returns a mask (BATCH, length), 1 where a token is real."""
    lengths = torch.tensor([max(1, n * length // LENGTH) for n in LENGTHS])
    mask = (torch.arange(length) < lengths[:, None]).long()
    return mask.flip(1) if left else mask


def inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yields candidate arguments of the model; the first that it runs with are used."""
    config = model.config
    parameters = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def ids(length: int) -> Tensor:
        largest = min(_find(config, "vocab_size", default=100), 100)
        return torch.randint(3, largest, (BATCH, length), generator=generator)

    image, channels = _find(config, "image_size", default=32), _find(config, "num_channels")
    height, width = (image, image) if isinstance(image, int) else tuple(image)[-2:]
    mels = _find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", default=80)
    frames = 2 * _find(config, "max_source_positions", default=32)
    frames = frames if isinstance(frames, int) and frames <= 4000 else 64
    boxes = torch.randint(0, 50, (BATCH, LENGTH, 4), generator=generator)
    boxes = torch.cat([boxes[..., :2], boxes[..., :2] + boxes[..., 2:]], -1)
    patch, temporal = _find(config, "patch_size", default=8), _find(config, "temporal_patch_size")
    patches = (channels or 3) * (temporal or 1) * (patch**2 if isinstance(patch, int) else 1)
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    makers: dict[str, tuple[Tensor, ...]] = {  # candidates by argument
        "input_ids": (ids(LENGTH),),
        "decoder_input_ids": (ids(7),),
        "bbox": (boxes,),
        "pixel_values": (noise(BATCH, channels or 3, height, width), noise(24, patches)),
        "hidden_states": (noise(24, patches),),
        "pixel_values_videos": (noise(BATCH, 4, channels or 3, height, width),),
        "input_features": (noise(BATCH, mels, frames), noise(BATCH, frames, mels)),
        "input_values": (noise(BATCH, 3200), noise(BATCH, _find(config, "max_length") or 64, mels)),
    }
    if str(config.model_type).startswith("bros"):
        makers["bbox"] = (boxes.double() / 100,)
    always = {
        "grid_thw": grid,
        "input_features_mask": torch.ones(BATCH, frames, dtype=torch.long),
    }
    always = {n: v for n, v in always.items() if n in parameters}
    text = {n: makers[n][0] for n in ("input_ids", "decoder_input_ids", "bbox") if n in parameters}
    encoder = {n: v for n, v in text.items() if n != "decoder_input_ids"}
    decoder = {n: v for n, v in text.items() if n == "decoder_input_ids"}
    if "pixel_values" not in parameters or parameters["pixel_values"].default is None:
        yield from (texts for texts in (text, encoder) if texts)
    for name, values in makers.items():
        if name in parameters and name not in text:
            for value in values:
                for texts in (text, encoder, decoder, {}):
                    yield texts | {name: value} | always


# Runs -------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """One way to call the model."""

    name: str
    arguments: dict[str, Tensor]
    keep: Tensor | None = None  # (BATCH, length): which tokens to compare


def runs(model: Any, given: dict[str, Tensor]) -> Iterator[Run]:
    """Yields the runs: whole, padded on either side, and in pieces through a cache."""
    config, parameters = model.config, inspect.signature(model.forward).parameters
    yield Run("whole", given)
    main = next(
        (given[n] for n in ("input_ids", "input_values", "input_features") if n in given), None
    )
    if main is None or "attention_mask" not in parameters:
        return
    for left in (False, True):
        mask = padding(main.shape[-1] if main.ndim == 3 else main.shape[1], left)
        arguments = given | {"attention_mask": mask}
        if "input_ids" in given:  # a model that pools the last token must find a real one
            largest = _find(config, "vocab_size", default=int(given["input_ids"].max()) + 1)
            texts = given["input_ids"].masked_fill(mask == 0, _find(config, "pad_token_id") or 0)
            last = mask.cumsum(1).argmax(1, keepdim=True)
            end = _find(config, "eos_token_id")
            end = end if isinstance(end, int) and end < largest else largest - 1
            arguments["input_ids"] = texts.scatter(1, last, end)
        if "decoder_attention_mask" in parameters and "decoder_input_ids" in given:
            arguments["decoder_attention_mask"] = padding(7)
        keep = mask if "decoder_input_ids" not in given else padding(7)
        yield Run("padded left" if left else "padded", arguments, keep)
    if cache_name(model) is not None and set(given) == {"input_ids"}:
        yield Run("in pieces", given)
        yield Run(
            "in pieces, padded", given | {"attention_mask": padding(left=True)}, padding(left=True)
        )


def cache_name(model: Any) -> str | None:
    """Returns the name under which the model takes and returns its cache, or None without one."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors of a model's outputs, without caches and attentions."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in (*CACHE_NAMES, "cache_params", "attentions"):
                yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def called(model: Any, arguments: dict[str, Any], dtype: torch.dtype) -> Any:
    """Returns what the model returns.

    XGLM makes a tensor of a type's lowest number without naming the type. Where that overflows, the
    model is called again with ``dtype`` as the default.
    """
    try:
        return model(**arguments)
    except RuntimeError as error:
        if "without overflow" not in str(error):
            raise
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return model(**arguments)
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def call(model: Any, run: Run, dtype: torch.dtype) -> list[Tensor]:
    """Returns the outputs of one run at real tokens, in float64."""
    torch.manual_seed(0)
    arguments = {n: v.to(dtype) if v.is_floating_point() else v for n, v in run.arguments.items()}
    if not run.name.startswith("in pieces"):
        outputs = list(tensors(called(model, arguments, dtype)))
        pieces = [(output, run.keep) for output in outputs]
    else:
        pieces, cache, start, name = [], None, 0, cache_name(model)
        for length in PIECES:
            now = {"input_ids": arguments["input_ids"][:, start : start + length]}
            if "attention_mask" in arguments:
                now["attention_mask"] = arguments["attention_mask"][:, : start + length]
            out = called(model, now | {name: cache, "use_cache": True}, dtype)
            cache = out[name]
            keep = None if run.keep is None else run.keep[:, start : start + length]
            pieces += [(output, keep) for output in tensors(out)]
            start += length
    return [at_real_tokens(output, keep).double().flatten() for output, keep in pieces]


def at_real_tokens(output: Tensor, keep: Tensor | None) -> Tensor:
    """Returns what to compare of an output, given which tokens (BATCH, length) are real.

    A model that shortens its input takes a mask either of the input or of the shorter sequence. A
    token then counts as real if it is real in both readings.
    """
    if keep is None or output.ndim < 2 or len(output) != len(keep):
        return output
    length, tokens = keep.shape[1], output.shape[1]
    if output.ndim > 2 and 0 < tokens < length:
        keep = keep[:, :tokens] & keep[:, torch.arange(tokens) * length // tokens]
    return output[keep.bool()] if keep.shape == output.shape[:2] else output


def distance(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Returns the largest difference, relative to the largest value of its tensor."""
    worst = 0.0
    for a, b in zip(got, wanted, strict=True):
        if a.shape != b.shape:
            return float("inf")
        finite = b.isfinite()
        if not torch.equal(finite, a.isfinite()):
            return float("nan")
        if finite.any():
            a, b = a[finite], b[finite]
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)))
    return worst


def examine(model_type: str, config_class: type, model_class: type) -> Verdict:
    """Builds, runs and compares one model."""
    name = model_class.__name__
    problems: list[str] = []
    for config in configurations(config_class, problems):
        try:
            eager = build(model_class, config, "eager")
        except Exception as error:
            problems.append(f"not built: {_line(error)}")
            debug()
            continue
        eager32 = build(model_class, config, "eager")
        eager = eager.double()
        for given in inputs(eager):
            if not given:
                continue
            whole = Run("whole", given)
            try:
                call(eager, whole, torch.float64)
                call(eager32, whole, torch.float32)
            except Exception as error:
                problems.append(f"not run: {_line(error)}")
                debug()
                continue
            return compare(model_type, name, model_class, config, eager, eager32, given)
    # A failed run is a better reason than incompatible sizes.
    problems.sort(key=lambda problem: not problem.startswith("not run"))
    return Verdict(model_type, name, "not tried", problems[0])


def compare(
    model_type: str,
    name: str,
    model_class: type,
    config: Any,
    eager: Any,
    eager32: Any,
    given: dict[str, Tensor],
) -> Verdict:
    """Compares the model under "trifuse" with itself under "eager"."""
    try:
        ours = build(model_class, config, "trifuse").double()
    except Exception as error:
        return Verdict(model_type, name, "raises", f"when made: {_raised(error)}")
    from trifuse import huggingface

    used = []
    forward = huggingface.attention_forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        used.append(None)
        return forward(*args, **kwargs)

    huggingface.AttentionInterface.register("trifuse", spy)
    done, single = [], None
    error32 = 0.0  # eager's largest error in float32 so far
    for run in runs(eager, given):
        dtype = torch.float64
        try:
            wanted = call(eager, run, torch.float64)
            if all(torch.isfinite(x).all() for x in wanted):
                error32 = max(error32, distance(call(eager32, run, torch.float32), wanted))
            else:  # a mask of the lowest float64 may overflow in a softmax that runs in float32
                dtype, wanted = torch.float32, call(eager32, run, torch.float32)
        except Exception:
            debug()
            continue
        if not all(torch.isfinite(x).all() for x in wanted):
            continue
        try:
            if dtype == torch.float32 and single is None:
                single = build(model_class, config, "trifuse")
            model = ours if dtype == torch.float64 else single
            got = distance(call(model, run, dtype), wanted)
        except Exception as exception:
            debug()
            return Verdict(model_type, name, "raises", f"{run.name}: {_raised(exception)}")
        if not got <= FACTOR * error32 + 1e-9:
            detail = f"{run.name}: {got:.1e} where float32 makes {error32:.1e}"
            return Verdict(model_type, name, "WRONG", detail)
        done.append(run.name)
    if not done:
        return Verdict(model_type, name, "not tried", "eager gives no finite result")
    detail = ", ".join(done) + ("" if used else "; never calls it")
    return Verdict(model_type, name, "right", detail)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def _raised(error: BaseException) -> str:
    """Returns the error in one line, marked if it isn't ours."""
    ours = isinstance(error, ValueError) and "trifuse" in str(error)
    return _line(error) if ours else f"(not ours) {_line(error)}"


# Processes --------------------------------------------------------------------------------------


def models() -> list[tuple[str, type, type]]:
    """Returns (model type, configuration, model) of every base model."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found = []
    for model_type, names in modeling_auto.MODEL_MAPPING_NAMES.items():
        if model_type in CONFIG_MAPPING_NAMES:
            for name in (names,) if isinstance(names, str) else names:
                found.append((model_type, CONFIG_MAPPING_NAMES[model_type], name))
    return found


def _child(model_type: str, config_name: str, name: str, seconds: int, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.alarm(seconds)
    warnings.simplefilter("ignore")
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    if not DEBUG:
        os.dup2(devnull, 2)
    torch.set_num_threads(1)
    try:
        import transformers

        config_class, model_class = getattr(transformers, config_name), getattr(transformers, name)
        verdict = examine(model_type, config_class, model_class)
    except Exception as error:
        debug()
        verdict = Verdict(model_type, name, "not tried", _line(error))
    pipe.send(verdict)


def examine_apart(task: tuple[str, str, str], seconds: int) -> Verdict:
    """Runs :func:`examine` in a forked process, which inherits the imports that all models need."""
    model_type, _, name = task
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(*task, seconds, send))
    process.start()
    send.close()
    try:
        verdict = receive.recv()
    except EOFError:
        process.join()
        limit = process.exitcode == -signal.SIGALRM
        why = f"more than {seconds} s" if limit else f"the process ended with {process.exitcode}"
        verdict = Verdict(model_type, name, "not tried", why)
    process.join()
    return verdict


_HEAD = """## Which models `attn_implementation="trifuse"` serves

`python tests/support/scan_transformers.py --page docs/transformers.md` made this section, with
transformers {version}. The script builds base models of transformers at a tiny size with random
weights. A model is **right** if its results at real tokens are those of "eager", to within
{factor} times the error of "eager" in float32. This is checked on whole batches, on batches padded
on either side, and on a text that goes through a cache in pieces. A model "never calls it" if its
forward never calls trifuse's attention.

A model **raises** if its results would be wrong. transformers accepts the name of an attention for
any model. But a model whose code computes its attention itself would add a boolean mask to its
scores, or lose the causality that a mask of None leaves to the attention. So the code of a model's
classes is examined before the model is made: does an attention call go through transformers'
`AttentionInterface`? No list of model names is involved.

- A model that applies the mask in its own attentions, and never uses the interface, raises a
  `ValueError`. So does a model that looks its attention up in a table of functions without
  "trifuse". The error names the class and says what to do. A table of classes, as BERT has in
  transformers 4.57, gets ours.
- A model with both kinds of attention gets the masks of "eager", which are right for both. So does
  a model that uses the interface without declaring support for "sdpa".
- `trifuse.fuse(model)` leaves the attention of a model that would raise as it is, and its report
  says why.
- Attention sinks that a layer passes as `s_aux`, as gpt-oss does, are served. A model whose
  attention needs more than that and a softmax of masked scores raises at its first call of it.

`trifuse.huggingface.register()` installs this check in
`PreTrainedModel.get_correct_attn_implementation`, and `trifuse.fuse` calls `register()` when it
switches a model. The check ignores other names. Two cases lack it: after `import trifuse` alone,
only the name "trifuse" is registered, and some versions of transformers do not have that method. A
model that computes its attention itself then raises when it makes its first mask. A model that
looks its attention up in a table of its own, as Falcon, GPT-Neo and SAM do in transformers 5,
raises `KeyError: 'trifuse'` when it is made. It gets ours if `trifuse.huggingface.register()` was
called before.

A model was not tried if the script could not build or feed it at a small size, or took too long.
Nothing is known of it beyond what its code says.

Of {total} base models, the table has {tried}.{missing} BERT and LLaMA have also been run with
transformers 5.0.0, which requests masks by `cache_position`. The models with attention sinks,
those with tables of attention classes and XGLM were scanned with 5.24.0.

| model | class | | |
|---|---|---|---|
"""


def page(verdicts: list[Verdict], version: str, total: int) -> str:
    """Returns the section of the documentation, the last of its page."""
    order = {"WRONG": 0, "raises": 1, "right": 2, "not tried": 3}
    lines = [
        f"| {v.model_type} | {v.name} | {v.outcome} | {v.detail.replace('|', '/')} |"
        for v in sorted(verdicts, key=lambda v: (order[v.outcome], v.model_type))
    ]
    left = total - len(verdicts)
    missing = f" The other {left} have not been scanned." if left else ""
    head = _HEAD.format(
        version=version, factor=FACTOR, total=total, tried=len(verdicts), missing=missing
    )
    return head + "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_types", nargs="*", help="only these; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="the limit of one model")
    parser.add_argument("--json", type=Path, help="keep the verdicts here, and add to them")
    parser.add_argument("--page", type=Path, help="write the page of the documentation")
    arguments = parser.parse_args(argv)

    import transformers
    import transformers.modeling_utils
    from transformers import AutoModel  # noqa: F401 - its modules, once for all

    from trifuse import huggingface

    transformers.logging.set_verbosity_error()
    huggingface.register()
    tasks = [t for t in models() if not arguments.model_types or t[0] in arguments.model_types]
    verdicts: list[Verdict] = []
    if arguments.json and arguments.json.exists():
        verdicts = [Verdict(**verdict) for verdict in json.loads(arguments.json.read_text())]
        known = {verdict.name for verdict in verdicts}
        tasks = [task for task in tasks if task[2] not in known]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for verdict in pool.map(examine_apart, tasks, [arguments.seconds] * len(tasks)):
            verdicts.append(verdict)
            if arguments.json:
                kept = json.dumps([verdict._asdict() for verdict in verdicts], indent=1)
                arguments.json.write_text(kept)
            print(
                f"{verdict.outcome:10}{verdict.model_type:28}{verdict.name:36}{verdict.detail}",
                flush=True,
            )
    if arguments.page:
        section = page(verdicts, transformers.__version__, len(models()))
        before, _, _ = arguments.page.read_text().partition(section.partition("\n")[0])
        arguments.page.write_text(before + section)
    counts = {
        o: sum(v.outcome == o for v in verdicts) for o in dict.fromkeys(v.outcome for v in verdicts)
    }
    print(f"transformers {transformers.__version__}:", counts)
    return int(any(v.outcome == "WRONG" for v in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
