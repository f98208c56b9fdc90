"""The network of BYOL (arXiv:2006.07733), and its loss: each crop predicts what the teacher says of another."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from self_supervision.prototypes import ProjectionNet, Standardised


class PredictorNet(ProjectionNet):
    """An encoder, a projection, and a predictor of the teacher's projection, which the teacher itself does not use.

    Args:
        width: as for `ProjectionNet`.
        dimensions: as for `ProjectionNet`.
    """

    def __init__(self, width: int = 64, dimensions: int = 32) -> None:
        super().__init__(width, dimensions)
        self.predictor = nn.Sequential(
            nn.Linear(dimensions, 2 * width), Standardised(), nn.ReLU(), nn.Linear(2 * width, dimensions)
        )

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Runs images of several sizes; the projections and the predictions, (all rows, dimensions)."""
        projected = self.project(*inputs)
        return projected, self.predictor(projected)


def prediction_loss(predictions: Tensor, targets: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The squared distance of each crop's prediction to the target of each other crop that has one, both of length 1.

    Args:
        predictions: (crops, images, dimensions).
        targets: the teacher's projections of the first crops, (targets, images, dimensions).
        valid: the crops that count, (crops, images). A pair counts if both of its crops do.

    Returns:
        The sum over the pairs that count, each between 0 and 4, and their number.
    """
    cosines = torch.einsum("tbd,cbd->tcb", F.normalize(targets, dim=2), F.normalize(predictions, dim=2))
    others = ~torch.eye(len(targets), len(predictions), dtype=torch.bool, device=predictions.device)
    counted = valid[: len(targets), None] & valid & others[..., None]
    return (2 - 2 * cosines[counted]).sum(), counted.sum()
