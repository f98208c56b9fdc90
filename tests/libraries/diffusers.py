"""diffusers: a denoising network, its noise schedule and its average of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch import nn
from torch.nn.functional import mse_loss

from ignite_train import ForwardOutput
from libraries.harness import Around, Case, dealt

NOISE = DDPMScheduler(num_train_timesteps=100)


def unet() -> nn.Module:
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=8,
        **blocks,
    )


def pictures() -> list[Any]:
    generator, batches = torch.Generator().manual_seed(0), []
    for count in (2, 1, 3, 2, 2, 1, 2, 3):
        clean, noise = (torch.randn(count, 1, 8, 8, generator=generator) for _ in range(2))
        batches.append((clean, noise, torch.randint(100, (count,), generator=generator)))
    return batches


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    clean, noise, times = batch
    found = model(NOISE.add_noise(clean, noise, times), times).sample
    return ForwardOutput(mse_loss(found, noise, reduction="sum"), noise.numel())


def draws_its_noise(model: nn.Module, batch: Any) -> ForwardOutput:
    clean = batch[0]
    return forward(model, (clean, torch.randn_like(clean), torch.randint(100, (len(clean),))))


def around(model: Any, optimizer: Any) -> Around:
    average = EMAModel(model.parameters(), decay=0.9)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 16)

    def after_step() -> None:
        schedule.step()
        average.step(model.parameters())

    return Around(after_step, {"average": average, "schedule": schedule})


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder / "diffusion_pytorch_model.safetensors"


RANDOM = {"ranks": "the ranks draw other noise than one process does"}
CASES = [
    Case("UNet2DModel, DDPMScheduler, EMAModel, cosine schedule", unet, dealt(pictures), forward, adamw, around, writes=saved),
    Case("noise drawn in forward", unet, dealt(pictures), draws_its_noise, adamw, around, not_tried=RANDOM),
]
