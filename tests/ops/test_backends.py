"""Which backend serves a call, how it is selected, and what is logged about it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import trifuse
from trifuse import backends

X = torch.ones(1, 2, 3, 4)
attention = trifuse.scaled_dot_product_attention

needs_cpp = pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")


@pytest.fixture
def _no_extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hides the C++ extension, as on a machine where it was not built."""
    monkeypatch.setattr(backends, "_C", None)
    backends._choose.cache_clear()
    yield
    backends._choose.cache_clear()


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_extension_serves_cpu_tensors(dtype):
    choice = trifuse.explain(attention, X.to(dtype), X.to(dtype), X.to(dtype))
    assert choice.backend == "cpp"
    assert [name for name, _ in choice.refused] == ["cuda", "triton"]
    assert str(choice).startswith("cpp\n  not cuda: ")


def test_the_interpreter_is_never_chosen_for_anyone(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backends._choose.cache_clear()
    choice = trifuse.explain(attention, X, X, X)
    assert choice.backend != "triton"
    assert "only when asked for by name" in dict(choice.refused)["triton"]


def test_explain_takes_the_call_as_it_is_made():
    """explain() takes the arguments of either operator, positional or by name, return_lse too."""
    assert trifuse.explain(attention, query=X, key=X, value=X, return_lse=True).backend
    packed = X[0].transpose(0, 1)
    cu = torch.tensor([0, 3])
    choice = trifuse.explain(trifuse.varlen_attention, packed, packed, packed, cu, return_lse=True)
    assert choice == trifuse.explain(attention, X, X, X)
    with trifuse.backend("eager"):
        assert trifuse.explain(attention, X, X, X) == backends.Choice("eager", ())
    with pytest.raises(TypeError, match=r"missing a required argument: 'value'"):
        trifuse.explain(attention, X, X)


def test_explain_runs_nothing():
    state = torch.get_rng_state()
    with torch.profiler.profile() as profile:
        trifuse.explain(attention, X, X, X, dropout_p=0.5)
    assert not [e for e in profile.events() if e.name.startswith("trifuse::")]
    assert torch.equal(torch.get_rng_state(), state)


def test_explain_knows_only_operators_of_trifuse():
    message = r"function: expected one of .*scaled_dot_product_attention, .*; got <built-in"
    with pytest.raises(TypeError, match=message):
        trifuse.explain(torch.nn.functional.scaled_dot_product_attention, X, X, X)


def test_context_manager_nests_and_restores():
    def current() -> str:
        return trifuse.explain(attention, X, X, X).backend

    auto = current()
    with trifuse.backend("eager"):
        assert current() == "eager"
        with trifuse.backend("auto"):
            assert current() == auto
        assert current() == "eager"
        with pytest.raises(ZeroDivisionError), trifuse.backend("auto"):
            _ = 1 / 0
        assert current() == "eager"
    assert current() == auto


def test_unknown_backends_are_refused_before_anything_changes():
    before = trifuse.explain(attention, X, X, X)
    message = r"backend: expected one of auto, cuda.*; got 'tpu'"
    with pytest.raises(ValueError, match=message), trifuse.backend("tpu"):
        pytest.fail("entered")
    assert trifuse.explain(attention, X, X, X) == before


@pytest.mark.parametrize("name", ["eager", pytest.param("cpp", marks=needs_cpp)])
def test_environment_variable(name):
    code = "import torch, trifuse; x = torch.ones(1, 1, 2, 3); "
    code += "print(trifuse.explain(trifuse.scaled_dot_product_attention, x, x, x).backend)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRIFUSE_BACKEND": name},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == name


def test_the_choice_is_what_runs(backend):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 3, 4).requires_grad_() for _ in range(3))
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "trifuse":
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        out = attention(query, key, value)
        with trifuse.backend("auto"):  # the backward keeps the forward's backend
            out.sum().backward()
    assert seen == [
        f"trifuse.attention_forward.{backend}",
        f"trifuse.attention_backward.{backend}",
    ]


@pytest.mark.usefixtures("_no_extension")
def test_falling_back_is_said_once_and_why(caplog):
    with caplog.at_level(logging.WARNING, logger="trifuse"):
        for _ in range(3):
            attention(X, X, X)
    (record,) = caplog.records
    assert record.name == "trifuse"
    assert record.getMessage().startswith("attention (cpu, torch.float32) → eager, because ")
    for reason in ("cuda: ", "triton: ", "cpp: the C++ extension is missing"):
        assert reason in record.getMessage()
    attention(X.double(), X.double(), X.double())
    assert len(caplog.records) == 2  # another dtype is logged again


@needs_cpp
def test_nothing_is_said_where_a_kernel_serves(caplog):
    backends._choose.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="trifuse"):
        attention(X, X, X)
    assert caplog.records == []


@needs_cpp
def test_cpu_capabilities():
    """Capabilities are listed from DEFAULT to the best. Each can be set; any other name raises."""
    available = backends._C.cpu_capabilities()
    assert available[0] == "DEFAULT"
    assert len(set(available)) == len(available)
    assert set(available) <= set(backends.build_info()["capabilities"])
    before = backends._C.cpu_capability()
    try:
        for name in available:
            backends._C.set_cpu_capability(name)
            assert backends._C.cpu_capability() == name
        with pytest.raises(ValueError, match="AVX10"):
            backends._C.set_cpu_capability("AVX10")
        assert backends._C.cpu_capability() == available[-1]
    finally:
        backends._C.set_cpu_capability(before)


@pytest.mark.skipif(not backends._HAS_TRITON, reason="triton is not installed")
def test_triton_comes_before_cuda_where_that_has_not_measured_faster(monkeypatch):
    operator = "attention"
    monkeypatch.setattr(backends, "_CUDA_OPERATORS", (operator,))
    call = backends.Call(operator, "cuda", torch.float32)

    def chosen(call: backends.Call) -> backends.Choice:
        return backends._choose.__wrapped__(call, "auto")

    assert chosen(call).backend == "cuda"
    masked = call._replace(masked=True)
    refused = (("cuda", "not measured to be faster than Triton with a mask"),)
    assert chosen(masked) == backends.Choice("triton", refused)
    assert dict(chosen(call._replace(operator="dropout")).refused) == {
        "cuda": "no CUDA kernel for this operator"
    }
    monkeypatch.setattr(backends, "CUDA_BEFORE_TRITON", frozenset())
    assert chosen(call).refused == (("cuda", "not measured to be faster than Triton"),)
    monkeypatch.setattr(backends, "_HAS_TRITON", False)
    assert chosen(masked).backend == "cuda"
    monkeypatch.undo()
    monkeypatch.setattr(backends, "_CUDA_OPERATORS", (operator,))
    monkeypatch.setattr(backends, "_capability", lambda: (7, 5))
    too_old = ("cuda", "the GPU's compute capability is 7.5, and 8.0 is the least")
    assert chosen(call) == backends.Choice("triton", (too_old,))


@needs_cpp
def test_cuda_kernels_that_a_build_names_are_registered():
    for operator in backends.build_info()["cuda"]:
        for direction in ("forward", "backward"):
            name = f"trifuse::{operator}_{direction}.cuda"
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"), name
