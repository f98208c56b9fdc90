"""The same work with the peers of this library, written as the documentation of each shows.

Everything that the work does not ask for is switched off. What a peer does not offer, such as clipping in Ignite, is added
through its public hooks. A peer that is not installed is left out, and `contestants` says so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from typing import Any

from ignite.engine import Events, create_supervised_trainer
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from contestants import LOG_EVERY, Contestant, Outcome, Work, ranks

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is looked up


def installed(peers: dict[str, Contestant]) -> dict[str, Contestant]:
    """Those of `peers` that can be imported here; says of each other that it is left out."""
    found: dict[str, Contestant] = {}
    for name, peer in peers.items():
        module = name.split()[0].lower()
        if importlib.util.find_spec({"fabric": "lightning", "transformers": "transformers"}.get(module, module)) is None:
            print(f"left out: {name}, which is not installed", file=sys.stderr)
        else:
            found[name] = peer
    return found


def ignite(work: Work) -> Outcome:
    """`create_supervised_trainer`, which neither clips nor knows `no_sync`."""
    norms: list[Any] = []

    def clip(*_: Any) -> None:
        norms.append(clip_grad_norm_(work.model.parameters(), work.max_grad_norm or 0.0))

    def loss_of(model: nn.Module, micro_batch: Any) -> Tensor:
        with work.autocast():
            return work.mean_loss(model, micro_batch)

    if work.max_grad_norm is not None:
        work.optimizer.register_step_pre_hook(clip)
    trainer = create_supervised_trainer(
        work.wrapped(),
        work.optimizer,
        lambda loss, _: loss,
        prepare_batch=lambda batch, **_: (batch, None),
        model_fn=loss_of,
        gradient_accumulation_steps=work.accumulation_steps,
    )
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    trainer.run(work.micro_batches, max_epochs=1)
    return Outcome(work.means(losses), norms)


def fabric(work: Work) -> Outcome:
    """Lightning's Fabric: a loop by hand with its wrappers."""
    from lightning.fabric import Fabric

    strategy = "ddp" if ranks() > 1 else "auto"
    fabric = Fabric(accelerator=work.device, devices=ranks(), strategy=strategy, precision=work.mixed)
    fabric.launch()
    model, optimizer = fabric.setup(work.model, work.optimizer)
    steps, outcome, total = work.accumulation_steps, Outcome([]), None
    model.train()
    for index, micro_batch in enumerate(work.micro_batches):
        due = (index + 1) % steps == 0
        with fabric.no_backward_sync(model, enabled=not due):
            loss = work.mean_loss(model, micro_batch)
            if steps > 1:
                loss = loss / steps
            fabric.backward(loss)
        total = loss.detach() if total is None else total + loss.detach()
        if due:
            if work.max_grad_norm is not None:
                norm = fabric.clip_gradients(model, optimizer, max_norm=work.max_grad_norm, error_if_nonfinite=False)
                outcome.norms.append(norm)
            optimizer.step()
            optimizer.zero_grad()
            outcome.losses.append(total)
            total = None
    return outcome


def accelerate(work: Work) -> Outcome:
    """Hugging Face Accelerate: a loop by hand with its wrappers."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # what the contestant before has left
    GradientState._reset_state()
    steps = work.accumulation_steps
    mixed = "bf16" if work.precision == "bf16" else "no"
    accelerator = Accelerator(cpu=work.device == "cpu", gradient_accumulation_steps=steps, mixed_precision=mixed)
    model, optimizer = accelerator.prepare(work.model, work.optimizer)
    outcome, total = Outcome([]), None
    model.train()
    for micro_batch in work.micro_batches:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = work.mean_loss(model, micro_batch)
            accelerator.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
            if accelerator.sync_gradients:
                if work.max_grad_norm is not None:
                    outcome.norms.append(accelerator.clip_grad_norm_(model.parameters(), work.max_grad_norm))
                outcome.losses.append(total / steps if steps > 1 else total)
                total = None
            optimizer.step()
            optimizer.zero_grad()
    return outcome


def lightning(work: Work) -> Outcome:
    """Lightning's Trainer with `barebones=True`, which refuses to log."""
    return _lightning(work, barebones=True)


def lightning_with_logging(work: Work) -> Outcome:
    """Lightning's Trainer with `self.log` in each step, a CSV logger every so often, and nothing else."""
    from lightning.pytorch.loggers import CSVLogger

    with tempfile.TemporaryDirectory() as directory:
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        return _lightning(work, logger=CSVLogger(directory), log_every_n_steps=LOG_EVERY, **quiet)


def _lightning(work: Work, **options: Any) -> Outcome:
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

    losses: list[Tensor] = []
    norms: list[Tensor] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model

        def configure_optimizers(self) -> Any:
            return work.optimizer

        def training_step(self, micro_batch: Any) -> Tensor:
            loss = work.mean_loss(self.model, micro_batch)
            losses.append(loss.detach())
            if "barebones" not in options:
                self.log("loss", loss)
            return loss

        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            if work.max_grad_norm is not None:
                norms.append(clip_grad_norm_(self.parameters(), work.max_grad_norm))

    trainer = lightning.Trainer(
        accelerator=work.device,
        devices=ranks(),
        strategy="ddp" if ranks() > 1 else "auto",
        plugins=[LightningEnvironment()],
        precision=work.mixed,
        max_epochs=1,
        accumulate_grad_batches=work.accumulation_steps,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(Module(), work.micro_batches)
    return Outcome(work.means(losses), norms)


def transformers(work: Work) -> Outcome:
    """Transformers' Trainer, without its files and reports."""
    from transformers import Trainer, TrainingArguments

    losses: list[Tensor] = []
    norms: list[Any] = []

    class SameWork(Trainer):
        def get_train_dataloader(self) -> Any:
            return work.micro_batches

        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
            loss = work.mean_loss(model, inputs)
            losses.append(loss.detach())
            return loss

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            use_cpu=work.device == "cpu",
            bf16=work.precision == "bf16",
            num_train_epochs=1,
            gradient_accumulation_steps=work.accumulation_steps,
            max_grad_norm=work.max_grad_norm or 0.0,
            lr_scheduler_type="constant",
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        trainer = SameWork(work.model, arguments, optimizers=(work.optimizer, None))
        clip = trainer.accelerator.clip_grad_norm_

        def keep(*args: Any) -> Any:
            norms.append(clip(*args))
            return norms[-1]

        trainer.accelerator.clip_grad_norm_ = keep
        trainer.train()
    return Outcome(work.means(losses), norms)


WITHOUT_LOGGING: dict[str, Contestant] = {
    "Ignite `create_supervised_trainer`": ignite,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "Lightning Trainer, barebones": lightning,
}
"""By the names that tables show, for `installed`."""
PEERS = WITHOUT_LOGGING | {"Transformers Trainer": transformers}
