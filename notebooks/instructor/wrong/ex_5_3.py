"""Plausible wrong answers to exercise 5.3; the sentence that each must show is in the registry."""

import torch

from fxlab.passes.quantize import QParams, fake_quantize


def _forward(ctx, x, scale, zero_point, quant_min, quant_max):
    codes = torch.round(x / scale) + zero_point
    ctx.save_for_backward(codes)
    ctx.ends = quant_min, quant_max
    return (codes.clamp(quant_min, quant_max) - zero_point) * scale


def _mask(ctx):
    (codes,) = ctx.saved_tensors
    low, high = ctx.ends
    return (codes >= low) & (codes <= high)


class wrong_gradient_of_round(torch.autograd.Function):
    """Returns the true gradient of a staircase."""

    forward = staticmethod(_forward)

    @staticmethod
    def backward(ctx, gradient):
        """Return 0."""
        return torch.zeros_like(gradient), None, None, None, None


class wrong_passes_everywhere(torch.autograd.Function):
    """Forgets saturation."""

    forward = staticmethod(_forward)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient as it is."""
        return gradient, None, None, None, None


class wrong_mask_only(torch.autograd.Function):
    """Forgets the chain rule."""

    forward = staticmethod(_forward)

    @staticmethod
    def backward(ctx, gradient):
        """Return the mask."""
        return _mask(ctx).to(gradient.dtype), None, None, None, None


class wrong_strictly_inside(torch.autograd.Function):
    """Counts the last code as saturated."""

    forward = staticmethod(_forward)

    @staticmethod
    def backward(ctx, gradient):
        """Compare strictly."""
        (codes,) = ctx.saved_tensors
        low, high = ctx.ends
        return gradient * ((codes > low) & (codes < high)), None, None, None, None


class wrong_no_clamp(torch.autograd.Function):
    """Rounds and does not clamp."""

    @staticmethod
    def forward(ctx, x, scale, zero_point, quant_min, quant_max):
        """Round."""
        _forward(ctx, x, scale, zero_point, quant_min, quant_max)
        return torch.round(x / scale) * scale

    @staticmethod
    def backward(ctx, gradient):
        """Return what is right."""
        return gradient * _mask(ctx), None, None, None, None


class wrong_one_gradient(torch.autograd.Function):
    """Returns a gradient for x and none for the other arguments."""

    forward = staticmethod(_forward)

    @staticmethod
    def backward(ctx, gradient):
        """Return one gradient of five."""
        return gradient * _mask(ctx)


class wrong_returns_codes(torch.autograd.Function):
    """Returns codes, not their values."""

    @staticmethod
    def forward(ctx, x, scale, zero_point, quant_min, quant_max):
        """Return the codes."""
        _forward(ctx, x, scale, zero_point, quant_min, quant_max)
        return (torch.round(x / scale) + zero_point).clamp(quant_min, quant_max)

    @staticmethod
    def backward(ctx, gradient):
        """Return what is right."""
        return gradient * _mask(ctx), None, None, None, None


class wrong_delegation:
    """Asks the kit."""

    @staticmethod
    def apply(x, scale, zero_point, quant_min, quant_max):
        """Call the kit's fake_quantize, which has a gradient of its own."""
        q = QParams(torch.tensor(scale), torch.tensor(zero_point), quant_min, quant_max)
        return fake_quantize(x, q)
