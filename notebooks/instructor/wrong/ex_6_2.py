"""Plausible wrong answers to exercise 6.2; the sentence that each must show is in the registry."""

import torch
import torch.nn.functional as F


def _silu(ctx, input, inplace=False):
    return ctx.op("Mul", input, ctx.op("Sigmoid", input))


def _mean(ctx, input, dim, keepdim=False):
    axes = [dim] if isinstance(dim, int) else list(dim)
    return ctx.op("ReduceMean", input, ctx.ints(axes), keepdims=int(keepdim))


def _linear(ctx, input, weight, bias=None):
    product = ctx.op("MatMul", input, weight.t())
    return product if bias is None else ctx.op("Add", product, bias)


def _table(silu=_silu, mean=_mean, linear=_linear):
    return {F.silu: silu, torch.mean: mean, F.linear: linear}


def wrong_sigmoid_only():
    """Forgets to multiply."""
    return _table(silu=lambda ctx, input, inplace=False: ctx.op("Sigmoid", input))


def wrong_no_inplace():
    """Leaves a parameter out."""
    return _table(silu=lambda ctx, input: _silu(ctx, input))


def wrong_keeps_dims():
    """Trusts that ONNX and torch have the same default."""

    def mean(ctx, input, dim, keepdim=False):
        axes = [dim] if isinstance(dim, int) else list(dim)
        return ctx.op("ReduceMean", input, ctx.ints(axes))

    return _table(mean=mean)


def wrong_axes_attribute():
    """Writes the axes as they were written before opset 18."""

    def mean(ctx, input, dim, keepdim=False):
        axes = [dim] if isinstance(dim, int) else list(dim)
        return ctx.op("ReduceMean", input, axes=axes, keepdims=int(keepdim))

    return _table(mean=mean)


def wrong_one_axis():
    """Knows one dimension only."""

    def mean(ctx, input, dim, keepdim=False):
        return ctx.op("ReduceMean", input, ctx.ints([dim + 0]), keepdims=int(keepdim))

    return _table(mean=mean)


def wrong_not_transposed():
    """Multiplies by the weight as it is stored."""

    def linear(ctx, input, weight, bias=None):
        product = ctx.op("MatMul", input, weight)
        return product if bias is None else ctx.op("Add", product, bias)

    return _table(linear=linear)


def wrong_gemm_only():
    """Takes Gemm, which multiplies matrices and nothing else."""

    def linear(ctx, input, weight, bias=None):
        return ctx.op("Gemm", input, weight, bias, transB=1)

    return _table(linear=linear)


def wrong_bias_needed():
    """Adds a bias that may not be there."""

    def linear(ctx, input, weight, bias=None):
        return ctx.op("Add", ctx.op("MatMul", input, weight.t()), bias)

    return _table(linear=linear)


def wrong_delegation():
    """Takes the kit's own converters."""
    from fxlab.backends import converters_act, converters_reduce
    from fxlab.backends.registry import find_converter

    assert converters_act and converters_reduce  # imported: their converters are in the registry
    targets = (F.silu, torch.mean, F.linear)
    return {target: find_converter("call_function", target) for target in targets}
