"""``torch.nn.LSTM`` and ``LSTMCell`` on the fused operator."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from trifuse import backends
from trifuse.nn import sizes
from trifuse.nn.dropout import drop
from trifuse.nn.quantization import Unquantizable
from trifuse.ops import _checks, _lstm_notes, _recurrent, lstm_stack
from trifuse.ops import lstm as ops
from trifuse.ops._checks import fail

Sequences = TypeVar("Sequences", Tensor, PackedSequence)


class Recurrent(nn.RNNBase):
    """The base of LSTM, GRU and RNN: handles padded and packed sequences, and runs the layers.

    They do not derive from ``torch.nn.LSTM``, ``GRU`` and ``RNN``, because torch.compile refuses
    every instance of those.
    """

    def flatten_parameters(self) -> None:
        """Does nothing: weights, whether parameters or plain tensors, are read where they are."""

    def _layer(
        self, k: int, x: Tensor, states: list[Tensor | None], lengths: Tensor | None
    ) -> list[Tensor]:
        """Runs layer k on (T, B, ...); returns the output and last states of all directions."""
        raise NotImplementedError

    def _parameter_names(self) -> list[str]:
        """Returns the names of a layer's parameters, without ``_l{k}`` and ``_reverse``."""
        return ["weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ())]

    def _widths(self) -> list[int]:
        """Returns the last dimension of each state."""
        raise NotImplementedError

    def _forward(
        self, input: Sequences, states: list[Tensor | None], lengths: Tensor | None
    ) -> tuple[Sequences, list[Tensor]]:
        x, batch, states, lengths = self._padded(input, states, lengths)
        output, last = self._layers(x, states, lengths)
        if isinstance(input, PackedSequence):
            return _packed_as(input, output), last
        if not batch:
            return output.squeeze(1), [t.squeeze(1) for t in last]
        return output.transpose(0, 1) if self.batch_first else output, last

    def _padded(
        self, input: Tensor | PackedSequence, states: list[Tensor | None], lengths: Tensor | None
    ) -> tuple[Tensor, tuple[int, ...], list[Tensor | None], Tensor | None]:
        """Returns the input as (T, B, ...), the caller's batch shape, (B,) or (), the states with a
        batch dimension, and the lengths."""
        if isinstance(input, PackedSequence):
            if lengths is not None:
                raise fail("lengths", "None beside a PackedSequence, which has its own", "a tensor")
            if input.data.dim() != 2:
                expected = "a PackedSequence with data of shape (tokens, I)"
                raise fail("input", expected, tuple(input.data.shape))
            x, lengths = pad_packed_sequence(input)
            batch: tuple[int, ...] = (x.shape[1],)
            lengths = lengths.to(x.device)
        else:
            x, batch = _recurrent.sequence(input, self.batch_first)
        if x.shape[2] != self.input_size:
            raise fail("input", f"{self.input_size} features (input_size)", x.shape[2])
        D = len(self._suffixes())
        names = ("h0", "c0") if len(states) == 2 else ("hx",)
        for name, state, width in zip(names, states, self._widths(), strict=True):
            shape = (self.num_layers * D, *batch, width)
            if state is not None and _checks.tensor(name, state).shape != shape:
                raise fail(name, f"shape {shape}", tuple(state.shape))
        if not batch:
            states = [None if t is None else t.unsqueeze(1) for t in states]
        return x, batch, states, lengths

    def _layers(
        self, x: Tensor, states: list[Tensor | None], lengths: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs all layers on (T, B, ...); returns the last output and all last states."""
        D = len(self._suffixes())
        layers = []
        for k in range(self.num_layers):
            if k > 0:
                x = drop(x, self.dropout, self.training, batch_dim=1)
            own = [None if t is None else t[k * D : (k + 1) * D] for t in states]
            x, *last = self._layer(k, x, own, lengths)
            layers.append(last)
        if len(layers) == 1:
            return x, layers[0]
        return x, [torch.cat(parts) for parts in zip(*layers, strict=True)]

    def _suffixes(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def _reverse(self) -> tuple[bool, ...]:
        return (False, True) if self.bidirectional else (False,)

    def _parameters_of(self, cls: Any, k: int) -> list[Any]:
        """Returns layer k's parameters for each direction, read under torch's attribute names."""
        names = self._parameter_names()
        return [
            cls(**{name: getattr(self, f"{name}_l{k}{suffix}") for name in names})
            for suffix in self._suffixes()
        ]


class RecurrentWithoutCells(Recurrent):
    """A module whose only state is h."""

    def forward(
        self, input: Sequences, hx: Tensor | None = None, *, lengths: Tensor | None = None
    ) -> tuple[Sequences, Tensor]:
        """As the forward of torch's module.

        Args:
            input: (T, B, I), with ``batch_first`` (B, T, I), or (T, I), or a PackedSequence.
            hx: as in torch, or None for zeros.
            lengths: int32 or int64 (B,), instead of packing, as in :func:`trifuse.gru`.

        Raises:
            As :func:`trifuse.gru`.
        """
        output, (h_n,) = self._forward(input, [hx], lengths)
        return output, h_n

    def _widths(self) -> list[int]:
        return [self.hidden_size]


def _packed_as(like: PackedSequence, padded: Tensor) -> PackedSequence:
    """Packs (T, B, ...), with rows in the caller's order, as ``like`` is packed."""
    if like.sorted_indices is not None:
        padded = padded.index_select(1, like.sorted_indices)
    column = torch.arange(padded.shape[1])
    taken = (column < like.batch_sizes[:, None]).to(padded.device)
    return PackedSequence(
        padded[taken], like.batch_sizes, like.sorted_indices, like.unsorted_indices
    )


@sizes.checked("input_size", "hidden_size", "proj_size")
class LSTM(Recurrent):
    """``torch.nn.LSTM`` on the fused operator, with optional extensions of the cell.

    The first ten arguments, the parameters' names and their initialisation are torch's own. Both
    directions of a layer run in one call, in any dtype and with any option; weights may be replaced
    by plain tensors, as weight drop does, at no cost.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first: as in ``torch.nn.LSTM``.
        dropout: between layers, as in ``torch.nn.LSTM``; on a CPU it uses trifuse's generator.
        bidirectional, proj_size, device, dtype: as in ``torch.nn.LSTM``.
        cell_clip, proj_clip, forget_bias, eps, zoneout_h, zoneout_c: as in :func:`trifuse.lstm`.
        coupled: as in :func:`trifuse.lstm`. The weights have three gates: i, g, o.
        recurrent_dropout, recompute: as in :func:`trifuse.lstm`.
        peephole: adds parameters ``weight_peephole_l{k}``, (3, hidden_size), or with ``coupled``
            (2, hidden_size).
        layer_norm: adds ``norm_ih_weight_l{k}``, ``norm_hh_weight_l{k}`` (gates · hidden_size),
            ``norm_cell_weight_l{k}`` and ``norm_cell_bias_l{k}`` (hidden_size): weights start as
            ones, the bias as zeros.

    Raises:
        As ``torch.nn.LSTM``, and for the other options as :func:`trifuse.lstm`.
        ValueError: a size is above 2^60.
    """

    qconfig = Unquantizable(nn.LSTM)

    # Also on the class, because fuse changes the class of a torch.nn.LSTM and calls no __init__.
    cell_clip: float | None = None
    proj_clip: float | None = None
    forget_bias = 0.0
    coupled = False
    peephole = False
    layer_norm = False
    eps = 1e-5
    zoneout_h = 0.0
    zoneout_c = 0.0
    recurrent_dropout = 0.0
    recompute = False

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
        *,
        cell_clip: float | None = None,
        proj_clip: float | None = None,
        forget_bias: float = 0.0,
        coupled: bool = False,
        peephole: bool = False,
        layer_norm: bool = False,
        eps: float = 1e-5,
        zoneout_h: float = 0.0,
        zoneout_c: float = 0.0,
        recurrent_dropout: float = 0.0,
        recompute: bool = False,
    ) -> None:
        super().__init__(
            "LSTM",
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
            device,
            dtype,
        )
        self.cell_clip, self.proj_clip, self.forget_bias = cell_clip, proj_clip, forget_bias
        self.coupled, self.peephole, self.layer_norm = coupled, peephole, layer_norm
        self.eps, self.recompute = eps, recompute
        self.zoneout_h, self.zoneout_c = zoneout_h, zoneout_c
        self.recurrent_dropout = recurrent_dropout
        options = self._options()
        flags = {
            "peephole": peephole,
            "layer_norm": layer_norm,
            "recompute": options.pop("recompute"),
        }
        for name, value in flags.items():
            _checks.flag(name, value)
        ops.check_options(proj_size > 0, self._reverse(), **options)
        gates = 3 if coupled else 4
        rows = gates * hidden_size
        more: dict[str, tuple[int, ...]] = {}
        if peephole:
            more["weight_peephole"] = (gates - 1, hidden_size)
        if layer_norm:
            more |= {"norm_ih_weight": (rows,), "norm_hh_weight": (rows,)}
            more |= {"norm_cell_weight": (hidden_size,), "norm_cell_bias": (hidden_size,)}
        for layer in range(num_layers):
            for suffix in self._suffixes():
                end = f"_l{layer}{suffix}"
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                    if coupled and hasattr(self, name + end):
                        whole = getattr(self, name + end)
                        # A view would keep, and save, the memory of four gates.
                        setattr(self, name + end, nn.Parameter(whole[:rows].detach().clone()))
                for name, shape in more.items():
                    empty = torch.empty(shape, device=device, dtype=dtype)
                    self.register_parameter(name + end, nn.Parameter(empty))
        if coupled or more:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets as torch does; layer normalisation starts with gain 1 and bias 0."""
        super().reset_parameters()
        for name, parameter in self.named_parameters():
            if name.startswith("norm"):
                nn.init.constant_(parameter, 0.0 if "bias" in name else 1.0)

    def extra_repr(self) -> str:
        names = (
            "cell_clip",
            "proj_clip",
            "forget_bias",
            "coupled",
            "peephole",
            "layer_norm",
            "zoneout_h",
            "zoneout_c",
            "recurrent_dropout",
            "recompute",
        )
        given = [f"{n}={getattr(self, n)}" for n in names if getattr(self, n) != getattr(LSTM, n)]
        return ", ".join([super().extra_repr(), *given])

    def forward(
        self,
        input: Sequences,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> tuple[Sequences, tuple[Tensor, Tensor]]:
        """As ``torch.nn.LSTM.forward``.

        Args:
            input: (T, B, I), with ``batch_first`` (B, T, I), or (T, I), or a PackedSequence.
            hx: (h0, c0), or None for zeros.
            lengths: int32 or int64 (B,), instead of packing: see :func:`trifuse.lstm`.

        Returns:
            The output, in the form of ``input``, and (h_n, c_n). c_n has the dtype of c0, so that
            a float32 c0 with a 16-bit input keeps all its bits; without c0, the dtype of the
            output.

        Raises:
            As :func:`trifuse.lstm`.
        """
        h0, c0 = ops.pair(hx)
        output, (h_n, c_n) = self._forward(input, [h0, c0], lengths)
        c_like = h_n if c0 is None else c0
        return output, (h_n, c_n.to(c_like.dtype))

    # Methods of torch.nn.LSTM that RNNBase lacks, or that handle both states.
    get_expected_cell_size = nn.LSTM.get_expected_cell_size
    check_forward_args = nn.LSTM.check_forward_args  # type: ignore[assignment]
    permute_hidden = nn.LSTM.permute_hidden  # type: ignore[assignment]

    def _why_not_stacked(self, x: Tensor) -> str | None:
        """Returns why layers are called one by one, or None if one call runs them all."""
        if self.num_layers == 1:
            return "there is one layer"
        if self.bidirectional:
            return "layers have two directions"
        if self.dropout > 0 and self.training:
            return "there is dropout between layers"
        return lstm_stack.why_not_stacked(x, **self._options())

    def _layers(
        self, x: Tensor, states: list[Tensor | None], lengths: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        if self._why_not_stacked(x) is not None:
            return super()._layers(x, states, lengths)
        parameters = [self._parameters_of(ops.Parameters, k)[0] for k in range(self.num_layers)]
        h0, c0 = states
        x, *last = lstm_stack.stack(x, h0, c0, parameters, lengths, **self._options())
        return x, last

    def _explain(
        self,
        input: Tensor | PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | None = None,
    ) -> backends.Choice:
        """Explains the one call for all layers or, if each has its own call, the first one."""
        x, _, (h0, c0), lengths = self._padded(input, [*ops.pair(hx)], lengths)
        why_not, options = self._why_not_stacked(x), self._options()
        layers = [self._parameters_of(ops.Parameters, k) for k in range(self.num_layers)]
        if why_not is None:
            parameters = [directions[0] for directions in layers]
            call = lstm_stack.prepare_stack(x, h0, c0, parameters, lengths, **options)
        else:
            reverse = self._reverse()
            h0, c0 = (None if t is None else t[: len(reverse)] for t in (h0, c0))
            call = ops.prepare_layer(x, h0, c0, layers[0], lengths, reverse, **options)
        notes = _lstm_notes.launch_notes(call)
        if notes and why_not is not None and self.num_layers > 1:
            notes = (f"layer after layer: {why_not}", *notes)
        return call.choice._replace(notes=notes)

    def _layer(
        self, k: int, x: Tensor, states: list[Tensor | None], lengths: Tensor | None
    ) -> list[Tensor]:
        (h0, c0), parameters = states, self._parameters_of(ops.Parameters, k)
        options = {"reverse": self._reverse(), **self._options()}
        return list(ops.layer(x, h0, c0, parameters, lengths, **options))

    def _options(self) -> dict[str, Any]:
        """Returns the options, which all layers share."""
        names = (
            "recompute",
            "cell_clip",
            "proj_clip",
            "forget_bias",
            "coupled",
            "eps",
            "zoneout_h",
            "zoneout_c",
            "recurrent_dropout",
            "training",
        )
        return {name: getattr(self, name) for name in names}

    def _parameter_names(self) -> list[str]:
        names = super()._parameter_names()
        if self.proj_size:
            names.append("weight_hr")
        if self.peephole:
            names.append("weight_peephole")
        if self.layer_norm:
            names += ["norm_ih_weight", "norm_hh_weight", "norm_cell_weight", "norm_cell_bias"]
        return names

    def _widths(self) -> list[int]:
        return [self.proj_size or self.hidden_size, self.hidden_size]


@sizes.checked("input_size", "hidden_size")
class LSTMCell(nn.LSTMCell):
    """``torch.nn.LSTMCell`` on the fused operator; the constructor is torch's own.

    Raises:
        ValueError: a size is above 2^60.
    """

    qconfig = Unquantizable(nn.LSTMCell)

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """One step. Shapes as in torch; c is returned in the dtype of c0, or of h without one."""
        h, c = ops.lstm_cell(input, hx, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        c_like = h if hx is None or hx[1] is None else hx[1]
        return h, c if c.dtype == c_like.dtype else c.to(c_like.dtype)
