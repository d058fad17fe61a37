"""Calls of every operator for fault tests, and helpers to run and fail them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse
from trifuse import backends
from trifuse.ops import _linear_product
from trifuse.ops import dropout as dropout_ops
from trifuse.ops import gru as gru_ops
from trifuse.ops import lstm as lstm_ops
from trifuse.ops import rnn as rnn_ops
from trifuse.reference.gru import Parameters as GRUParameters
from trifuse.reference.lstm import Parameters as LSTMParameters


class Case(NamedTuple):
    """A call as a function of named tensors."""

    make: Callable[[int], dict[str, Tensor]]  # makes tensors of a size, from 1
    call: Callable[[dict[str, Tensor]], Any]
    trains: bool = True  # whether the call has a backward

    def tensors(self, size: int = 1) -> dict[str, Tensor]:
        return {
            k: t.requires_grad_(self.trains) if t.is_floating_point() else t
            for k, t in self.make(size).items()
        }

    def results(self, size: int = 1) -> list[Tensor]:
        """Returns the results of a forward and its backward."""
        torch.manual_seed(0)
        tensors = self.tensors(size)
        if not self.trains:
            return flat(self.call(tensors))
        outputs = floating(self.call(tensors))
        inputs = [t for t in tensors.values() if t.requires_grad]
        grads = torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs])
        return [*(o.detach() for o in outputs), *grads]


def flat(results: Any) -> list[Tensor]:
    """Returns the tensors in a call's result."""
    if isinstance(results, Tensor):
        return [results]
    return [t for each in results for t in flat(each)]


def floating(results: Any) -> list[Tensor]:
    """Returns the tensors in a call's result that require a gradient."""
    return [t for t in flat(results) if t.requires_grad]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def attention(dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    def make(size: int) -> dict[str, Tensor]:
        # More keys than one chunk of the backward holds, so that threads wait for one another.
        rows = {n: normal(2, 2, 540, 16 * size, dtype=dtype) for n in ("key", "value")}
        rows["query"] = normal(2, 2, 80, 16 * size, dtype=dtype)
        mask = normal(1, 2, 1, 540, dtype=dtype)
        return {**rows, "attn_mask": mask, "key_lengths": torch.tensor([540, 410])}

    return Case(make, lambda t: trifuse.scaled_dot_product_attention(**t, **options))


def attention_on_diagonals() -> Case:
    """A causal call with a diagonal and a slope for each sequence or head, and sinks."""

    def make(size: int) -> dict[str, Tensor]:
        rows = {n: normal(2, 2, 140, 16 * size) for n in ("key", "value")}
        rows["query"] = normal(2, 2, 9, 16 * size)
        return {**rows, "sinks": normal(2), "diagonal": torch.tensor([7, -2])}

    return Case(make, lambda t: trifuse.scaled_dot_product_attention(**t, is_causal=True))


def attention_of_few_queries() -> Case:
    def make(size: int) -> dict[str, Tensor]:
        rows = {n: normal(2, 2, 140, 16 * size) for n in ("key", "value")}
        return {**rows, "query": normal(2, 2, 3, 16 * size), "alibi_slopes": normal(2).abs()}

    return Case(make, lambda t: trifuse.scaled_dot_product_attention(**t, is_causal=True))


def attention_of_tables() -> Case:
    def make(size: int) -> dict[str, Tensor]:
        rows = {n: normal(2, 2, 140, 16 * size) for n in ("query", "key", "value")}
        tables = {n: normal(2, 2, 140, 9) for n in ("query_bias", "key_bias")}
        index = torch.arange(140)[:, None] * torch.arange(140) % 9
        return {**rows, "relative_bias": normal(1, 2, 9), **tables, "relative_index": index}

    return Case(make, lambda t: trifuse.scaled_dot_product_attention(**t, is_causal=True))


def varlen() -> Case:
    def make(size: int) -> dict[str, Tensor]:
        rows = {n: normal(300, 2, 16 * size) for n in ("query", "key", "value")}
        bounds = torch.tensor([0, 30, 290])
        biases = {"relative_bias": normal(1, 2, 300 + 300 - 1)}
        return {**rows, **biases, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds.clone()}

    return Case(make, lambda t: trifuse.varlen_attention(**t, is_causal=True))


def norm(dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    def make(size: int) -> dict[str, Tensor]:
        N = 96 * size
        rows = {n: normal(400, N, dtype=dtype) for n in ("x", "residual")}
        return {**rows, **{n: normal(N) for n in ("weight", "bias", "x_bias")}}

    def call(t: dict[str, Tensor]) -> Any:
        return trifuse.dropout_add_layer_norm(**t, dropout_p=0.1, training=True, **options)

    return Case(make, call)


def _recurrent(gates: int, H: int, R: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "input": normal(12, 40, 12, dtype=dtype),
        "h0": normal(40, R, dtype=dtype),
        "weight_ih": normal(gates * H, 12, dtype=dtype),
        "weight_hh": normal(gates * H, R, dtype=dtype),
        "bias_ih": normal(gates * H),
        "bias_hh": normal(gates * H),
    }


def lstm(dtype: torch.dtype = torch.float32, projected: bool = False, **options: Any) -> Case:
    def make(size: int) -> dict[str, Tensor]:
        H = 24 * size
        R = H // 2 if projected else H
        gates = 3 if options.get("coupled") else 4
        tensors = _recurrent(gates, H, R, dtype) | {
            "c0": normal(40, H),
            "lengths": torch.arange(40) % 13,
        }
        if projected:
            tensors |= {"weight_hr": normal(R, H, dtype=dtype), "weight_peephole": normal(3, H)}
            tensors |= {name: normal(4 * H) for name in ("norm_ih_weight", "norm_hh_weight")}
            tensors |= {name: normal(H) for name in ("norm_cell_weight", "norm_cell_bias")}
        return tensors

    def call(t: dict[str, Tensor]) -> Any:
        rest = {k: v for k, v in t.items() if k not in ("input", "h0", "c0")}
        return trifuse.lstm(t["input"], (t["h0"], t["c0"]), **rest, **options)

    return Case(make, call)


_GATES = {"gru": 3, "rnn": 1}


def without_cells(operator: str, **options: Any) -> Case:
    """A call of gru or rnn."""

    def make(size: int) -> dict[str, Tensor]:
        H = 24 * size
        return _recurrent(_GATES[operator], H, H, torch.float32) | {
            "lengths": torch.arange(40) % 13
        }

    def call(t: dict[str, Tensor]) -> Any:
        rest = {k: v for k, v in t.items() if k not in ("input", "h0")}
        return getattr(trifuse, operator)(t["input"], t["h0"], **rest, **options)

    return Case(make, call)


def plain_lstm() -> Case:
    """Both directions at once, through the op that checks its arguments in C++."""

    def make(size: int) -> dict[str, Tensor]:
        H = 24 * size
        states = {"h0": normal(2, 40, H), "c0": normal(2, 40, H)}
        return _recurrent(4, H, H, torch.float32) | states

    def call(t: dict[str, Tensor]) -> Any:
        one = LSTMParameters(t["weight_ih"], t["weight_hh"], t["bias_ih"], t["bias_hh"])
        return lstm_ops.layer(t["input"], t["h0"], t["c0"], [one, one], reverse=(False, True))

    return Case(make, call)


def plain(operator: str) -> Case:
    """A layer of gru or rnn, through the op that checks its arguments in C++."""

    def make(size: int) -> dict[str, Tensor]:
        H = 24 * size
        return _recurrent(_GATES[operator], H, H, torch.float32) | {"h0": normal(1, 40, H)}

    def call(t: dict[str, Tensor]) -> Any:
        one = GRUParameters(t["weight_ih"], t["weight_hh"], t["bias_ih"], t["bias_hh"])
        ops: Any = {"gru": gru_ops, "rnn": rnn_ops}[operator]
        return ops.layer(t["input"], t["h0"], [one])

    return Case(make, call)


def lstm_cell() -> Case:
    def make(size: int) -> dict[str, Tensor]:
        H = 24 * size
        tensors = _recurrent(4, H, H, torch.float32) | {"c0": normal(40, H)}
        return tensors | {"input": normal(40, 12)}

    def call(t: dict[str, Tensor]) -> Any:
        rest = {k: v for k, v in t.items() if k not in ("input", "h0", "c0")}
        return trifuse.lstm_cell(t["input"], (t["h0"], t["c0"]), **rest)

    return Case(make, call)


def cell(operator: str, **options: Any) -> Case:
    """One step of gru or rnn."""

    def make(size: int) -> dict[str, Tensor]:
        H = 24 * size
        return _recurrent(_GATES[operator], H, H, torch.float32) | {"input": normal(40, 12)}

    def call(t: dict[str, Tensor]) -> Any:
        rest = {k: v for k, v in t.items() if k not in ("input", "h0")}
        return getattr(trifuse, f"{operator}_cell")(t["input"], t["h0"], **rest, **options)

    return Case(make, call)


def dropout() -> Case:
    return Case(
        lambda size: {"x": normal(300, 500 * size)}, lambda t: dropout_ops.dropout(t["x"], 0.3)
    )


def linear() -> Case:
    """The product of trifuse.nn.Linear where ours is faster than torch's."""

    def make(size: int) -> dict[str, Tensor]:
        N = 70 * size
        return {"x": normal(300, 50), "weight": normal(N, 50), "bias": normal(N)}

    def call(t: dict[str, Tensor]) -> Any:

        return _linear_product.product(t["x"], t["weight"], t["bias"], True)

    return Case(make, call)


def packed_linear(gated: bool = False) -> Case:
    def make(size: int) -> dict[str, Tensor]:
        N = 70 * size
        weight = torch.ops.trifuse.pack_linear(normal(N, 50))
        tensors = {"x": normal(300, 50), "packed": weight, "bias": normal(N)}
        return tensors | ({"up": weight.clone(), "up_bias": normal(N)} if gated else {})

    def call(t: dict[str, Tensor]) -> Any:
        return torch.ops.trifuse.linear_packed(
            t["x"], t["packed"], t["bias"].shape[0], t["bias"], "silu", *list(t.values())[3:]
        )

    return Case(make, call, trains=False)


def unpacked_linear(gated: bool = False) -> Case:
    def make(size: int) -> dict[str, Tensor]:
        N = 70 * size
        tensors = {"x": normal(7, 50), "weight": normal(N, 50), "bias": normal(N)}
        return tensors | ({"up": normal(N, 50), "up_bias": normal(N)} if gated else {})

    def call(t: dict[str, Tensor]) -> Any:
        return torch.ops.trifuse.linear_unpacked(
            t["x"], t["weight"], t["bias"], "silu", *list(t.values())[3:]
        )

    return Case(make, call, trains=False)


def packing() -> Case:
    """Several weights at once."""
    return Case(
        lambda size: {"first": normal(70 * size, 50), "second": normal(65 * size, 33)},
        lambda t: torch.ops.trifuse.pack_linears(list(t.values())),
        trains=False,
    )


def unpacking() -> Case:
    """The weight has 64 features, one panel of the packed form."""

    def call(t: dict[str, Tensor]) -> Any:
        packed = t["packed"]
        in_features = packed.nbytes // (64 * torch.float32.itemsize)
        return torch.ops.trifuse.unpack_linear(packed, 64, in_features, torch.float32)

    return Case(
        lambda size: {"packed": torch.ops.trifuse.pack_linear(normal(64, 50 * size))},
        call,
        trains=False,
    )


def embedding_sum() -> Case:
    def make(size: int) -> dict[str, Tensor]:
        ids = {f"ids {i}": torch.arange(70).view(2, 35) % 9 for i in range(2)}
        return ids | {f"table {i}": normal(9, 64 * size) for i in range(2)}

    def call(t: dict[str, Tensor]) -> Any:
        ids, tables = list(t.values())[:2], list(t.values())[2:]
        return torch.ops.trifuse.embedding_sum(ids, tables)

    return Case(make, call, trains=False)


def activation(name: str) -> Case:
    """A gradient; that of a gate's halves has the most tensors."""
    op = getattr(torch.ops.trifuse, name)
    halves = name == "gate_halves_backward"

    def make(size: int) -> dict[str, Tensor]:
        return {"grad": normal(40 * size, 48), "x": normal(40 * size, 96 if halves else 48)}

    def call(t: dict[str, Tensor]) -> Any:
        return op(*t.values(), *([1] if halves else []), "silu")

    return Case(make, call, trains=False)


def bias_gradient() -> Case:
    def make(size: int) -> dict[str, Tensor]:
        return {"grad": normal(40 * size, 48), "out": normal(40 * size, 48).relu()}

    def call(t: dict[str, Tensor]) -> Any:
        return torch.ops.trifuse.bias_gradient(*t.values())

    return Case(make, call, trains=False)


def rotary() -> Case:
    def make(size: int) -> dict[str, Tensor]:
        places = {name: normal(2, 35, 32) for name in ("cos", "sin")}
        return {"x": normal(2, 35, 2 * size, 32).transpose(1, 2)} | places

    def call(t: dict[str, Tensor]) -> Any:
        return torch.ops.trifuse.rotate(*t.values(), 1, *(False,) * 4)

    return Case(make, call, trains=False)


def encoder_layer() -> Case:
    """Heads of size 8, and a feed-forward network as wide as the layer."""

    def make(size: int) -> dict[str, Tensor]:
        D = 16 * size
        pack = torch.ops.trifuse.pack_linear
        tensors = {"x": normal(2, 70, D), "attn_mask": torch.arange(140).view(2, 1, 1, 70) % 9 > 0}
        tensors |= {f"weight {i}": pack(normal(D, D)) for i in range(6)}
        tensors |= {f"bias {i}": normal(D) for i in range(6)}
        return tensors | {f"norm {i}": normal(D) for i in range(4)}

    def call(t: dict[str, Tensor]) -> Any:
        x, mask, *rest = t.values()
        D = x.shape[-1]
        sizes = D // 8, D // 8, 8, D
        options = ((1e-5, 1e-5), *sizes, 0.4, 1.0, None, "gelu", *(False,) * 10, -1, -1)
        return torch.ops.trifuse.encoder_layer(
            x, mask, None, 0, rest[:6], rest[6:12], rest[12:], *options
        )

    return Case(make, call, trains=False)


CASES = {
    "attention": attention(return_lse=True),
    "attention_bf16": attention(torch.bfloat16, dropout_p=0.1),
    "attention, diagonal": attention_on_diagonals(),
    "attention, few queries": attention_of_few_queries(),
    "attention, tables": attention_of_tables(),
    "varlen": varlen(),
    "norm": norm(prenorm=True),
    "norm_bf16": norm(torch.bfloat16),
    "lstm": lstm(),
    "lstm_bf16": lstm(torch.bfloat16, cell_clip=0.5),
    "lstm_projected": lstm(projected=True, proj_clip=0.5, recompute=True),
    "lstm_random": lstm(
        coupled=True,
        zoneout_h=0.1,
        zoneout_c=0.1,
        recurrent_dropout=0.2,
        cell_clip=0.5,
        reverse=True,
        training=True,
    ),
    "plain_lstm": plain_lstm(),
    "lstm_cell": lstm_cell(),
    "gru": without_cells("gru"),
    "gru, reset first": without_cells("gru", linear_before_reset=False),
    "plain_gru": plain("gru"),
    "gru_cell": cell("gru"),
    "rnn": without_cells("rnn", nonlinearity="relu", reverse=True),
    "plain_rnn": plain("rnn"),
    "rnn_cell": cell("rnn", nonlinearity="relu"),
    "dropout": dropout(),
    "linear": linear(),
}


# Calls of the C++ ops that have no backward.
INFERENCE = {
    "linear_packed": packed_linear(),
    "linear_packed, gated": packed_linear(gated=True),
    "linear_unpacked": unpacked_linear(),
    "linear_unpacked, gated": unpacked_linear(gated=True),
    "pack_linears": packing(),
    "unpack_linear": unpacking(),
    "embedding_sum": embedding_sum(),
    "rotate": rotary(),
    "activate_backward": activation("activate_backward"),
    "gate_halves_backward": activation("gate_halves_backward"),
    "bias_gradient": bias_gradient(),
    "encoder_layer": encoder_layer(),
}


# Sizes of the cases that train, and smaller ones, for interpreters.
_SMALL = {540: 7, 140: 7, 300: 9, 599: 17, 80: 5, 400: 3, 40: 2, 12: 2}


def shrink(case: Case) -> Case:
    def make(size: int) -> dict[str, Tensor]:
        tensors = {}
        for name, t in case.make(size).items():
            for dim, n in enumerate(t.shape):
                t = t.narrow(dim, 0, _SMALL.get(n, n))
            tensors[name] = t.clone() if t.is_floating_point() else t.clamp(max=7)
        return tensors

    return case._replace(make=make)


SHRUNK = {
    name: shrink(CASES[name])
    for name in (
        "attention", "attention, diagonal", "varlen", "norm", "lstm", "lstm_projected", "gru",
        "gru, reset first", "rnn",
    )
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Records the calls of our ops, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "trifuse":
            self.calls.append((func, list(args)))
        return func(*args, **(kwargs or {}))


def calls_of_ops(case: Case) -> list[tuple[Any, list[Any]]]:
    """Records each op of a forward and its backward, with its arguments."""
    with Recorder() as recorder:
        case.results()
    return recorder.calls


# Calls functions of test modules, in JSON lines of its input, in forks of this process. It has
# imported what takes most of the time, and has no threads.
_SERVE = """
import faulthandler, gc, importlib, json, os, sys
import fault_cases
gc.freeze()
for line in sys.stdin:
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
out, seconds, sys.path[:], module, name, args = json.loads(line)
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number in (1, 2):
    os.dup2(os.open(out, os.O_WRONLY | os.O_APPEND), number)
faulthandler.enable()
faulthandler.dump_traceback_later(seconds, exit=True)
getattr(importlib.import_module(module), name)(*eval(args))
"""


@functools.cache
def _server(environment: frozenset[tuple[str, str]]) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def in_process(function: Callable[..., None], *args: Any, seconds: float = 180) -> None:
    """Calls a test module's function in a separate process, which may crash or hang."""
    folder = os.path.dirname(__file__)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": folder}
    environment.pop("PYTEST_CURRENT_TEST", None)
    server = _server(frozenset(environment.items()))
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile("r", errors="replace") as out:
        request = (out.name, seconds, sys.path, function.__module__, function.__name__, repr(args))
        print(json.dumps(request), file=server.stdin, flush=True)
        status = server.stdout.readline().strip()
        if status != "0":
            why = f"ended with {status or 'its server'}\n{out.read()}"
            pytest.fail(why, pytrace=False)


def in_new_thread(function: Callable[..., Any], *args: Any) -> None:
    """Calls a function in a thread that has no scratch memory yet; raises what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


ALL = 1 << 40  # a count for `failing`: every allocation from the first one on


@contextlib.contextmanager
def failing(first: int, count: int) -> Iterator[None]:
    backends._C.fail_allocations(first, count)
    try:
        yield
    finally:
        backends._C.fail_allocations(0)


def unless_out_of_memory(call: Callable[[], Any]) -> Any:
    """Returns the call's result, or None if it ran out of memory."""
    try:
        return call()
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return None


def for_each_allocation(attempt: Callable[[int], int]) -> int:
    """Calls ``attempt(number)`` in a new thread for 1, 2, and so on; returns the last number.

    ``attempt`` makes allocation ``number`` fail, and returns how many allocations were requested.
    The last number is the first one beyond them.
    """
    number, made = 0, 0

    def call() -> None:
        nonlocal made
        made = attempt(number)

    while number <= made:
        number += 1
        in_new_thread(call)
    return number


def equal(results: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def smaller(t: Tensor) -> list[Tensor]:
    """Returns copies of ``t``, each halved along one dimension."""
    return [
        t.detach().narrow(d, 0, max(t.shape[d] // 2, 0)).clone()
        for d in range(t.dim())
        if t.shape[d] > 1
    ]


def exchanged_data_raises(shrunk: str = "", any_type: bool = False) -> None:
    """Exchanges each tensor of each case, or of one case of ``SHRUNK``, in every way.

    Args:
        any_type: whether kernels accept tensors of any type, as Triton's do.
    """
    for name, case in {shrunk: SHRUNK[shrunk]}.items() if shrunk else CASES.items():
        for argument, t in case.tensors().items():
            for other in smaller(t):
                _exchange(name, case, argument, other)
            if t.is_floating_point() and not any_type:
                for dtype in (torch.float64, torch.float16):
                    _exchange(name, case, argument, t.detach().to(dtype))


def _exchange(name: str, case: Case, argument: str, other: Tensor) -> None:
    """Exchanges data before a backward. It must raise unless it kept the old data or reads none."""

    def gradients(exchanged: bool) -> list[Tensor]:
        torch.manual_seed(0)
        tensors = case.tensors()
        outputs = floating(case.call(tensors))
        if exchanged:
            tensors[argument].data = other
        inputs = [t for k, t in tensors.items() if t.requires_grad and k != argument]
        ones = [torch.ones_like(o) for o in outputs]
        return list(torch.autograd.grad(outputs, inputs, ones)) if inputs else []

    message = ""
    try:
        found = gradients(True)
    except (ValueError, TypeError, RuntimeError) as error:
        message = str(error)
    if not message:
        assert equal(found, gradients(False)), (name, argument)
        return
    if "invalid gradient" in message:  # the gradient is right, but autograd rejects its shape
        return
    # The backward of linear multiplies with torch, which raises its own errors.
    assert re.search(r": expected .*; got |same dtype", message), (name, argument, message)
    # If a tensor sets the sizes of others, the error may name one of the others.
    if argument.startswith(("weight", "bias", "x_bias", "norm", "residual", "lengths")):
        assert message.startswith(argument), (name, argument, message)
    if argument == "input":
        assert message.startswith(("input", "weight_ih", "output", "h0", "hx")), (
            name,
            argument,
            message,
        )


def short_storage_raises(*names: str, shrunk: bool = False) -> None:
    """Gives each tensor of a call a storage that is too small: empty, or short of one element.

    Args:
        names: the calls. Default: all.
        shrunk: whether the calls are those of ``SHRUNK``.
    """
    cases = SHRUNK if shrunk else CASES | INFERENCE
    for case in [cases[name] for name in names or cases]:
        for argument, t in case.make(1).items():
            for kept in (0, t.nbytes - t.itemsize):
                tensors = case.make(1)
                tensors[argument] = t.clone()
                tensors[argument].untyped_storage().resize_(kept)
                # If the operator first takes a view, torch itself raises.
                with pytest.raises((ValueError, RuntimeError), match="storage"):
                    case.call(tensors)
