"""How are recurrent layers said in ONNX?

Converters (see `fxlab.backends.onnx`). ONNX has LSTM, GRU and RNN for one layer in one or two
directions; several layers are several nodes. Its gates stand in another order than PyTorch's, so
the rows of the weights are put into ONNX's order once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fxlab.backends.converters_shape import reshape_to, slice_axes
from fxlab.backends.onnx import Builder, OnnxValue, Unsupported, converter

__all__: list[str] = []

I64 = torch.int64
# Operator of ONNX, its gates by their place in PyTorch, and what else tells it from PyTorch's.
_KINDS: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "LSTM": ("LSTM", [0, 3, 1, 2], {}),  # PyTorch: i f g o; ONNX: i o f g
    "GRU": ("GRU", [1, 0, 2], {"linear_before_reset": 1}),  # r z n; z r n
    "RNN_TANH": ("RNN", [0], {}),
    "RNN_RELU": ("RNN", [0], {"activations": ["Relu"]}),
}


def _layers(
    ctx: Builder,
    kind: str,
    x: Any,
    states: Sequence[Any],
    weights: Sequence[Sequence[Any]],
    directions: int,
) -> tuple[Any, list[Any]]:
    """Run all layers over a sequence.

    Args:
        ctx: the builder.
        kind: a key of the table above.
        x: (length, batch, features).
        states: initial h, and c of an LSTM, (layers * directions, batch, hidden); may be empty.
        weights: for each layer and direction w_ih, w_hh and perhaps b_ih, b_hh.
        directions: 1 or 2.

    Returns:
        The output (length, batch, directions * hidden) and the final states.
    """
    op, _, options = _KINDS[kind]
    options = dict(options)
    if "activations" in options:
        options["activations"] = options["activations"] * directions
    sizes = x.shape[:2]
    finals: list[list[Any]] = [[] for _ in range(2 if kind == "LSTM" else 1)]
    for first in range(0, len(weights), directions):
        group = weights[first : first + directions]
        initial = [slice_axes(ctx, s, [(0, first, first + directions, 1)]) for s in states]
        hidden = int(group[0][1].shape[1])
        y, *last = ctx.op(
            op,
            x,
            _in_onnx_order(ctx, kind, group, 0, 1),
            _in_onnx_order(ctx, kind, group, 1, 1),
            _in_onnx_order(ctx, kind, group, 2, 2) if len(group[0]) > 2 else None,
            None,
            *initial,
            hidden_size=hidden,
            direction="bidirectional" if directions == 2 else "forward",
            outputs=1 + len(finals),
            **options,
        )  # y: (length, directions, batch, hidden)
        if directions == 1:
            x = ctx.op("Squeeze", y, ctx.const([1], I64))
        else:
            joined = ctx.op("Transpose", y, perm=[0, 2, 1, 3])
            x = reshape_to(ctx, joined, [*sizes, directions * hidden])
        for state, value in zip(finals, last, strict=True):
            state.append(value)
    return x, [v[0] if len(v) == 1 else ctx.op("Concat", *v, axis=0) for v in finals]


def _in_onnx_order(
    ctx: Builder, kind: str, group: Sequence[Sequence[Any]], place: int, count: int
) -> Any:
    """Parameters of one layer, stacked over the directions, their gates in ONNX's order."""
    order = _KINDS[kind][1]
    made = []
    for parameters in group:
        rows = []
        for parameter in parameters[place : place + count]:
            if not isinstance(parameter, torch.Tensor):
                raise Unsupported("recurrent weights that are computed when the program runs")
            gates = parameter.detach().chunk(len(order))
            rows += [gates[gate] for gate in order]
        made.append(torch.cat(rows))
    return ctx.derived(group[0][place], f"{kind} {len(group)}", torch.stack(made))


@converter(nn.LSTM, nn.GRU, nn.RNN)
def recurrent(ctx: Builder, module: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    if not isinstance(input, (OnnxValue, torch.Tensor)):
        raise Unsupported("a packed sequence")
    if module.proj_size:
        raise Unsupported("proj_size: ONNX's LSTM does not project its hidden state")
    states = [] if hx is None else list(hx) if isinstance(hx, (tuple, list)) else [hx]
    wide = input.dim() == 3
    if not wide:
        input, states = input.unsqueeze(1), [state.unsqueeze(1) for state in states]
    elif module.batch_first:
        input = input.transpose(0, 1)
    y, finals = _layers(
        ctx, module.mode, input, states, module.all_weights, 1 + module.bidirectional
    )
    if not wide:
        y, *finals = (ctx.op("Squeeze", value, ctx.const([1], I64)) for value in (y, *finals))
    elif module.batch_first:
        y = ctx.op("Transpose", y, perm=[1, 0, 2])
    return y, tuple(finals) if module.mode == "LSTM" else finals[0]


def _operator(kind: str) -> Callable[..., Any]:
    """The function that nn.LSTM and its kin call, as an exported program has it."""

    def convert(
        ctx: Builder,
        input: Any,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if not isinstance(params, (tuple, list)) or (train and dropout):
            raise Unsupported("a packed sequence, or dropout in training")
        directions = 1 + bidirectional
        each = len(params) // (num_layers * directions)
        if each != 2 + 2 * has_biases:
            raise Unsupported("proj_size: ONNX's LSTM does not project its hidden state")
        weights = [params[k : k + each] for k in range(0, len(params), each)]
        states = list(hx) if kind == "LSTM" else [hx]
        x = input.transpose(0, 1) if batch_first else input
        y, finals = _layers(ctx, kind, x, states, weights, directions)
        return (ctx.op("Transpose", y, perm=[1, 0, 2]) if batch_first else y), *finals

    return convert


for _kind in _KINDS:
    converter(getattr(torch, _kind.lower()), _kind.lower())(_operator(_kind))


# One step.


@converter(torch.lstm_cell, "lstm_cell")
def lstm_cell(
    ctx: Builder, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    h, c = hx
    i, f, g, o = (F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


@converter(torch.gru_cell, "gru_cell")
def gru_cell(
    ctx: Builder, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    r, z, n = F.linear(input, w_ih, b_ih).chunk(3, -1)
    r_h, z_h, n_h = F.linear(hx, w_hh, b_hh).chunk(3, -1)
    z = (z + z_h).sigmoid()
    n = (n + (r + r_h).sigmoid() * n_h).tanh()
    return n + z * (hx - n)


def _rnn_cell(activation: Callable[[Any], Any]) -> Callable[..., Any]:
    def convert(
        ctx: Builder, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        return activation(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))

    return convert


converter(torch.rnn_tanh_cell, "rnn_tanh_cell")(_rnn_cell(torch.tanh))
converter(torch.rnn_relu_cell, "rnn_relu_cell")(_rnn_cell(torch.relu))


@converter(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
def cell(ctx: Builder, module: nn.RNNCellBase, input: Any, hx: Any = None) -> Any:
    if isinstance(module, nn.LSTMCell):
        step: Any = lstm_cell
    elif isinstance(module, nn.GRUCell):
        step = gru_cell
    else:
        step = _rnn_cell(getattr(torch, str(module.nonlinearity)))
    if hx is None:
        zeros = input.new_zeros(*input.shape[:-1], module.hidden_size)
        hx = (zeros, zeros) if step is lstm_cell else zeros
    weights = (module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh)
    return step(ctx, input, hx, *weights)
