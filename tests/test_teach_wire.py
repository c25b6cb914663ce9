"""What crosses the pipe comes out equal, and nothing that arrives can run anything."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from torch import nn

import fxlab
from fxlab.teach import exercises, programs, wire
from fxlab.teach.examine import generate
from fxlab.teach.exercise import Case
from fxlab.teach.judge import same_program, unequal

PARTS = [(one.id, one) for owner in exercises() for one in owner.parts]


def there_and_back(value):
    return wire.decode(wire.encode(value))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -2.5, float("inf"), "text", [1, [2, "x"]], (1, (2,)), {"a": 1, (1, 2): None},
        torch.Size([2, 3]), torch.float16, torch.device("cpu"), slice(1, None, 2), {1, 2},
        torch.relu,
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)  # fmt: skip
def test_plain_values_come_out_equal_and_of_the_same_type(value):
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8,
                                   torch.bool, torch.complex64, torch.int64])  # fmt: skip
def test_tensors_come_out_bit_for_bit(dtype):
    tensors = [torch.randn(2, 3).to(dtype), torch.randn(()).to(dtype), torch.empty(0, 3).to(dtype)]
    tensors.append(torch.arange(6).reshape(2, 3).t().to(dtype))
    for one, other in zip(tensors, there_and_back(tensors), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_one_tensor_in_two_places_stays_one_and_parameters_stay_parameters():
    weight = nn.Parameter(torch.randn(2), requires_grad=False)
    one, other, third = there_and_back([weight, weight, torch.zeros(1, requires_grad=True)])
    assert one is other and isinstance(one, nn.Parameter) and not one.requires_grad
    assert third.requires_grad


def test_a_program_with_layers_runs_the_same_on_the_other_side():
    inner = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.2), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), inner, nn.Linear(16, 2))
    gm = fxlab.symbolic_trace(programs.fill(model).eval())
    found = there_and_back(gm)
    assert same_program(gm, found, [torch.randn(2, 3, 4, 4)]) == ""
    assert [n.name for n in found.graph.nodes] == [n.name for n in gm.graph.nodes]
    assert [type(m) for m in found.modules()][1:] == [type(m) for m in gm.modules()][1:]
    found.get_submodule("0").register_forward_hook(lambda *a: None)


def test_a_shared_module_stays_shared():
    relu = nn.Linear(2, 2)
    found = there_and_back(nn.Sequential(relu, relu, nn.Linear(2, 2)))
    assert found[0] is found[1] and found[0] is not found[2]


@pytest.mark.parametrize("id, asked", PARTS, ids=[id for id, _ in PARTS])
def test_the_arguments_of_every_case_cross_the_pipe(id, asked):
    count = 0
    for case in asked.cases():
        if isinstance(case, Case):
            args = case.args()
            found = there_and_back(args)
            assert len(found) == len(args)
            for one, other in zip(args, found, strict=True):
                if isinstance(one, torch.Tensor | float | int | str):
                    assert unequal(one, other) == ""
            count += 1
        else:
            first = []

            def keep(args, first=first):
                first.append(wire.encode(args)) if len(first) < 3 else None

            generate(case, keep)
            assert all(isinstance(wire.decode(one), tuple) for one in first)
            count += len(first)
    assert count


class NotOurs(nn.Module):
    """A module class of a student's."""


@pytest.mark.parametrize(
    "value, why",
    [
        (object(), "object, which can't leave its process"),
        (os.system, "can't leave"),
        (NotOurs(), "no layer of torch.nn"),
        ([lambda: None], "can't leave"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.ones(2, 2).to_sparse(), "layout"),
    ],
)
def test_what_cannot_be_sent_is_named(value, why):
    with pytest.raises(wire.WireError, match=why):
        wire.encode(value)


def test_what_is_nested_without_end_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(wire.WireError, match="nested"):
        wire.encode(endless)


def message(data, blob=b""):
    text = json.dumps(data).encode()
    return wire._HEAD.pack(len(text), len(blob)) + text + blob


MODULE = {"class": "torch.nn.modules.activation.ReLU", "number": 0, "name": "x", "attributes": {},
          "parameters": [], "buffers": [], "modules": [], "temporary": []}  # fmt: skip
TENSOR = {"dtype": "torch.float32", "shape": [2], "at": 0, "bytes": 8}


@pytest.mark.parametrize(
    "arrives",
    [
        b"", b"short", pickle.dumps([1]), message({}), message([]), message({"value": 1}),
        message({"value": {"function": "os.system"}, "tensors": []})[:-3],
        message({"value": {"module": {**MODULE, "class": "os.PathLike"}}, "tensors": []}),
        message({"value": {"module": {**MODULE, "class": "fxlab.cli.Finding"}}, "tensors": []}),
        message({"value": {"module": {**MODULE, "attributes": {"forward": 1}}}, "tensors": []}),
        message({"value": {"module": {**MODULE, "attributes": {"__class__": 1}}}, "tensors": []}),
        message({"value": {"module": {**MODULE, "attributes": {"extra_repr": 1}}}, "tensors": []}),
        message(
            {"value": {"module": {**MODULE, "attributes": {"_forward_hooks": 1}}}, "tensors": []}
        ),
        message({"value": {"module": {**MODULE, "attributes": {"_modules": {"dict": []}}}},
                 "tensors": []}),
        message({"value": {"module": {**MODULE, "parameters": [["w", 3]]}}, "tensors": []}),
        message({"value": {"same": 7}, "tensors": []}),
        message({"value": {"tensor": 0}, "tensors": [{**TENSOR, "at": 4}]}, b"12345678"),
        message({"value": {"tensor": 0}, "tensors": [{**TENSOR, "shape": [10**12]}]}, b"12345678"),
        message({"value": {"tensor": 0}, "tensors": [{**TENSOR, "shape": [-2]}]}, b"12345678"),
        message({"value": {"tensor": 0}, "tensors": [{**TENSOR, "dtype": "os"}]}, b"12345678"),
        message({"value": {"what": 1}, "tensors": []}), message({"value": {}, "tensors": []}),
        message({"value": {"a": 1, "b": 2}, "tensors": []}),
        wire._HEAD.pack(4, 0) + b"[[[[", wire._HEAD.pack(200_000, 0) + b"[" * 200_000,
    ],
)  # fmt: skip
def test_what_is_no_message_of_ours_is_refused(arrives):
    with pytest.raises(wire.WireError):
        wire.decode(arrives)


def test_a_function_that_is_not_in_the_table_does_not_become_one():
    assert wire.decode(message({"value": {"function": "os.system"}, "tensors": []})) is None
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x))
    data = json.loads(bytes(wire.encode(gm)[wire._HEAD.size :]).decode())
    assert data["value"]["module"]["graph"]["nodes"][1]["target"] == "torch.relu"
    data["value"]["module"]["graph"]["nodes"][1]["target"] = "os.system"
    found = wire.decode(message(data))
    with pytest.raises(fxlab.RewriteError, match="not in the kit's table"):
        found(torch.ones(1))


def test_a_graph_that_is_not_well_formed_is_refused():
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x).neg())
    data = json.loads(bytes(wire.encode(gm)[wire._HEAD.size :]).decode())
    data["value"]["module"]["graph"]["nodes"].reverse()
    with pytest.raises(wire.WireError, match="no graph of fxlab"):
        wire.decode(message(data))


def test_no_place_in_a_file_crosses():
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x))
    assert gm.graph.find_nodes(op="call_function")[0].meta["source"]
    assert __file__.encode() not in wire.encode(gm)
