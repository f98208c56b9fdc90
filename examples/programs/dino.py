"""Self-distillation from crops, in the manner of DINO (arXiv:2104.14294), on waves: a student that sees parts, and a teacher.

    python examples/programs/dino.py
    torchrun --nproc_per_node=2 examples/programs/dino.py

Each part of it has its place: the teacher's weights follow in a handler; the centre of its answers is carried from update to
update, and saved; a handler of GRADIENTS_REDUCED clips each parameter and holds the last layer; the temperature of the teacher
depends on `state.progress`.
"""

import copy

import ignite.distributed as idist
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ignite_train import ForwardOutput, Trainer, TrainEvents, TrainState, create_trainer
from ignite_train.handlers import MomentumTeacher
from workbench import Trained, accumulation_steps, losses_of, micro_batches, mine, start

ANSWERS, MOMENTUM, HELD_UPDATES, MAX_NORM = 12, 0.95, 4, 0.3


class OnSphere(nn.Module):
    """Divides features by their length."""

    def forward(self, features: Tensor) -> Tensor:
        """(crops, features) to the same shape."""
        return normalize(features, dim=1)


def build() -> tuple[nn.Sequential, nn.Module, torch.optim.Optimizer]:
    """The student, the teacher with the same weights, and the optimizer of the student."""
    torch.manual_seed(0)
    student = nn.Sequential(
        *(nn.Conv1d(1, 16, 5, padding=2), nn.GELU(), nn.Conv1d(16, 32, 5, padding=2), nn.GELU()),
        *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 16), OnSphere(), nn.Linear(16, ANSWERS, bias=False)),
    )
    nn.init.orthogonal_(student[-1].weight)
    return student, copy.deepcopy(student).requires_grad_(False), torch.optim.AdamW(student.parameters(), lr=0.01)


def data() -> list[tuple[Tensor, ...]]:
    """Micro-batches of two long and two short crops of waves, with noise: (waves, 2, 24) and (waves, 2, 10)."""
    torch.manual_seed(1)
    waves = (torch.arange(48) / (1 + 3 * torch.rand(320, 1)) + 6 * torch.rand(320, 1)).sin()
    waves = torch.stack([waves, waves], dim=1) + 0.2 * torch.randn(320, 2, 48)

    def crops(length: int) -> Tensor:
        begin = torch.randint(48 - length, (320, 2, 1))
        return waves.gather(2, begin + torch.arange(length))

    return micro_batches(crops(24), crops(10))


def answers(model: nn.Module, crops: Tensor) -> Tensor:
    """(waves, crops, values) to (crops, waves, ANSWERS)."""
    return model(crops.flatten(0, 1)[:, None]).view(*crops.shape[:2], ANSWERS).transpose(0, 1)


def temperature(progress: float) -> float:
    """Of the teacher: it rises in the first half."""
    return 0.04 + 0.03 * min(1.0, 2 * progress)


def disagreement(student: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy of the student's answers on each crop to the teacher's on each other crop, summed over the waves."""
    pairs = [(s, t) for s in range(len(student)) for t in range(len(teacher)) if s != t]
    said = (student / 0.1).log_softmax(dim=2)
    return -sum((teacher[t] * said[s]).sum() for s, t in pairs) / len(pairs)


def train(num_updates: int = 200) -> Trained:
    """Returns the teacher, and the losses of the student, which grow with the temperature before they fall."""
    student, teacher, optimizer = build()
    teacher.to(idist.device())

    def forward(student: nn.Module, crops: tuple[Tensor, Tensor], state: TrainState) -> ForwardOutput:
        with torch.no_grad():
            taught = answers(teacher, crops[0])
        state.carried["seen"] = state.carried.get("seen", 0) + taught.sum(dim=(0, 1))
        targets = ((taught - state.carried.get("centre", 0)) / temperature(state.progress)).softmax(dim=2)
        said = torch.cat([answers(student, one) for one in crops])
        return ForwardOutput(disagreement(said, targets), sample_size=len(crops[0]))

    trainer = create_trainer(idist.auto_model(student), optimizer, forward, accumulation_steps=accumulation_steps())
    MomentumTeacher(teacher, student, MOMENTUM).attach(trainer)

    @trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def change_gradients(trainer: Trainer) -> None:
        for parameter in student.parameters():
            nn.utils.clip_grad_norm_(parameter, MAX_NORM)
        if trainer.state.iteration <= HELD_UPDATES:
            student[-1].weight.grad = None

    @trainer.on(TrainEvents.STEP_COMPLETED)
    def move_centre(trainer: Trainer) -> None:
        carried, size = trainer.state.carried, trainer.state.update_output.sample_size
        mean = idist.all_reduce(carried.pop("seen")) / (2 * size)
        carried["centre"] = 0.9 * carried.get("centre", 0) + 0.1 * mean

    losses = losses_of(trainer)
    trainer.run(mine(data()), max_iters=num_updates)
    return teacher, losses


if __name__ == "__main__":
    start(train)
