"""DeepRecommender: the network whose quantization is the paper's Figure 6 and Appendix B.

Which program does the quantization figure run on? Kuchaiev and Ginsburg, "Training Deep
AutoEncoders for Collaborative Filtering", 2017: an auto-encoder over a user's vector of ratings,
with an activation after every layer, the last included, and dropout on the code alone. Almost all
of its weights are in the first and the last layer, so at batch 1 its time is the time to read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeepRecommender(nn.Module):
    """An auto-encoder of rating vectors, decoder weights not tied to the encoder's.

    With 17,768 items (all of Netflix) it has 19,788,136 parameters, 79 MB in float32; with
    197,951, which is very probably what the paper measured, 204,475,711 parameters, 818 MB. A row
    costs ``4 * (n_items * 512 + 512 * 512 + 512 * 1024)`` FLOPs. A trace has 15 nodes: six Linear
    and one Dropout, six calls of selu, placeholder and output.

    Args:
        n_items: Width of the input and of the output.
        hidden: Widths of the encoder's layers; the decoder mirrors them.
        dropout: Probability of dropping an element of the code while training.

    Shapes:
        ``f[N, n_items]`` -> ``f[N, n_items]``

    Example:
        >>> DeepRecommender(n_items=100, hidden=(8, 4))(torch.ones(2, 100)).shape
        torch.Size([2, 100])
    """

    def __init__(
        self,
        n_items: int = 17768,
        hidden: Sequence[int] = (512, 512, 1024),
        dropout: float = 0.8,
    ) -> None:
        super().__init__()
        widths = (n_items, *hidden)
        self.encoder = nn.ModuleList(_linear(a, b) for a, b in pairwise(widths))
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.ModuleList(_linear(a, b) for a, b in pairwise(widths[::-1]))

    def forward(self, ratings: Tensor) -> Tensor:
        """Reconstruct ``ratings``, a batch of vectors: ``f[N, n_items]`` -> ``f[N, n_items]``."""
        x = ratings
        for layer in self.encoder:
            x = F.selu(layer(x))  # (N, width)
        x = self.dropout(x)
        for layer in self.decoder:
            x = F.selu(layer(x))
        return x


def _linear(width_in: int, width_out: int) -> nn.Linear:
    """Make a layer with Xavier weights and no bias yet, without a first, default initialisation.

    The widest model has 800 MB of weights: drawing them twice takes seconds.
    """
    device = torch.get_default_device()
    layer = cast(nn.Linear, nn.utils.skip_init(nn.Linear, width_in, width_out, device=device))
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
