"""The models have the sizes, names, shapes and traces that the paper's figures rest on."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.fx
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fxlab
from fxlab.models import (
    MLP,
    DeepRecommender,
    FusionCases,
    LearningToPaintActor,
    TransformerBlock,
    randomize_batch_norms,
    resnet18,
    resnet50,
)

TRACERS = pytest.mark.parametrize("fx", [torch.fx, fxlab], ids=["torch.fx", "fxlab"])

# name: (builder, input shape, parameters, nodes by opcode)
MODELS = {
    "resnet18": (
        resnet18,
        (1, 3, 64, 64),
        11_689_512,
        {"placeholder": 1, "call_module": 60, "call_function": 9, "output": 1},
    ),
    "resnet50": (
        resnet50,
        (1, 3, 64, 64),
        25_557_032,
        {"placeholder": 1, "call_module": 158, "call_function": 17, "output": 1},
    ),
    "DeepRecommender": (
        DeepRecommender,
        (2, 17768),
        19_788_136,
        {"placeholder": 1, "call_module": 7, "call_function": 6, "output": 1},
    ),
    "LearningToPaintActor": (
        LearningToPaintActor,
        (1, 9, 128, 128),
        11_209_857,
        {"placeholder": 1, "call_module": 43, "call_function": 27, "call_method": 2, "output": 1},
    ),
    "MLP": (
        MLP,
        (2, 8),
        484,
        {"placeholder": 1, "call_module": 3, "call_function": 2, "output": 1},
    ),
    "TransformerBlock": (
        TransformerBlock,
        (2, 5, 32),
        12_704,
        {"placeholder": 1, "call_module": 8, "call_function": 7, "call_method": 9, "output": 1},
    ),
    "FusionCases": (
        FusionCases,
        (2, 4, 8, 8),
        884,
        {"placeholder": 1, "get_attr": 2, "call_module": 25, "call_function": 5, "output": 1},
    ),
}


@TRACERS
@pytest.mark.parametrize("name", MODELS)
def test_a_default_trace_has_the_documented_nodes_and_computes_the_same(name, fx):
    build, shape, parameters, opcodes = MODELS[name]
    torch.manual_seed(0)
    model = randomize_batch_norms(build().eval())
    assert sum(p.numel() for p in model.parameters()) == parameters
    gm = fx.symbolic_trace(model)
    assert Counter(node.op for node in gm.graph.nodes) == opcodes
    x = torch.randn(shape)
    with torch.no_grad():
        assert torch.equal(gm(x), model(x))


@TRACERS
def test_resnet50_without_leaves_gives_the_445_lines_of_figure_5(fx):
    class NoLeaf(fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return False

        def to_bool(self, obj):
            # The only branch on a value is batch norm's check of its input's rank.
            return False

    model = resnet50().eval()
    graph = NoLeaf().trace(model)
    graph.eliminate_dead_code()
    functions = Counter(n.target.__name__ for n in graph.nodes if n.op == "call_function")
    assert len(graph.nodes) == 444
    assert len(str(graph).strip().splitlines()) == 445
    assert sum(node.op == "get_attr" for node in graph.nodes) == 267
    assert functions == {
        "conv2d": 53,
        "batch_norm": 53,
        "relu": 49,
        "add": 16,
        "boolean_dispatch" if "boolean_dispatch" in functions else "max_pool2d": 1,
        "adaptive_avg_pool2d": 1,
        "flatten": 1,
        "linear": 1,
    }


def test_resnet50_has_53_pairs_of_convolution_and_batch_norm_and_17_relu_modules():
    kinds = Counter(type(module) for module in resnet50().modules())
    assert (kinds[nn.Conv2d], kinds[nn.BatchNorm2d], kinds[nn.ReLU]) == (53, 53, 17)


def test_resnet50_has_the_names_of_the_published_checkpoints():
    names = resnet50().state_dict().keys()
    assert len(names) == 320
    assert list(names)[:7] == [
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
        "bn1.running_mean",
        "bn1.running_var",
        "bn1.num_batches_tracked",
        "layer1.0.conv1.weight",
    ]
    assert {
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.running_var",
        "layer3.5.bn3.bias",
        "layer4.2.conv3.weight",
        "fc.weight",
        "fc.bias",
    } <= names
    assert "layer1.1.downsample.0.weight" not in names


@pytest.mark.parametrize(
    ("build", "shape", "flops"),
    [
        (resnet50, (1, 3, 224, 224), 8_178_368_512),
        (LearningToPaintActor, (1, 9, 128, 128), 1_158_218_752),
        (DeepRecommender, (1, 17768), 4 * (17768 * 512 + 512 * 512 + 512 * 1024)),
    ],
    ids=["resnet50", "LearningToPaintActor", "DeepRecommender"],
)
def test_the_flops_of_an_input_are_the_documented_ones(build, shape, flops):
    model = build().eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(shape))
    assert counter.get_total_flops() == flops


def test_the_wide_recommender_has_818_megabytes_of_weights():
    with torch.device("meta"):
        model = DeepRecommender(n_items=197_951)
    assert sum(p.numel() for p in model.parameters()) == 204_475_711


def test_the_recommender_drops_only_its_code_and_only_while_training():
    torch.manual_seed(0)
    model = DeepRecommender(n_items=64, hidden=(16, 8))
    x = torch.randn(4, 64)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    assert sum(isinstance(module, nn.Dropout) for module in model.modules()) == 1


def test_the_paint_actor_proposes_five_strokes_of_thirteen_numbers_between_0_and_1():
    with torch.no_grad():
        y = LearningToPaintActor().eval()(torch.rand(2, 9, 128, 128))
    assert y.shape == (2, 5 * 13)
    assert bool(((y >= 0) & (y <= 1)).all())


def test_the_transformer_block_is_scaled_dot_product_attention():
    torch.manual_seed(0)
    block = TransformerBlock(width=8, heads=2).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    y = block.norm1(x)
    heads = [
        layer(y).unflatten(-1, (2, 4)).transpose(1, 2)
        for layer in (block.query, block.key, block.value)
    ]
    read = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)
    middle = x + block.merge(read)
    want = middle + block.down(nn.functional.gelu(block.up(block.norm2(middle))))
    torch.testing.assert_close(block(x), want, rtol=1e-12, atol=1e-12)


def test_a_transformer_block_refuses_heads_that_do_not_divide_its_width():
    with pytest.raises(ValueError, match="10 can't be shared by 4 heads"):
        TransformerBlock(width=10, heads=4)


def test_every_batch_norm_of_the_fusion_cases_is_either_folded_or_left_alone():
    norms = {
        name for name, module in FusionCases().named_modules() if isinstance(module, nn.BatchNorm2d)
    }
    assert norms == FusionCases.folded.keys() | (FusionCases.left_alone.keys() - {"functional_bn"})
    assert not FusionCases.folded.keys() & FusionCases.left_alone.keys()


def test_randomized_batch_norms_are_far_from_the_identity_and_repeatable():
    model = randomize_batch_norms(FusionCases().eval(), seed=3)
    again = randomize_batch_norms(FusionCases().eval(), seed=3)
    assert torch.equal(model.plain_bn.running_var, again.plain_bn.running_var)
    x = torch.ones(1, 4, 2, 2)
    assert (model.plain_bn(x) - x).abs().min() > 1e-3
