"""Loops that make one update, for `start.py`: what a loop does not need is not imported."""

import sys
import tempfile
from collections.abc import Callable
from typing import Any


def parts() -> tuple[Any, Any, Any]:
    """A small model, its optimizer and a micro-batch."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

        def forward(self, x: Any) -> Any:
            return self.layers(x)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, (torch.randn(16, 32), torch.randint(8, (16,)))


def by_hand(*, saves: bool, compiles: bool) -> None:
    """The loop that an expert writes."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils import clip_grad_norm_

    model, optimizer, (x, y) = parts()
    if compiles:
        model.compile()
    cross_entropy(model(x), y).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if saves:
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)


def ignite(*, saves: bool, compiles: bool) -> None:
    """Ignite's own trainer, which clips nothing."""
    from ignite.engine import Events, create_supervised_trainer
    from torch.nn.functional import cross_entropy

    model, optimizer, micro_batch = parts()
    if compiles:
        model.compile()
    trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    with tempfile.TemporaryDirectory() as directory:
        if saves:
            from ignite.handlers import Checkpoint, DiskSaver

            saver = DiskSaver(directory, require_empty=False)
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED, Checkpoint({"model": model, "optimizer": optimizer, "trainer": trainer}, saver)
            )
        trainer.run([micro_batch], max_epochs=1)


def ours(*, saves: bool, compiles: bool) -> None:
    """This library."""
    from torch.nn.functional import cross_entropy

    from ignite_train import create_supervised_trainer

    model, optimizer, micro_batch = parts()
    trainer = create_supervised_trainer(model, optimizer, cross_entropy, max_grad_norm=1.0, compile=compiles)
    with tempfile.TemporaryDirectory() as directory:
        if saves:
            from ignite_train.handlers import Checkpoint

            Checkpoint(directory, every=1).attach(trainer)
        trainer.run([micro_batch], max_epochs=1)


def ours_with_defaults(*, saves: bool, compiles: bool) -> None:
    """This library with metrics, lines, a log and curves, and a checkpoint where one is asked for."""
    from torch.nn.functional import cross_entropy

    from ignite_train import attach_defaults, create_supervised_trainer

    model, optimizer, micro_batch = parts()
    trainer = create_supervised_trainer(model, optimizer, cross_entropy, max_grad_norm=1.0, compile=compiles)
    with tempfile.TemporaryDirectory() as directory:
        attach_defaults(trainer, directory=directory)
        if saves:
            from ignite_train.handlers import Checkpoint

            Checkpoint(directory, every=1).attach(trainer)
        trainer.run([micro_batch], max_epochs=1)


def lightning(*, saves: bool, compiles: bool) -> None:
    """Lightning's Trainer."""
    import lightning
    from torch.nn.functional import cross_entropy

    model, optimizer, micro_batch = parts()
    if compiles:
        model.compile()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any) -> Any:
            return cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer

    class Once:  # a list would be one of loaders
        def __iter__(self) -> Any:
            return iter([micro_batch])

    with tempfile.TemporaryDirectory() as directory:
        trainer = lightning.Trainer(
            max_steps=1,
            accelerator="cpu",
            default_root_dir=directory,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=saves,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), Once())


def transformers(*, saves: bool, compiles: bool) -> None:
    """Transformers' Trainer."""
    from torch.nn.functional import cross_entropy
    from transformers import Trainer, TrainingArguments

    model, optimizer, micro_batch = parts()
    if compiles:
        model.compile()

    class SameWork(Trainer):
        def get_train_dataloader(self) -> Any:
            return [micro_batch]

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return cross_entropy(model(inputs[0]), inputs[1])

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            use_cpu=True,
            max_steps=1,
            max_grad_norm=1.0,
            save_strategy="steps" if saves else "no",
            save_steps=1,
            report_to="none",
            disable_tqdm=True,
        )
        SameWork(model, arguments, optimizers=(optimizer, None)).train()


REFERENCE = "by hand"
LOOPS: dict[str, Callable[..., None]] = {
    REFERENCE: by_hand,
    f"{REFERENCE}, once more (the noise)": by_hand,
    "Ignite `create_supervised_trainer`": ignite,
    "ignite_train": ours,
    "ignite_train, attach_defaults": ours_with_defaults,
    "Lightning Trainer": lightning,
    "Transformers Trainer": transformers,
}
TASKS = {
    "one update": {"saves": False, "compiles": False},
    "one update and a checkpoint": {"saves": True, "compiles": False},
    "one compiled update": {"saves": False, "compiles": True},
}

if __name__ == "__main__":
    LOOPS[sys.argv[1]](**TASKS[sys.argv[2]])
    print("updated", flush=True)
