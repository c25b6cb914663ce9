"""The actor of LearningToPaint: the second network of the paper's Figure 8 and Appendix D.

Which program, next to ResNet-50, is lowered to a device? Huang, Heng and Zhou, "Learning to Paint
with Model-based Deep Reinforcement Learning", 2019. The paper does not say which of the three
networks it lowered; the actor is the one that benchmark suites call "the model". It writes ReLU,
pooling and sigmoid as functions, adds its residual in place and flattens by ``view`` with a size:
what a lowering must cope with, and ResNet's tidy modules do not show.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PaintBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, with functional ReLU and an in-place addition.

    Args:
        channels_in: Channels of the input.
        width: Channels of the output.
        stride: Stride of the first convolution and of the shortcut.

    Shapes:
        ``f[N, channels_in, H, W]`` -> ``f[N, width, H / stride, W / stride]``
    """

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Add the two convolutions' result to the shortcut's."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class LearningToPaintActor(nn.Module):
    """A small ResNet-18 that looks at a canvas and proposes five brush strokes.

    The nine input channels are the canvas (3), the picture to paint (3), the step number (1) and
    the coordinates of each pixel (2). The 65 outputs are five strokes of ten parameters and three
    colours. 11,209,857 parameters; 1.158 GFLOP an image; 74 nodes in a trace (43 call_module,
    27 call_function, 2 call_method).

    Args:
        channels: Channels of the input.
        outputs: Width of the output.

    Shapes:
        ``f[N, 9, 128, 128]`` -> ``f[N, 65]``, values between 0 and 1

    Example:
        >>> LearningToPaintActor().eval()(torch.zeros(1, 9, 128, 128)).shape
        torch.Size([1, 65])
    """

    def __init__(self, channels: int = 9, outputs: int = 65) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, 2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(PaintBlock(64, 64, 2), PaintBlock(64, 64, 1))
        self.layer2 = nn.Sequential(PaintBlock(64, 128, 2), PaintBlock(128, 128, 1))
        self.layer3 = nn.Sequential(PaintBlock(128, 256, 2), PaintBlock(256, 256, 1))
        self.layer4 = nn.Sequential(PaintBlock(256, 512, 2), PaintBlock(512, 512, 1))
        self.fc = nn.Linear(512, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Propose strokes for ``x``, a batch of canvases: ``f[N, 9, 128, 128]`` -> ``f[N, 65]``."""
        x = F.relu(self.bn1(self.conv1(x)))  # (N, 64, 64, 64)
        x = self.layer1(x)  # (N, 64, 32, 32)
        x = self.layer2(x)  # (N, 128, 16, 16)
        x = self.layer3(x)  # (N, 256, 8, 8)
        x = self.layer4(x)  # (N, 512, 4, 4)
        x = F.avg_pool2d(x, 4)  # (N, 512, 1, 1)
        x = x.view(x.size(0), -1)
        return torch.sigmoid(self.fc(x))
