"""The models of the paper's figures, and three small ones for the lectures; they need torch only.

Which programs do the figures transform? ``resnet50`` (Figures 5, 7, 8), ``DeepRecommender``
(Figure 6), ``LearningToPaintActor`` (Figure 8); ``resnet18`` is a quicker stand-in. All are made
with random weights: the figures measure programs, not accuracy.

Example:
    >>> from fxlab.models import MLP
    >>> [name for name, _ in MLP((2, 3, 1)).named_parameters()]
    ['layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias']
"""

from fxlab.models.paint import LearningToPaintActor
from fxlab.models.recommender import DeepRecommender
from fxlab.models.resnet import ResNet, resnet18, resnet50
from fxlab.models.small import MLP, FusionCases, TransformerBlock, randomize_batch_norms

__all__ = [
    "resnet18",
    "resnet50",
    "ResNet",
    "DeepRecommender",
    "LearningToPaintActor",
    "MLP",
    "TransformerBlock",
    "FusionCases",
    "randomize_batch_norms",
]
