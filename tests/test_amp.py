"""Mixed precision: autocast's answer with fewer casts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxlab
from fxlab.models import MLP, DeepRecommender, LearningToPaintActor, TransformerBlock, resnet50
from fxlab.passes import PassManager, amp, compare
from fxlab.passes.amp import column

torch.set_num_threads(1)


class CountCasts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def casts(work):
    with torch.no_grad(), CountCasts() as counter:
        out = work()
    return counter.count, out


MODELS = [
    (TransformerBlock, (2, 16, 32)),
    (resnet50, (1, 3, 64, 64)),
    (LearningToPaintActor, (1, 9, 128, 128)),
    (lambda: DeepRecommender(500), (4, 500)),
    (MLP, (2, 8)),
]


@pytest.mark.parametrize(("make", "shape"), MODELS)
def test_casts_are_fewer_than_autocasts_and_the_error_is_no_larger(make, shape):
    model, x = make().eval(), torch.randn(shape)

    def autocast():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    gm = amp(fxlab.symbolic_trace(model), torch.bfloat16, x)
    ours, out = casts(lambda: gm(x))
    theirs, out_autocast = casts(autocast)
    assert ours == gm.meta["reports"]["amp"]["casts"]
    assert ours <= theirs
    exact = model.double()(x.double())
    ours_db, theirs_db = (compare(exact, o).sqnr_db for o in (out, out_autocast))
    assert ours_db > theirs_db - 3
    assert ours_db > 25
    assert out.dtype == torch.float32
    assert gm.meta["reports"]["amp"]["sqnr_db"] == pytest.approx(ours_db, abs=1)


def test_the_users_weights_stay_float32_and_the_copies_are_low():
    model = MLP().eval()
    gm = amp(fxlab.symbolic_trace(model))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in gm.parameters()} == {torch.bfloat16}


def test_a_value_is_cast_once_for_all_its_readers():
    gm = amp(fxlab.symbolic_trace(TransformerBlock().eval()))
    query, key, value = (gm.graph.find_nodes(op="call_module", target=t)[0]
                         for t in ("query", "key", "value"))  # fmt: skip
    assert query.args[0] is key.args[0] is value.args[0]


def test_a_cast_moves_up_through_views_to_where_it_is_shared():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(2, 2)

        def forward(self, x):
            x = torch.softmax(x, -1)
            return self.a(x.reshape(-1, 4)).sum() + self.b(x.reshape(-1, 2)).sum()

    gm = amp(fxlab.symbolic_trace(Views().eval()))
    low = [n for n in gm.graph.find_nodes(op="call_method", target="to")
           if n.args[1] == torch.bfloat16]  # fmt: skip
    assert len(low) == 1
    assert low[0].args[0].target is torch.softmax


def test_parameters_read_by_functions_are_cast_ahead_of_time():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return F.linear(x, self.w, bias=self.b)

    gm = amp(fxlab.symbolic_trace(Functional().eval()))
    assert gm.w_bfloat16.dtype == torch.bfloat16
    assert gm.meta["reports"]["amp"]["casts"] == 2  # the input and the output
    assert gm(torch.randn(2, 4)).dtype == torch.float32


def test_integers_masks_and_sizes_are_never_cast():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(10, 4), nn.Linear(4, 4)

        def forward(self, ids):
            x = self.table(ids)
            mask = (ids > 3).unsqueeze(-1)
            x = self.out(x).masked_fill(mask, 0.0)
            return x.reshape(ids.shape[0], -1), ids + 1

    model, ids = Tokens().eval(), torch.tensor([[1, 5], [2, 3]])
    gm = amp(fxlab.symbolic_trace(model), torch.bfloat16, ids)
    out, more = gm(ids)
    assert torch.equal(more, ids + 1)
    assert compare(model(ids)[0], out).sqnr_db > 25


def test_a_value_that_is_written_in_place_is_cast_anew():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = torch.exp(x)
            y = self.a(x)
            x.mul_(3)
            return y + self.b(x)

    model, x = Writes().eval(), torch.randn(2, 4)
    gm = amp(fxlab.symbolic_trace(model))
    assert compare(model(x.clone()), gm(x.clone())).sqnr_db > 25


def test_a_number_of_float32_does_not_make_a_16_bit_tensor_wide():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.slope = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            h = self.fc(x)
            return h * h.mean() * self.slope, h.sum() * self.slope

    x = torch.randn(3, 4)
    expected = Scaled()
    for inputs in (None, x):  # shapes unknown, and known
        gm = amp(fxlab.symbolic_trace(expected), inputs=inputs)
        with torch.no_grad():
            out, reference = gm(x), expected(x)
        assert [(one.dtype, one.shape) for one in out] == [(r.dtype, r.shape) for r in reference]
        torch.testing.assert_close(out, reference, rtol=0.05, atol=0.05)


class Several(nn.Module):
    """Values that are several tensors: no cast takes those at once."""

    def __init__(self):
        super().__init__()
        self.fc, self.narrow = nn.Linear(8, 8), nn.Linear(4, 4)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.pool = nn.MaxPool1d(2, return_indices=True)

    def forward(self, x):
        y = self.fc(x)
        a, b = y.chunk(2, -1)
        rows = [self.fc(x.unbind(1)[i]) for i in range(2)]
        z, state = self.lstm(y)
        pooled, places = self.pool(y)
        return (
            *(self.narrow(a) + b, *rows, self.fc(z), self.fc(state[0][0]), state),
            *(torch.cat(y.split(2, 1)), y.chunk(2, -1), self.fc(x.max(1).values), self.fc(y.mT.mT)),
            *(self.fc(x.sort(1)[0]), self.narrow(pooled), places, y.mT),
        )


@pytest.mark.parametrize("known", [False, True])
def test_several_tensors_at_once_are_never_cast_and_each_of_them_is(known):
    torch.manual_seed(0)
    model, x = Several().eval().requires_grad_(False), torch.randn(2, 4, 8)
    gm = amp(fxlab.symbolic_trace(model), inputs=x if known else None)
    (*floats, places, last), (*expected, _, expected_last) = gm(x), model(x)
    assert places.dtype == torch.int64
    difference = compare((*expected, expected_last), (*floats, last))
    assert difference.same_structure
    assert difference.types == ""  # all of them float32 again
    assert difference.sqnr_db > 25


class Casting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        wide = y.float(), y.to(x.dtype), y.type_as(x), y.double().float(), torch.tanh(y).to(x)
        masks = y >= 0, ~(y > 0) & (y < 1), y.isnan(), (y != 0).any(), y.long(), y.sort(1)[1]
        return *(self.fc(value) for value in wide), *masks


@pytest.mark.parametrize("known", [False, True])
def test_casts_of_the_programs_own_are_known_and_masks_are_no_floats(known):
    model, x = Casting().eval().requires_grad_(False), torch.randn(2, 4, 8)
    gm = amp(fxlab.symbolic_trace(model), inputs=x if known else None)
    found, expected = gm(x), model(x)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    assert compare(expected[:5], found[:5]).sqnr_db > 25


def test_numbers_made_of_numbers_are_numbers():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.slope = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.5))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return self.fc(x) * self.calls, self.fc(x) * (self.slope.exp() * 2).sqrt()

    x = torch.randn(3, 4)
    gm = amp(fxlab.symbolic_trace(Counts().requires_grad_(False)))
    assert [out.dtype for out in gm(x)] == [torch.float32] * 2


def test_the_op_table_has_the_four_words():
    gm = fxlab.symbolic_trace(TransformerBlock().eval())
    words = {node.name: column(node, gm) for node in gm.graph.nodes}
    assert words["query"] == words["matmul"] == "lower"
    assert words["softmax"] == words["norm1"] == "keep"
    assert words["add"] == words["gelu"] == "follow"
    scatter = fxlab.symbolic_trace(lambda x, i, y: x.index_add(0, i, y))
    assert column(scatter.graph.find_nodes(op="call_method")[0], scatter) == "widest"


def test_the_manager_accepts_the_loss_that_the_pass_declares():
    x = torch.randn(2, 16, 32)
    manager = PassManager([amp], inputs=(x,))
    manager(fxlab.symbolic_trace(TransformerBlock().eval()))
    assert 20 < manager.rows[0].difference.sqnr_db < 100


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"bfloat16 or torch\.float16"):
        amp(fxlab.symbolic_trace(MLP()), torch.float64)


class Masked(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.q = nn.Linear(8, 24)
        self.in_place = in_place

    def forward(self, x):
        q, k, v = self.q(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2)
        mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
        fill = scores.masked_fill_ if self.in_place else scores.masked_fill
        return fill(mask, -1e9).softmax(-1) @ v


@pytest.mark.parametrize("given", [True, False])
def test_a_number_beyond_float16_keeps_its_operation_in_float32(given):
    model, x = Masked(False).eval(), torch.randn(2, 4, 8)
    gm = amp(fxlab.symbolic_trace(model), torch.float16, x if given else None)
    kept = gm.meta["reports"]["amp"].kept
    assert "masked_fill kept in float32: -1e+09 is beyond torch.float16" in kept
    with torch.no_grad():
        assert torch.allclose(gm(x), model(x), atol=1e-2)
    low = amp(fxlab.symbolic_trace(model), torch.bfloat16)
    assert not any("masked_fill" in sentence for sentence in low.meta["reports"]["amp"].kept)


def test_a_number_written_into_float16_is_told_with_its_node():
    model, x = Masked(True).eval(), torch.randn(2, 4, 8)
    gm = amp(fxlab.symbolic_trace(model), torch.float16)
    assert any("masked_fill_ writes -1e+09" in text for text in gm.meta["reports"]["amp"].kept)
    with pytest.raises(fxlab.passes.ShapeError, match="masked_fill_ ran before") as caught:
        amp(fxlab.symbolic_trace(model), torch.float16, x)
    assert "65504" in str(caught.value)
    assert "bfloat16" in str(caught.value)
