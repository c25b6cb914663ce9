"""Every operator of Python and every documented torch.nn.functional function that torch.fx traces.

An operator on a Proxy must be recorded as what it is, print as code that means it, and give eager's
result in generated code and in the Interpreter, for tensors and for the numbers and containers that
such nodes meet.
"""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F

import fxlab

UNARY = ("neg", "pos", "invert", "abs", "not_")
BINARY = ("add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift "
          "eq ne lt le gt ge").split()  # fmt: skip
IN_PLACE = ("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift").split()
SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@", "and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>", "eq": "==",
    "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
WHOLE = {"and_", "or_", "xor", "lshift", "rshift", "iand", "ior", "ixor", "ilshift", "irshift",
         "invert"}  # fmt: skip


def tensors(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if name in WHOLE:
        return torch.tensor([[5, 3], [1, 6]]), torch.tensor([[1, 2], [3, 1]])
    return torch.tensor([[1.5, -2.0], [0.5, 3.0]]), torch.tensor([[2.0, 1.0], [1.5, -1.0]])


def number(name: str) -> Any:
    return 2 if name in WHOLE else 1.5


def check(fn: Any, *args: Any) -> Any:
    """Trace a function, run the module in every way, compare with eager; return the module."""
    gm = fxlab.symbolic_trace(fn)
    gm.graph.lint()
    expected_args, expected = copy.deepcopy(args), None
    expected = fn(*expected_args)
    for run in (gm, fxlab.Interpreter(gm).run, copy.deepcopy(gm), retraced(gm)):
        given = copy.deepcopy(args)
        result = run(*given)
        assert type(result) is type(expected)
        torch.testing.assert_close(result, expected, equal_nan=True)
        torch.testing.assert_close(given, expected_args, equal_nan=True)
    return gm


def retraced(gm: Any) -> Any:
    again = fxlab.symbolic_trace(gm)
    assert [n.op for n in again.graph.nodes] == [n.op for n in gm.graph.nodes]
    return again


def only_call(gm: Any) -> Any:
    (node,) = [n for n in gm.graph.nodes if n.op.startswith("call")]
    return node


@pytest.mark.parametrize("name", [n for n in UNARY if n != "not_"])
def test_unary_operator(name: str) -> None:
    fn = getattr(operator, name)
    node = only_call(check(lambda x: fn(x), tensors(name)[0]))
    assert node.target in (fn, torch.abs)


def test_not_is_refused_like_any_truth() -> None:
    with pytest.raises(fxlab.TraceError):
        fxlab.symbolic_trace(lambda x: operator.not_(x))


@pytest.mark.parametrize("name", BINARY)
def test_binary_operator(name: str) -> None:
    fn = getattr(operator, name)
    gm = check(lambda x, y: fn(x, y), *tensors(name))
    assert only_call(gm).target is fn
    assert f" {SYMBOLS[name]} " in gm.code


@pytest.mark.parametrize("name", [n for n in BINARY if n != "matmul"])
def test_binary_operator_with_a_number(name: str) -> None:
    fn, value = getattr(operator, name), number(name)
    node = only_call(check(lambda x: fn(x, value), tensors(name)[0]))
    assert (node.target, node.args[1]) == (fn, value)


@pytest.mark.parametrize("name", [n for n in BINARY if n != "matmul"])
def test_reflected_operator(name: str) -> None:
    fn, value = getattr(operator, name), number(name)
    theirs = torch.fx.symbolic_trace(lambda x: fn(value, x))
    gm = check(lambda x: fn(value, x), tensors(name)[0])
    old, new = only_call(theirs), only_call(gm)
    assert (new.target, str(new.args)) == (old.target, str(old.args))


@pytest.mark.parametrize("value", [-1, -2.0, 0, -0.0, 1e-300, 2**70, True, 3 + 4j, -1j])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "pow"])
def test_operators_keep_the_sign_and_size_of_constants(name: str, value: Any) -> None:
    fn = getattr(operator, name)
    x = torch.tensor([1.5, 2.0, 0.25])
    for program in (lambda x: fn(x, value), lambda x: fn(value, x)):
        try:
            program(x)
        except (RuntimeError, OverflowError):  # eager refuses it: nothing to compare
            continue
        check(program, x)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operator_writes_into_the_caller(name: str) -> None:
    fn = getattr(operator, name)
    x, y = tensors(name)
    node = only_call(check(lambda x, y: fn(x, y), x, y))
    assert node.target is fn
    check(lambda x, y: fn(x, y) * 2, x, y)
    check(lambda x: fn(x, number(name)), x)


IN_PLACE_STATEMENTS = {
    "+=": "iadd", "-=": "isub", "*=": "imul", "/=": "itruediv", "//=": "ifloordiv", "%=": "imod",
    "**=": "ipow", "&=": "iand", "|=": "ior", "^=": "ixor", "<<=": "ilshift", ">>=": "irshift",
}  # fmt: skip


@pytest.mark.parametrize("symbol", IN_PLACE_STATEMENTS)
def test_in_place_statement_is_recorded_as_one(symbol: str) -> None:
    name = IN_PLACE_STATEMENTS[symbol]
    namespace: dict[str, Any] = {}
    exec(f"def program(x, y):\n    z = x\n    x {symbol} y\n    return x, z\n", namespace)
    gm = check(namespace["program"], *tensors(name))
    assert only_call(gm).target is getattr(operator, name)
    assert f"operator.{name}(" in gm.code


def test_in_place_on_numbers_and_tuples_means_the_same_in_code_and_interpreter() -> None:
    graph = fxlab.Graph()
    x = graph.placeholder("x")
    added = graph.call_function(operator.iadd, (x, 2))
    graph.output((x, graph.call_function(operator.imul, (added, 3))))
    gm = fxlab.GraphModule(torch.nn.Module(), graph)
    assert gm(1) == (1, 9) == fxlab.Interpreter(gm).run(1)
    again = fxlab.Graph()
    x = again.placeholder("x")
    again.output((x, again.call_function(operator.iadd, (x, (3,)))))
    gm = fxlab.GraphModule(torch.nn.Module(), again)
    assert gm((1, 2)) == ((1, 2), (1, 2, 3)) == fxlab.Interpreter(gm).run((1, 2))


ITEMS: dict[str, Any] = {
    "int": lambda x: x[0],
    "negative": lambda x: x[-1],
    "slice": lambda x: x[0:1],
    "slice with step": lambda x: x[::2],
    "open slice": lambda x: x[1:],
    "ellipsis": lambda x: x[..., 0],
    "none": lambda x: x[None, :, None],
    "mask": lambda x: x[x > 0],
    "list": lambda x: x[[0, 1]],
    "tuple": lambda x: x[0, 1],
    "tensor": lambda x: x[torch.tensor([1, 0])],
    "mixed": lambda x: x[:, [0], None],
    "computed": lambda x: x[x.size(0) - 1],
    "computed slice": lambda x: x[: x.size(0) // 2],
    "bool": lambda x: x[True],
}


@pytest.mark.parametrize("name", ITEMS)
def test_item(name: str) -> None:
    check(ITEMS[name], tensors("add")[0])


@pytest.mark.parametrize(
    "program",
    [
        lambda x: operator.setitem(x, 0, 1.0) or x,
        lambda x: operator.setitem(x, (slice(None), 0), x[:, 1]) or x,
        lambda x: x.__setitem__(0, 2.0) or x,
        lambda x: operator.setitem(x, x > 0, 0.0) or x,
    ],
)
def test_assigned_items_are_seen_by_the_caller(program: Any) -> None:
    gm = check(program, tensors("add")[0])
    gm.graph.eliminate_dead_code()
    x, y = tensors("add")[0], tensors("add")[0]
    torch.testing.assert_close(gm(x), program(y))
    torch.testing.assert_close(x, y)


METHODS = sorted(
    name
    for name in dir(torch.Tensor)
    if name.endswith("__") and name.strip("_") in {
        *(f"r{n.rstrip('_')}" for n in BINARY), *(n.rstrip("_") for n in BINARY),
    }
)  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_operator_called_by_its_method_name(name: str) -> None:
    stem = name.strip("_").removeprefix("r")
    kind = stem if hasattr(operator, stem) or hasattr(operator, stem + "_") else name.strip("_")
    x, y = tensors(kind + "_" if kind in ("and", "or") else kind)
    try:
        expected = getattr(x, name)(y)
    except (TypeError, RuntimeError):
        pytest.skip("eager has no such call")
    if expected is NotImplemented:
        pytest.skip("eager has no such call")
    check(lambda x, y: getattr(x, name)(y), x, y)


# -- torch.nn.functional --------------------------------------------------------------------------

T = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(3))
IMAGE = torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(4))
VOLUME = torch.randn(1, 2, 4, 4, 4, generator=torch.Generator().manual_seed(5))
FLAT = T[0]
LABELS = torch.tensor([0, 2, 1, 3])
ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(6))
PROBABILITIES = FLAT.sigmoid()
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
_, INDICES1 = F.max_pool1d(T, 2, return_indices=True)
_, INDICES2 = F.max_pool2d(IMAGE, 2, return_indices=True)
_, INDICES3 = F.max_pool3d(VOLUME, 2, return_indices=True)
W1, W2, W3 = torch.ones(4, 4, 3), torch.ones(4, 4, 3, 3), torch.ones(2, 2, 3, 3, 3)

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "conv1d": ((T, W1), {}), "conv2d": ((IMAGE, W2), {"padding": 1}), "conv3d": ((VOLUME, W3), {}),
    "conv_transpose1d": ((T, W1), {}), "conv_transpose2d": ((IMAGE, W2), {"stride": 2}),
    "conv_transpose3d": ((VOLUME, W3), {}),
    "conv_tbc": ((T, torch.ones(3, 6, 5), torch.ones(5)), {}),
    "unfold": ((IMAGE, 2), {}), "fold": ((torch.ones(1, 8, 9), (4, 4), 2), {}),
    "avg_pool1d": ((T, 2), {}), "avg_pool2d": ((IMAGE, 2), {"stride": 1}),
    "avg_pool3d": ((VOLUME, 2), {}), "max_pool1d": ((T, 2), {}), "max_pool2d": ((IMAGE, 2), {}),
    "max_pool3d": ((VOLUME, 2), {}), "max_unpool1d": ((F.max_pool1d(T, 2), INDICES1, 2), {}),
    "max_unpool2d": ((F.max_pool2d(IMAGE, 2), INDICES2, 2), {}),
    "max_unpool3d": ((F.max_pool3d(VOLUME, 2), INDICES3, 2), {}),
    "lp_pool1d": ((T, 2, 2), {}), "lp_pool2d": ((IMAGE.abs(), 2, 2), {}),
    "lp_pool3d": ((VOLUME.abs(), 2, 2), {}), "adaptive_max_pool1d": ((T, 2), {}),
    "adaptive_max_pool2d": ((IMAGE, 2), {}), "adaptive_max_pool3d": ((VOLUME, 2), {}),
    "adaptive_avg_pool1d": ((T, 2), {}), "adaptive_avg_pool2d": ((IMAGE, (2, None)), {}),
    "adaptive_avg_pool3d": ((VOLUME, 2), {}),
    "fractional_max_pool2d": ((IMAGE, 2), {"output_size": 3}),
    "fractional_max_pool3d": ((VOLUME, 2), {"output_size": 2}),
    "max_pool1d_with_indices": ((T, 2), {}), "max_pool2d_with_indices": ((IMAGE, 2), {}),
    "max_pool3d_with_indices": ((VOLUME, 2), {}),
    "adaptive_max_pool1d_with_indices": ((T, 2), {}),
    "adaptive_max_pool2d_with_indices": ((IMAGE, 2), {}),
    "adaptive_max_pool3d_with_indices": ((VOLUME, 2), {}),
    "fractional_max_pool2d_with_indices": ((IMAGE, 2), {"output_size": 3}),
    "fractional_max_pool3d_with_indices": ((VOLUME, 2), {"output_size": 2}),
    "scaled_dot_product_attention": ((T, T, T), {}),
    "threshold": ((T, 0.1, 20.0), {}), "threshold_": ((T, 0.1, 20.0), {}),
    "rrelu": ((T,), {"training": False}), "rrelu_": ((T,), {}), "glu": ((T,), {}),
    "softmax": ((T,), {"dim": 1}), "softmin": ((T, 1), {}), "log_softmax": ((T, 1), {}),
    "gumbel_softmax": ((T,), {"hard": True}), "hardtanh": ((T, -0.5), {"max_val": 0.5}),
    "layer_norm": ((T, (6,)), {"eps": 1e-4}), "rms_norm": ((T, (6,)), {}),
    "group_norm": ((T, 2), {}), "local_response_norm": ((T, 2), {}),
    "normalize": ((T,), {"dim": 0}),
    "batch_norm": ((T, torch.zeros(4), torch.ones(4)), {}),
    "instance_norm": ((T,), {}), "linear": ((FLAT, ROWS), {}),
    "bilinear": ((FLAT, FLAT, torch.ones(3, 6, 6)), {}),
    "prelu": ((T, torch.tensor([0.1])), {}), "dropout": ((T,), {"training": False}),
    "alpha_dropout": ((T,), {}), "feature_alpha_dropout": ((T,), {}), "dropout1d": ((T,), {}),
    "dropout2d": ((IMAGE,), {}), "dropout3d": ((VOLUME,), {}),
    "embedding": ((LABELS, ROWS), {}), "embedding_bag": ((LABELS.view(2, 2), ROWS), {}),
    "one_hot": ((LABELS,), {"num_classes": 5}), "pairwise_distance": ((FLAT, FLAT + 1), {}),
    "cosine_similarity": ((FLAT, FLAT + 1), {}), "pdist": ((FLAT,), {}),
    "binary_cross_entropy": ((PROBABILITIES, PROBABILITIES), {}),
    "binary_cross_entropy_with_logits": ((FLAT, PROBABILITIES), {}),
    "poisson_nll_loss": ((FLAT, PROBABILITIES), {}),
    "cosine_embedding_loss": ((FLAT, FLAT + 1, SIGNS), {}), "cross_entropy": ((FLAT, LABELS), {}),
    "ctc_loss": ((T.log_softmax(2), torch.ones(4, 2, dtype=torch.long), torch.full((4,), 2),
                  torch.full((4,), 1)), {}),
    "gaussian_nll_loss": ((FLAT, FLAT, PROBABILITIES), {}),
    "hinge_embedding_loss": ((FLAT, SIGNS[:, None].expand(4, 6)), {}),
    "kl_div": ((FLAT, PROBABILITIES), {"reduction": "sum"}), "l1_loss": ((FLAT, FLAT + 1), {}),
    "mse_loss": ((FLAT, FLAT + 1), {"reduction": "none"}),
    "margin_ranking_loss": ((FLAT[:, 0], FLAT[:, 1], SIGNS), {}),
    "multilabel_margin_loss": ((FLAT, torch.zeros(4, 6, dtype=torch.long)), {}),
    "multilabel_soft_margin_loss": ((FLAT, PROBABILITIES), {}),
    "multi_margin_loss": ((FLAT, LABELS), {}), "nll_loss": ((FLAT.log_softmax(1), LABELS), {}),
    "huber_loss": ((FLAT, FLAT + 2), {}), "smooth_l1_loss": ((FLAT, FLAT + 2), {"beta": 0.5}),
    "soft_margin_loss": ((FLAT, SIGNS[:, None].expand(4, 6)), {}),
    "triplet_margin_loss": ((FLAT, FLAT + 1, FLAT - 1), {}),
    "triplet_margin_with_distance_loss": ((FLAT, FLAT + 1, FLAT - 1), {}),
    "pixel_shuffle": ((IMAGE, 2), {}), "pixel_unshuffle": ((IMAGE, 2), {}),
    "channel_shuffle": ((IMAGE, 2), {}), "native_channel_shuffle": ((IMAGE, 2), {}),
    "pad": ((T, (1, 1)), {"mode": "reflect"}),
    "interpolate": ((IMAGE,), {"scale_factor": 2.0, "mode": "bilinear"}),
    "upsample": ((IMAGE,), {"scale_factor": 2}), "upsample_nearest": ((IMAGE, 12), {}),
    "upsample_bilinear": ((IMAGE, 12), {}),
    "grid_sample": ((IMAGE, torch.zeros(1, 3, 3, 2)), {"align_corners": False}),
    "affine_grid": ((torch.eye(2, 3)[None], (1, 1, 4, 4)), {"align_corners": False}),
    "hardshrink": ((T, 0.3), {}), "softshrink": ((T, 0.3), {}), "softplus": ((T, 2), {}),
    "linear_cross_entropy": ((FLAT, ROWS, LABELS), {}), "multi_head_attention_forward": ((), {}),
    "grouped_mm": ((), {}), "scaled_mm": ((), {}), "scaled_grouped_mm": ((), {}),
}  # fmt: skip
PLAIN = ("relu relu_ relu6 elu elu_ selu selu_ celu celu_ leaky_relu leaky_relu_ gelu logsigmoid "
         "hardtanh_ tanhshrink softsign tanh sigmoid hardsigmoid silu mish hardswish"
         ).split()  # fmt: skip
CALLS.update({name: ((T,), {}) for name in PLAIN})
OTHERS = {  # names in the module that are no operation on tensors
    "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic",
    "handle_torch_function", "boolean_dispatch", "assert_int_or_pair", "TYPE_CHECKING",
}  # fmt: skip


def functionals() -> list[str]:
    """Names of torch.nn.functional that are functions of its own or of torch's kernels."""
    found = []
    for name, value in vars(F).items():
        own = getattr(value, "__module__", None)
        inside = own in ("torch.nn.functional", "torch._C._nn", None, "torch._jit_internal")
        public = callable(value) and not name.startswith("_") and not inspect.isclass(value)
        if public and inside and name not in OTHERS and getattr(value, "__doc__", None):
            found.append(name)
    return sorted(found)


def test_every_documented_functional_is_in_the_table() -> None:
    missing = [name for name in functionals() if name not in CALLS]
    assert not missing


def seeded(fn: Any, args: Any, kwargs: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        return fn(*copy.deepcopy(args), **kwargs)


@pytest.mark.parametrize("name", [n for n in functionals() if CALLS.get(n, ((), {}))[0]])
def test_functional(name: str) -> None:
    fn = getattr(F, name)
    args, kwargs = CALLS[name]
    proxied = sum(isinstance(a, torch.Tensor) for a in args)

    def program(*inputs: Any) -> Any:
        return fn(*inputs, *args[proxied:], **kwargs)

    given = [f"a{i}" for i in range(proxied)]
    namespace: dict[str, Any] = {"program": program}
    exec(f"def traced({', '.join(given)}):\n    return program({', '.join(given)})", namespace)
    traced = namespace["traced"]
    inputs = args[:proxied]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            theirs = torch.fx.symbolic_trace(traced)
        except Exception as error:
            theirs = error
        try:
            ours = fxlab.symbolic_trace(traced)
        except fxlab.TraceError:
            if isinstance(theirs, Exception):
                return  # neither can capture it, and ours says why
            raise
    ours.graph.lint()
    if not isinstance(theirs, Exception):
        assert [(n.op, n.target, str(n.args), str(n.kwargs)) for n in ours.graph.nodes] == [
            (n.op, n.target, str(n.args), str(n.kwargs)) for n in theirs.graph.nodes
        ]
    expected = seeded(fn, args, kwargs)
    for run in (ours, fxlab.Interpreter(ours).run, copy.deepcopy(ours)):
        torch.testing.assert_close(seeded(run, inputs, {}), expected, equal_nan=True)


def writes_and_returns_input(fn: Any, rest: Any) -> Any:
    def program(x):
        fn(x, *rest)
        return x

    return program


def test_writing_functionals_write() -> None:
    for name in ("relu_", "elu_", "selu_", "celu_", "leaky_relu_", "hardtanh_", "threshold_"):
        args, kwargs = CALLS[name]
        fn, rest = getattr(F, name), args[1:]
        gm = fxlab.symbolic_trace(writes_and_returns_input(fn, rest))
        gm.graph.eliminate_dead_code()
        x = T.clone()
        assert gm(x) is x
        torch.testing.assert_close(x, fn(T.clone(), *rest, **kwargs))
