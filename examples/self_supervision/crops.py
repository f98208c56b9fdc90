"""Samples of several inputs: random crops of one image, each with a flag that says whether it may be learned from."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import Dataset

LARGE, SMALL = 2, 4  # crops of each kind in a sample
LARGE_SIZE, SMALL_SIZE = 10, 6  # pixels along a side
LEAST_CONTRAST = 0.18  # standard deviation of the pixels, below which a crop shows too little


class Sample(NamedTuple):
    """One image, or a micro-batch of them with one more dimension in front.

    Attributes:
        large: crops of most of the image, (LARGE, 1, LARGE_SIZE, LARGE_SIZE), with values in [0, 1].
        small: crops of a part of it, (SMALL, 1, SMALL_SIZE, SMALL_SIZE).
        valid: which of the crops count, large ones first, (LARGE + SMALL,). VISSL calls it `data_valid`.
        index: of the image. VISSL calls it `data_idx`.
    """

    large: Tensor
    small: Tensor
    valid: Tensor
    index: int | Tensor


class Digits(NamedTuple):
    """Handwritten digits: images of shape (n, 1, 8, 8) with values in [0, 1], and their classes."""

    images: Tensor
    classes: Tensor


def read_digits() -> tuple[Digits, Digits]:
    """Returns the images to train on and every fifth, drawn at random but always alike, to test on."""
    images, classes = load_digits(return_X_y=True)
    arrays = train_test_split(images, classes, test_size=0.2, stratify=classes, random_state=0)
    x, x_test, y, y_test = map(torch.from_numpy, arrays)
    x, x_test = (pixels.to(torch.get_default_dtype()).view(-1, 1, 8, 8) / 16 for pixels in (x, x_test))
    return Digits(x, y), Digits(x_test, y_test)


class Crops(Dataset[Sample]):
    """Random crops of images. A crop does not count if its image cannot be read or if it shows too little.

    The random numbers are those of torch's generator, which `ResumableLoader` seeds for each sample.

    Args:
        images: (n, 1, height, width).
        damaged: this share of the images cannot be read: their pixels are NaN, so that one of them that counts by mistake ends
            the run. It stands in for the files that are broken in any large collection.
    """

    def __init__(self, images: Tensor, damaged: float = 0.0) -> None:
        self.images = images.clone()
        if damaged:
            self.images[:: round(1 / damaged)] = math.nan

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        image = self.images[index]
        large = random_crops(image, LARGE, LARGE_SIZE, (0.75, 1.1))
        small = random_crops(image, SMALL, SMALL_SIZE, (0.4, 0.65))
        valid = torch.cat([shows_something(large), shows_something(small)])
        return Sample(large, small, valid, index)


def random_crops(image: Tensor, count: int, size: int, scale: tuple[float, float]) -> Tensor:
    """Crops of an image, turned, stretched and moved at random, with other contrast and with noise.

    Args:
        image: (1, height, width).
        count: how many.
        size: their pixels along a side.
        scale: least and largest part of the image's side that a crop shows.

    Returns:
        (count, 1, size, size).
    """
    sides = torch.empty(count, 2).uniform_(*scale)
    angles = torch.empty(count).uniform_(-0.3, 0.3)  # in radians
    cos, sin = angles.cos(), angles.sin()
    turns = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], 1)
    shifts = torch.empty(count, 2).uniform_(-1, 1) * (1.1 - sides).clamp_min(0)
    places = torch.cat([turns * sides[:, None], shifts[:, :, None]], dim=2)  # (count, 2, 3)
    grid = F.affine_grid(places, [count, 1, size, size], align_corners=False)
    crops = F.grid_sample(image.expand(count, -1, -1, -1), grid, align_corners=False)
    contrast = torch.empty(count, 1, 1, 1).uniform_(0.6, 1.4)
    return crops * contrast + 0.05 * torch.randn(crops.shape)


def shows_something(crops: Tensor) -> Tensor:
    """Which crops have finite pixels and enough contrast; (count, 1, size, size) to (count,)."""
    pixels = crops.flatten(1)
    return pixels.isfinite().all(1) & (pixels.std(1) > LEAST_CONTRAST)
