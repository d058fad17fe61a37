"""The cache of large results' memory: freed blocks are reused, blocks in use never."""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from attention_cases import assert_equal, normal
from torch import Tensor
from torch.profiler import ProfilerActivity

import trifuse
from trifuse import backends

pytestmark = pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")

SHAPE = (300, 1024)  # 1.2 MB in float32; results of 128 KiB and more are cached
MIB = 2**20


@pytest.fixture(autouse=True)
def _cpp() -> Iterator[None]:
    with trifuse.backend("cpp"):
        yield


def result(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return trifuse.dropout_add_layer_norm(normal(*shape, seed=seed))


def expected(seed: int = 0) -> Tensor:
    """Returns the same bits as :func:`result`, in torch's memory, computed in small parts."""
    rows = normal(*SHAPE, seed=seed).split(10)
    return torch.cat([trifuse.dropout_add_layer_norm(row) for row in rows])


def test_memory_is_used_again():
    """The next result of about the same size reuses a freed block; a much smaller one doesn't."""
    big = result(shape=(3000, 1024))
    address = big.data_ptr()
    assert address % (2 * MIB) == 0  # aligned for 2 MiB pages
    del big
    small = result()
    assert small.data_ptr() != address
    assert result(shape=(2900, 1024)).data_ptr() == address


@pytest.mark.parametrize("rows", [128, 200, 1000, 1024], ids="{} KiB".format)
def test_a_small_result_is_used_again(rows):
    """Results of 128 KiB to 1 MiB have blocks of about their size."""
    address = result(shape=(rows, 256)).data_ptr()
    assert result(shape=(rows, 256)).data_ptr() == address
    assert result(shape=(2 * rows, 256)).data_ptr() != address
    assert result(shape=(rows, 256)).data_ptr() == address


def test_results_in_use_are_left_alone():
    """Later forwards and backwards overwrite no live result, while other blocks are freed."""
    kept: list[Tensor] = []
    for seed in range(6):
        x = normal(*SHAPE, seed=seed).requires_grad_()
        out = trifuse.dropout_add_layer_norm(x)
        out.square().sum().backward()
        kept.append(out.detach())
        addresses = sorted(t.data_ptr() for t in (*kept, x, x.grad))
        assert all(b - a >= out.nbytes for a, b in itertools.pairwise(addresses))
        result(seed)  # freed at once
    for seed, out in enumerate(kept):
        assert_equal(out, expected(seed))


def test_what_a_graph_holds_is_in_use():
    x = normal(*SHAPE).requires_grad_()
    loss = trifuse.dropout_add_layer_norm(x).square().sum()  # saves its argument
    others = [result(seed) for seed in range(1, 4)]
    (grad,) = torch.autograd.grad(loss, x)
    assert all(t.isfinite().all() for t in others)
    with trifuse.backend("eager"):
        loss = trifuse.dropout_add_layer_norm(x).square().sum()
    torch.testing.assert_close(grad, torch.autograd.grad(loss, x)[0])


def saved_and_loaded(t: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    "copied",
    [
        torch.clone,
        copy.deepcopy,
        copy.copy,
        lambda t: pickle.loads(pickle.dumps(t)),
        saved_and_loaded,
        lambda t: t.share_memory_(),
        lambda t: torch.from_numpy(t.numpy()),
        lambda t: torch.from_dlpack(t),
        lambda t: torch.empty(0).set_(t),
    ],
    ids=["clone", "deepcopy", "copy", "pickle", "save", "share", "numpy", "dlpack", "set"],
)
def test_copies_and_views_outlive_a_result(copied: Callable[[Tensor], Tensor]):
    other = copied(result())
    more = [result(seed) for seed in range(1, 4)]  # would overwrite a block freed too early
    assert_equal(other, expected())
    assert_equal(more[0], expected(1))


def test_sharing_moves_a_result():
    out = result()
    before = out.data_ptr()
    assert out.share_memory_().is_shared()
    assert out.data_ptr() != before
    assert_equal(out, expected())


@pytest.mark.parametrize("rows", [10, 600, 5000])
def test_results_can_be_resized(rows):
    out = result()
    out.resize_(rows, 1024)
    common = min(rows, 300)
    assert_equal(out[:common], expected()[:common])
    out.fill_(1)  # all of it can be written
    assert_equal(result(1), expected(1))
    assert out.eq(1).all()
    out.untyped_storage().resize_(0)
    assert out.untyped_storage().nbytes() == 0


def test_threads_make_and_free_results():
    """Threads also free results that other threads made."""
    torch.set_num_threads(1)
    reference = [expected(seed) for seed in range(4)]
    handed_on: list[Tensor] = []
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(20):
            out = result(seed)
            if not torch.equal(out, reference[seed]):
                wrong.append(seed)
            handed_on.append(out)
            del out
            if len(handed_on) > 6:
                handed_on.pop(0)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(any(torch.equal(out, r) for r in reference) for out in handed_on)


def test_freed_by_another_thread():
    held = [result()]
    address = held[0].data_ptr()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert result(1).data_ptr() == address


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms_fill_it_with_nan(deterministic):
    """Results are filled as torch fills ``torch.empty``, so that unwritten elements show."""
    torch.use_deterministic_algorithms(deterministic)
    result()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profile:
        trifuse.dropout_add_layer_norm(torch.ones(()).expand(SHAPE))
    filled = [e.input_shapes[0] for e in profile.events() if e.name == "aten::fill_"]
    assert (list(SHAPE) in filled) == deterministic


# Runs in a separate process: the limit is read once, and resident memory is counted per process.
# The input is one row, expanded, which takes no memory.
SCRIPT = """
import torch, trifuse
def resident():
    with open("/proc/self/status") as lines:
        (line,) = (line for line in lines if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
torch.set_num_threads(1)
trifuse.dropout_add_layer_norm(torch.ones(10, 1024))
before = resident()
results = [trifuse.dropout_add_layer_norm(torch.ones(1024).expand(8192, -1)) for _ in range(10)]
print(resident() - before)
results.clear()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("limit", "kept"), [("0", 0), ("100", 96), (None, 256)], ids=str)
def test_what_is_kept_is_bounded(limit, kept):
    """The cache keeps none of ten results of 32 MiB, as many as fit, or by default 256 MiB."""
    environment = {k: v for k, v in os.environ.items() if k != "TRIFUSE_CPU_CACHE_MIB"}
    if limit is not None:
        environment["TRIFUSE_CPU_CACHE_MIB"] = limit
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    in_use, freed = map(float, done.stdout.split())
    assert 320 <= in_use < 340
    assert kept <= freed + 1 < kept + 20
