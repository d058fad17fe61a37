"""Masked attention against what a user of torch would call instead.

On a CPU the peer is ``torch.nn.functional.scaled_dot_product_attention``, called as a user would:
with a boolean (B, 1, 1, L) mask in place of our ``key_lengths``, a boolean (L, L) mask in place of
our ``window``, and otherwise with the same arguments. On a GPU each of its backends is a peer, and
without ``--quick`` so is FlexAttention, which takes longer to compile than all the others together.
On a Hopper GPU the CUDA kernels for all GPUs are timed beside those only for Hopper.

Rates count only the products that a case needs: for each pair of a query and a key that takes part,
2 (E + Ev) operations forward and 2.5 times as many backward, where one of the five products
recomputes the scores. A random mask leaves no block of pairs empty, so it counts in full.

One query over a cache of keys and values mostly computes little for each byte. Then its rate counts
bytes: keys and values are read once, the query is read and the output written. Its ceiling is the
rate at which this machine copies memory. If so many heads share a key head that their products take
longer, its rate counts operations, as elsewhere.

T5 makes its bias from a table of distances once for all layers. So the peer is given the dense
bias, and its gradient is that of the dense bias; ours is given the table.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import trifuse
from trifuse import backends
from trifuse.benchmarks import ceilings, command_line, machine, report, timing
from trifuse.benchmarks.agreement import check_agreement
from trifuse.benchmarks.cases import run_all, select
from trifuse.benchmarks.comparison import MemoryResult, Result
from trifuse.benchmarks.memory import peak_extra_memory
from trifuse.benchmarks.other_kernels import other_kernels
from trifuse.benchmarks.terminal import console

# Cases ------------------------------------------------------------------------------------------

Masking = Literal[
    "no mask",
    "key lengths",
    "causal",
    "window 64",
    "boolean mask",
    "float mask",
    "relative bias",
    "dropout 0.1",
]
WINDOW = 64  # the keys that a query attends to on each side of its own position


@dataclass(frozen=True)
class Case:
    """One row: a size, a mask, forward alone or with its backward, and a target.

    ``at_least`` is a target for the fastest peer's time over ours, or, with ``against``, for the
    fastest of those peers; ``at_most_over`` is a limit on our seconds beyond the peer's;
    ``at_least_fraction`` is a target for the fraction of the ceiling; ``at_most`` is a limit on our
    own seconds.
    """

    masking: Masking
    shape: tuple[int, int, int, int]  # B, query heads H, keys L, E
    dtype: torch.dtype
    backward: bool
    peers: tuple[str, ...]
    at_least: float | None = None
    at_most_over: float | None = None
    against: tuple[str, ...] = ()
    at_least_fraction: float | None = None
    at_most: float | None = None
    queries: int | None = None  # None for L; not with "causal", "window 64" or "relative bias"
    key_heads: int | None = None  # None for H; otherwise query heads share them

    @property
    def name(self) -> str:
        return f"{self.masking}, {self.step}, {self.size}"

    @property
    def step(self) -> str:
        return "forward + backward" if self.backward else "forward"

    @property
    def size(self) -> str:
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        size = f"{dtype} ({','.join(map(str, self.shape))})"
        if self.queries is not None:
            size += f", {self.queries} {'query' if self.queries == 1 else 'queries'}"
        if self.key_heads is not None:
            size += f", {self.key_heads} key {'head' if self.key_heads == 1 else 'heads'}"
        return size

    @property
    def decodes(self) -> bool:
        """Whether the call is one query over a cache."""
        return self.queries == 1 and not self.backward


_CPU = ("sdpa",)
_EFFICIENT = ("mem-efficient",)
_SDPA = ("flash", "mem-efficient", "cudnn", "math")
_GPU = (*_SDPA, "flex")
_LONG = ("flash", "mem-efficient", "cudnn")  # store no (L, L) scores
_CUDNN = ("cudnn",)
_FP32, _BF16 = torch.float32, torch.bfloat16
_BERT, _SHORT = (4, 12, 512, 64), (8, 12, 128, 64)
# A language model that writes text reads its cache of keys and values for each new token.
_CACHE = Case("no mask", (1, 32, 4096, 128), _BF16, False, _SDPA, queries=1, key_heads=8)


def _caches(dtype: torch.dtype) -> tuple[Case, ...]:
    """One query over caches with a key head for each query head, for some of them, and for all."""
    sizes = (
        ((1, 12, 2048, 64), None),
        ((1, 12, 16384, 64), None),
        ((4, 32, 2048, 128), 8),
        ((1, 32, 8192, 128), 8),
        ((16, 32, 4096, 128), 1),
    )
    case = replace(_CACHE, dtype=dtype, peers=_CPU, at_least=1.0, at_least_fraction=0.8)
    return tuple(replace(case, shape=shape, key_heads=heads) for shape, heads in sizes)


def _both_steps(masking: Masking, shape: tuple[int, int, int, int]) -> tuple[Case, ...]:
    """Forward, and forward + backward, in both dtypes, at a size at which torch is slow."""
    return tuple(
        Case(masking, shape, dtype, backward, _CPU, at_least=1.6)
        for dtype in (_FP32, _BF16)
        for backward in (False, True)
    )


CASES: dict[str, tuple[Case, ...]] = {
    "cpu": (
        Case("no mask", _BERT, _FP32, False, _CPU, at_least=2.0),
        Case("no mask", _BERT, _FP32, True, _CPU, at_least=1.9),
        Case("key lengths", _BERT, _FP32, False, _CPU, at_least=3.5, at_least_fraction=0.85),
        Case("key lengths", _BERT, _FP32, True, _CPU, at_least=3.0, at_least_fraction=0.85),
        Case("causal", _BERT, _FP32, False, _CPU, at_least=3.2, at_least_fraction=0.8),
        Case("boolean mask", _BERT, _FP32, False, _CPU, at_least=3.0, at_least_fraction=0.8),
        Case("float mask", _BERT, _FP32, True, _CPU, at_least=2.5, at_least_fraction=0.8),
        Case("dropout 0.1", _BERT, _FP32, True, _CPU, at_least=4.0),
        Case("no mask", _BERT, _BF16, False, _CPU, at_least=3.0, at_least_fraction=0.8),
        Case("no mask", _BERT, _BF16, True, _CPU, at_least=2.5, at_least_fraction=0.8),
        Case("key lengths", _SHORT, _BF16, True, _CPU, at_least=3.5, at_least_fraction=0.6),
        Case("causal", (1, 12, 4096, 64), _FP32, False, _CPU, at_least=1.8),
        Case("window 64", (1, 12, 4096, 64), _FP32, False, _CPU, at_least_fraction=0.6),
        Case("window 64", (1, 12, 4096, 64), _BF16, False, _CPU, at_least_fraction=0.6),
        *(case for E in (160, 192, 256) for case in _both_steps("no mask", (2, 8, 512, E))),
        *_both_steps("float mask", (64, 4, 49, 32)),  # the bias of Swin's windows
        *_both_steps("relative bias", _BERT),  # T5's
        *_caches(_FP32),
        *_caches(_BF16),
        Case("no mask", (1, 2, 8, 16), _FP32, False, _CPU, at_most_over=10e-6),
    ),
    "cuda": (
        Case("key lengths", (64, 16, 512, 64), _BF16, True, _GPU, at_least=2.5, against=_SDPA),
        Case("float mask", (16, 16, 1024, 64), _BF16, True, _GPU, at_least=2.0, against=_EFFICIENT),
        Case("no mask", (4, 16, 4096, 128), _BF16, False, _GPU, at_least=0.85, against=_CUDNN),
        Case("no mask", (4, 16, 4096, 128), _BF16, True, _GPU, at_least=0.8, against=_CUDNN),
        Case("no mask", (1, 16, 16384, 128), _BF16, False, _LONG, at_least=0.85, against=_CUDNN),
        Case("no mask", (1, 16, 16384, 128), _BF16, True, _LONG, at_least=0.8, against=_CUDNN),
        replace(_CACHE, shape=(1, 32, 65536, 128), at_least_fraction=0.8),
        replace(_CACHE, shape=(16, 32, 4096, 128), at_least_fraction=0.8),
        replace(_CACHE, at_least=1.0, at_most=12e-6),
        Case("causal", (4, 16, 4096, 128), _BF16, False, _GPU),
        Case("causal", (4, 16, 4096, 128), _BF16, True, _GPU),
        Case("key lengths", (64, 16, 512, 64), _BF16, False, _GPU),
        Case("boolean mask", (16, 16, 1024, 64), _BF16, True, _GPU),
        Case("dropout 0.1", (64, 16, 512, 64), _BF16, True, _GPU),
        Case("key lengths", (16, 12, 512, 64), _FP32, True, _GPU),
        Case("no mask", (1, 2, 8, 16), _BF16, False, ("sdpa",), at_most_over=10e-6),
    ),
}

# A sequence so long that its scores must not be stored, and the limit on our extra bytes for it.
MEMORY_CASE = Case("no mask", (1, 8, 8192, 64), _FP32, True, _CPU)
MEMORY_AT_MOST = 64 << 20


def flops(case: Case, lengths: Sequence[int]) -> float:
    """Operations of the products that the case needs; ``lengths`` are its key lengths."""
    B, H, L, E = case.shape
    if case.masking == "causal":
        pairs = L * (L + 1) / 2 * B
    elif case.masking == "window 64":
        reach = min(WINDOW, L - 1)
        pairs = (L * (2 * reach + 1) - reach * (reach + 1)) * B  # minus those beyond either end
    else:
        pairs = (L if case.queries is None else case.queries) * sum(lengths)
    forward = pairs * H * 4 * E
    return forward * 3.5 if case.backward else forward


def moved(given: Inputs) -> float:
    """Bytes that any forward without a mask reads and writes; the output is the query's size."""
    return 2.0 * given.query.nbytes + given.key.nbytes + given.value.nbytes


# Calls ------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    query: Tensor  # (B, H, queries, E)
    key: Tensor  # (B, key heads, L, E)
    value: Tensor
    attn_mask: Tensor | None  # bool (B, H, queries, L) or float (1, H, queries, L)
    key_lengths: Tensor | None  # (B,), from a quarter of L to three quarters, half on average
    relative_bias: Tensor | None  # (H, 2L - 1)
    grad_out: Tensor

    @property
    def lengths(self) -> list[int]:
        B, _, L, _ = self.key.shape
        return [L] * B if self.key_lengths is None else self.key_lengths.tolist()

    def distances(self) -> Tensor:
        """The column of ``relative_bias`` that each pair of a query and a key reads, (L, L)."""
        L = self.key.shape[2]
        positions = torch.arange(L, device=self.key.device)
        return positions - positions[:, None] + L - 1


def inputs(case: Case, device: str) -> Inputs:
    B, H, L, E = case.shape
    queries = L if case.queries is None else case.queries
    key_heads = H if case.key_heads is None else case.key_heads
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, requires_grad: bool = case.backward) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        return values.to(case.dtype).requires_grad_(requires_grad)

    attn_mask = key_lengths = relative_bias = None
    if case.masking == "boolean mask":
        attn_mask = torch.rand(B, H, queries, L, generator=generator, device=device) < 0.5
    elif case.masking == "float mask":
        attn_mask = random(1, H, queries, L)
    elif case.masking == "relative bias":
        relative_bias = random(H, 2 * L - 1)
    elif case.masking == "key lengths":
        key_lengths = torch.linspace(L / 4, 3 * L / 4, B, device=device).round().long()
    query = random(B, H, queries, E)
    key, value = (random(B, key_heads, L, E) for _ in range(2))
    grad_out = random(B, H, queries, E, requires_grad=False)
    return Inputs(query, key, value, attn_mask, key_lengths, relative_bias, grad_out)


def ours(case: Case, given: Inputs) -> Callable[[], Sequence[Tensor]]:
    """Return a step, which returns the output, and with ``case.backward`` the gradients."""
    arguments: dict[str, Any] = {
        "attn_mask": given.attn_mask,
        "dropout_p": 0.1 if case.masking == "dropout 0.1" else 0.0,
        "is_causal": case.masking == "causal",
        "enable_gqa": case.key_heads is not None,
        "key_lengths": given.key_lengths,
        "relative_bias": given.relative_bias,
        "window": WINDOW if case.masking == "window 64" else None,
    }
    function = functools.partial(trifuse.scaled_dot_product_attention, **arguments)
    return _step(function, given, given.attn_mask, given.relative_bias)


def theirs(peer: str, case: Case, given: Inputs) -> Callable[[], Sequence[Tensor]]:
    """As :func:`ours`, by a peer.

    Raises:
        RuntimeError: the peer does not serve the case (some raise it only when they are called).
    """
    if peer == "flex":
        return _step(_flex_attention(case, given), given, given.attn_mask, given.relative_bias)
    attn_mask = given.attn_mask
    positions = torch.arange(case.shape[2], device=given.query.device)
    if given.key_lengths is not None:
        attn_mask = (positions < given.key_lengths[:, None])[:, None, None]
    elif case.masking == "window 64":
        attn_mask = (positions - positions[:, None]).abs() <= WINDOW
    elif given.relative_bias is not None:
        dense = given.relative_bias.detach()[None, :, given.distances()]
        attn_mask = dense.requires_grad_(case.backward)
    sdpa = functools.partial(
        F.scaled_dot_product_attention,
        attn_mask=attn_mask,
        dropout_p=0.1 if case.masking == "dropout 0.1" else 0.0,
        is_causal=case.masking == "causal",
        enable_gqa=case.key_heads is not None,
    )
    if peer == "sdpa":
        return _step(sdpa, given, attn_mask)
    backend = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "mem-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }[peer]

    def by_backend(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(*tensors)

    return _step(by_backend, given, attn_mask)


def _step(
    attention: Callable[..., Any], given: Inputs, *masks: Tensor | None
) -> Callable[[], Sequence[Tensor]]:
    query, key, value = given.query, given.key, given.value
    if not query.requires_grad:
        return lambda: (attention(query, key, value),)
    variables = [query, key, value]
    variables += [mask for mask in masks if mask is not None and mask.requires_grad]

    def forward_backward() -> Sequence[Tensor]:
        out = attention(query, key, value)
        return (out.detach(), *torch.autograd.grad(out, variables, given.grad_out))

    return forward_backward


def like_ours(case: Case, given: Inputs, results: Sequence[Tensor]) -> Sequence[Tensor]:
    """Sum a peer's gradient of a dense bias over the pairs of each distance, as ours is."""
    if given.relative_bias is None or not case.backward or results[-1].dim() == 2:
        return results
    *others, dense = results
    table = torch.zeros_like(given.relative_bias, dtype=torch.float32)
    table.index_add_(1, given.distances().flatten(), dense[0].flatten(1).float())
    return [*others, table]


def _flex_attention(case: Case, given: Inputs, compiled: bool = True) -> Callable[..., Tensor]:
    """FlexAttention; its block mask is made once, outside the timed call."""
    from torch.nn.attention import flex_attention as flex

    if case.masking == "dropout 0.1":
        raise RuntimeError("FlexAttention has no dropout")
    attn_mask, key_lengths, relative_bias = given.attn_mask, given.key_lengths, given.relative_bias
    L = case.shape[2]

    # FlexAttention traces these: tensors b, h, i, j index the sequence, head, query and key.
    def lengths(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert key_lengths is not None
        return j < key_lengths[b]

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i

    def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() <= WINDOW

    def boolean(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert attn_mask is not None
        return attn_mask[b, h, i, j]

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert attn_mask is not None
        return score + attn_mask[0, h, i, j]

    def by_distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert relative_bias is not None
        return score + relative_bias[h, j - i + L - 1]

    mask_mod = {
        "key lengths": lengths,
        "causal": causal,
        "window 64": window,
        "boolean mask": boolean,
    }.get(case.masking)
    block_mask = None
    if mask_mod is not None:
        B, H, _, _ = case.shape
        block_mask = flex.create_block_mask(mask_mod, B, H, L, L, device=given.query.device.type)
    torch.compiler.reset()  # or dynamo gives up compiling after a handful of cases
    function = torch.compile(flex.flex_attention) if compiled else flex.flex_attention
    score_mod = {"float mask": biased, "relative bias": by_distance}.get(case.masking)
    return functools.partial(function, score_mod=score_mod, block_mask=block_mask)


# Measuring --------------------------------------------------------------------------------------


def run(case: Case, device: str, seconds: float) -> Result:
    given = inputs(case, device)
    functions = {"ours": ours(case, given)}
    refused = {}
    for peer in case.peers:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of each reason to refuse
                function = theirs(peer, case, given)
                result = function()
            if case.masking != "dropout 0.1":
                check_agreement(peer, functions["ours"](), like_ours(case, given, result))
        except Exception as error:
            refused[peer] = str(error).partition("\n")[0]
        else:
            functions[peer] = function
    if len(functions) == 1:  # no peer agrees, so ours may be wrong
        raise AssertionError("; ".join(refused.values()))
    expected = functions["ours"]() if case.masking != "dropout 0.1" else ()
    ampere = {("cuda", "as for 8.0"): lambda: _as_for_8_0(ours(case, given))}
    also, why_not = other_kernels(
        backends.Call("attention", device, case.dtype, case.shape[-1], given.attn_mask is not None),
        lambda: ours(case, given),
        lambda other: check_agreement("other kernels", other()[: len(expected)], expected),
        ampere if _uses_hopper_kernels(case, device) else None,
    )
    functions |= also
    work = flops(case, given.lengths)
    ceiling = ceilings.matrix_rate(case.dtype, device=device)
    counts_bytes = False
    if case.decodes:
        copies = ceilings.copy_rate(device=device)
        counts_bytes = moved(given) / copies.value > work / ceiling.value
        if counts_bytes:
            work, ceiling = moved(given), copies
    waited = case.at_most_over is not None
    timings = timing.alternate(functions, device=device, waited=waited, seconds=seconds)
    return Result(
        case=case.masking,
        step=case.step,
        shape=case.size,
        ours=timings.pop("ours"),
        also={name: timings.pop(name) for name in also},
        peers=timings,
        refused=refused | why_not,
        work=work,
        ceiling=ceiling,
        unit="B" if counts_bytes else "FLOP",
        at_least=case.at_least,
        at_most_over=case.at_most_over,
        at_least_fraction=case.at_least_fraction,
        at_most=case.at_most,
        against=case.against,
    )


_CAPABILITY = "TRIFUSE_CUDA_CAPABILITY"


def _uses_hopper_kernels(case: Case, device: str) -> bool:
    """Whether a case gets the CUDA kernels that are only for Hopper GPUs."""
    return (
        device == "cuda"
        and torch.cuda.get_device_capability() == (9, 0)
        and case.dtype.itemsize == 2
        and _CAPABILITY not in os.environ
    )


def _as_for_8_0(step: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    """Run a step with the CUDA kernels that other GPUs get."""

    def serve() -> Sequence[Tensor]:
        os.environ[_CAPABILITY] = "8.0"
        try:
            return step()
        finally:
            del os.environ[_CAPABILITY]

    return serve


def prepare_memory(
    who: str, case: Case, device: str, backend: str
) -> Callable[[], Sequence[Tensor]]:
    """Prepare a step for :func:`peak_extra_memory`, which calls this in a fresh process."""

    def step(case: Case) -> Callable[[], Sequence[Tensor]]:
        given = inputs(case, device)
        return ours(case, given) if who == "ours" else theirs(who, case, given)

    def compute(step: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        with trifuse.backend(backend):
            return step()

    compute(step(replace(case, shape=(1, 2, 128, 64))))
    return functools.partial(compute, step(case))


def run_memory(case: Case, device: str, backend: str) -> MemoryResult:
    def peak(who: str) -> int:
        return peak_extra_memory(prepare_memory, who, case, device, backend)

    return MemoryResult(
        case=case.masking,
        step=case.step,
        shape=case.size,
        ours=peak("ours"),
        peers={"sdpa": peak("sdpa")},
        at_most=MEMORY_AT_MOST,
    )


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table."""
    options = command_line.parser("attention", __doc__).parse_args(argv)
    device = options.device
    torch.set_num_threads(options.threads)
    cases = select([*CASES[device], MEMORY_CASE], lambda case: case.name, options.cases)
    timed = [case for case in cases if case is not MEMORY_CASE]
    if options.quick:
        timed = [replace(case, peers=tuple(p for p in case.peers if p != "flex")) for case in timed]
    facts = machine.facts(device)
    console.print(machine.describe(facts), soft_wrap=True, markup=False)
    seconds = 0.6 if options.quick else 4.0
    with trifuse.backend(options.backend):
        results, failed = run_all(
            timed,
            lambda case: case.name,
            lambda case: run(case, device, seconds),
            lambda some: report.save(options, facts, some),
        )
    memory, no_memory = run_all(
        [case for case in cases if case is MEMORY_CASE and not failed],
        lambda case: f"memory, {case.name}",
        lambda case: run_memory(case, device, options.backend),
        lambda some: None,
    )
    failed |= no_memory
    report.write("attention", options, facts, results, memory, failed=failed)
    return bool(failed)
