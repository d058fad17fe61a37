"""A stacked LSTM with its layers in several processes. Sequences go through them in chunks.

While a process computes a chunk of steps, the previous process computes the next chunk. The
backward goes in the opposite direction. With n processes and C chunks a pass takes (C + n - 1) /
(C n) of one process's time, and sends T · B · R numbers from each process to the next.

The bits of a long sum depend on where it is cut. So the backward of a chunk computes no gradients
of weights. One call on all steps computes them after the last chunk, as in one process. That call
goes through the steps again: a layer's backward has four products of its weights' size, and here
one of them, dG W_hh, is computed twice. The gradient of h goes from chunk to chunk in float32, as
it goes from step to step in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trifuse import _meshes
from trifuse.nn.lstm import LSTM
from trifuse.ops import _checks, _draws, _operator, _recurrent, lstm
from trifuse.ops._checks import fail
from trifuse.ops.dropout import drop_by_seed
from trifuse.reference.lstm import SLOTS, Parameters
from trifuse.reference.philox import draw_seed
from trifuse.reference.results import accumulation_dtype

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class PipelinedLSTM(nn.Module):
    """A stacked LSTM in a pipeline, where each process holds some of the layers.

    On a CPU the results and the gradients have the bits of :class:`trifuse.nn.LSTM` in one process.
    Every process takes part in each forward and in each backward::

        pipeline = PipelinedLSTM(lstm, mesh)
        out, _ = pipeline(x)  # only the first process's x is read
        loss = criterion(out, target) if rank == size - 1 else out.sum()
        loss.backward()

    Args:
        lstm: the whole LSTM, the same in every process, in one direction. Of its L layers, process
            r of n keeps layers r · L // n to (r + 1) · L // n, as parameters of the same names.
        mesh: one dimension of a mesh: the processes in the order of their layers.
        chunk: how many steps a process computes at a time. Short chunks fill the pipeline sooner;
            long ones have larger products.

    Raises:
        NotImplementedError: the LSTM is bidirectional; in the forward, zoneout or recurrent dropout
            while training, or lengths with layer normalisation.
        TypeError: an argument of the wrong type.
        ValueError: there are more processes than layers (``trifuse.ArgumentError``).
        RuntimeError: in the forward, another process raises for its arguments.
    """

    def __init__(self, lstm: LSTM, mesh: DeviceMesh, chunk: int = 32) -> None:
        super().__init__()
        if not isinstance(lstm, LSTM):
            raise TypeError(f"lstm: expected a trifuse.nn.LSTM; got {type(lstm).__name__}")
        _meshes.check("mesh", mesh)
        if lstm.bidirectional:
            raise NotImplementedError(
                "lstm: a bidirectional layer begins with the last step, so that no layer can begin "
                "before the one below it has ended"
            )
        L, n, r = lstm.num_layers, mesh.size(), mesh.get_local_rank()
        if n > L:
            raise fail("mesh", f"at most {L} processes, one for each layer", n)
        if not isinstance(chunk, int) or chunk < 1:
            raise fail("chunk", "a number of steps, at least 1", chunk)
        self.mesh, self.chunk = mesh, chunk
        self.num_layers, self.batch_first, self.dropout = L, lstm.batch_first, lstm.dropout
        self.layers = range(r * L // n, (r + 1) * L // n)
        self.options = {k: v for k, v in lstm._options().items() if k != "training"}
        self.names = lstm._parameter_names()
        self.training = lstm.training
        for k in self.layers:
            for name in self.names:
                self.register_parameter(f"{name}_l{k}", getattr(lstm, f"{name}_l{k}"))

    def extra_repr(self) -> str:
        return f"layers {self.layers.start} to {self.layers.stop - 1} of {self.num_layers}"

    def forward(
        self,
        input: Tensor | None = None,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Runs all layers of all processes.

        Args:
            input: (T, B, I), or with ``batch_first`` (B, T, I); in all processes but the first it
                is not read, and may be None.
            hx: (h0, c0) of this process's layers, or None for zeros.
            lengths: int32 or int64 (B,), the same in every process: see :func:`trifuse.lstm`.

        Returns:
            The output in the last process, and elsewhere an empty tensor, (0,), by which this
            process joins the backward; and (h_n, c_n) of this process's layers.
        """
        device = getattr(self, f"weight_ih_l{self.layers.start}").device
        parameters = [getattr(self, f"{name}_l{k}") for k in self.layers for name in self.names]
        # A process that raised while others wait for it would leave them waiting.
        run = h0 = c0 = x = error = None
        try:
            self._check_options(lengths)
            h0, c0 = lstm.pair(hx)
            x = self._input(input)
        except Exception as caught:
            error = caught
        sizes = self._shared_sizes(x, device)
        if error is None and sizes is not None:
            try:
                run = _Run(self, *sizes, device, lengths)
                run.check(x, h0, c0, parameters)
            except Exception as caught:
                error = caught
        _meshes.raise_together(error, self.mesh, device)
        assert run is not None
        run.seeds = self._seeds(device)
        # Every process takes part in the backward, even one without its own gradients.
        takes_part = torch.empty(0, requires_grad=run.records)
        out, h_n, c_n = _Pipeline.apply(run, takes_part, x, h0, c0, *parameters)
        if run.is_last and self.batch_first:
            out = out.transpose(0, 1)
        return out, (h_n, c_n.to(h_n.dtype if c0 is None else c0.dtype))

    def _check_options(self, lengths: Tensor | None) -> None:
        random = max(self.options[p] for p in ("zoneout_h", "zoneout_c", "recurrent_dropout"))
        if self.training and random > 0:
            raise NotImplementedError(
                "zoneout and recurrent dropout: a PipelinedLSTM draws none while training"
            )
        if lengths is not None and "norm_ih_weight" in self.names:
            raise NotImplementedError("lengths: not in a PipelinedLSTM with layer normalisation")

    def _input(self, input: Tensor | None) -> Tensor | None:
        """Returns the first process's input as (T, B, I), after autocast; elsewhere None."""
        if self.layers.start > 0:
            return None
        x = _checks.tensor("input", input)
        if x.dim() != 3:
            raise fail("input", "shape (T, B, I), or (B, T, I) with batch_first", tuple(x.shape))
        return _recurrent.floating(x.transpose(0, 1) if self.batch_first else x)

    def _shared_sizes(
        self, x: Tensor | None, device: torch.device
    ) -> tuple[int, int, torch.dtype] | None:
        """Returns T, B and the dtype of the first process's input, or None if it has no valid one.

        x is None in the other processes.
        """
        sizes = [0, 0, -1] if x is None else [*x.shape[:2], _DTYPES.index(x.dtype)]
        T, B, dtype = _meshes.broadcast(torch.tensor(sizes, device=device), self.mesh).tolist()
        return None if dtype < 0 else (T, B, _DTYPES[dtype])

    def _seeds(self, device: torch.device) -> Tensor | None:
        """Returns the seeds of dropout before each layer except the first, as one process draws
        them."""
        if self.dropout == 0 or not self.training or self.num_layers == 1:
            return None
        like = torch.empty(0, device=device)
        seeds = [draw_seed(like) for _ in range(1, self.num_layers)]
        return _meshes.broadcast(torch.cat(seeds), self.mesh)


class _Chunk(NamedTuple):
    """A layer's call on a chunk of time: its checked arguments and its results."""

    call: _recurrent.CheckedRecurrent
    results: Any  # Operator.results


class _Run:
    """One pass of sequences through the pipeline."""

    def __init__(
        self,
        module: PipelinedLSTM,
        T: int,
        B: int,
        dtype: torch.dtype,
        device: torch.device,
        lengths: Tensor | None,
    ) -> None:
        self.T, self.B, self.dtype, self.device = T, B, dtype, device
        self.layers, self.names = module.layers, module.names
        self.options = {**module.options, "training": module.training}
        self.recompute = self.options.pop("recompute")
        self.dropout = module.dropout
        self.seeds: Tensor | None = None  # set once all processes have valid arguments
        self.lengths = None
        if lengths is not None:
            self.lengths = _checks.integers("lengths", lengths, "(B,)", B, lengths).long()
            _recurrent.check_values(self.lengths, T)
        self.records = torch.is_grad_enabled()
        self.group = module.mesh.get_group()
        self.rank, self.size = module.mesh.get_local_rank(), module.mesh.size()
        self.is_first, self.is_last = self.rank == 0, self.rank == self.size - 1
        self.starts = range(0, max(T, 1), module.chunk)
        self.chunk = module.chunk
        self.sent: list[tuple[Any, Tensor]] = []

    def steps(self, start: int) -> int:
        return min(self.chunk, self.T - start)

    # Communication ------------------------------------------------------------------------------

    def send(self, t: Tensor, to: int) -> None:
        t = t.contiguous()
        # The tensor is kept until it has been sent.
        self.sent.append((dist.isend(t, group=self.group, group_dst=to), t))

    def receive(self, start: int, width: int, source: int) -> tuple[Any, Tensor]:
        t = torch.empty(self.steps(start), self.B, width, dtype=self.dtype, device=self.device)
        return dist.irecv(t, group=self.group, group_src=source), t

    def received(self, starts: Sequence[int], width: int, source: int) -> Iterator[Tensor]:
        """Yields the chunks that a process sends; the next one is in flight while one is used."""
        coming = self.receive(starts[0], width, source)
        for i in range(len(starts)):
            work, t = coming
            if i + 1 < len(starts):
                coming = self.receive(starts[i + 1], width, source)
            work.wait()
            yield t

    def wait(self) -> None:
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    # Layers -------------------------------------------------------------------------------------

    def parameters(self, flat: Sequence[Tensor]) -> list[Parameters]:
        """Returns those of each layer."""
        n = len(self.names)
        of_layers = [flat[i * n : (i + 1) * n] for i in range(len(self.layers))]
        return [Parameters(**dict(zip(self.names, each, strict=True))) for each in of_layers]

    def check(
        self, x: Tensor | None, h0: Tensor | None, c0: Tensor | None, flat: Sequence[Tensor]
    ) -> None:
        """Checks all that this process's layers get, but for what the process before sends."""
        for name, t in (("h0", h0), ("c0", c0)):
            if isinstance(t, Tensor) and t.dim() == 3 and len(t) != len(self.layers):
                raise fail(name, f"{len(self.layers)} layers, those of this process", len(t))
        for i, parameters in enumerate(self.parameters(flat)):
            if i > 0 or x is None:
                width = parameters.weight_ih.shape[1]
                x = torch.empty(self.steps(0), self.B, width, dtype=self.dtype, device=self.device)
            self.prepare(x[: self.chunk], _of_layer((h0, c0), i), parameters, 0)

    def drop(self, x: Tensor, k: int, start: int) -> Tensor:
        """Applies the dropout before layer k, or its derivative, to the chunk from ``start`` on."""
        if self.seeds is None or k == 0:
            return x
        first, count, total, _ = _draws.current().batch
        piece = self.B // count
        whole = (self.T, total * piece, x.shape[2])
        place = _draws.place_of_box(whole, (start, first * piece, 0), x.shape)
        return drop_by_seed(x, self.seeds[k - 1 : k], place, self.dropout)

    def chunk_lengths(self, start: int) -> Tensor | None:
        if self.lengths is None:
            return None
        return (self.lengths - start).clamp(0, self.steps(start))

    def prepare(
        self,
        x: Tensor,
        states: tuple[Tensor | None, Tensor | None],
        parameters: Parameters,
        start: int,
    ) -> _recurrent.CheckedRecurrent:
        """Checks a layer's call on the chunk from ``start`` on."""
        return lstm.prepare_layer(
            x,
            *states,
            [parameters],
            self.chunk_lengths(start),
            (False,),
            self.recompute,
            **self.options,
        )

    def forward(
        self,
        x: Tensor,
        states: tuple[Tensor | None, Tensor | None],
        parameters: Parameters,
        start: int,
        save: int,
    ) -> _Chunk:
        """Runs a layer on the chunk from ``start`` on."""
        call = self.prepare(x, states, parameters, start)
        last = (call.lengths, None)
        op = lstm.OPERATOR.forward[call.choice.backend]
        found = op(call.input, *call.states, list(call.parameters), *last, *call.options, save)
        return _Chunk(call, lstm.OPERATOR.results(*found))


def _of_layer(
    states: tuple[Tensor | None, Tensor | None], i: int
) -> tuple[Tensor | None, Tensor | None]:
    h0, c0 = (None if t is None else t[i : i + 1] for t in states)
    return h0, c0


def _backward(
    call: _recurrent.CheckedRecurrent,
    grads: Sequence[Tensor | None],
    results: Any,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """Runs the backward op; returns the gradients of the input, h0, c0 and the parameters."""
    found: list[Tensor] = lstm.OPERATOR.backward[call.choice.backend](
        *grads,
        call.input,
        *call.states,
        list(call.parameters),
        call.lengths,
        None,
        *(getattr(results, name) for name in lstm.OPERATOR.saved),
        *call.options,
        list(needs_grad),
    )
    return found


class _Pipeline(torch.autograd.Function):
    """All layers of this process, with the chunks that it receives and sends."""

    @staticmethod
    def forward(
        ctx: Any,
        run: _Run,
        takes_part: Tensor,
        input: Tensor | None,
        h0: Tensor | None,
        c0: Tensor | None,
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parameters = run.parameters(flat)
        states = [_of_layer((h0, c0), i) for i in range(len(run.layers))]
        save = _operator.SAVE_NOTHING
        if run.records:
            save = _operator.SAVE_STATES if run.recompute else _operator.SAVE_ALL
        if run.is_first:
            assert input is not None
            coming = iter([input[t : t + run.chunk] for t in run.starts])
        else:
            width = parameters[0].weight_ih.shape[1]
            coming = run.received(run.starts, width, run.rank - 1)
        chunks: list[list[_Chunk]] = [[] for _ in run.layers]
        outputs = []
        for start, x in zip(run.starts, coming, strict=True):
            for i, k in enumerate(run.layers):
                x = run.drop(x, k, start)
                chunk = run.forward(x, states[i], parameters[i], start, save)
                states[i] = chunk.results.h_n, chunk.results.c_n
                x = chunk.results.output
                if run.records:
                    chunks[i].append(chunk)
            if run.is_last:
                outputs.append(x)
            else:
                run.send(x, run.rank + 1)
        run.wait()
        ctx.run, ctx.chunks = run, chunks
        ctx.dtypes = [None if t is None else t.dtype for t in (input, h0, c0, *flat)]
        ctx.set_materialize_grads(False)
        h_n, c_n = (torch.cat(ends) for ends in zip(*states, strict=True))
        return torch.cat(outputs) if run.is_last else h_n.new_empty(0), h_n, c_n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_h_n: Tensor | None, grad_c_n: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        chunks: list[list[_Chunk]] = ctx.chunks
        ctx.chunks = None  # they are used once
        if chunks is None:
            raise RuntimeError("PipelinedLSTM: its backward runs once; the forward must run again")
        _, _, need_input, *needs_states_and_parameters = ctx.needs_input_grad
        backwards = list(reversed(run.starts))
        width = chunks[-1][0].results.output.shape[2]
        if not run.is_last:
            coming = run.received(backwards, width, run.rank + 1)
        else:
            if grad_out is None:
                grad_out = torch.zeros(run.T, run.B, width, dtype=run.dtype, device=run.device)
            coming = iter([grad_out[t : t + run.chunk] for t in backwards])
        ends = [
            [None if g is None else g[i : i + 1] for g in (grad_h_n, grad_c_n)]
            for i in range(len(run.layers))
        ]
        carried: list[list[Any]] = [list(end) for end in ends]
        of_outputs: list[list[Tensor]] = [[] for _ in run.layers]
        of_input: list[Tensor] = []
        for place, (start, grad) in enumerate(zip(backwards, coming, strict=True)):
            for i in reversed(range(len(run.layers))):
                chunk = chunks[i][-1 - place]
                of_h = _unrounded(carried[i][0], chunk.call)
                of_outputs[i].insert(0, grad)
                needs = [
                    i > 0 or not run.is_first or need_input,
                    *(t is not None for t in chunk.call.states),
                    *[False] * SLOTS,
                ]
                grad, *of_states = _backward(
                    chunk.call, (grad, of_h, carried[i][1]), chunk.results, needs
                )[:3]
                carried[i] = of_states
                if needs[0]:
                    grad = run.drop(grad, run.layers[i], start)
            if not run.is_first:
                run.send(grad, run.rank - 1)
            elif need_input:
                of_input.insert(0, grad)
        grads: list[Tensor | None] = [torch.cat(of_input) if of_input else None]
        needs_states, needs_grad = needs_states_and_parameters[:2], needs_states_and_parameters[2:]
        for which, wanted in enumerate(needs_states):
            grads.append(torch.cat([c[which] for c in carried]) if wanted else None)
        count = len(run.names)
        for i in range(len(run.layers)):
            wanted_names = {
                name for name, need in zip(run.names, needs_grad[i * count :], strict=False) if need
            }
            found = _of_parameters(run, chunks[i], of_outputs[i], ends[i], wanted_names)
            grads += [found.get(name) for name in run.names]
        run.wait()
        return (
            None,
            None,
            *(
                None if g is None else g.to(dtype)
                for g, dtype in zip(grads, ctx.dtypes, strict=True)
            ),
        )


def _unrounded(grad_h_n: Tensor | None, call: _recurrent.CheckedRecurrent) -> Tensor | None:
    """Returns the gradient of h_n for a chunk's backward, which then does not round that of h0."""
    h0 = call.states[0]
    if h0 is None:
        return grad_h_n
    wide = accumulation_dtype(call.input.dtype)
    return h0.new_zeros(h0.shape, dtype=wide) if grad_h_n is None else grad_h_n.to(wide)


def _of_parameters(
    run: _Run,
    chunks: Sequence[_Chunk],
    of_outputs: Sequence[Tensor],
    of_ends: Sequence[Tensor | None],
    wanted: set[str],
) -> dict[str, Tensor]:
    """Returns a layer's gradients of parameters, from one call on all steps."""
    if not wanted:
        return {}
    first = chunks[0].call
    whole = first._replace(
        input=torch.cat([chunk.call.input for chunk in chunks]), lengths=run.lengths
    )

    def joined(name: str) -> Tensor:
        parts = [getattr(chunk.results, name) for chunk in chunks]
        # Results by step are (T, B, ...) or (1, T, B, ...); others were not saved.
        return parts[0] if parts[0].dim() < 3 else torch.cat(parts, parts[0].dim() - 3)

    saved = {name: joined(name) for name in lstm.OPERATOR.saved}
    results = chunks[-1].results._replace(**saved)
    flags = [name in wanted for name in Parameters._fields]
    found = _backward(
        whole, (torch.cat(list(of_outputs)), *of_ends), results, [False, False, False, *flags]
    )
    by_name = dict(zip(Parameters._fields, found[3:], strict=True))
    return {name: by_name[name] for name in wanted}
