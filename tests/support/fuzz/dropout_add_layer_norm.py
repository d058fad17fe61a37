"""``trifuse.dropout_add_layer_norm``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import philox
from .attention import PROBABILITIES
from .call import Call, Tensors, draw_modes
from .draws import Draws
from .rounding import Rounding
from .tensors import INF, NAN, Values, draw_layout

WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 130)
WIDE = (255, 256, 300, 512, 513, 1024, 1030)


def draw(d: Draws, kernel: str, dtype: str) -> Call:
    N = d.choice(WIDE if d.flag(8) else WIDTHS)
    if d.flag(3):
        N = 0
    rows: tuple[int, ...] = ()
    for _ in range(d.integer(0, 3)):
        size = d.integer(1, 5) if d.flag(85) else d.choice((0, 9, 17, 40))
        if math.prod(rows) * size * N <= 8_000:
            rows = (*rows, size)
    beside = ("float32", dtype) if dtype in ("bfloat16", "float16") else (dtype,)
    tensors: dict[str, Values] = {}

    def values(name: str, *shape: int, **rest: Any) -> None:
        seed, kind = d.integer(0, 255), dtype if name == "x" else d.choice(beside[::-1])
        tensors[name] = Values(shape, kind, seed, layout=draw_layout(d, shape), **rest)

    # With a mean far from 0, only deviations from it carry information.
    mean = d.choice((0.0, 0.0, 0.0, 3.0, 1000.0))
    values("x", *rows, N, scale=d.choice((1.0, 1.0, 0.01, 30.0)), mean=mean)
    if d.flag(60):
        shape = tuple(1 if d.flag(15) else n for n in (*rows, N))
        values("residual", *shape[d.integer(0, len(rows)) if d.flag(15) else 0 :])
    for name, percent in (("weight", 70), ("bias", 60), ("x_bias", 30)):
        if d.flag(percent):
            values(name, N)
    options: dict[str, Any] = {}
    if d.flag(50):
        # With 1e-12, float16 gradients of rows that vary little would overflow.
        options["eps"] = d.choice((1e-5, 1e-5 if dtype == "float16" else 1e-12, 0.1, 3))
    percents = {"training": 50, "prenorm": 40, "rms_norm": 35, "residual_in_fp32": 25}
    for name, percent in percents.items():
        if d.flag(percent):
            options[name] = True
    if d.flag(45):
        options["dropout_p"] = d.choice(PROBABILITIES)
    call = Call("dropout_add_layer_norm", kernel, dtype, tensors, options)
    results = {"out": Values((*rows, N), dtype)}
    if options.get("prenorm"):
        results["sum"] = Values((*rows, N), str(_sum_dtype(call)).removeprefix("torch."))
    call = draw_modes(d, call, list(tensors), results)
    residual = tensors.get("residual")
    if residual and N > 1 and residual.shape[-1] == 1:
        # Layer norm cancels such a shift of whole rows, so its derivatives are only rounding
        # errors.
        call = dataclasses.replace(call, second=False)
    if dropped(call) and d.flag(15) and not tensors["x"].layout.repeated:
        call = dataclasses.replace(call, poison=d.choice((NAN, INF)), second=False)
    elif d.flag(6) and call.tensors["x"].shape and math.prod(call.tensors["x"].shape):
        count = math.prod(call.tensors["x"].shape)
        kinds = (NAN, 0.0, 1e-40, 3e-8, 1e4)
        planted = tuple((d.integer(0, count - 1), d.choice(kinds)) for _ in range(2))
        x = dataclasses.replace(tensors["x"], planted=planted)
        call = dataclasses.replace(
            call, tensors={**tensors, "x": x}, overflow=True, second=False, same_bits=False
        )
    elif "dropout_p" not in options and not call.same_bits and d.flag(8):
        call = _sampled(d, call)
    return dataclasses.replace(call, seed=d.integer(0, 255))


def _sampled(d: Draws, call: Call) -> Call:
    """Returns the call under vmap, with two samples of x and of some other tensors."""
    names = [n for n in call.tensors if n == "x" or d.flag(30)]
    samples = {n: d.integer(0, len(call.tensors[n].shape)) for n in names}
    tensors = dict(call.tensors)
    for name, dim in samples.items():
        shape = list(tensors[name].shape)
        shape.insert(dim, 2)
        tensors[name] = dataclasses.replace(
            tensors[name], shape=tuple(shape), layout=draw_layout(d, tuple(shape))
        )
    upstream = {
        n: dataclasses.replace(v, shape=(2, *v.shape), layout=draw_layout(d, (2, *v.shape)))
        for n, v in call.upstream.items()
    }
    return dataclasses.replace(
        call, tensors=tensors, upstream=upstream, samples=samples, second=False
    )


def _sum_dtype(call: Call) -> torch.dtype:
    dtype = call.torch_dtype
    if "residual" in call.tensors:
        dtype = getattr(torch, call.tensors["residual"].dtype)
    wide = call.options.get("residual_in_fp32") and dtype != torch.float64
    return torch.float32 if wide else dtype


def arguments(call: Call, tensors: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return "trifuse.dropout_add_layer_norm", {**tensors, **call.options}


def outputs(call: Call, result: Any) -> Tensors:
    return {"out": result[0], "sum": result[1]} if call.options.get("prenorm") else {"out": result}


def dropped(call: Call) -> bool:
    return bool(call.options.get("training") and call.options.get("dropout_p", 0.0))


def _kept(call: Call, rows: int, N: int) -> Tensor:
    """Returns the indices in a flattened x that dropout keeps."""
    p, seed = call.options["dropout_p"], philox.drawn_seed(call.seed)
    places = np.arange(rows * N)
    keep = philox.keep(seed, p, np.zeros_like(places), places // max(N, 1), places % max(N, 1))
    return keep.nonzero()[:, 0]


def formula(call: Call, tensors: Tensors, r: Rounding) -> Tensors:
    shape, options = tensors["x"].shape, call.options
    N = shape[-1]
    flat = {}
    for name, t in tensors.items():
        if name == "residual":
            t = t[(slice(None), *(None,) * (len(shape) - t.dim()))].expand(shape)
        flat[name] = t.reshape(len(t), -1, N) if name in ("x", "residual") and N else t
    if N == 0:
        x = tensors["x"]
        return {"out": x, "sum": x} if options.get("prenorm") else {"out": x}
    added = r(flat["x"])
    if "x_bias" in flat:
        added = r(added + flat["x_bias"][:, None])
    rows = added.shape[1]
    total = added.new_zeros(added.shape) if "residual" not in flat else flat["residual"]
    if dropped(call):
        # Dropped elements are left out, not multiplied by 0, so that NaN does not pass.
        kept = _kept(call, rows, N)
        rest = added.flatten(1).index_select(1, kept) * philox.scale(options["dropout_p"])
        total = total.flatten(1).index_add(1, kept, r(rest)).view_as(added)
    else:
        total = total + added
    total = r(total)
    if options.get("prenorm"):
        # The sum is normalised as returned, in its dtype. Gradients pass through the rounding.
        total = total + (total.detach().to(_sum_dtype(call)).double() - total.detach())
    centred = deviation = total
    if not options.get("rms_norm"):
        mean = r(total).mean(-1, keepdim=True)
        centred = r(total - r(mean))
        # Deviations add up to 0, so their squares send no first gradient back through the mean,
        # only a second one. With a detached mean, its errors reach gradients as in torch's formula.
        deviation = r(total - r(mean if call.second else mean.detach()))
    variance = r(r(deviation.square()).mean(-1, keepdim=True))
    rstd = r((variance + options.get("eps", 1e-5)).rsqrt())
    # Each feature has its own copy of rstd, so that the copies' gradients err independently.
    out = r(r(centred) * r(rstd.expand_as(centred)))
    if "weight" in flat:
        out = r(out * r(flat["weight"][:, None].expand_as(out)))
    if "bias" in flat:
        out = r(out + flat["bias"][:, None])
    results = {"out": out.reshape(shape)}
    if options.get("prenorm"):
        results["sum"] = total.reshape(shape)
    return results


def poison(call: Call, tensors: Tensors, value: float) -> None:
    """Overwrites the dropped elements of x."""
    x = tensors["x"]
    kept = _kept(call, x.numel() // max(1, x.shape[-1]), x.shape[-1])
    unused = torch.ones(x.numel(), dtype=torch.bool).index_fill(0, kept, False)
    x.masked_fill_(unused.view(x.shape), value)


def first(call: Call, tensors: Tensors) -> tuple[Tensors, Mapping[str, Any]] | None:
    x = tensors["x"]
    if x.dim() < 2 or len(x) < 2:
        return None
    one = slice(0, 1)
    given = dict(tensors, x=x[one])
    places = dict.fromkeys(("out", "sum", "grad_x"), one)
    residual = given.get("residual")
    if residual is not None and residual.dim() == x.dim():
        given["residual"] = residual[one]
        if len(residual) > 1:
            places["grad_residual"] = one
    return given, places
