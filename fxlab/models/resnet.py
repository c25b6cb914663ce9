"""ResNet: the network of the paper's Figures 5, 7 and 8.

Which program do the fusion and IR-size figures run on? He, Zhang, Ren and Sun, "Deep Residual
Learning for Image Recognition", 2015, in the variant that strides on the 3x3 convolution (v1.5).
Parameters and buffers bear torchvision's names, so its checkpoints load; the code is our own, since
the published torchvision wheel does not import beside every build of torch.

Each block has one ReLU module that it calls two or three times. That is why a default trace of
ResNet-50 has 177 nodes: 49 calls of ReLU, by 17 modules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, for ResNet-18.

    Args:
        channels_in: Channels of the input.
        width: Channels of both convolutions.
        stride: Stride of the first convolution and of the shortcut.

    Shapes:
        ``f[N, channels_in, H, W]`` -> ``f[N, width, H / stride, W / stride]``
    """

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels_in, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the two convolutions' result to the shortcut's."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(out + shortcut)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution and a shortcut, for ResNet-50.

    Args:
        channels_in: Channels of the input.
        width: Channels of the first two convolutions; the third has four times as many.
        stride: Stride of the 3x3 convolution and of the shortcut.

    Shapes:
        ``f[N, channels_in, H, W]`` -> ``f[N, 4 * width, H / stride, W / stride]``
    """

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels_in, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add the three convolutions' result to the shortcut's."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(out + shortcut)


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Sequential | None:
    """Project the shortcut where its shape would not fit; elsewhere the input itself is added."""
    if stride == 1 and channels_in == channels_out:
        return None
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
    )


def _stage(
    block: type[BasicBlock | Bottleneck], channels_in: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    """Stack ``depth`` blocks, of which the first changes the number of channels and the size."""
    rest = [block(width * block.expansion, width) for _ in range(depth - 1)]
    return nn.Sequential(block(channels_in, width, stride), *rest)


class ResNet(nn.Module):
    """A residual network for images of about 224 x 224.

    Args:
        block: ``BasicBlock`` or ``Bottleneck``.
        depths: Blocks in each of the four stages, whose widths are 64, 128, 256 and 512.
        classes: Width of the output.

    Shapes:
        ``f[N, 3, H, W]`` -> ``f[N, classes]``, H and W at least 32
    """

    def __init__(
        self, block: type[BasicBlock | Bottleneck], depths: Sequence[int], classes: int = 1000
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        widths = [64 * block.expansion * 2**stage for stage in range(4)]
        self.layer1 = _stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = _stage(block, widths[0], 128, depths[1], stride=2)
        self.layer3 = _stage(block, widths[1], 256, depths[2], stride=2)
        self.layer4 = _stage(block, widths[2], 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[3], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Classify ``x``, a batch of images: ``f[N, 3, H, W]`` -> ``f[N, classes]``."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))  # (N, 64, H/4, W/4)
        x = self.layer1(x)
        x = self.layer2(x)  # (N, 2 * 64 * expansion, H/8, W/8)
        x = self.layer3(x)
        x = self.layer4(x)  # (N, 512 * expansion, H/32, W/32)
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


def resnet18(classes: int = 1000) -> ResNet:
    """Build ResNet-18 with random weights.

    11,689,512 parameters with 1,000 classes; 20 convolutions, each with its batch norm; 71 nodes
    in a default trace.

    Args:
        classes: Width of the output.

    Returns:
        A model in train mode, ``f32[N, 3, 224, 224]`` -> ``f32[N, classes]``.

    Example:
        >>> sum(p.numel() for p in resnet18().parameters())
        11689512
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet50(classes: int = 1000) -> ResNet:
    """Build ResNet-50 with random weights: the model of Figures 5, 7 and 8.

    25,557,032 parameters with 1,000 classes; 53 convolutions, each with its batch norm; 177 nodes
    in a default trace (158 call_module, 17 call_function); 8.18 GFLOP an image of 224 x 224,
    multiply and add counted separately.

    Args:
        classes: Width of the output.

    Returns:
        A model in train mode, ``f32[N, 3, 224, 224]`` -> ``f32[N, classes]``.

    Example:
        >>> sum(p.numel() for p in resnet50().parameters())
        25557032
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), classes)
