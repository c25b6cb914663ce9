"""Passes that torch's own authors wrote for torch.fx, run on fxlab: the same programs come out."""

import ast
import importlib
import operator
from pathlib import Path

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

import fxlab
from fxlab.models import resnet18
from tests.in_place_of_torch_fx import TORCHS_OWN, load

THEIRS, OURS = (torch.fx, importlib.import_module), (fxlab, load)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout()
        self.head, self.w = nn.Linear(8, 4), nn.Parameter(torch.randn(4))

    def forward(self, x):
        y = self.drop(F.relu(self.bn(self.conv(x)))).mean((2, 3))
        z = self.head(y) + torch.ones(4) * 2 + self.w * 3
        return torch.relu(z + 1) + torch.relu(z + 1), torch.cat([z, z], dim=1)


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.matmul(x, self.a) + torch.matmul(x, self.b)


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def made(kind):
    torch.manual_seed(0)
    return kind().eval()


def traced(fx, kind=Net):
    return fx.symbolic_trace(made(kind))


def supports(get):
    class Some(get("torch.fx.passes.operator_support").OperatorSupport):
        def is_node_supported(self, submodules, node):
            return node.target in (torch.relu, F.relu, operator.add, operator.mul)

    return Some()


def fuse(fx, get):
    gm = get("torch.fx.experimental.optimization").fuse(made(Net))
    return gm, X


def remove_dropout(fx, get):
    return get("torch.fx.experimental.optimization").remove_dropout(made(Net)), X


def optimize_for_inference(fx, get):
    gm = get("torch.fx.experimental.optimization").optimize_for_inference(made(resnet18))
    return gm, torch.ones(1, 3, 32, 32)


def fold_constants(fx, get):
    gm = get("torch.fx.experimental.const_fold").split_const_subgraphs(made(Net))
    gm.run_folding()
    return gm, X


def merge_matmul(fx, get):
    return get("torch.fx.experimental.merge_matmul").merge_matmul(made(Products)), torch.ones(4, 4)


def normalize_operators(fx, get):
    return get("torch.fx.experimental.normalize").NormalizeOperators(traced(fx)).transform(), X


def normalize_arguments(fx, get):
    return get("torch.fx.experimental.normalize").NormalizeArgs(traced(fx)).transform(), X


def annotate_types(fx, get):
    file = get("torch.fx.experimental.schema_type_annotation")
    gm = file.AnnotateTypesWithSchema(traced(fx)).transform()
    return gm, X, [str(node.type) for node in gm.graph.nodes]


def rewrite_asserts(fx, get):
    class Checked(nn.Module):
        def forward(self, x):
            assert x.shape[0] > 1, "more than one"
            return torch.relu(x)

    model = Checked()
    graph = get("torch.fx.experimental.rewriter").RewritingTracer().trace(model)
    return fx.GraphModule(model, graph), X


def trace_with_meta_tensors(fx, get):
    class Sized(nn.Module):
        def forward(self, x):
            return x + torch.ones(x.size(0)) if x.dim() == 1 else x

    tracer = get("torch.fx.experimental.meta_tracer")
    example = {"x": torch.ones(3, device="meta")}
    return tracer.symbolic_trace(Sized(), meta_args=example), torch.ones(3)


def check_gradual_types(fx, get):
    kinds, file = torch.fx.tensor_type, get("torch.fx.experimental.graph_gradual_typechecker")
    tensor = getattr(get("torch.fx.tensor_type"), "TensorType", kinds.TensorType)

    class Sum(nn.Module):
        def forward(self, x: tensor((1, 2, 3, 4)), y: tensor((1, 2, 3, 4))):
            return torch.add(x, y)

    gm = fx.symbolic_trace(Sum())
    file.GraphTypeChecker({}, gm).type_check()
    return gm, None, [str(node.type) for node in gm.graph.nodes]


def common_subexpressions(fx, get):
    result = get("torch.fx.passes.dialect.common.cse_pass").CSEPass()(traced(fx))
    return result.graph_module, X, result.modified


def shapes(fx, get):
    gm = traced(fx)
    get("torch.fx.passes.shape_prop").ShapeProp(gm).propagate(X)
    return gm, X, [str(node.meta.get("tensor_meta")) for node in gm.graph.nodes]


def fake_shapes(fx, get):
    gm = traced(fx, Products)
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    get("torch.fx.passes.fake_tensor_prop").FakeTensorProp(gm, mode).propagate(torch.ones(4, 4))
    return gm, torch.ones(4, 4), [str(node.meta["val"].shape) for node in gm.graph.nodes]


def sizes_in_bytes(fx, get):
    gm = traced(fx)
    get("torch.fx.passes.graph_manipulation").get_size_of_all_nodes(gm, [X])
    return gm, X, [str(node.size_bytes) for node in gm.graph.nodes if node.op != "output"]


def split(fx, get):
    gm = traced(fx)
    parts = {node: i // 5 for i, node in enumerate(gm.graph.nodes)}
    return get("torch.fx.passes.split_module").split_module(gm, None, parts.__getitem__), X


def split_by_tags(fx, get):
    gm = traced(fx)
    for i, node in enumerate(gm.graph.nodes):
        if node.op not in ("placeholder", "output"):
            node.tag = "a" if i < 6 else "b"
    return get("torch.fx.passes.split_utils").split_by_tags(gm, ["a", "b"]), X


def split_for_a_device(fx, get):
    file = get("torch.fx.passes.splitter_base")

    class Splitter(file._SplitterBase):
        def _lower_model_to_backend(self, mod, inputs):
            return mod

    settings = file._SplitterSettingBase(min_acc_module_size=1)
    splitter = Splitter(traced(fx), (X,), supports(get), settings)
    return splitter(), X, splitter.node_support_preview()


def minimize(fx, get):
    file = get("torch.fx.passes.net_min_base")

    class Minimizer(file._MinimizerBase):
        def run_a(self, mod, inputs, report_idx=-1):
            return mod(*inputs)

        def run_b(self, mod, inputs, report_idx=-1):
            out = mod(*inputs)
            wrong = any(node.target is operator.mul for node in mod.graph.nodes)
            return out + 1 if wrong else out

    def compare(a, b, names):
        return 0.0, not isinstance(a, torch.Tensor) or torch.allclose(a, b)

    settings = file._MinimizerSettingBase(traverse_method="sequential")
    gm = traced(fx)
    return gm, X, [node.name for node in Minimizer(gm, (X,), compare, settings).minimize()]


def manage_passes(fx, get):
    base = get("torch.fx.passes.infra.pass_base")

    class Sigmoid(base.PassBase):
        def call(self, graph_module):
            found = graph_module.graph.find_nodes(op="call_function", target=torch.relu)
            for node in found:
                node.target = torch.sigmoid
            return base.PassResult(graph_module, bool(found))

    manager = get("torch.fx.passes.infra.pass_manager").PassManager
    result = manager(passes=[Sigmoid(), Sigmoid()], steps=2)(traced(fx))
    return result.graph_module, X, result.modified


def match(fx, get):
    gm = traced(fx)
    pattern = fx.symbolic_trace(lambda z: torch.relu(z + 1)).graph
    matcher = get("torch.fx.passes.utils.matcher_utils").SubgraphMatcher(pattern)
    found = matcher.match(gm.graph)
    return gm, X, [sorted(str(node) for node in one.nodes_map.values()) for one in found]


def match_by_source(fx, get):
    gm = traced(fx)
    file = get("torch.fx.passes.utils.source_matcher_utils")
    return gm, X, str(file.get_source_partitions(gm.graph, [torch.relu]))


def annotate_getitem(fx, get):
    gm = fx.symbolic_trace(lambda x: torch.topk(x, 1)[0])
    get("torch.fx.passes.annotate_getitem_nodes").annotate_getitem_nodes(gm.graph)
    return gm, X, [str(node.type) for node in gm.graph.nodes]


def legalize(fx, get):
    gm = traced(fx)
    (relu,) = gm.graph.find_nodes(op="call_function", target=F.relu)
    gm.graph.output_node().prepend(relu)
    return get("torch.fx.passes.tools_common").legalize_graph(gm), X


def sort(fx, get):
    gm = traced(fx)
    return get("torch.fx.passes.tools_common").stable_topological_sort(gm), X


PROGRAMS = [
    annotate_getitem, annotate_types, check_gradual_types, common_subexpressions, fake_shapes,
    fold_constants, fuse, legalize, manage_passes, match, match_by_source, merge_matmul, minimize,
    normalize_arguments, normalize_operators, optimize_for_inference, remove_dropout,
    rewrite_asserts, shapes, sizes_in_bytes, sort, split, split_by_tags, split_for_a_device,
    trace_with_meta_tensors,
]  # fmt: skip


class _Bare(ast.NodeTransformer):
    """Without annotations: torch.fx writes them as names that it made up, and loses some."""

    def visit_FunctionDef(self, node):
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node):
        return ast.Assign([node.target], node.value)


def code_of(gm):
    return ast.unparse(ast.fix_missing_locations(_Bare().visit(ast.parse(gm.code))))


def text(said):
    """A text without the name of the package that said it."""
    return str(said).replace("fxlab_as_fx", "torch.fx").replace("fxlab.", "torch.fx.")


@pytest.mark.filterwarnings("ignore")  # torch's own deprecations
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_pass_of_torchs_own_does_on_fxlab_what_it_does_on_torch_fx(program):
    try:
        theirs, x, *more = program(*THEIRS)
    except ImportError as error:
        pytest.skip(f"this torch has no such pass: {error}")
    ours, _, *mine = program(*OURS)
    assert isinstance(ours, fxlab.GraphModule) and not isinstance(theirs, fxlab.GraphModule)
    assert code_of(ours) == code_of(theirs)
    assert list(map(text, mine)) == list(map(text, more))
    if x is not None:
        for a, b in zip(tuples(ours(x)), tuples(theirs(x)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def tuples(value):
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.filterwarnings("ignore")
def test_every_file_of_torchs_own_passes_can_be_loaded_on_fxlab():
    base = Path(torch.fx.__file__).parent
    files = [file for part in ("passes", "experimental") for file in (base / part).rglob("*.py")]
    names = [f"torch.fx.{'.'.join(f.relative_to(base).with_suffix('').parts)}" for f in files]
    for name in names:
        if not name.endswith("__init__") and not TORCHS_OWN.match(name):
            load(name)
    assert len(names) > 60


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["static", "dynamic", "qat"])
@pytest.mark.parametrize("model", ["net", "resnet18"])
def test_torchs_own_quantizer_makes_on_fxlab_the_program_that_it_makes_on_torch_fx(model, way):
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no fbgemm")
    from torch.ao import quantization as ao

    kind, x = {"net": (Net, X), "resnet18": (resnet18, torch.ones(1, 3, 64, 64))}[model]
    settings = {
        "static": lambda: ao.get_default_qconfig_mapping("fbgemm"),
        "qat": lambda: ao.get_default_qat_qconfig_mapping("fbgemm"),
        "dynamic": lambda: ao.QConfigMapping().set_global(ao.default_dynamic_qconfig),
    }[way]

    def quantize(get):
        file = get("torch.ao.quantization.quantize_fx")
        prepare = file.prepare_qat_fx if way == "qat" else file.prepare_fx
        prepared = prepare(made(kind).train(way == "qat"), settings(), (x,))
        torch.manual_seed(1)
        prepared(x)
        return file.convert_fx(prepared.eval())

    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        theirs, ours = quantize(importlib.import_module), quantize(load)
        assert isinstance(ours, fxlab.GraphModule)
        assert code_of(ours) == code_of(theirs)
        for a, b in zip(tuples(ours(x)), tuples(theirs(x)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    finally:
        torch.backends.quantized.engine = engine
