"""Exercise 6.2: lower three operations to ONNX (section 6.4 of the paper)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxlab.core.graph_module import GraphModule
from fxlab.core.tracer import symbolic_trace
from fxlab.teach import judge
from fxlab.teach.exercise import Case, Exercise, Finding, Part
from fxlab.teach.limits import AnswerError

STUB = '''\
import torch.nn.functional as F


def my_converters():
    """Return a dict of three converters, by the function that each stands for.

    F.silu      ``silu(input, inplace=False)``: ``input * sigmoid(input)``, element by element
    torch.mean  ``mean(input, dim, keepdim=False)``: ``dim`` is a number or a tuple of numbers
    F.linear    ``linear(input, weight, bias=None)``: for input of any rank; weight is ``[out, in]``

    A converter takes the builder and then exactly the arguments of its function. It appends ONNX
    nodes with ``ctx.op(kind, *inputs, **attributes)`` and returns the last one's value.
    """'''

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "F.silu": (F.silu,),
    "torch.mean": (torch.mean, "mean"),
    "F.linear": (F.linear,),
}
MISSING = (
    "6.2 needs the packages onnx and onnxruntime: pip install 'fxlab[lower]', then restart the "
    "kernel"
)


def entry(answer: Any, gm: GraphModule, inputs: Sequence[Tensor] = ()) -> Any:
    """Lower the program with the answer's converters; return the bytes of the ONNX model."""
    table = answer()
    if not isinstance(table, dict):
        raise AnswerError("type", f"it returned {judge.kind_of(table)}, a dict was asked for")
    for name, targets in FUNCTIONS.items():
        if not callable(table.get(targets[0])):
            raise AnswerError("type", f"the dict has no converter for {name}")
    try:
        from fxlab.backends import registry
        from fxlab.backends.lowering import with_shapes
        from fxlab.backends.onnx import Emitter
    except ImportError as error:
        raise AnswerError("error", MISSING) from error
    before = dict(registry._REGISTRY)
    try:
        for targets in FUNCTIONS.values():
            registry._REGISTRY.update(dict.fromkeys(targets, table[targets[0]]))
        emitter = Emitter(with_shapes(gm, inputs, False))
        emitter.emit()
        model, _ = emitter.model()
    finally:
        registry._REGISTRY.clear()
        registry._REGISTRY.update(before)
    kinds = [node.op_type for node in model.graph.node]
    return {"model": torch.frombuffer(bytearray(model.SerializeToString()), dtype=torch.uint8),
            "kinds": kinds}  # fmt: skip


def judge_model(args: tuple, found: Any) -> Finding | None:
    """Run the model on onnxruntime, on the inputs and on others; compare with eager."""
    gm, inputs = args
    try:
        import onnxruntime
    except ImportError:
        return Finding(MISSING, graph=gm)

    def wrong(sentence: str) -> Finding:
        return Finding(sentence, actual="\n".join(found["kinds"]), graph=gm)

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    data = found["model"].numpy().tobytes()
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has an exception class for each kind of refusal
        return wrong(_refusal(_first(error)))
    names = [port.name for port in session.get_inputs()]
    for given in (inputs, [x * -2.5 + 0.3 for x in inputs]):
        feed = dict(zip(names, (x.numpy() for x in given), strict=True))
        try:
            outputs = session.run(None, feed)
        except Exception as error:
            return wrong(f"onnxruntime can't run the model: {_first(error)}")
        with torch.no_grad():
            expected = gm(*given)
        if text := judge.unequal(expected, torch.from_numpy(outputs[0]), 1e-5):
            return wrong(_why(gm, given, expected, torch.from_numpy(outputs[0])) or text)
    return None


def _first(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or ["no message"]
    return lines[0].split("] : ")[-1][:300]


def _refusal(text: str) -> str:
    """Add to the runtime's words what they mean here."""
    meanings = {
        "Unrecognized attribute: axes": "since opset 18 axes are an input, not an attribute",
        "has input size": "an input is missing; what is None was left out",
        "expected to have rank 2": "Gemm multiplies matrices only; MatMul takes any rank",
        "Incompatible dimensions": "the weight is [out, in], so it has to be transposed",
    }
    meaning = next((m for part, m in meanings.items() if part in text), "")
    return f"onnxruntime refuses the model{f' ({meaning})' if meaning else ''}: {text}"


def _why(gm: GraphModule, given: Sequence[Tensor], expected: Tensor, got: Tensor) -> str:
    """Say which usual mistake gives this output, "" for none."""
    (x, *_) = given
    if got.numel() == expected.numel() and got.shape != expected.shape:
        return (
            f"the output has shape {list(got.shape)}, expected {list(expected.shape)}: ONNX keeps "
            "reduced dimensions unless it is told keepdims=0; torch drops them unless told"
        )
    if not judge.unequal(torch.sigmoid(x), got):
        return "this is sigmoid(x); silu multiplies x by it"
    layer = next((m for m in gm.modules() if isinstance(m, nn.Linear)), None)
    if layer is not None and layer.in_features == layer.out_features:
        bias = 0 if layer.bias is None else layer.bias
        if not judge.unequal(x @ layer.weight + bias, got):
            return "the weight is [out, in]: F.linear multiplies by its transpose"
        if not judge.unequal(x @ layer.weight.t(), got):
            return "the bias is lost"
    return ""


class Together(nn.Module):
    """All three."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(6, 5), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over the last dimension of a silu of a linear layer."""
        return self.act(self.fc(x)).mean(-1)


def layer(width: int, out: int, bias: bool = True) -> nn.Module:
    """One linear layer that stays a module in the graph."""
    return nn.Sequential(nn.Linear(width, out, bias=bias))


def a_silu(x: Tensor) -> Tensor:
    """Call silu as a function."""
    return F.silu(x)


def mean_of_rows(x: Tensor) -> Tensor:
    """Drop the dimension."""
    return torch.mean(x, 1)


def mean_kept(x: Tensor) -> Tensor:
    """Keep the dimension."""
    return torch.mean(x, dim=1, keepdim=True)


def mean_of_two(x: Tensor) -> Tensor:
    """Two dimensions at once, as a method, by keyword."""
    return x.mean(dim=(0, 2))


def lowered(make: Callable[[], Any], shape: tuple[int, ...], seed: int = 0) -> tuple[Any, list]:
    """Return the arguments of a case: a traced program in eval mode and one random input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        program = make()
        gm = symbolic_trace(program.eval() if isinstance(program, nn.Module) else program)
        for parameter in gm.parameters():
            parameter.requires_grad_(False)
        return gm, [torch.randn(shape)]


PROGRAMS: list[tuple[str, str, Callable[[], Any], tuple[int, ...]]] = [
    ("silu", "F.silu(x)", lambda: a_silu, (3,)),
    ("silu", "nn.SiLU()(x), which says inplace=False", nn.SiLU, (2, 3)),
    ("mean", "torch.mean(x, 1)", lambda: mean_of_rows, (2, 3)),
    ("mean", "torch.mean(x, dim=1, keepdim=True)", lambda: mean_kept, (2, 3)),
    ("mean", "x.mean(dim=(0, 2))", lambda: mean_of_two, (2, 3, 4)),
    ("linear", "a square weight", partial(layer, 3, 3), (2, 3)),
    ("linear", "no bias", partial(layer, 3, 2, bias=False), (2, 3)),
    ("linear", "input of rank 3", partial(layer, 3, 2), (2, 4, 3)),
    ("together", "nn.Linear, nn.SiLU, x.mean(-1)", Together, (2, 3, 6)),
]


def cases() -> Iterator[Case]:
    """The public cases, smallest first."""
    for behaviour, title, make, shape in PROGRAMS:
        yield Case(behaviour, title, partial(lowered, make, shape), judge_model)


def hidden() -> Iterable[Case]:
    """The same behaviours on other shapes and numbers."""
    rows: list[tuple[str, Callable[[], Any], tuple[int, ...]]] = [
        ("silu", nn.SiLU, (5,)),
        ("mean", lambda: mean_of_two, (3, 5, 2)),
        ("mean", lambda: mean_kept, (4, 7)),
        ("linear", partial(layer, 5, 7), (1, 2, 3, 5)),
        ("linear", partial(layer, 5, 5, bias=False), (4, 5)),
        ("together", Together, (4, 6)),
    ]
    for behaviour, make, shape in rows:
        yield Case(behaviour, f"shape {shape}", partial(lowered, make, shape, 7), judge_model)


EXERCISE = Exercise(
    id="6.2",
    title="Lower three operations to ONNX",
    level=3,
    minutes=45,
    idea="Lowering is an interpreter that appends to another system's graph instead of computing "
    "(section 6.4).",
    needs=("lowering", "converter", "arguments"),
    teaches=("attribute of an ONNX node",),
    hints=(
        "A converter says one torch function in ONNX operators. The lecture's section 'What is "
        "missing, and adding it' writes one of three nodes. The operators are listed, with inputs "
        "and attributes, at onnx.ai/onnx/operators; the builder writes opset 20.",
        "silu needs two operators. mean needs ReduceMean, whose axes are its second *input* since "
        "opset 18 and whose attribute keepdims is 1 unless you say otherwise. linear of any rank "
        "is a MatMul with the transposed weight and, if there is a bias, an Add. Give each "
        "converter the parameters of its function, with their defaults.",
        "`ctx.ints([0, 2])` is a constant that an operator can read as an input. A parameter of "
        "the model reaches a converter as a torch tensor, so `weight.t()` works on it, and what "
        "you hand to ctx.op becomes an initializer. Booleans of torch are numbers in ONNX: "
        "`ctx.op('ArgMax', x, axis=1, keepdims=int(False))`.",
    ),
    asks=(
        "fxlab.backends.converters_act._silu",
        "fxlab.backends.converters_reduce._reduce",
        "fxlab.backends.converters_reduce.linear",
        "torch.onnx.export",
    ),
    parts=(
        Part(
            id="6.2",
            name="my_converters",
            points={"silu": 2, "mean": 3, "linear": 3, "together": 1},
            entry=entry,
            cases=cases,
            hidden=hidden,
            wrong={
                "sigmoid_only": "silu multiplies x by it",
                "no_inplace": "unexpected keyword argument 'inplace'",
                "keeps_dims": "ONNX keeps reduced dimensions",
                "axes_attribute": "axes are an input, not an attribute",
                "one_axis": "its conversion failed: TypeError",
                "not_transposed": "F.linear multiplies by its transpose",
                "gemm_only": "Gemm multiplies matrices only",
                "bias_needed": "an input is missing",
            },
            stub=STUB,
            loads=("torch._dynamo.aot_compile", "onnx"),  # what FakeTensorMode and Emitter import
        ),
    ),
)
