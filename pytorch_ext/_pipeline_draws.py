"""Random numbers in the stages of a pipeline (torch.distributed.pipelining): those of one process.

One process draws the seeds of a model's calls in the order of its modules, each for the whole
batch. A stage computes one microbatch after another. So each microbatch is a part of the batch, and
begins with the generator state that one process would have when it reaches the stage.

That state depends on how many numbers the earlier stages drew. After its first microbatch a stage
sends the state to the next one, ahead of the activations. This is about 5 kB a step, and no stage
waits for it. It goes through the store with which the processes found each other. A message in the
group would be mistaken for the activations, and creating a further group of the same processes is
collective: all of them would have to take part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trifuse.ops import _draws
from trifuse.ops._checks import fail

_COMPUTING = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def check(stages: Any, microbatches: Any) -> list[Any]:
    """Checks the stages that this process has and the number of microbatches; returns a list."""
    found = list(stages) if isinstance(stages, (list, tuple)) else [stages]
    for stage in found:
        if not all(hasattr(stage, name) for name in _COMPUTING):
            expected = "stages of torch.distributed.pipelining"
            raise TypeError(f"stages: expected {expected}; got {type(stage).__name__}")
        if any(isinstance(module, torch.fx.GraphModule) for module in stage.submod.modules()):
            raise NotImplementedError(
                "stages: a stage that pipeline() traced has no part of the batch that changes from "
                "one microbatch to the next; make a PipelineStage of modules"
            )
    if not isinstance(microbatches, int) or microbatches < 1:
        raise fail("microbatches", "the number of the schedule's microbatches", microbatches)
    return found


@contextmanager
def drawing_as_one(stages: Sequence[Any], part: _draws.Part, microbatches: int) -> Iterator[None]:
    """Makes the stages draw, in one step of their schedule, what one process draws.

    Args:
        part: the part of the batch that all microbatches make up.
    """
    every: dict[int, _Stage] = {}
    for stage in stages:
        every[stage.stage_index] = _Stage(stage, part, microbatches, every)
    for found in every.values():
        found.begin()
    try:
        yield
    finally:
        for found in every.values():
            found.end()


class _Stage:
    """A stage in this process, during a step."""

    def __init__(
        self, stage: Any, part: _draws.Part, microbatches: int, here: Mapping[int, _Stage]
    ) -> None:
        self.stage, self.part, self.microbatches = stage, part, microbatches
        self.here = here  # all stages of this process, by index
        self.devices = [stage.device] if stage.device.type == "cuda" else []
        self.state = self.current_state() if stage.stage_index == 0 else None
        self.sizes: list[torch.Size] | None = None
        self.computed: set[int] = set()

    def begin(self) -> None:
        """Wraps the stage's methods that compute."""
        index = self.stage.stage_index
        self.key_before = self.key_of_state(index - 1) if index > 0 else ""
        self.key_after = self.key_of_state(index) if index + 1 < self.stage.num_stages else ""
        self.before = {name: vars(self.stage).get(name) for name in _COMPUTING}
        for name in _COMPUTING:
            setattr(self.stage, name, self.wrapped(name))

    def end(self) -> None:
        for name, before in self.before.items():
            delattr(self.stage, name)
            if before is not None:
                setattr(self.stage, name, before)

    def wrapped(self, name: str) -> Callable[..., Any]:
        original = getattr(self.stage, name)
        if name != "forward_one_chunk":

            def compute(chunk: int, *args: Any, **kwargs: Any) -> Any:
                # Checkpointed activations are recomputed here.
                with _draws.part(self.part_of(chunk)):
                    return original(chunk, *args, **kwargs)

            return compute

        def forward(chunk: int, *args: Any, **kwargs: Any) -> Any:
            first = not self.computed
            if chunk in self.computed:
                raise RuntimeError("part_of_batch: with stages, a block is one step of a schedule")
            self.computed.add(chunk)
            self.check_sizes(args[0] if args else kwargs.get("args"))
            self.set_state(self.received() if self.state is None else self.state)
            with _draws.part(self.part_of(chunk)):
                result = original(chunk, *args, **kwargs)
            if first:
                self.pass_on()
            return result

        return forward

    def part_of(self, chunk: int) -> _draws.Part:
        """Returns the part of the batch that a microbatch is."""
        first, pieces, whole, _ = self.part.batch
        numbers = (first * self.microbatches + chunk * pieces, pieces, whole * self.microbatches)
        step = math.gcd(*numbers)
        return self.part._replace(batch=_draws.Share(*(n // step for n in numbers)))

    def check_sizes(self, args: Any) -> None:
        """Checks that microbatches are equal parts, where the schedule passes them in."""
        sizes = [t.shape for t in tree_leaves(args) if isinstance(t, Tensor)]
        if self.sizes is None:
            self.sizes = sizes
        elif sizes != self.sizes:
            expected = f"a batch that {self.microbatches} divides"
            raise fail("microbatches", expected, f"inputs of {self.sizes} and {sizes}")

    # The generators' state ----------------------------------------------------------------------

    def current_state(self) -> Tensor:
        """Returns the state of the CPU's generator, followed by that of the stage's GPU."""
        states = [torch.cuda.get_rng_state(device) for device in self.devices]
        return torch.cat([torch.get_rng_state(), *states])

    def set_state(self, state: Tensor) -> None:
        size = torch.get_rng_state().numel()
        torch.set_rng_state(state[:size])
        for device in self.devices:
            torch.cuda.set_rng_state(state[size:], device)

    def received(self) -> Tensor:
        """Returns the state that the previous stage has sent to this one."""
        store = _store()
        self.state = torch.frombuffer(bytearray(store.get(self.key_before)), dtype=torch.uint8)
        store.delete_key(self.key_before)
        return self.state

    def pass_on(self) -> None:
        """Sends the state to the next stage, if there is one."""
        index = self.stage.stage_index + 1
        if index == self.stage.num_stages:
            return
        state = self.current_state()
        if index in self.here:
            self.here[index].state = state
        else:
            _store().set(self.key_after, bytes(state.tolist()))

    def key_of_state(self, index: int) -> str:
        """Returns the key under which stage ``index`` stores its state for the next, in a new step.

        Both processes count the steps that they begin. A step that fails may store a state that no
        process reads, or wait for one that no process stores.
        """
        world: Any = dist.group.WORLD
        group = world if self.stage.group is None else self.stage.group
        to_rank = self.stage.stage_index_to_group_rank
        giver, taker = (dist.get_global_rank(group, to_rank[i]) for i in (index, index + 1))
        name = f"trifuse generators of stage {index}, process {giver} to {taker}"
        counts = _begun_steps.setdefault(world, Counter())
        counts[name] += 1
        return f"{name}, {counts[name]}"


_begun_steps: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
