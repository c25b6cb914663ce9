"""Three small networks for the lectures, each of a size whose whole graph fits on a screen.

What does a transform see when everything is in view? ``MLP`` for the first pictures,
``TransformerBlock`` for matrix products, softmax and reshaping, ``FusionCases`` for the
convolutions and batch norms that a fuser (section 6.2.2) folds, and those it must leave alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with a ReLU between neighbours.

    Args:
        widths: Width of the input, of each hidden layer and of the output.

    Shapes:
        ``f[N, widths[0]]`` -> ``f[N, widths[-1]]``

    Example:
        >>> MLP((8, 16, 4))(torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """

    def __init__(self, widths: Sequence[int] = (8, 16, 16, 4)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers to ``x``, no ReLU last: ``f[N, widths[0]]`` -> ``f[N, widths[-1]]``."""
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


class TransformerBlock(nn.Module):
    """Self-attention and a feed-forward net, each on a normalized input and added to it.

    The attention is written out, product by product, so that a cost or precision pass sees it.

    Args:
        width: Width of a token; a multiple of ``heads``.
        heads: Number of attention heads.
        hidden: Width inside the feed-forward net; four times ``width`` if not given.

    Shapes:
        ``f[N, T, width]`` -> ``f[N, T, width]``

    Raises:
        ValueError: If ``heads`` does not divide ``width``.

    Example:
        >>> TransformerBlock(width=8, heads=2)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    def __init__(self, width: int = 32, heads: int = 4, hidden: int | None = None) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} can't be shared by {heads} heads")
        self.split = (heads, width // heads)
        self.scale = self.split[1] ** -0.5
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden or 4 * width)
        self.down = nn.Linear(hidden or 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Let every token of ``x`` read all the others, then transform each by itself.

        ``f[N, T, width]`` -> ``f[N, T, width]``
        """
        y = self.norm1(x)
        query = self.query(y).unflatten(-1, self.split).transpose(1, 2)  # (N, heads, T, width')
        key = self.key(y).unflatten(-1, self.split).transpose(1, 2)
        value = self.value(y).unflatten(-1, self.split).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(-2, -1)) * self.scale  # (N, heads, T, T)
        read = torch.matmul(torch.softmax(scores, dim=-1), value)  # (N, heads, T, width')
        x = x + self.merge(read.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class FusionCases(nn.Module):
    """One network with every neighbourhood of convolution and batch norm that matters to a fuser.

    Each case keeps the shape, so they stand in a row. In eval mode ``folded`` names the batch
    norms that may be folded into the convolution before them; ``left_alone`` names those that may
    not, each with the reason.

    Shapes:
        ``f[N, 4, H, W]`` -> ``f[N, 4, H, W]``

    Example:
        >>> FusionCases().eval()(torch.ones(1, 4, 8, 8)).shape
        torch.Size([1, 4, 8, 8])
    """

    folded: ClassVar[dict[str, str]] = {
        "plain_bn": "a convolution without bias",
        "biased_bn": "a convolution with bias; a batch norm without weight and bias",
        "grouped_bn": "a grouped convolution",
        "transposed_bn": "a transposed convolution: its output channels are weight dimension 1",
        "common_bn": "one batch norm after two convolutions: each takes a copy of the fold",
    }
    left_alone: ClassVar[dict[str, str]] = {
        "two_readers_bn": "the convolution has a second reader, which wants the unfolded value",
        "shared_first_bn": "the convolution is called twice, each time before another batch norm",
        "shared_second_bn": "the convolution is called twice, each time before another batch norm",
        "batch_bn": "no running statistics: it normalizes by the batch at hand",
        "before_bn": "it stands before the convolution, whose padding is added after it",
        "far_bn": "a ReLU stands between the convolution and it",
        "functional_bn": "a call of F.batch_norm, not of a module",
    }

    def __init__(self) -> None:
        super().__init__()
        self.plain_conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.plain_bn = nn.BatchNorm2d(4)
        self.biased_conv = nn.Conv2d(4, 4, 3, padding=1)
        self.biased_bn = nn.BatchNorm2d(4, affine=False)
        self.grouped_conv = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.grouped_bn = nn.BatchNorm2d(4)
        self.transposed_conv = nn.ConvTranspose2d(4, 4, 3, padding=1)
        self.transposed_bn = nn.BatchNorm2d(4)
        self.common_conv1 = nn.Conv2d(4, 4, 1)
        self.common_conv2 = nn.Conv2d(4, 4, 1)
        self.common_bn = nn.BatchNorm2d(4)
        self.two_readers_conv = nn.Conv2d(4, 4, 1)
        self.two_readers_bn = nn.BatchNorm2d(4)
        self.shared_conv = nn.Conv2d(4, 4, 1)
        self.shared_first_bn = nn.BatchNorm2d(4)
        self.shared_second_bn = nn.BatchNorm2d(4)
        self.batch_conv = nn.Conv2d(4, 4, 1)
        self.batch_bn = nn.BatchNorm2d(4, track_running_stats=False)
        self.before_bn = nn.BatchNorm2d(4)
        self.before_conv = nn.Conv2d(4, 4, 3, padding=1)
        self.far_conv = nn.Conv2d(4, 4, 1)
        self.far_bn = nn.BatchNorm2d(4)
        self.functional_conv = nn.Conv2d(4, 4, 1)
        self.functional_mean = nn.Buffer(torch.zeros(4))
        self.functional_var = nn.Buffer(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """Put ``x`` through all cases, ``folded`` first: ``f[N, 4, H, W]`` -> ``f[N, 4, H, W]``."""
        x = self.plain_bn(self.plain_conv(x))
        x = self.biased_bn(self.biased_conv(x))
        x = self.grouped_bn(self.grouped_conv(x))
        x = self.transposed_bn(self.transposed_conv(x))
        x = self.common_bn(self.common_conv1(x)) + self.common_bn(self.common_conv2(x))
        y = self.two_readers_conv(x)
        x = self.two_readers_bn(y) + y
        x = self.shared_second_bn(self.shared_conv(self.shared_first_bn(self.shared_conv(x))))
        x = self.batch_bn(self.batch_conv(x))
        x = self.before_conv(torch.relu(self.before_bn(x)))
        x = self.far_bn(torch.relu(self.far_conv(x)))
        x = self.functional_conv(x)
        return F.batch_norm(x, self.functional_mean, self.functional_var)


def randomize_batch_norms(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every batch norm of ``model`` statistics and weights as if trained, in place.

    A new batch norm is almost the identity, and hides a wrong fold.

    Args:
        model: Any module.
        seed: Of the random numbers: means and biases normal with deviation 0.2, variances and
            weights uniform between 0.5 and 1.5.

    Returns:
        ``model`` itself.

    Example:
        >>> bn = randomize_batch_norms(nn.BatchNorm1d(2))
        >>> bool((bn.running_var != 1).all())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                continue
            for tensor in (module.running_mean, module.bias):
                if tensor is not None:
                    tensor.normal_(0.0, 0.2, generator=generator)
            for tensor in (module.running_var, module.weight):
                if tensor is not None:
                    tensor.uniform_(0.5, 1.5, generator=generator)
    return model
