# ruff: noqa: E741, UP006, UP007, UP035, UP045 - every form of annotation is tested
"""Generated code means what the graph means, and reads like torch.fx's in the ordinary case."""

import collections
import dataclasses
import enum
import functools
import inspect
import keyword
import math
import operator
import pathlib
import types
import typing
from typing import Callable, Dict, List, Optional, Tuple, Union

import pytest
import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxlab
from fxlab.core.codegen import CodeGen, PythonCode
from fxlab.core.errors import CodegenError
from fxlab.core.graph import Graph, _enter_region, _exit_region
from fxlab.core.graph_module import GraphModule
from fxlab.core.writer import is_name


def identity(value, *more, **named):
    return value


def returns(graph: Graph, value) -> GraphModule:
    """Finish a graph and wrap it."""
    graph.output(value)
    return GraphModule(nn.Module(), graph)


def through_code(value):
    """What generated code makes of an argument."""
    graph = Graph()
    return returns(graph, graph.call_function(identity, (value,)))()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.weight = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, scale: float = 2.0):
        y = self.norm(self.layer(x)) * self.weight + scale
        return y[:, None], {"t": y.T, "s": [y.sum(-1, keepdim=True), -y]}


PROGRAMS = {
    "module": Net(),
    "operators": lambda x, y: ((x + y) * 2 - 1, x / y // 3, x % 2, x**2, x @ y),
    "bits": lambda x, y: (x & y, x | y, x ^ y),
    "comparisons": lambda x, y: (x == y, x != y, x < y, x > y, x <= y, x >= y),
    "unary": lambda x: (-x, +x, ~x),
    "shifts": lambda x: (x << 1, x >> 2),
    "reflected": lambda x: (1 + x, 2 - x, 3 * x, 4 / x),
    "index": lambda x: (x[0], x[:, 1:2], x[..., None], x[1, :, ::2]),
    "attribute": lambda x: (x.shape, x.T, x.mT),
    "method": lambda x: x.view(-1, 2).flatten(start_dim=1).relu(),
    "function": lambda x: torch.cat([x, torch.relu(x)], dim=1),
    "functional": lambda x: torch.nn.functional.gelu(torch.nn.functional.dropout(x, 0.5, False)),
    "dtype and device": lambda x: x.to(torch.float64).to(torch.device("cpu")),
    "aten": lambda x: torch.ops.aten.relu.default(x),
    "infinite": lambda x: torch.clamp(x, float("-inf"), float("inf")),
    "nested output": lambda x: ({"a": (x, [x]), "b": None}, x),
    "unused": lambda x, y: torch.relu(x),
    "shadowing names": lambda input, len: input + len,
    "nothing": lambda: 1,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ordinary_programs_print_what_torch_fx_prints(name):
    ours, theirs = fxlab.symbolic_trace(PROGRAMS[name]), torch.fx.symbolic_trace(PROGRAMS[name])
    assert ours.code.strip() == theirs.code.strip()


def test_torch_compatible_fields_and_line_map():
    gm = fxlab.symbolic_trace(Net())
    code = gm.graph.python_code("self")
    theirs = torch.fx.symbolic_trace(Net()).graph.python_code("self")
    assert isinstance(code, PythonCode)
    assert code._prologue_start == theirs._prologue_start
    assert code._lineno_map.items() <= theirs._lineno_map.items()
    lines = code.src.splitlines()
    found = {line: code.node_at(line) for line in range(1, len(lines) + 1) if code.node_at(line)}
    assert {*found.values()} >= {node for node in gm.graph.nodes if node.op.startswith("call")}
    for line, node in found.items():
        if node.op not in ("output", "placeholder"):
            assert lines[line - 1].strip().startswith(node.name + " =")
    assert code.node_at(1) is None and code.node_at(999) is None


# -- names -------------------------------------------------------------------------------------

HOSTILE = [
    "torch", "operator", "getattr", "slice", "inf", "nan", "device", "math", "self_", "forward",
    "print", "list", "None_", "builtins", "_constant", "math_sqrt", "type", "Ellipsis", "range",
    "set", "frozenset", "NoneType", "typing_List", "_ndarray", "match", "é", "変数", "_", "__x",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_parameter_shadows_nothing(name):
    source = (
        f"def program({name}, other):\n"
        f"    y = helper({name}).clamp(min=-inf_) + other[sl]\n"
        f"    return root(y.sum()), y.T, {name} * 2"
    )
    helper = torch.relu
    scope = {"helper": helper, "inf_": math.inf, "sl": slice(0, 1), "root": torch.sqrt}
    exec(source, scope)
    gm = fxlab.symbolic_trace(scope["program"])
    args = torch.tensor([[4.0, -1.0]]), torch.tensor([[1.0], [2.0]])
    for got, want in zip(gm(*args), scope["program"](*args), strict=True):
        assert torch.equal(got, want)
    assert list(inspect.signature(gm.forward).parameters) == [name, "other"]


def test_a_parameter_of_a_function_may_be_called_self():
    gm = fxlab.symbolic_trace(lambda self, x: self + x)
    assert gm(1, 2) == 3


ATTRIBUTES = ["class", "0", "a b", 'q"uote', "it's", "é", "ﬁ", "back\\slash", "new\nline", "None",
              "__private", "x", "print", "torch", "1a", "__debug__", "lambda", "日本"]  # fmt: skip


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_any_name_of_a_submodule_parameter_or_buffer_works(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(name, nn.Linear(2, 2))
            self.inner = nn.Module()
            self.inner.register_parameter(name, nn.Parameter(torch.tensor([2.0, 3.0])))
            self.inner.register_buffer(name + "_", torch.tensor([5.0, 7.0]))

        def forward(self, x):
            inner = self.inner
            return getattr(self, name)(x) * getattr(inner, name) + getattr(inner, name + "_")

    model, x = Model(), torch.randn(3, 2)
    assert torch.equal(fxlab.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize("name", ["class", "a b", "é", "ﬁ", "x", "__debug__", "self", "'"])
def test_any_keyword_argument_and_attribute_name_works(name):
    graph = Graph()
    x = graph.placeholder("x")
    value = graph.call_function(dict, (), {name: x, "plain": 1})
    holder = graph.call_function(types.SimpleNamespace, (), {name: 5})
    gm = returns(graph, (value, graph.call_function(getattr, (holder, name))))
    assert gm(3) == ({name: 3, "plain": 1}, 5)


def test_any_method_name_works():
    graph = Graph()
    methods = type("Methods", (), {n: lambda self, n=n: n for n in ("class", "a.b", "ok")})()
    x = graph.placeholder("x")
    gm = returns(graph, [graph.call_method(name, (x,)) for name in ("class", "a.b", "ok")])
    assert gm(methods) == ["class", "a.b", "ok"]


def test_a_placeholder_that_is_no_name_becomes_a_parameter():
    graph = Graph()
    nodes = [graph.placeholder(name) for name in ("class", "a b", "0", "é", "", "ª", "_", "_")]
    gm = returns(graph, tuple(nodes))
    assert gm(*range(8)) == tuple(range(8))
    assert list(inspect.signature(gm.forward).parameters)[6] == "_"


def test_renamed_nodes_never_meet_parameters_or_each_other():
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    total = graph.call_function(operator.sub, (a, b))
    gm = returns(graph, (total, a, b))
    a.name, b.name, total.name = "b", "a", "class"
    assert gm(5, 3) == (2, 5, 3)
    total.name = "self"
    assert gm(5, 3) == (2, 5, 3)
    b.name = "b"  # two nodes of one name: lint refuses it, but the code is still right
    assert gm(5, 3) == (2, 5, 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(
    st.sampled_from([*HOSTILE, *keyword.kwlist, *keyword.softkwlist, "self", "torch_1"]),
    st.text(st.characters(categories=("L", "Nd", "Pc")), min_size=1, max_size=6),
), min_size=2, max_size=6, unique=True))  # fmt: skip
def test_hostile_names_everywhere_keep_their_meaning(names):
    graph = Graph()
    inputs = [graph.placeholder(name) for name in names]
    outs = []
    for node, name in zip(inputs, reversed(names), strict=True):
        out = graph.call_function(operator.add, (node, math.pi))
        out.name = name
        outs.append(graph.call_function(dict, (), {name: graph.call_function(math.sqrt, (out,))}))
    gm = returns(graph, outs)
    want = [{n: math.sqrt(i + math.pi)} for i, n in enumerate(reversed(names))]
    assert gm(*range(len(names))) == want
    parameters = list(inspect.signature(gm.forward).parameters)
    assert [p for p, n in zip(parameters, names, strict=True) if is_name(n)] == [
        n for n in names if is_name(n)
    ]


# -- values that stand in arguments ------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Level(enum.IntEnum):
    HIGH = 3


Point = collections.namedtuple("Point", "x y")


class Checked(typing.NamedTuple):
    x: int


@dataclasses.dataclass
class Box:
    value: int


class Hostile:
    def __repr__(self):
        return "__import__('os').abort()"


class Text(str):
    pass


CONSTANTS = [
    None, True, 0, -1, 2**70, 10**6000, 1.5, -0.0, 1e-300, "a'b\"c\n\\", "", b"\x00'", "\ud800",
    ..., 1 + 2j, complex(-0.0, 1), complex(math.inf, math.nan), math.inf, -math.inf,
    (), (1,), (1, (2, [3])), [], [None], {"a": [1]}, {1: 2, (1, 2): 3, None: 4}, {Color.RED: 1},
    slice(None), slice(1, None, -2), (slice(0, 1), ...), range(3), range(1, 9, 2),
    set(), {1, 2}, {"a", "b"}, frozenset(), frozenset({1}), Color.RED, Flags.A, Flags.A | Flags.B,
    Level.HIGH, Point(1, 2), Point([1], None), Checked(1), Box(3), Hostile(), Text("t"),
    torch.float32, torch.strided, torch.channels_last, torch.device("cpu"), torch.device("meta"),
    torch.device("cuda", 1), torch.Size([2, 3]), torch.Size([]), torch.per_tensor_affine,
    torch.tensor([1.0, 2.0]), nn.Parameter(torch.ones(1)),
    torch.Generator(), torch.finfo(torch.float32), pathlib.Path("a/b"), int, torch.Tensor,
    nn.Linear,
    Color, list[int], typing.Optional[int], functools.partial(int, base=2), len, torch.relu,
    torch.Tensor.add, torch.ops.aten.add, torch.ops.aten.add.Tensor, math.sqrt, identity,
    collections.deque([1]),
    bytearray(b"x"), types.SimpleNamespace(a=1), object(), NotImplemented, torch, math, type(None),
    lambda: 1, print, operator.add, "getattr", Ellipsis, inspect.Parameter.empty,
]  # fmt: skip


@pytest.mark.parametrize("value", CONSTANTS, ids=lambda v: f"{type(v).__name__}")
def test_a_constant_comes_back_with_its_type_and_value(value):
    got = through_code(value)
    assert type(got) is type(value)
    if type(value) is complex:
        assert repr(got) == repr(value)
    elif isinstance(value, torch.Tensor):
        assert got is value
    else:
        assert got is value or got == value
        assert isinstance(value, (int, set, frozenset)) or repr(got) == repr(value)
    for place in ([value], (value, 1), {"k": value}, slice(value, None)):
        assert type(through_code(place)) is type(place)


def test_numpy_scalars_and_arrays_come_back_as_themselves():
    np = pytest.importorskip("numpy")
    for value in (np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), np.arange(2)):
        assert through_code(value) is value
    assert math.isnan(through_code(float("nan")))


def test_no_repr_of_an_object_is_executed():
    graph = Graph()
    gm = returns(graph, graph.call_function(identity, (Hostile(),), {"k": Hostile()}))
    assert "abort" not in gm.code
    gm()


def test_a_literal_is_new_in_each_call_and_an_object_is_the_same_one():
    graph = Graph()
    box = Box(1)
    made = graph.call_function(identity, ([1, {"a": {2}}],))
    gm = returns(graph, (made, graph.call_function(identity, (box,))))
    (first, same), (second, again) = gm(), gm()
    assert first == second and first is not second and first[1]["a"] is not second[1]["a"]
    assert same is box and again is box


def test_equal_objects_of_different_identity_are_told_apart():
    graph = Graph()
    a, b = Box(1), Box(1)
    gm = returns(graph, (graph.call_function(identity, (a,)), graph.call_function(identity, (b,))))
    assert gm()[0] is a and gm()[1] is b


@pytest.mark.parametrize("value", [
    collections.OrderedDict, dict, list, tuple, set, Point, Box,
], ids=lambda v: v.__name__)  # fmt: skip
def test_an_output_comes_back_as_the_type_that_the_program_returned(value):
    def program(x):
        y = torch.relu(x)
        if value in (dict, collections.OrderedDict):
            return value(b=y, a=x)
        if value is Point:
            return Point(y, [x])
        return Box(y) if value is Box else value([y])

    x = torch.ones(2)
    got, want = fxlab.symbolic_trace(program)(x), program(x)
    assert type(got) is type(want)
    if isinstance(want, dict):
        assert list(got) == list(want)


def test_values_that_hold_nodes_keep_their_type():
    graph = Graph()
    x = graph.placeholder("x")
    values = [(x,), [x, (x, {"k": x})], slice(x, None, x), Point(x, [x]), Checked(x)]
    gm = returns(graph, [graph.call_function(identity, (v,)) for v in values])
    want = [(7,), [7, (7, {"k": 7})], slice(7, None, 7), Point(7, [7]), Checked(7)]
    assert gm(7) == want and [type(v) for v in gm(7)] == [type(v) for v in want]


@pytest.mark.parametrize("program, want", [
    (lambda x: (-1) ** x, (-1) ** 2), (lambda x: (-x) ** 2, 4), (lambda x: -(x**2), -4),
    (lambda x: 2.5 - (-1.5 - x), 6.0), (lambda x: (x + 1) * (x - 1), 3), (lambda x: -(x * 2), -4),
    (lambda x: (x < 3) == (x > 1), True), (lambda x: -(-x), 2), (lambda x: ~(~x), 2),  # noqa: B002
])  # fmt: skip
def test_operators_bind_as_they_did_in_the_program(program, want):
    assert fxlab.symbolic_trace(program)(2) == want


def test_a_constant_as_the_left_operand_or_object():
    graph = Graph()
    x = graph.placeholder("x")
    gm = returns(graph, [
        graph.call_function(operator.pow, (-2, x)),
        graph.call_function(operator.getitem, ([4, 5], x)),
        graph.call_method("bit_length", (7,)), graph.call_method("conjugate", (-1.5,)),
        graph.call_method("join", (",", ["a", "b"])), graph.call_function(getattr, (3, "real")),
        graph.call_function(getattr, (-3, "imag")), graph.call_function(operator.neg, (-3,)),
    ])  # fmt: skip
    assert gm(1) == [-2, 5, 3, -1.5, "a,b", 3, 0, 3]


def test_in_place_operators_mean_the_same_in_code_and_interpreter():
    names = ("iadd", "isub", "imul", "iand", "ior", "ixor", "ilshift", "irshift", "imod", "ipow")
    graph = Graph()
    x = graph.placeholder("x")
    gm = returns(graph, [graph.call_function(getattr(operator, n), (x, 3)) for n in names])
    assert gm(7) == fxlab.Interpreter(gm).run(7)
    assert "operator.iadd(x, 3)" in gm.code
    graph = Graph()
    t = graph.placeholder("t")
    gm = returns(graph, (graph.call_function(operator.iadd, (t, 1)), t))
    value = torch.zeros(2)
    assert all(out is value for out in gm(value))
    assert fxlab.Interpreter(gm).run(2) == (3, 2) == gm(2)


# -- signatures --------------------------------------------------------------------------------


def _like(a, /, b, *args, c, **kwargs):
    return a


DEFAULT_TENSOR, DEFAULT_LIST = torch.ones(2), [1, 2]


def _defaults(a, b=1.25, *, c=DEFAULT_TENSOR, d=torch.relu, e=Color.RED, f=Box(1),  # noqa: B008
              g=DEFAULT_LIST,
              h="text", i=None, j=(1, [2]), k=math.inf, m=Hostile()):  # noqa: B008  # fmt: skip
    return a


def _annotated(
    a: int, b: torch.Tensor | None, c: List[torch.Tensor], d: Optional[int],
    e: Callable[[int], str], f: "typing.Any", g: list[int], h: dict[str, tuple[int, ...]],
    i: typing.Annotated[int, "x"], j: typing.Literal["a b"], k: Color, l: Tuple[()],
    m: Union[int, str, None], n: Box, *o: float, p: None = None, **q: Dict[str, int],
) -> Tuple[int, str]:  # fmt: skip
    return a


def _keyword_only(a, *, b, c=2):
    return a + b + c


def _positional_only(a, b=2, /, c=3):
    return a - b * c


@pytest.mark.parametrize("program", [
    _like, _defaults, _annotated, _keyword_only, _positional_only, lambda: 1, lambda *a: a,
    lambda **k: k, lambda a, /: a, lambda a, *, b: a,
])  # fmt: skip
def test_the_generated_function_has_the_signature_of_the_program(program):
    made = type(fxlab.symbolic_trace(program)).forward
    code, ours = program.__code__, made.__code__
    assert ours.co_argcount == code.co_argcount + 1
    assert ours.co_posonlyargcount == (code.co_posonlyargcount and code.co_posonlyargcount + 1)
    assert ours.co_kwonlyargcount == code.co_kwonlyargcount
    stars = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    assert ours.co_flags & stars == code.co_flags & stars
    count = len(inspect.signature(program).parameters)
    assert ours.co_varnames[1 : count + 1] == code.co_varnames[:count]
    for got, want in zip(made.__defaults__ or (), program.__defaults__ or (), strict=True):
        assert got is want
    assert (made.__kwdefaults__ or {}).keys() == (program.__kwdefaults__ or {}).keys()
    for name, want in (program.__kwdefaults__ or {}).items():
        got = made.__kwdefaults__[name]
        assert got is want or (isinstance(want, (list, tuple)) and got == want), name
    notes = typing.get_type_hints(program, include_extras=True)
    assert {k: v for k, v in made.__annotations__.items() if v is not None} == {
        k: v for k, v in notes.items() if v is not type(None)
    }


def test_keyword_and_positional_only_parameters_are_passed_on():
    x = torch.ones(2)
    gm = fxlab.symbolic_trace(_keyword_only)
    assert torch.equal(gm(x, b=3), _keyword_only(x, b=3))
    gm = fxlab.symbolic_trace(_positional_only)
    assert torch.equal(gm(x, 4, c=5), _positional_only(x, 4, c=5))


def test_placeholders_are_put_in_the_order_that_python_wants():
    graph = Graph()
    rest, x = graph.placeholder("*rest"), graph.placeholder("x")
    named = graph.placeholder("k", default_value=1)
    named.meta["param_kind"] = "KEYWORD_ONLY"
    gm = returns(graph, (x, rest, named, graph.placeholder("**more")))
    assert gm(1, 2, 3, k=4, z=5) == (1, (2, 3), 4, {"z": 5})


def test_a_parameter_without_default_behind_one_with_is_refused():
    graph = Graph()
    graph.placeholder("a", default_value=1)
    graph.placeholder("b")
    gm = returns(graph, 1)
    with pytest.raises(CodegenError, match=r"b has no default but stands behind a(.|\n)*%b : "):
        gm()


def test_node_types_are_annotations_that_do_not_matter_to_the_run():
    graph = Graph()
    x = graph.placeholder("x", type_expr=List[int])
    y = graph.call_function(len, (x,), type_expr=int)
    graph.output(y, type_expr=int)
    gm = GraphModule({}, graph)
    assert "def forward(self, x : typing_List[int]) -> int:" in gm.code
    assert "len_1 : int = len(x)" in gm.code and gm([1, 2]) == 2


# -- regions -----------------------------------------------------------------------------------


def region(graph, factory, *args, **kwargs):
    return graph.call_function(_enter_region, (factory, *args), kwargs)


def test_a_pair_of_region_nodes_is_a_with_block():
    graph = Graph()
    x = graph.placeholder("x")
    outer = region(graph, torch.no_grad)
    y = graph.call_function(torch.mul, (x, 2))
    inner = region(graph, torch.autocast, "cpu", dtype=torch.bfloat16)
    z = graph.call_function(torch.mm, (y, y))
    graph.call_function(_exit_region, (inner,))
    empty = region(graph, torch.enable_grad)
    graph.call_function(_exit_region, (empty,))
    graph.call_function(_exit_region, (outer,))
    w = graph.call_function(torch.mul, (x, 3))
    gm = returns(graph, (z, w))
    want = """def forward(self, x):
    with torch.autograd.grad_mode.no_grad():
        mul = torch.mul(x, 2)
        with torch.amp.autocast_mode.autocast('cpu', dtype = torch.bfloat16):
            mm = torch.mm(mul, mul);  mul = None
        with torch.autograd.grad_mode.enable_grad():
            pass
    mul_1 = torch.mul(x, 3);  x = None
    return (mm, mul_1)"""
    assert gm.code.strip() == want
    z, w = gm(torch.ones(2, 2, requires_grad=True))
    assert z.dtype is torch.bfloat16 and not z.requires_grad and w.requires_grad
    for mode in (True, False):
        with torch.set_grad_enabled(mode), pytest.raises(RuntimeError):
            gm(torch.ones(2, 3, requires_grad=True))
        assert torch.is_grad_enabled()


def test_a_region_that_is_read_is_named():
    graph = Graph()
    enter = region(graph, torch.profiler.record_function, "part")
    name = graph.call_function(getattr, (enter, "name"))
    graph.call_function(_exit_region, (enter,))
    assert returns(graph, name)() == "part"


def test_regions_that_do_not_nest_are_refused_by_name():
    graph = Graph()
    a, b = region(graph, torch.no_grad), region(graph, torch.enable_grad)
    graph.call_function(_exit_region, (a,))
    graph.call_function(_exit_region, (b,))
    with pytest.raises(CodegenError, match="_exit_region"):
        returns(graph, 1)()
    graph = Graph()
    region(graph, torch.no_grad)
    with pytest.raises(CodegenError, match="never left"):
        returns(graph, 1)()
    graph = Graph()
    nested = [region(graph, torch.no_grad) for _ in range(30)]
    for enter in reversed(nested):
        graph.call_function(_exit_region, (enter,))
    with pytest.raises(CodegenError, match="regions inside one another"):
        returns(graph, 1)()


# -- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [5, 70, 90, 150, 5000])
def test_a_deep_argument_without_nodes_goes_to_the_constant_table(depth):
    value = 1
    for _ in range(depth):
        value = (value,)
    graph = Graph()
    got = returns(graph, graph.call_function(identity, (value,)))()
    for _ in range(depth):
        assert type(got) is tuple
        (got,) = got
    assert got == 1


@pytest.mark.parametrize("depth, fine", [(5, True), (70, True), (200, False), (5000, False)])
def test_a_deep_argument_with_a_node_works_or_is_refused_by_name(depth, fine):
    graph = Graph()
    value = graph.placeholder("x")
    for _ in range(depth):
        value = [value]
    gm = returns(graph, graph.call_function(identity, (value,)))
    if fine:
        gm(1)
    else:
        with pytest.raises(CodegenError, match="identity cannot be written as Python"):
            gm(1)


def test_a_node_of_another_graph_is_refused_by_name():
    other, graph = Graph(), Graph()
    stray = other.placeholder("stray")
    graph.output(graph.call_function(torch.relu, (stray,)))
    with pytest.raises(CodegenError, match="stray is not in this graph"):
        GraphModule({}, graph).code  # noqa: B018


def test_code_of_a_long_graph_is_written_without_recursion():
    graph = Graph()
    x = graph.placeholder("x")
    for _ in range(20_000):
        x = graph.call_function(operator.add, (x, 1))
    assert returns(graph, x)(0) == 20_000


def test_verbose_code_shows_sources_shapes_and_meta_and_still_runs():
    gm = fxlab.symbolic_trace(Net())
    for node in gm.graph.nodes:
        node.meta.update(tensor_meta=torch.empty(2, 4), seq_nr=7)
    code = gm.graph.python_code(
        "self", verbose=True, include_stride=True, include_device=True, colored=True,
        additional_meta=["seq_nr"], expanded_def=True,
    )  # fmt: skip
    assert "# seq_nr: 7" in code.src and "test_codegen.py" in code.src and "code: y = " in code.src
    assert '\033[34mf32[2, 4](4, 1)cpu\033[0m"' in code.src
    scope = dict(code.globals)
    exec(code.src, scope)
    x = torch.ones(2, 4)
    assert torch.equal(scope["forward"](gm, x)[0], gm(x)[0])


def test_an_unknown_option_is_refused():
    gm = fxlab.symbolic_trace(Net())
    with pytest.raises(CodegenError, match="no option record_func") as caught:
        gm.graph.python_code("self", record_func=True)
    assert caught.value.where[0][0] == __file__
    assert gm.graph.python_code("self", record_func=False).src == gm.code


# -- hooks -------------------------------------------------------------------------------------


class ListCodeGen(CodeGen):
    """The example of torch.fx's documentation."""

    def gen_fn_def(self, free_vars, maybe_return_annotation):
        unpack = f"{', '.join(free_vars)}, = args_list"
        return f"def forward(self, args_list: List):{maybe_return_annotation}\n    {unpack}"

    def additional_globals(self):
        return [("List", List)]

    def process_inputs(self, *inputs):
        assert len(inputs) == 1
        return inputs[0]

    def generate_output(self, output_args):
        return f"return list([{output_args!r}])"

    def process_outputs(self, outputs):
        return [outputs]


def test_a_code_generator_of_torch_fx_s_kind_works():
    def program(class_, input):
        return class_ + 2 * input

    gm = fxlab.symbolic_trace(program)
    gm.graph.set_codegen(ListCodeGen())
    gm.graph.output_node().args[0].name = "lambda"
    assert gm([1, 2]) == [5]
    assert fxlab.Interpreter(gm).run([1, 2]) == [5]
    graph = gm.graph
    inner = fxlab.Interpreter(gm).run(*graph.process_inputs([1, 2]), enable_io_processing=False)
    assert graph.process_outputs(inner) == [5]


def test_a_body_transformer_changes_the_code_and_keeps_the_line_map():
    gm = fxlab.symbolic_trace(lambda x: torch.relu(x) + 1)
    seen = []

    def transform(body):
        seen.extend(body)
        return ["seen.append(x)\n", *[line.replace("relu(", "neg(") for line in body]]

    gm.graph.on_generate_code(lambda old: transform)
    code = gm.graph.python_code("self")
    assert code.src.splitlines()[4] == "    seen.append(x)"
    lines = code.src.splitlines()
    named = {line.split()[0]: code.node_at(i) for i, line in enumerate(lines, 1) if line.strip()}
    for first, name in {"relu": "relu", "add": "add", "return": "output"}.items():
        assert named[first].name == name
    assert "relu = torch.relu(x);  x = None\n" in seen
    gm.forward.__globals__["seen"] = []
    assert torch.equal(gm(torch.ones(2)), torch.zeros(2))


@pytest.mark.parametrize("args, concrete", [
    (lambda x: ({"a": x, "b": [x + 1, x + 2]},), {"d": {"a": fxlab.PH, "b": [fxlab.PH, fxlab.PH]}}),
    (lambda x: (Point(x, x + 1),), {"d": Point(fxlab.PH, fxlab.PH)}),
])  # fmt: skip
def test_nested_inputs_and_outputs_are_taken_apart_and_put_back(args, concrete):
    def program(d):
        if isinstance(d, dict):
            return {"sum": d["a"] + d["b"][0], "all": (d["b"][1], [d["a"]])}
        return Point(d.x + d.y, d)

    gm = fxlab.symbolic_trace(program, concrete_args=concrete)
    x = torch.ones(2)
    got, want = gm(*args(x)), program(*args(x))
    assert repr(got) == repr(want)
    assert repr(fxlab.Interpreter(gm).run(*args(x))) == repr(want)
    with pytest.raises(ValueError):
        gm([1, 2, 3])


def test_a_transformer_registered_for_a_while_works_as_in_torch_fx():
    def shift(old):
        return lambda body: ["x = x + 100\n", *body]

    for lib in (torch.fx, fxlab):
        gm, zero = lib.symbolic_trace(lambda x: torch.relu(x)), torch.zeros(1)
        with gm.graph.on_generate_code(shift):
            gm.recompile()
            assert gm(zero) == 100
        assert gm(zero) == 100
        gm.recompile()
        assert gm(zero) == 0
        with gm.graph.on_generate_code(shift):
            pass
        assert gm(zero) == 0


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, device, /, *, k=3, torch=None):
        return {"y": self.linear(x) + device["a"] * k - device["b"].to("cpu"), "z": torch}


def test_a_module_with_nested_inputs_keeps_its_signature():
    module, ph = Nested(), fxlab.PH
    gm = fxlab.symbolic_trace(module, concrete_args={"device": {"a": ph, "b": ph}})
    for node in gm.graph.nodes:
        if node.target == "to":
            node.args = (node.args[0], torch.device("cpu"))
    kinds = [
        (p.name, p.kind, p.default) for p in inspect.signature(module.forward).parameters.values()
    ]
    assert kinds == [
        (p.name, p.kind, p.default) for p in inspect.signature(gm.forward).parameters.values()
    ]
    x = torch.ones(2)
    for d in ({"a": x, "b": x * 5}, {"b": x * 5, "a": x}):
        want = module(x, d, torch=7)
        assert torch.equal(gm(x, d, torch=7)["y"], want["y"])
        assert torch.equal(fxlab.Interpreter(gm).run(x, d, 3, 7)["y"], want["y"])


def test_a_placeholder_of_a_structure_that_is_gone_is_a_taught_error():
    gm = fxlab.symbolic_trace(lambda x, y: x + y[0], concrete_args={"y": [fxlab.PH, fxlab.PH]})
    unused = [n for n in gm.graph.nodes if n.op == "placeholder" and not n.users]
    gm.graph.erase_node(unused[0])
    with pytest.raises(fxlab.CodegenError, match=r"2 placeholders, and the structure .* 3 places"):
        _ = gm.code
    gm.graph.set_codegen(fxlab.CodeGen())
    (value,) = gm(torch.ones(2), torch.ones(2))
    assert torch.equal(value, torch.full((2,), 2.0))
