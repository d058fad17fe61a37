"""Checks that attn_implementation="trifuse" is right or raises, for every model of transformers.

    python tests/support/scan_transformers.py                      # all of them: about half an hour
    python tests/support/scan_transformers.py bert bloom t5        # only these
    python tests/support/scan_transformers.py --page docs/transformers.md    # also writes the page
    python tests/support/scan_transformers.py --fuse               # trifuse.fuse instead: an hour

Every base model that the installed transformers knows (``MODEL_MAPPING``) is built at a tiny size
with random weights, in a separate process with limits on memory and time. It runs under "eager"
and under "trifuse", both in float64: on whole batches, on padded batches and, if it has a cache, on
a text in three pieces. Results are compared at real tokens, and may differ by no more than a few
times the error of "eager" in float32.

The result of a query without keys, as in a window that holds only padding, is undefined. So a
padded run that differs from "eager" is left out if "sdpa" differs from it too and equals ours.

With ``--fuse``, a model on torch's attention is fused with ``unpad=True``, and the gradients of its
parameters are compared too.

A model that the script can't build or feed is listed as not tried, with the reason.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from model_inputs import DECODER_LENGTH, LENGTH, LENGTHS, find, inputs
from small_models import DEBUG, build, configurations, debug, line
from torch import Tensor
from torch.overrides import TorchFunctionMode

GIB = 2**30
MEMORY = 8 * GIB
SECONDS = 60
SECONDS_OF_INPUTS = 8  # after this time no more inputs of one configuration are tried
PIECES = (6, 5, 1)  # lengths of the pieces of a text that goes through a cache

CACHE_NAMES = ("cache", "past_key_values")  # the second before transformers 5.24

# Largest error against eager in float64, as a multiple of eager's own error in float32.
FACTOR = 4
# Largest difference of a gradient in float64, relative to the largest number of its parameter's.
OF_GRADIENTS = 1e-4


class Verdict(NamedTuple):
    """The outcome of one model."""

    model_type: str
    name: str
    outcome: str  # "right", "raises", "WRONG", "not tried"
    detail: str = ""


def padding(length: int = LENGTH, left: bool = False) -> Tensor:
    """Returns a mask (BATCH, length), 1 where a token is real."""
    lengths = torch.tensor([max(1, n * length // LENGTH) for n in LENGTHS])
    mask = (torch.arange(length) < lengths[:, None]).long()
    return mask.flip(1) if left else mask


# Runs -------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """One way to call the model."""

    name: str
    arguments: dict[str, Tensor]
    keep: Tensor | None = None  # (BATCH, length): which tokens to compare
    encoder: Tensor | None = None  # the same for an encoder's tokens, if there is a decoder


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
        if "input_ids" in given:  # a model that pools the last token needs a real one
            largest = find(config, "vocab_size", default=int(given["input_ids"].max()) + 1)
            texts = given["input_ids"].masked_fill(mask == 0, find(config, "pad_token_id") or 0)
            last = mask.cumsum(1).argmax(1, keepdim=True)
            end = find(config, "eos_token_id")
            end = end if isinstance(end, int) and end < largest else largest - 1
            arguments["input_ids"] = texts.scatter(1, last, end)
        if "decoder_attention_mask" in parameters and "decoder_input_ids" in given:
            arguments["decoder_attention_mask"] = padding(DECODER_LENGTH)
        name = "padded left" if left else "padded"
        if "decoder_input_ids" in given:
            yield Run(name, arguments, padding(DECODER_LENGTH), mask)
        else:
            yield Run(name, arguments, mask)
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


class InDouble(TorchFunctionMode):
    """Replaces float32 by float64 wherever the code of a model names it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def double(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        named = {name: double(value) for name, value in (kwargs or {}).items()}
        return func(*(double(value) for value in args), **named)


def called(model: Any, arguments: dict[str, Any], dtype: torch.dtype) -> Any:
    """Returns what the model returns.

    Some models don't run in float64, because they make a float32 tensor without regard to the
    model's dtype, as XGLM does with a type's lowest number. Such a model is called again with
    ``dtype`` as the default dtype, and with float64 wherever it names float32.
    """
    try:
        return model(**arguments)
    except RuntimeError as error:
        if not re.search(r"without overflow|same dtype|should be the same|scalar type", str(error)):
            raise
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with InDouble() if dtype == torch.float64 else contextlib.nullcontext():
            return model(**arguments)
    finally:
        torch.set_default_dtype(before)


def call(model: Any, run: Run, dtype: torch.dtype, known: bool = False) -> list[Tensor]:
    """Returns the outputs of one run at real tokens, in float64, without gradients.

    Args:
        known: whether to leave out what may be computed from padding: sequences of another length
            than the mask's, and what is pooled from the first token, if that is padding.
    """
    with torch.no_grad():
        return outputs(model, run, dtype, known)


def outputs(model: Any, run: Run, dtype: torch.dtype, known: bool = False) -> list[Tensor]:
    """As :func:`call`, with gradients."""
    torch.manual_seed(0)
    arguments = {n: v.to(dtype) if v.is_floating_point() else v for n, v in run.arguments.items()}
    if not run.name.startswith("in pieces"):
        pieces = []
        for output in tensors(called(model, arguments, dtype)):
            of_encoder = run.encoder is not None and output.shape[:2] == run.encoder.shape
            pieces.append((output, run.encoder if of_encoder else run.keep))
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
    if known:
        pooled = run.name != "padded left"
        pieces = [
            (x, keep)
            for x, keep in pieces
            if keep is None or x.shape[:2] == keep.shape or (pooled and x.ndim == 2)
        ]
    return [at_real_tokens(output, keep).double().flatten() for output, keep in pieces]


def gradients(model: Any, run: Run, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Returns the gradients of the parameters, from random gradients of the outputs.

    A parameter that no output needs has none.
    """
    generator = torch.Generator().manual_seed(2)
    results = [x for x in outputs(model, run, dtype, known=True) if x.requires_grad]
    given = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in results]
    model.zero_grad()
    if results:
        torch.autograd.backward(results, given)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def worst_gradient(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """Returns the largest difference of the gradients of one parameter, and its name.

    It is relative to the largest number of that gradient. A gradient that is far below all others
    is 0 but for rounding, as a key bias's.
    """
    largest = max((float(grad.abs().max()) for grad in wanted.values() if grad.numel()), default=0)
    worst = 0.0, ""
    for name in sorted(got.keys() | wanted.keys()):
        ours, theirs = (grads.get(name, torch.zeros(1)) for grads in (got, wanted))
        if ours.numel() and theirs.numel():
            least = max(float(theirs.abs().max()), 1e-3 * largest, 1e-30)
            worst = max(worst, (float((ours - theirs).abs().max()) / least, name))
    return worst


def at_real_tokens(output: Tensor, keep: Tensor | None) -> Tensor:
    """Returns the part of an output to compare, given which tokens (BATCH, length) are real.

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


def examine(model_type: str, config_class: type, model_class: type, fused: bool = False) -> Verdict:
    """Builds, runs and compares one model; ``fused``: as ``trifuse.fuse`` changes it."""
    name = model_class.__name__
    problems: list[str] = []
    own = getattr(model_class, "config_class", None) or config_class  # a part has its own
    classes = dict.fromkeys([config_class, own])
    for config in (c for some in classes for c in configurations(some, problems)):
        try:
            eager = build(model_class, config, "eager")
        except Exception as error:
            problems.append(f"not built: {line(error)}")
            debug()
            continue
        eager32 = build(model_class, config, "eager")
        eager = eager.double()
        start = time.monotonic()
        for given in inputs(eager):
            if time.monotonic() - start > SECONDS_OF_INPUTS:
                break
            whole = Run("whole", given)
            try:
                call(eager, whole, torch.float64)
                call(eager32, whole, torch.float32)
            except Exception as error:
                problems.append(f"not run: {line(error)}")
                debug()
                continue
            return compare(model_type, name, model_class, config, eager, eager32, given, fused)
    # A failed run is a better reason than incompatible sizes.
    problems.sort(key=lambda problem: not problem.startswith("not run"))
    why = problems[0] if problems else "no known inputs"
    return Verdict(model_type, name, "not tried", why)


def compare(
    model_type: str,
    name: str,
    model_class: type,
    config: Any,
    eager: Any,
    eager32: Any,
    given: dict[str, Tensor],
    fused: bool,
) -> Verdict:
    """Compares the model under "trifuse", or fused, with itself under "eager"."""
    try:
        ours = served(model_class, config, fused, torch.float64)
    except Exception as error:
        return Verdict(model_type, name, "raises", f"when made: {_raised(error)}")
    from trifuse import huggingface

    used = []
    forward = huggingface.attention_forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        used.append(None)
        return forward(*args, **kwargs)

    huggingface.AttentionInterface.register("trifuse", spy)
    done, undefined, single, sdpa = [], [], None, None
    error32 = 0.0  # eager's largest error in float32 so far
    for run in runs(eager, given):
        dtype = torch.float64
        try:
            wanted = call(eager, run, torch.float64, known=fused)
            if all(torch.isfinite(x).all() for x in wanted):
                error32 = max(
                    error32, distance(call(eager32, run, torch.float32, known=fused), wanted)
                )
            else:  # a mask with the lowest float64 number may overflow in a softmax in float32
                dtype, wanted = torch.float32, call(eager32, run, torch.float32, known=fused)
        except Exception:
            debug()
            continue
        if not all(torch.isfinite(x).all() for x in wanted):
            continue
        try:
            if dtype == torch.float32 and single is None:
                single = served(model_class, config, fused, torch.float32)
            model = ours if dtype == torch.float64 else single
            result = call(model, run, dtype, known=fused)
            got = distance(result, wanted)
        except Exception as exception:
            debug()
            return Verdict(model_type, name, "raises", f"{run.name}: {_raised(exception)}")
        if not got <= tolerance(error32):
            if run.keep is not None:
                with contextlib.suppress(Exception):
                    sdpa = sdpa or build(model_class, config, "sdpa")
                    theirs = call(sdpa.to(dtype), run, dtype, known=fused)
                    apart = not distance(theirs, wanted) <= tolerance(error32)
                    if apart and distance(result, theirs) <= tolerance(error32):
                        undefined.append(run.name)
                        continue
            detail = f"{run.name}: {got:.1e} where float32 makes {error32:.1e}"
            return Verdict(model_type, name, "WRONG", detail)
        done.append(run.name)
        if fused and dtype == torch.float64 and not run.name.startswith("in pieces"):
            problem = compare_gradients(eager, eager32, ours, run)
            if problem is not None:
                return Verdict(model_type, name, problem[0], f"gradients, {run.name}: {problem[1]}")
    if not done:
        return Verdict(model_type, name, "not tried", "eager gives no finite result")
    detail = ", ".join(done) + ("" if used else "; never calls it")
    if undefined:
        detail += f"; equals sdpa, but sdpa differs from eager: {', '.join(undefined)}"
    return Verdict(model_type, name, "right", detail)


def served(model_class: type, config: Any, fused: bool, dtype: torch.dtype) -> Any:
    """Returns the model under "trifuse", or fused and without padding."""
    if not fused:
        return build(model_class, config, "trifuse").to(dtype)
    import trifuse

    try:
        model = build(model_class, config, "sdpa").to(dtype)
    except ValueError:  # the model doesn't support it
        model = build(model_class, config, "eager").to(dtype)
    trifuse.fuse(model, unpad=True)
    return model


def compare_gradients(eager: Any, eager32: Any, ours: Any, run: Run) -> tuple[str, str] | None:
    """Returns an outcome and a detail if the gradients differ; None too if eager has none.

    They may differ by more where those of eager in float32 do, as where a model computes a part in
    float32 whatever its type.
    """
    try:
        wanted = gradients(eager, run)
    except Exception:
        debug()
        return None
    if not all(grad.isfinite().all() for grad in wanted.values()):
        return None  # a query without keys
    try:
        worst, name = worst_gradient(gradients(ours, run), wanted)
    except Exception as error:
        debug()
        return "raises", _raised(error)
    if worst <= OF_GRADIENTS:
        return None
    error32, _ = worst_gradient(gradients(eager32, run, torch.float32), wanted)
    if worst <= FACTOR * error32:
        return None
    return "WRONG", f"{worst:.1e} of {name}, where float32 makes {error32:.1e}"


def tolerance(error32: float) -> float:
    """Returns how much results may differ, given the error of "eager" in float32.

    A model whose results are equal in both types computes in float32, whatever its type.
    """
    return FACTOR * (error32 or torch.finfo(torch.float32).eps) + 1e-9


def _raised(error: BaseException) -> str:
    """Returns the error in one line, marked if it isn't ours."""
    ours = isinstance(error, ValueError) and "trifuse" in str(error)
    return line(error) if ours else f"(not ours) {line(error)}"


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


def _child(
    model_type: str, config_name: str, name: str, fused: bool, seconds: int, pipe: Any
) -> None:
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

        config_class = getattr(transformers, config_name)
        model_class = getattr(transformers, name, None)
        if model_class is None:  # not exported
            module = config_class.__module__.replace(".configuration_", ".modeling_")
            model_class = getattr(importlib.import_module(module), name)
        verdict = examine(model_type, config_class, model_class, fused)
    except Exception as error:
        debug()
        verdict = Verdict(model_type, name, "not tried", line(error))
    pipe.send(verdict)


def examine_apart(task: tuple[str, str, str], fused: bool, seconds: int) -> Verdict:
    """Runs :func:`examine` in a forked process, which inherits the imports that all models need."""
    model_type, _, name = task
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(*task, fused, seconds, send))
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
forward never calls trifuse's attention. (With `--fuse`, the script checks
`trifuse.fuse(model, unpad=True)` instead, and compares gradients too.) What a query without any key
attends to is undefined. So a padded run that differs from "eager" does not count if transformers'
own "sdpa" differs from "eager" too and equals trifuse. The table names such runs.

A model **raises** if its results would be wrong. transformers accepts the name of an attention for
any model. But a model whose code computes its attention itself would add a boolean mask to its
scores, or lose the causality that a mask of None leaves to the attention. So the code of a model's
classes is examined before the model is made: does an attention call go through transformers'
`AttentionInterface`? No list of model names is involved.

- A model raises a `ValueError` if it applies the mask in its own attentions and never uses the
  interface, or if it looks its attention up in a table of functions that lacks "trifuse". The error
  names the class and says what to do. If the table is one of classes, as BERT's in transformers
  4.57, trifuse's class is found there.
- A model with both kinds of attention gets the masks of "eager", which are right for both. So does
  a model that uses the interface without declaring support for "sdpa".
- `trifuse.fuse(model)` runs the attention of such a model on trifuse, within the model's own code,
  if that code has a form that it knows. So it supports MPNet, BLOOM and MPT, and the name does not:
  transformers builds their attention without its interface, and no name reaches it. Other
  attentions stay as they are, and the report says why.
- Attention sinks that a layer passes as `s_aux`, as gpt-oss does, are supported. A model whose
  attention needs more than that and a softmax of masked scores raises at its first call of it.

`import trifuse` installs this check in `PreTrainedModel.get_correct_attn_implementation` as soon
as transformers is imported; `trifuse.huggingface.register()` and `trifuse.fuse` do so too. The
check ignores other names. In a version of transformers without that method, a model that computes
its attention itself raises when it makes its first mask, and one that looks its attention up in a
table of its own, as Falcon, GPT-Neo and SAM do in transformers 5, raises `KeyError: 'trifuse'`
when it is made: call `trifuse.fuse(model)` there.

A model was not tried if the script could not build or feed it at a small size, or took too long.
Nothing is known of it beyond what its code says.

Of {total} base models, {counts}.{missing} BERT and LLaMA have also been run with
transformers 5.0.0, which requests masks by `cache_position`.

| model | class | | |
|---|---|---|---|
"""

_COUNTED = {
    "right": "are right",
    "raises": "raise",
    "WRONG": "are wrong",
    "not tried": "were not tried",
}


def page(verdicts: list[Verdict], version: str, total: int) -> str:
    """Returns the section of the documentation, which is the last on its page."""
    order = {"WRONG": 0, "raises": 1, "right": 2, "not tried": 3}
    lines = [
        f"| {v.model_type} | {v.name} | {v.outcome} | {v.detail.replace('|', '/')} |"
        for v in sorted(verdicts, key=lambda v: (order[v.outcome], v.model_type))
    ]
    found = collections.Counter(v.outcome for v in verdicts)
    counts = ", ".join(f"{found[outcome]} {words}" for outcome, words in _COUNTED.items())
    left = total - len(verdicts)
    missing = f" The other {left} have not been scanned." if left else ""
    head = _HEAD.format(version=version, factor=FACTOR, total=total, counts=counts, missing=missing)
    return head + "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_types", nargs="*", help="only these; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="the limit of one model")
    parser.add_argument("--json", type=Path, help="keep the verdicts here, and add to them")
    parser.add_argument("--page", type=Path, help="write the page of the documentation")
    parser.add_argument("--fuse", action="store_true", help="check trifuse.fuse, with gradients")
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
        examine_each = functools.partial(
            examine_apart, fused=arguments.fuse, seconds=arguments.seconds
        )
        for verdict in pool.map(examine_each, tasks):
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
