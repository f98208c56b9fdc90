"""Learns features of handwritten digits without their labels, as users of VISSL know it: SwAV, DINO or BYOL.

    python examples/self_supervised.py                                 # one process
    python examples/self_supervised.py --method dino                   # with a momentum teacher; or --method byol
    python examples/self_supervised.py --nproc 2                       # two, started by the script itself
    torchrun --nproc_per_node=2 examples/self_supervised.py            # two, started by torchrun

The images come with scikit-learn. At the end a linear classifier of the features is compared with the same classifier of the
pixels and of the features before training. Interrupt it with Ctrl-C, or kill it, and start it again: it continues in the middle
of the epoch and ends with the same bits. What VISSL calls its parts is in docs/self-supervised.md.

The samples with their crops, the network with its losses, and LARS are in the folder self_supervision.
"""

import copy
import inspect
import math
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

# Before torch starts its threads: waiting threads sleep. By default they spin, which slows a busy machine down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import ignite.distributed as idist
import torch
import typer
from ignite.engine import Events
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from typer import Option

from ignite_train import (
    ForwardOutput,
    ResumableLoader,
    Trainer,
    TrainEvents,
    TrainState,
    UpdateOptions,
    create_trainer,
    parameter_groups,
)
from ignite_train.handlers import Checkpoint, Freeze, MomentumTeacher, ProgressLog, StepTimer, StopOnSignal, TrainingMetrics
from launching import launch, number_of_processes
from self_supervision.crops import LARGE, Crops, Digits, Sample, read_digits
from self_supervision.lars import LARS
from self_supervision.prediction import PredictorNet, prediction_loss
from self_supervision.prototypes import ProjectionNet, PrototypeNet, normalise, sinkhorn, swapped_loss


@dataclass(frozen=True)
class Settings:
    """What the command line can change. Counts of images are over all processes together."""

    nproc: Annotated[int, Option(min=1, help="Processes to start; leave at 1 under torchrun.")] = 1
    method: Annotated[Literal["swav", "dino", "byol"], Option(help="Targets by prototypes, or by a teacher.")] = "swav"
    epochs: Annotated[int, Option(min=1, help="Passes over the images.")] = 30
    batch_size: Annotated[int, Option(min=1, help="Images to an update.")] = 128
    prototypes: Annotated[int, Option(min=2, help="Prototypes of SwAV; size of DINO's answers.")] = 60
    queue: Annotated[int, Option(min=0, help="SwAV: earlier updates whose projections take part in the assignments.")] = 4
    queue_from: Annotated[float, Option(min=0, max=1, help="The part of the run before the queue is used.")] = 0.2
    frozen: Annotated[int, Option(min=0, help="Steps in which the prototypes do not move yet.")] = 20
    learning_rate: Annotated[float, Option(min=0.0, help="Learning rate at its highest, after the warm-up.")] = 4.0
    damaged: Annotated[float, Option(min=0, max=1, help="Share of the images that cannot be read.")] = 0.02
    max_images: Annotated[int | None, Option(min=1, help="Train on only this many images.")] = None
    labels: Annotated[int, Option(min=1, help="Labelled images of each class for the classifiers at the end.")] = 10
    save_every: Annotated[int, Option(min=1, help="Updates between two checkpoints.")] = 50
    seed: Annotated[int, Option(min=0, help="Seed of the initial weights, the order of the images, and crops.")] = 0
    log_dir: Annotated[
        Path | None,
        Option(help="Folder of the checkpoints, from which a run resumes; by default one for each method, in runs."),
    ] = None


class Views(NamedTuple):
    """The crops of a micro-batch. What does not count is 0.

    Attributes:
        large: the large crops that count, (rows, 1, height, width).
        projected: (crops, images, dimensions).
        scores: (crops, images, prototypes); of BYOL predictions, (crops, images, dimensions).
        valid: which count, (crops, images).
    """

    large: Tensor
    projected: Tensor
    scores: Tensor
    valid: Tensor


class SelfSupervised:
    """The forward of all methods: it makes targets of the large crops, and has all other crops predict them.

    Args:
        settings: of the run.
        net: the network that is trained, not wrapped.
        teacher: of DINO and BYOL.
        timer: times its sections.
    """

    def __init__(self, settings: Settings, net: ProjectionNet, teacher: ProjectionNet | None, timer: StepTimer) -> None:
        self.settings, self.net, self.teacher, self.timer = settings, net, teacher, timer
        self.make_targets = {"swav": self.assignments, "dino": self.answers, "byol": self.projections}[settings.method]
        self.loss = prediction_loss if settings.method == "byol" else swapped_loss

    def __call__(self, model: nn.Module, sample: Sample, state: TrainState) -> ForwardOutput:
        """The loss of a micro-batch is that of its pairs of crops: the sum over those that count, and their number."""
        valid = sample.valid.T
        large, small = sample.large.transpose(0, 1)[valid[:LARGE]], sample.small.transpose(0, 1)[valid[LARGE:]]
        projected, scores = (scattered(rows, valid) for rows in model(large, small))
        with self.timer.section("loss_compute"):
            with torch.no_grad():
                targets = self.make_targets(Views(large, projected, scores, valid), state)
            loss, pairs = self.loss(scores, targets, valid)
        return ForwardOutput(loss, pairs, logs={"valid": (valid.sum(), valid.numel())}, outputs=(scores, targets))

    def assignments(self, views: Views, state: TrainState) -> Tensor:
        """SwAV's targets: this batch and the queue are assigned to the prototypes in equal shares, over all processes."""
        projected, scores, valid = (part[:LARGE] for part in (views.projected, views.scores, views.valid))
        images, queue = scores.shape[1], state.carried.get("queue", [])
        if self.settings.queue:
            state.carried["queue"] = [(projected, valid), *queue][: self.settings.queue]
        if (state.progress or 0.0) >= self.settings.queue_from:
            scores = torch.cat([scores, *(self.net.prototypes(rows) for rows, _ in queue)], dim=1)
            valid = torch.cat([valid, *(counted for _, counted in queue)], dim=1)
        return sinkhorn(scores, valid)[:, :images]

    def answers(self, views: Views, state: TrainState) -> Tensor:
        """DINO's targets: the teacher's scores, less their running mean over all processes, sharpened."""
        valid = views.valid[:LARGE]
        scores = scattered(self.teacher(views.large)[1], valid)
        centre = state.carried.get("centre", torch.zeros_like(scores[0, 0]))
        sums = idist.all_reduce(torch.cat([scores.sum((0, 1)), valid.sum()[None]]))
        if sums[-1] > 0:
            state.carried["centre"] = 0.9 * centre + 0.1 * sums[:-1] / sums[-1]
        return ((scores - centre) / teacher_temperature(state.progress)).softmax(2)

    def projections(self, views: Views, _state: TrainState) -> Tensor:
        """BYOL's targets: the teacher's projections."""
        return scattered(self.teacher(views.large)[0], views.valid[:LARGE])


def scattered(rows: Tensor, valid: Tensor) -> Tensor:
    """Puts the rows of the crops that count in their places: (rows, size) to (crops, images, size), 0 in the others."""
    return rows.new_zeros(*valid.shape, rows.shape[1]).index_put((valid,), rows)


# --- schedules: functions of the part of the run that is done, which VISSL calls `where` ---


def teacher_temperature(where: float) -> float:
    """It rises in the first fifth."""
    return 0.04 + 0.03 * min(1.0, 5 * where)


def teacher_momentum(where: float) -> float:
    """From 0.95 to 1 by a cosine, as in BYOL and DINO, whose runs are longer and begin higher."""
    return 1 - 0.05 * (1 + math.cos(math.pi * where)) / 2


def rate(where: float) -> float:
    """Of the highest rate: a warm-up in the first tenth, then a cosine."""
    return min(1.0, 10 * where + 0.05) * (1 + math.cos(math.pi * where)) / 2


# --- what a handler sees, and under which names the times are known ---


class LastBatch(NamedTuple):
    """What hooks of VISSL read as `task.last_batch`, of the micro-batch that is running."""

    sample: Sample
    target: Tensor
    model_output: Tensor
    loss: float


def last_batch(state: TrainState) -> LastBatch:
    """For handlers of FORWARD_COMPLETED and BACKWARD_COMPLETED; the loss is the mean of this process."""
    loss, sample_size, _, (scores, targets) = state.forward_output
    return LastBatch(state.batch[state.micro_batch_in_group], targets, scores, float(loss.detach() / sample_size))


class PrototypesInUse:
    """A meter: how many prototypes are the nearest to some crop in an epoch. If they become few, the features collapse."""

    def __init__(self, timer: StepTimer) -> None:
        self.timer = timer
        self.used = torch.zeros(0, dtype=torch.bool)

    def attach(self, trainer: Trainer) -> None:
        """Looks at each micro-batch, and publishes after each epoch. It is saved with the run."""
        trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED, self)
        trainer.prepend_event_handler(Events.EPOCH_COMPLETED, self.publish)

    def __call__(self, trainer: Trainer) -> None:
        """VISSL's `on_loss_and_meter`."""
        with self.timer.section("meters_update"):
            batch = last_batch(trainer.state)
            nearest = batch.model_output.argmax(2)[batch.sample.valid.T]
            seen = torch.bincount(nearest, minlength=batch.model_output.shape[2]) > 0
            self.used = seen | self.used if len(self.used) else seen

    def publish(self, trainer: Trainer) -> None:
        """Of all processes."""
        used = idist.all_reduce(self.used.long()) > 0
        trainer.state.metrics["prototypes_in_use"], self.used = int(used.sum()), used[:0]

    def state_dict(self) -> dict[str, Tensor]:
        """Those seen in this epoch."""
        return {"used": self.used}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Continues in the middle of an epoch."""
        self.used = state_dict["used"]


def perf_stats(timer: StepTimer) -> dict[str, float]:
    """Milliseconds of an update, by VISSL's names."""
    means = {name: 1e3 * times.mean for name, times in timer.summary().items()}
    own = {name: means.pop(name, 0.0) for name in ("loss_compute", "meters_update")}
    return {
        "read_sample": means.get("data", 0.0),
        "forward": means.get("forward", 0.0) - own["loss_compute"],
        "loss_compute": own["loss_compute"],
        "loss_all_reduce": means.get("reduction", 0.0),
        "meters_update": own["meters_update"],
        "backward": means.get("backward", 0.0),
        "optimizer_step": means.get("optimizer", 0.0),
        "train_step_total": sum(means.values()),
    }


# --- the run ---


class Run(NamedTuple):
    """What each process makes before it trains."""

    trainer: Trainer
    net: ProjectionNet
    teacher: ProjectionNet | None
    optimizer: LARS
    loader: ResumableLoader
    timer: StepTimer


def build(settings: Settings, train_set: Digits) -> Run:
    """The trainer, with all that makes a method of it."""
    torch.manual_seed(settings.seed)
    net = (PredictorNet() if settings.method == "byol" else PrototypeNet(settings.prototypes)).to(idist.device())
    teacher = None if settings.method == "swav" else copy.deepcopy(net)
    processes = idist.get_world_size()
    model = idist.auto_model(net) if processes > 1 else net
    matrices, others = parameter_groups(model, weight_decay=1e-4)
    optimizer = LARS([matrices, {**others, "trust": None}], settings.learning_rate)
    timer = StepTimer()
    trainer = create_trainer(
        model,
        optimizer,
        SelfSupervised(settings, net, teacher, timer),
        options=UpdateOptions(uneven="shortest"),  # forward has collectives of its own
    )

    timer.attach(trainer)
    if teacher is not None:
        MomentumTeacher(teacher, net, lambda state: teacher_momentum(state.progress)).attach(trainer)
    if isinstance(net, PrototypeNet):
        if settings.frozen:
            Freeze(net.prototypes, until=settings.frozen).attach(trainer)
        # Before the teacher follows.
        trainer.prepend_event_handler(TrainEvents.STEP_COMPLETED, lambda: normalise(net.prototypes))

    @trainer.on(Events.ITERATION_STARTED)
    def set_rate(trainer: Trainer) -> None:
        matrices, others = optimizer.param_groups
        matrices["lr"] = settings.learning_rate * rate(trainer.state.progress)
        others["lr"] = matrices["lr"] / 50  # they have no trust ratio that makes it small

    images = Crops(train_set.images[: settings.max_images], settings.damaged)
    loader = ResumableLoader(images, settings.batch_size // processes, shuffle=True, seed=settings.seed, drop_last=True)
    return Run(trainer, net, teacher, optimizer, loader, timer)


def watch(run: Run, settings: Settings) -> None:
    """Attaches what shows the run and saves it."""
    if isinstance(run.net, PrototypeNet):
        PrototypesInUse(run.timer).attach(run.trainer)
    TrainingMetrics().attach(run.trainer, Events.EPOCH_COMPLETED)
    ProgressLog().attach(run.trainer, Events.EPOCH_COMPLETED(every=5))
    folder = settings.log_dir or Path("runs") / f"self_supervised_{settings.method}"
    Checkpoint(folder, every=settings.save_every, config=asdict(settings)).attach(run.trainer)
    StopOnSignal([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]).attach(run.trainer)  # SIGINT: of a parent that ends


@torch.no_grad()
def features(net: ProjectionNet, images: Tensor) -> Tensor:
    """Of whole images, at the size of large crops."""
    device = next(net.parameters()).device
    return net.encoder(nn.functional.interpolate(images.to(device), 10, mode="bilinear", align_corners=False)).cpu()


def probe(train_set: Digits, test_set: Digits, train_features: Tensor, test_features: Tensor, labels: int) -> float:
    """Accuracy on the test images of a linear classifier of some features, trained on this many images of each class."""
    chosen = torch.cat([(train_set.classes == label).nonzero().flatten()[:labels] for label in range(10)])
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    classifier.fit(train_features.flatten(1)[chosen].numpy(), train_set.classes[chosen].numpy())
    return float(classifier.score(test_features.flatten(1).numpy(), test_set.classes.numpy()))


def train(_local_rank: int, settings: Settings) -> None:
    """What each process does."""
    torch.set_num_threads(1)  # the operations are too small for threads to share
    train_set, test_set = read_digits()
    run = build(settings, train_set)
    watch(run, settings)
    untrained = copy.deepcopy(run.net)
    state = run.trainer.run(run.loader, max_epochs=settings.epochs)
    if idist.get_rank() != 0:
        return
    if state.epoch < settings.epochs or run.trainer.should_terminate:
        print(f"stopped after update {state.iteration}; the same command continues from there")
        return
    print(f"last update: loss {state.update_output.loss:.6f}, gradient norm {state.update_output.grad_norm:.6f}")
    for name, milliseconds in perf_stats(run.timer).items():
        print(f"{name:<20}{milliseconds:10.2f} ms")
    nets = {"untrained features": untrained, f"features of {settings.method}": run.teacher or run.net}
    inputs = {"pixels": (train_set.images, test_set.images)}
    inputs |= {name: (features(net, train_set.images), features(net, test_set.images)) for name, net in nets.items()}
    print(f"accuracy of a linear classifier with {settings.labels} labels of each class:")
    for name, (of_train, of_test) in inputs.items():
        print(f"{name:<20}{probe(train_set, test_set, of_train, of_test, settings.labels):10.2%}")


def main(**options: Any) -> None:
    """Learn features of handwritten digits without labels, and test them."""
    settings = Settings(**options)
    processes = number_of_processes(settings.nproc)
    if settings.batch_size % processes:
        raise typer.BadParameter(f"--batch-size must be a multiple of {processes}, the processes; got {settings.batch_size}")
    launch(train, processes, settings)


main.__signature__ = inspect.signature(Settings)  # typer takes the options of the command line from here

if __name__ == "__main__":
    typer.run(main)
