"""The network with its prototypes, and what SwAV and DINO make of them: targets for some crops, and the loss of the others."""

import ignite.distributed as idist
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce


class Standardised(nn.Module):
    """Gives each feature the mean 0 and the variance 1 over the rows of all processes: a SyncBatchNorm for the CPU too.

    It keeps the scores of different images apart, which are alike at first. Gradients go through mean and variance. It has no
    running statistics: only the projection uses it, which is not used after training.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """(rows, features) to the same shape. All processes call it equally often, also without rows."""
        sums = torch.cat([rows.sum(0), rows.square().sum(0), rows.new_tensor([len(rows)])])
        if idist.get_world_size() > 1:
            sums = all_reduce(sums)  # differentiable
        mean, square = (sums[:-1] / sums[-1].clamp_min(1)).chunk(2)
        return (rows - mean) * (square - mean.square() + 1e-5).rsqrt()


class ProjectionNet(nn.Module):
    """Projects images of any size to a small space, behind an encoder.

    The encoder normalises each image by itself, so that its features do not depend on the other images.

    Args:
        width: channels of the encoder's last layer.
        dimensions: of the space that projections are in.
    """

    def __init__(self, width: int = 64, dimensions: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, width // 2, 3, padding=1), nn.GroupNorm(4, width // 2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width // 2, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        )
        self.projection = nn.Sequential(
            nn.Linear(4 * width, 2 * width), Standardised(), nn.ReLU(), nn.Linear(2 * width, dimensions)
        )

    def project(self, *inputs: Tensor) -> Tensor:
        """The projections of images of several sizes, one size after the other, (all rows, dimensions)."""
        projected: Tensor = self.projection(torch.cat([self.encoder(images) for images in inputs]))
        return projected


class PrototypeNet(ProjectionNet):
    """Compares images with prototypes: an encoder, a projection to unit length, and a product with each prototype.

    Args:
        prototypes: how many.
        width: as for `ProjectionNet`.
        dimensions: as for `ProjectionNet`.
    """

    def __init__(self, prototypes: int = 60, width: int = 64, dimensions: int = 32) -> None:
        super().__init__(width, dimensions)
        self.prototypes = nn.Linear(dimensions, prototypes, bias=False)
        normalise(self.prototypes)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Runs images of several sizes, one size after the other.

        Args:
            inputs: images of one size each, (rows, 1, height, width).

        Returns:
            Their projections, (all rows, dimensions), and their scores in [-1, 1], (all rows, prototypes).
        """
        projected = F.normalize(self.project(*inputs), dim=1)
        return projected, self.prototypes(projected)


@torch.no_grad()
def normalise(prototypes: nn.Linear) -> None:
    """Gives each prototype the length 1."""
    prototypes.weight.copy_(F.normalize(prototypes.weight, dim=1))


def sinkhorn(scores: Tensor, valid: Tensor, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    """Assigns rows to prototypes so that all prototypes get equal shares of the rows of all processes.

    Sinkhorn's algorithm as in SwAV (arXiv:2006.09882): exp(score / epsilon), whose columns and then rows are divided by their
    sums, some times. One reduction over the processes for each time, of the sums of the columns.

    Args:
        scores: at most 1; (crops, rows, prototypes). Each crop is a problem of its own.
        valid: the rows that count, (crops, rows).
        epsilon: the smaller, the nearer the assignments are to one prototype each.
        iterations: how many times.

    Returns:
        Assignments in float64 that sum to 1 in each valid row and are 0 in the others; of the shape of `scores`.
    """
    shares = ((scores.double() - 1) / epsilon).exp() * valid[..., None]
    for _ in range(iterations):
        columns = idist.all_reduce(shares.sum(1))  # (crops, prototypes)
        shares = shares / torch.where(columns > 0, columns, 1)[:, None]
        rows = shares.sum(2, keepdim=True)
        shares = shares / torch.where(rows > 0, rows, 1)
    return shares


def swapped_loss(scores: Tensor, targets: Tensor, valid: Tensor, temperature: float = 0.1) -> tuple[Tensor, Tensor]:
    """Cross-entropy of what each crop says to the targets of each other crop that has some.

    Args:
        scores: (crops, images, prototypes).
        targets: of the first crops, (targets, images, prototypes).
        valid: the crops that count, (crops, images). A pair counts if both of its crops do.
        temperature: of the scores.

    Returns:
        The sum over the pairs that count, and their number.
    """
    log_shares = (scores / temperature).log_softmax(2)
    losses = -torch.einsum("tbk,cbk->tcb", targets.to(log_shares.dtype), log_shares)
    others = ~torch.eye(len(targets), len(scores), dtype=torch.bool, device=scores.device)
    counted = valid[: len(targets), None] & valid & others[..., None]
    return losses[counted].sum(), counted.sum()
