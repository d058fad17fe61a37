"""Fused models trained by several processes: the loss and the gradients of one process."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from dtensor_checks import close
from processes import check
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import trifuse
from trifuse import backends
from trifuse.distributed import SequenceParallel
from trifuse.models.bert import BertConfig, BertModel
from trifuse.ops import _linear_choice, _linear_of_parts, _linear_product, linear
from trifuse.ops._linear_choice import Choice

BATCH, LENGTH = 8, 4


def bert(dropout: float = 0.0) -> BertModel:
    """Returns a small fused BERT with the same weights in every process."""
    torch.manual_seed(1)
    model = BertModel(
        BertConfig(
            vocab_size=40,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=8,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        ),
        add_pooling_layer=False,  # DDP averages nothing if the loss leaves out a parameter
    ).double()
    report = trifuse.fuse(model)
    assert report.swapped
    return model


def tokens() -> tuple[Tensor, Tensor]:
    """Returns a batch of tokens, and its mask: sequences of two lengths in every process's part."""
    torch.manual_seed(2)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[::2, -1] = False
    return torch.randint(1, 40, (BATCH, LENGTH)), mask


def loss_of(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    out = model(ids, mask)[0]
    return out.square().mul(torch.arange(out.shape[-1])).mean()


def part(t: Tensor) -> Tensor:
    return t.chunk(dist.get_world_size())[dist.get_rank()]


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.replace("module.", ""): whole(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def same_gradients(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert expected
    assert actual.keys() == expected.keys()
    for name in expected:
        close(actual[name], expected[name], name)


def in_one_process(
    make: Callable[[], nn.Module] = bert, loss: Callable[..., Tensor] = loss_of
) -> tuple[Tensor, dict[str, Tensor]]:
    model = make()
    found = loss(model, *tokens())
    found.backward()
    return found.detach(), gradients(model)


def trained_on_parts(model: nn.Module) -> None:
    """Compares one step, in which each process has a part of the batch, with one process."""
    expected, grads = in_one_process()
    loss = loss_of(model, *map(part, tokens()))
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    close(mean / dist.get_world_size(), expected, "loss")
    same_gradients(gradients(model), grads)


@check
def ddp() -> None:
    model = bert()
    trained_on_parts(nn.parallel.DistributedDataParallel(model))


def sharded(model: BertModel, mesh: DeviceMesh) -> BertModel:
    from torch.distributed.fsdp import fully_shard

    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@check
def fsdp2() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded(bert(), mesh)
    trained_on_parts(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())


def huggingface_bert(dropout: float = 0.0, fused: bool = True) -> nn.Module:
    """Returns transformers' BERT with the same weights in every process."""
    import transformers

    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = transformers.BertModel(config, add_pooling_layer=False).double()
    assert not fused or trifuse.fuse(model).swapped
    return model


@check
def tensor_parallel_bert() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected, grads = in_one_process(huggingface_bert)
    model = split_by_heads(huggingface_bert(), mesh)
    loss = loss_of(model, *tokens())
    loss.backward()
    close(loss, expected, "loss")
    same_gradients(gradients(model), grads)


@check
def inference_before_and_after_a_step() -> None:
    """Packed forms of weights are those of the moment, however the model is split."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids, mask = (t.repeat(8, 1) for t in tokens())  # more rows than a product without packing has
    ways: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], bool]] = {
        "DDP": (bert, nn.parallel.DistributedDataParallel, True),
        "FSDP2": (bert, lambda model: sharded(model, mesh), True),
        "TP": (huggingface_bert, lambda model: split_by_heads(model, mesh), False),
    }
    for name, (make, split, by_batch) in ways.items():
        alone, model = make().float(), split(make().float())
        mine = (part(ids), part(mask)) if by_batch else (ids, mask)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (alone, model)]
        for step in range(3):
            for each in (alone, model):
                each.eval()
            with torch.no_grad():
                expected, actual = alone(ids, mask)[0], model(*mine)[0]
            expected = part(expected) if by_batch else expected
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=f"{name} {step}")
            batches = ((ids, mask), mine)
            for each, batch, optimizer in zip((alone, model), batches, optimizers, strict=True):
                each.train()
                loss_of(each, *batch).backward()
                optimizer.step()
                optimizer.zero_grad()


def collectives(model: nn.Module, *inputs: Tensor) -> Counter[tuple[str, str]]:
    """Counts the collectives of a step, by name and shapes."""
    with torch.profiler.profile(record_shapes=True) as profile:
        out = model(*inputs)
        whole(out if isinstance(out, Tensor) else out[0]).square().sum().backward()
    events = (e for e in profile.events() if e.name.startswith("c10d::"))
    return Counter((e.name, str(e.input_shapes)) for e in events)


@contextlib.contextmanager
def our_products(*dtypes: torch.dtype) -> Iterator[mock.Mock]:
    """Serves linear layers in training by trifuse's product, whatever the CPU.

    Yields a mock that is called as often as a layer of DTensors is.
    """
    choice = Choice("a test", inference=True, training=True)
    layers = mock.Mock()
    forward = _linear_of_parts._LinearOfParts.forward

    def counted(*args):
        layers()
        return forward(*args)

    with (
        mock.patch.dict(_linear_choice._made, dict.fromkeys(dtypes, choice)),
        mock.patch.object(_linear_of_parts._LinearOfParts, "forward", staticmethod(counted)),
    ):
        yield layers


@check
def fused_layers_communicate_as_torch_s_do() -> None:
    if backends.cpu_capability() is None:
        return  # no C++ extension
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ids, mask = (t.repeat(4, 1) for t in tokens())
    with our_products(torch.float64, torch.float32) as layers:  # it is fused in float64
        ours, theirs = (
            collectives(split_by_heads(huggingface_bert(fused=fused).float(), mesh), ids, mask)
            for fused in (True, False)
        )
        assert layers.call_count == 12  # six in each of two
        assert ours == theirs
        assert ours.total() >= 8  # in each of two layers, two sums and two of gradients
        layers.reset_mock()
        x = distribute_tensor(torch.randn(2, 64, 32), mesh, [Shard(1)])
        fused, plain = Sublayer(), Sublayer(fused=False)
        assert trifuse.fuse(fused).swapped
        ours, theirs = (collectives(split_by_tokens(each, mesh), x) for each in (fused, plain))
        assert layers.call_count == 2
        assert ours == theirs
        assert ours.total() >= 4


@check
def linear_layers_communicate_as_torch_s_do() -> None:
    """However x and the parameters are sharded, and if the parameters are frozen."""
    if backends.cpu_capability() is None:
        return  # no C++ extension
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, columns = Replicate(), (Shard(0), Shard(0))
    cases = [
        *((x, *columns) for x in (whole, Shard(0), Shard(1))),
        *((x, whole, whole) for x in (whole, Shard(0), Shard(1), Shard(2))),
        *((x, Shard(1), whole) for x in (whole, Shard(2))),
    ]
    shapes = ((4, 40, 16), (12, 16), (12,))

    class Layer(nn.Module):
        def __init__(self, function: Callable[..., Tensor], places: Any, frozen: bool) -> None:
            super().__init__()
            self.function = function
            self.parameters_ = [
                distribute_tensor(torch.randn(shape), mesh, [place]).requires_grad_(not frozen)
                for shape, place in zip(shapes[1:], places, strict=True)
            ]

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x, *self.parameters_)

    for (place, *places), frozen in itertools.product(cases, (False, True)):
        x = distribute_tensor(torch.randn(shapes[0]), mesh, [place]).requires_grad_()
        with our_products(torch.float32) as layers:
            ours, theirs = (
                collectives(Layer(function, places, frozen), x)
                for function in (linear.linear, nn.functional.linear)
            )
            assert layers.call_count == 1
        assert ours == theirs, (place, places, frozen, ours, theirs)


def split_by_heads(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.encoder.layer:
        plan = {f"attention.self.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"attention.output.dense": RowwiseParallel(), "output.dense": RowwiseParallel()}
        plan["intermediate.dense"] = ColwiseParallel()
        parallelize_module(layer, mesh, plan)
    return model


@check
def tensor_parallel_products_are_ours() -> None:
    """Columns, then rows of a feed-forward network, with more rows than torch's product serves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if backends.cpu_capability() is None:
        return  # no C++ extension
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)).double()
    split = copy.deepcopy(plain)
    served = mock.Mock(side_effect=_linear_product.product)
    products = mock.patch.object(_linear_of_parts, "product", served)
    gradients = mock.patch.object(_linear_product, "product", served)  # those of the weights
    with our_products(torch.float64), products, gradients:
        trifuse.fuse(split)
        parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch.manual_seed(4)
        x = torch.randn(4, 24, 32).double()
        given = [x.clone().requires_grad_() for _ in range(2)]
        out, expected = split(given[0]), plain(given[1])
        close(out, expected, "out")
        (out.square().sum()).backward()
        (expected.square().sum()).backward()
        assert served.call_count == 6  # two layers, and two gradients of each
    close(given[0].grad, given[1].grad, "x")
    for (name, p), q in zip(split.named_parameters(), plain.parameters(), strict=True):
        close(p.grad.full_tensor(), q.grad, name)


@check
def linear_layers_of_dtensors() -> None:
    """By columns, terms, rows and tokens: results, gradients and second derivatives.

    Neither the rows nor the tokens divide by the number of processes.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if backends.cpu_capability() is None:
        return  # no C++ extension
    torch.manual_seed(3)
    shapes = {"x": (5, 25, 16), "weight": (20, 16), "bias": (20,)}
    given = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    whole, columns, terms = Replicate(), Shard(0), Shard(1)
    cases = {  # the placements of x, weight and bias, and the result's
        "columns": (whole, columns, columns, Shard(2)),
        "columns, x by rows": (Shard(0), columns, columns, Shard(2)),
        "columns, x by tokens": (Shard(1), columns, columns, Shard(2)),
        "terms": (Shard(2), terms, whole, Partial()),
        "terms of x": (Shard(2), whole, whole, Partial()),
        "rows": (Shard(0), whole, whole, Shard(0)),
        "tokens": (Shard(1), whole, whole, Shard(1)),
        "replicated": (whole, whole, whole, whole),
    }

    def derivatives(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        """The result, its gradients, and those of their squares."""
        out = function(*tensors)
        first = torch.autograd.grad(total(out), tensors, create_graph=True)
        second = torch.autograd.grad(sum(map(total, first)), tensors)
        return [out, *first, *second]

    def total(t: Tensor) -> Tensor:
        return (t.full_tensor() if isinstance(t, DTensor) else t).square().sum()

    for transposed in (False, True):  # a weight's layout, as GPT-2 has it
        expected = derivatives(
            nn.functional.linear, *(t.clone().requires_grad_() for t in given.values())
        )
        for name, (*placements, place) in cases.items():
            tensors = [
                distribute_tensor(t, mesh, [p])
                for t, p in zip(given.values(), placements, strict=True)
            ]
            if transposed:
                across = {columns: terms, terms: columns, whole: whole}[placements[1]]
                tensors[1] = distribute_tensor(given["weight"].t().contiguous(), mesh, [across]).t()
            tensors = [t.detach().requires_grad_() for t in tensors]
            with our_products(torch.float64) as layers:
                actual = derivatives(linear.linear, *tensors)
            assert layers.call_count > 0
            assert actual[0].placements == (place,), (name, actual[0].placements)
            for a, e, what in zip(actual, expected, ("out", *shapes, *shapes), strict=True):
                close(a.full_tensor(), e, f"{name}: {what}")


@check
def split_weights_are_not_frozen() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if backends.cpu_capability() is None:
        return  # nothing is frozen
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), torch.randn(3, 16)
    with torch.no_grad():
        expected = model(x)
        parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
        report = trifuse.fuse(model, freeze=True)
        assert report.frozen == ["1"], report.frozen
        torch.testing.assert_close(model(x), expected)


@check
def tensor_parallel_llama() -> None:
    import transformers

    def make() -> nn.Module:
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=48,
            max_position_embeddings=8,
        )
        model = transformers.LlamaModel(config).double()
        assert trifuse.fuse(model).swapped
        return model

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected, grads = in_one_process(make)
    model = make()
    for layer in model.layers:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        plan = dict.fromkeys((*columns, "mlp.gate_proj", "mlp.up_proj"), ColwiseParallel())
        plan |= dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
        parallelize_module(layer, mesh, plan)
    loss = loss_of(model, *tokens())
    loss.backward()
    close(loss, expected, "loss")
    same_gradients(gradients(model), grads)


class Sublayer(nn.Module):
    """A feed-forward sublayer that ends in trifuse's norm, or in torch's."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(32, 48)
        self.second = nn.Linear(48, 32)
        self.norm = trifuse.nn.DropoutAddLayerNorm(32) if fused else nn.LayerNorm(32)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(torch.relu(self.first(x)))
        return self.norm(out, x) if self.fused else self.norm(out + x)


def split_by_tokens(sublayer: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {
        "first": ColwiseParallel(input_layouts=Shard(1)),
        "second": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
    }
    return parallelize_module(sublayer, mesh, plan)


@check
def sequence_parallel_sublayer() -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(Sublayer(), Sublayer()).double()

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(2, LENGTH, 32, dtype=torch.float64)
    alone, model = make(), make()
    expected = alone(x).square().sum()
    expected.backward()
    for sublayer in model:
        split_by_tokens(sublayer, mesh)
    whole_sequence = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
    )
    parallelize_module(model, mesh, {"0": whole_sequence})
    out = model(x)
    assert out.placements == (Shard(1),)
    loss = out.square().sum().full_tensor()
    loss.backward()
    close(loss, expected, "loss")
    same_gradients(gradients(model), gradients(alone))
