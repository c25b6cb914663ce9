"""Programs of every awkward kind: each runtime agrees with eager, or says what stays in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import fxlab
from fxlab.core.errors import LoweringError
from fxlab.interop import from_exported

pytest.importorskip("onnx")
from fxlab.backends import available_backends, explain, lower

HERE = [name for name, missing in available_backends().items() if missing is None]


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


def _module(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module with these submodules, buffers and parameters and this forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Model.forward = forward
    return Model().eval()


MODELS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {}


def model(make: Callable[[], tuple[Any, tuple[Any, ...]]]) -> Callable[..., Any]:
    MODELS[make.__name__] = make
    return make


@model
def integer_inputs() -> Any:
    def forward(self: Any, ids: Any, mask: Any) -> Any:
        x = self.table(ids) * mask.unsqueeze(-1)
        return x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)

    table = nn.Embedding(20, 6)
    return _module(forward, table=table), (torch.randint(20, (3, 5)), torch.randint(2, (3, 5)))


@model
def several_outputs() -> Any:
    def forward(self: Any, x: Any) -> Any:
        y = self.fc(x)
        return y, y.max(1), (y.shape[0], "label", None), [y.argmax(), 3.0]

    return _module(forward, fc=nn.Linear(4, 5)), (torch.randn(3, 4),)


@model
def dict_output() -> Any:
    def forward(self: Any, x: Any) -> Any:
        return {"a": x + 1, "b": {"c": [x * 2, x]}, "rows": x.size(0)}

    return _module(forward), (torch.randn(3, 4),)


@model
def named_tuple_output() -> Any:
    return _module(lambda self, x: Pair(x.exp(), torch.sort(x))), (torch.randn(3, 4),)


@model
def input_returned_untouched() -> Any:
    return _module(lambda self, x, y: (x, x + y, y)), (torch.randn(2), torch.randn(2))


@model
def the_same_value_twice() -> Any:
    def forward(self: Any, x: Any) -> Any:
        y = x * 2
        return y, y, y.view(-1), self.w, self.w

    return _module(forward, w=nn.Parameter(torch.ones(2))), (torch.randn(3, 2),)


@model
def shared_weights() -> Any:
    layer = nn.Linear(4, 4)

    def forward(self: Any, x: Any) -> Any:
        return F.linear(self.b(self.a(x)), self.a.weight.t(), self.b.bias)

    return _module(forward, a=layer, b=layer), (torch.randn(3, 4),)


@model
def tied_buffers() -> Any:
    table = torch.arange(12.0).view(3, 4)

    def forward(self: Any, x: Any) -> Any:
        return x @ self.whole.t() + self.part

    return _module(forward, whole=table, part=table[:, 0]), (torch.randn(2, 4),)


@model
def tied_embedding_and_head() -> Any:
    def forward(self: Any, ids: Any) -> Any:
        return F.linear(self.table(ids), self.table.weight)

    return _module(forward, table=nn.Embedding(9, 4)), (torch.randint(9, (2, 3)),)


@model
def half_precision_weights() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).half(), (
        torch.randn(3, 4).half(),
    )


@model
def bfloat16_weights() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU()).bfloat16(), (torch.randn(3, 4).bfloat16(),)


@model
def a_part_in_half_precision() -> Any:
    def forward(self: Any, x: Any) -> Any:
        return self.out(self.small(x.half()).float())

    parts = {"small": nn.Linear(4, 4).half(), "out": nn.Linear(4, 2)}
    return _module(forward, **parts), (torch.randn(3, 4),)


@model
def double_precision() -> Any:
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten())
    return layers.double().eval(), (torch.randn(2, 2, 6, 6, dtype=torch.float64),)


@model
def double_and_float() -> Any:
    def forward(self: Any, x: Any, y: Any) -> Any:
        return x + y, (x.double() * 1e-12 + 1).sin(), torch.tan(y)

    return _module(forward), (torch.randn(3), torch.randn(3, dtype=torch.float64))


@model
def complex_numbers() -> Any:
    def forward(self: Any, x: Any) -> Any:
        return torch.fft.rfft(x).abs() + 1

    return _module(forward), (torch.randn(8),)


@model
def zero_dimensional_tensors() -> Any:
    def forward(self: Any, x: Any, scale: Any) -> Any:
        loss = (x * scale).mean()
        return loss, loss.unsqueeze(0).expand(3), torch.stack([loss, scale]), x.sum().sqrt()

    return _module(forward), (torch.rand(3, 4), torch.tensor(2.0))


@model
def an_empty_batch() -> Any:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.randn(0, 4),)


@model
def empty_pieces() -> Any:
    def forward(self: Any, x: Any) -> Any:
        return (
            torch.cat([x[:, :0], x, x[:, 4:]], 1),
            x[2:2].sum(0),
            x[:, 4:].mean(),
            x[3:].max(1)[0],
        )

    return _module(forward), (torch.randn(3, 4),)


@model
def non_contiguous_inputs() -> Any:
    def forward(self: Any, x: Any, y: Any) -> Any:
        return self.fc(x) + y, x.reshape(-1)

    x, y = torch.randn(4, 6).t()[::2], torch.randn(3, 1).expand(3, 5)
    return _module(forward, fc=nn.Linear(4, 5)), (x, y)


@model
def channels_last() -> Any:
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), (x,)


@model
def writes_in_place() -> Any:
    def forward(self: Any, x: Any) -> Any:
        y = self.fc(x)
        y += 1
        y[:, 0] = x[:, 1]
        y.clamp_(min=0).mul_(2)
        y[1:, 1].neg_()
        return y, y[0]

    return _module(forward, fc=nn.Linear(4, 3)), (torch.randn(3, 4),)


@model
def a_write_that_a_view_shows() -> Any:
    def forward(self: Any, x: Any) -> Any:
        y = x + 1
        row, flat = y[0], y.view(-1)
        row.add_(5)
        y[:, 1] = 7
        return flat * 2, y

    return _module(forward), (torch.randn(3, 4),)


@model
def a_write_to_the_input() -> Any:
    def forward(self: Any, x: Any) -> Any:
        x.t().mul_(2)
        x[0] = 0
        return x + 1

    return _module(forward), (torch.randn(3, 4),)


@model
def a_write_to_a_buffer() -> Any:
    def forward(self: Any, x: Any) -> Any:
        self.count.add_(1)
        return x * self.count

    return _module(forward, count=torch.zeros(1)), (torch.randn(3),)


@model
def a_write_to_a_constant() -> Any:
    def forward(self: Any, x: Any) -> Any:
        z = torch.ones(x.shape[0])
        before = x + z
        z.add_(1)
        return before, x * z, z

    return _module(forward), (torch.randn(3),)


@model
def a_write_that_changes_only_the_view() -> Any:
    def forward(self: Any, x: Any) -> Any:
        y = x * 2
        y[0].t_()
        y[0, 0].unsqueeze_(0).add_(1)
        return y

    return _module(forward), (torch.randn(2, 3, 3),)


@model
def writes_in_a_loop() -> Any:
    def forward(self: Any, x: Any) -> Any:
        out = torch.zeros(x.shape[0], 5)
        for t in range(5):
            out[:, t] = x[:, t] + (out[:, t - 1] if t else 0)
        return out

    return _module(forward), (torch.randn(3, 5),)


@model
def a_size_counted_up() -> Any:
    def forward(self: Any, x: Any) -> Any:
        n = x.size(0)
        m = n
        n += 1
        return x.sum() * n - m, x.new_zeros(n, m)

    return _module(forward), (torch.randn(3, 5),)


@model
def in_place_to_another_dtype() -> Any:
    def forward(self: Any, x: Any, counts: Any) -> Any:
        y = x * 1
        y.mul_(counts).add_(counts > 2)
        counts = counts + 0
        counts.mul_(counts > 1)
        return y, counts

    return _module(forward), (torch.randn(3), torch.arange(3))


@model
def a_recurrent_model() -> Any:
    def forward(self: Any, x: Any) -> Any:
        y, (h, _) = self.lstm(x)
        y, h2 = self.gru(y, h[-1:])
        return self.head(y[:, -1]), h2

    parts = {"lstm": nn.LSTM(3, 4, 2, batch_first=True), "gru": nn.GRU(4, 4, batch_first=True)}
    return _module(forward, head=nn.Linear(4, 2), **parts), (torch.randn(2, 6, 3),)


@fxlab.wrap
def pack(x: torch.Tensor, lengths: torch.Tensor) -> Any:
    return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)


@model
def a_packed_sequence() -> Any:
    def forward(self: Any, x: Any, lengths: Any) -> Any:
        return self.gru(pack(x, lengths))[1]

    x = torch.randn(2, 4, 3)
    return _module(forward, gru=nn.GRU(3, 4, batch_first=True)), (x, torch.tensor([4, 2]))


@model
def a_transformer_with_masks() -> Any:
    def forward(self: Any, x: Any, padding: Any) -> Any:
        return self.layers(x, src_key_padding_mask=padding)

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return _module(forward, layers=layers), (torch.randn(2, 5, 8), padding)


@model
def a_unet() -> Any:
    def forward(self: Any, x: Any) -> Any:
        down = F.relu(self.a(x), inplace=True)
        low = F.relu_(self.b(F.max_pool2d(down, 2)))
        up = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        return torch.sigmoid(self.c(torch.cat([down, up], dim=1)))

    parts = {"a": nn.Conv2d(1, 4, 3, padding=1), "b": nn.Conv2d(4, 4, 3, padding=1)}
    return _module(forward, c=nn.Conv2d(8, 1, 1), **parts), (torch.randn(1, 1, 16, 16),)


@model
def several_dimensions() -> Any:
    def forward(self: Any, x: Any, y: Any) -> Any:
        z = self.norm(x[:, 1:, ::2] + y[:, None, :, 0, None])
        rows = z[torch.tensor([1, 0]), torch.tensor([0, 2])]
        return (
            F.pad(torch.where(z > 0, z, 0.0), (1, 1)),
            rows,
            z.var(1),
            z.unfold(2, 2, 1),
            z.max(1),
        )

    return _module(forward, norm=nn.InstanceNorm2d(3)), (
        torch.randn(2, 4, 6, 6),
        torch.rand(2, 3, 6),
    )


@model
def a_loss_in_the_model() -> Any:
    def forward(self: Any, x: Any, target: Any) -> Any:
        logits = self.fc(x)
        return F.cross_entropy(logits, target, label_smoothing=0.1), logits.softmax(-1)

    return _module(forward, fc=nn.Linear(4, 5)), (torch.randn(3, 4), torch.tensor([0, 4, 2]))


@model
def numbers_of_pytorch_in_between() -> Any:
    def forward(self: Any, x: Any) -> Any:
        y = torch.relu(x)
        scale = y.max().item()
        return y / (scale + 1), torch.special.i0(y).sum(), x[x > 0]

    return _module(forward), (torch.randn(3, 4),)


@model
def random_numbers() -> Any:
    def forward(self: Any, x: Any) -> Any:
        return x + torch.rand_like(x) * 0, F.dropout(x, 0.5, self.training)

    return _module(forward), (torch.randn(3, 4),)


@model
def regions() -> Any:
    def forward(self: Any, x: Any) -> Any:
        with torch.no_grad():
            y = self.fc(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.fc(y)
        return y, z.float().round(decimals=1)

    return _module(forward, fc=nn.Linear(4, 4)), (torch.ones(3, 4),)


@model
def out_arguments() -> Any:
    def forward(self: Any, x: Any) -> Any:
        y = torch.zeros_like(x)
        torch.add(x, 1, out=y)
        z = torch.empty_like(x, dtype=torch.float64)
        torch.mul(y, 2, out=z)
        return y, z

    return _module(forward), (torch.randn(3),)


@model
def integer_arithmetic() -> Any:
    def forward(self: Any, a: Any, b: Any) -> Any:
        return a // b, a % b, a / b, -a, a**2, a & b, (a > b) ^ (b > 2), a.abs().float().sqrt()

    a, b = torch.arange(-6, 6), torch.arange(1, 13)
    return _module(forward), (a, b)


@model
def small_integers_and_bools() -> Any:
    def forward(self: Any, a: Any, m: Any) -> Any:
        return a + 1, a.sum(), m.sum(), m + m, m * 2, (a * 2).to(torch.int16), m.any(), a.max()

    return _module(forward), (torch.tensor([1, 2, 200], dtype=torch.uint8), torch.ones(3).bool())


def _cases() -> list[Any]:
    return [pytest.param(make, backend, id=f"{name}-{backend}")
            for name, make in MODELS.items() for backend in HERE]  # fmt: skip


def _same(ours: Any, eager: Any, relative: float = 1e-4, absolute: float = 1e-5) -> None:
    assert pytree.tree_structure(ours) == pytree.tree_structure(eager)
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(eager), strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=relative, atol=absolute, equal_nan=True)
        else:
            assert a == b
            assert type(a) is type(b)


@pytest.mark.parametrize(("make", "backend"), _cases())
def test_a_program_agrees_with_eager_or_its_parts_stay_with_a_reason(
    make: Callable[[], Any], backend: str
) -> None:
    torch.manual_seed(0)
    program, inputs = make()
    gm = fxlab.symbolic_trace(program)
    lowered = lower(gm, inputs, backend, threads=1)
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in program.parameters())
    left = [n for n in gm.graph.nodes if n.op.startswith("call")]
    for _ in range(2):  # an engine must not remember the call before
        ours, eager = (pytree.tree_map(_clone, inputs) for _ in range(2))
        state = copy.deepcopy([*program.buffers()])
        with torch.no_grad():
            want = program(*eager)
        for buffer, value in zip(program.buffers(), state, strict=True):
            buffer.data.copy_(value)
        with torch.no_grad():
            _same(lowered(*ours), want, *([1e-2, 1e-2] if half else []))
        _same(ours, eager)  # what is written to an input is seen by both
    reasons = explain(gm, inputs, backend)
    assert len(reasons) < len(left) or not lowered.meta["partition_names"]
    try:
        strict = lower(gm, inputs, backend, threads=1, strict=True)
    except LoweringError as error:
        assert lowered.meta["reports"]["lower"]["reasons"]
        assert "at node" in str(error)
    else:
        assert not lowered.meta["reports"]["lower"]["reasons"]
        assert strict.meta["reports"]["lower"].kept == []


EXPORTED = (shared_weights, a_recurrent_model, a_unet, several_dimensions, a_transformer_with_masks)


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # torch's, of an LSTM
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("make", EXPORTED, ids=lambda make: make.__name__)
def test_an_exported_program_of_aten_operators_is_lowered_whole(
    make: Callable[[], Any], backend: str
) -> None:
    torch.manual_seed(0)
    program, inputs = make()
    gm = from_exported(torch.export.export(program, inputs))
    lowered = lower(gm, inputs, backend, threads=1, strict=True)
    with torch.no_grad():
        _same(pytree.tree_leaves(lowered(*inputs)), pytree.tree_leaves(program(*inputs)))


def _clone(value: Any) -> Any:
    """A copy with the same strides."""
    return value.clone() if isinstance(value, torch.Tensor) and value.is_contiguous() else value
