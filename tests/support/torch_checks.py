"""Checks of an operator under torch's dispatcher, autograd, compiler, checkpoints and generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from attention_cases import SEED, assert_equal
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint


class Kernels(TorchDispatchMode):
    """Records which ops of trifuse are called, and which of them return."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "trifuse":
            return func(*args, **(kwargs or {}))
        self.called.append(str(func))
        result = func(*args, **(kwargs or {}))
        self.ran.append(str(func))
        return result


def seeded(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a call to drop the same elements every time, so that differences are derivatives."""

    def wrapped(*args: Tensor) -> Any:
        torch.manual_seed(SEED)
        return call(*args)

    return wrapped


def check_fakes(
    real: Sequence[Tensor], call: Callable[[Any], Sequence[Tensor]], args: Any, mode: str
) -> None:
    """Checks that tensors without memory give results of the real shapes, dtypes and strides.

    Args:
        mode: "fake" for FakeTensorMode, or "meta" for tensors on the meta device.
    """
    if mode == "meta":
        pretended = call(tree_map_only(Tensor, lambda t: t.to("meta"), args))
    else:
        with FakeTensorMode() as fake_mode:
            pretended = call(tree_map_only(Tensor, fake_mode.from_tensor, args))
    for r, p in zip(real, pretended, strict=True):
        assert (p.shape, p.dtype, p.stride()) == (r.shape, r.dtype, r.stride())


def values_and_gradients(function: Callable[..., Tensor], args: Sequence[Tensor]) -> list[Tensor]:
    out = seeded(function)(*args)
    return [out, *torch.autograd.grad(out.sum(), args)]


def assert_same_results(
    actual: Callable[..., Tensor], expected: Callable[..., Tensor], args: Sequence[Tensor]
) -> None:
    results = (values_and_gradients(f, args) for f in (actual, expected))
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e)


def check_forward_mode(
    call: Callable[..., Any], args: Sequence[Tensor], draws: bool = False
) -> None:
    """Checks tangents: of a call, of its gradients, and under torch.func.

    Args:
        draws: whether the call draws random numbers, which torch rejects for a batch of tangents.
    """
    batched = not draws
    # The fast mode checks random sums of a derivative's elements. For the formulas that these
    # tangents differentiate, a gradcheck of the backward checks each element.
    torch.autograd.gradcheck(
        call,
        args,
        check_forward_ad=True,
        check_backward_ad=False,
        check_batched_forward_grad=batched,
        fast_mode=True,
    )
    torch.autograd.gradgradcheck(call, args, fast_mode=True, check_fwd_over_rev=True)
    values = tuple(t.detach() for t in args)
    tangents = tuple(torch.randn_like(t) for t in values)
    results, derivatives = torch.func.jvp(call, values, tangents)
    # This jvp runs two backwards, which use the kernels.
    expected = torch.autograd.functional.jvp(call, values, tangents)
    leaves = map(tree_leaves, ((results, derivatives), expected))
    for actual, wanted in zip(*leaves, strict=True):
        torch.testing.assert_close(actual, wanted)
    # A gradient is linear in the upstream gradient, which has a tangent here.
    outs = tree_leaves(call(*args))
    upstream = [torch.randn_like(o) for o in outs]
    plain = torch.autograd.grad(outs, args, upstream, allow_unused=True)
    outs = tree_leaves(call(*args))
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(u, 2 * u) for u in upstream]
        for grad, once in zip(
            torch.autograd.grad(outs, args, dual, allow_unused=True), plain, strict=True
        ):
            if once is not None:
                primal, tangent = forward_ad.unpack_dual(grad)
                torch.testing.assert_close(primal, once)
                torch.testing.assert_close(tangent, 2 * once)


def check_vmap(
    function: Callable[..., Any], in_dims: tuple[int | None, ...], args: Sequence[Tensor | None]
) -> None:
    """Checks that vmap gives the same results as a loop over the samples."""
    pairs = list(zip(args, in_dims, strict=True))
    (count,) = {t.shape[d] for t, d in pairs if d is not None}
    samples = [[t if d is None else t.select(d, n) for t, d in pairs] for n in range(count)]
    actual = torch.vmap(function, in_dims=in_dims)(*args)
    expected = zip(*(function(*sample) for sample in samples), strict=True)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, torch.stack(e))


def check_vmap_randomness(draw: Callable[[Tensor], Tensor], samples: Tensor) -> Tensor:
    """Checks that a function of equal samples draws like torch's random functions, from one seed
    for all samples or from one for each. Returns its draws from one seed for each."""
    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(draw)(samples)
    torch.manual_seed(3)
    alone = draw(samples[0])
    torch.manual_seed(3)
    same = torch.vmap(draw, randomness="same")(samples)
    assert all(torch.equal(sample, alone) for sample in same)
    torch.manual_seed(3)
    different = torch.vmap(draw, randomness="different")(samples)
    assert not torch.equal(different[0], different[1])
    return different


def check_compile(
    function: Callable[..., Tensor], make_inputs: Callable[[], Sequence[Tensor]]
) -> None:
    """Checks that a compiled function gives the same results, with gradients and without."""
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same_results(compiled, function, make_inputs())
    with torch.no_grad():
        actual, expected = (seeded(f)(*make_inputs()) for f in (compiled, function))
        torch.testing.assert_close(actual, expected)


def check_one_graph(function: Callable[..., Tensor], inputs: Iterable[Sequence[Tensor]]) -> None:
    """Checks that one graph, compiled for dynamic shapes, serves all inputs.

    No two sizes of one input may be equal, because the graph would depend on it.
    """
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    graphs = set()
    for args in inputs:
        assert_same_results(compiled, function, args)
        graphs.add(counter.frame_count)
    assert len(graphs) == 1


def check_checkpoint(function: Callable[..., Tensor], args: Sequence[Tensor]) -> None:
    """Checks that a forward repeated from the same generator state gives the same bits."""

    def run_twice(*args: Tensor) -> Tensor:
        out: Tensor = checkpoint(function, *args, use_reentrant=False)
        return out

    results = (values_and_gradients(f, args) for f in (run_twice, function))
    for actual, expected in zip(*results, strict=True):
        assert_equal(actual, expected)


def check_generator(call: Callable[[], Tensor]) -> None:
    """Checks that draws depend only on the seed and state of torch's default generator."""
    torch.manual_seed(1)
    first, second = call(), call()
    state = torch.get_rng_state()
    third = call()
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    torch.set_rng_state(state)
    assert torch.equal(call(), third)
    torch.manual_seed(1)
    assert torch.equal(call(), first)
    assert torch.equal(call(), second)
