"""A training run with Ignite; see docs/migration.md."""

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, global_step_from_engine
from ignite.metrics import Accuracy, Loss
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 4)
data = TensorDataset(x, (x @ torch.randn(4, 3)).argmax(1))
loader, held_out = DataLoader(data, batch_size=8), DataLoader(data, batch_size=32)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
schedule = CosineAnnealingLR(optimizer, T_max=18)


def step(engine, batch):
    model.train()
    loss = cross_entropy(model(batch[0]), batch[1])
    (loss / 2).backward()
    if engine.state.iteration % 2 == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return loss.item()


trainer = Engine(step)
evaluator = create_supervised_evaluator(model, {"loss": Loss(cross_entropy), "accuracy": Accuracy()})
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(held_out))


def score(engine):
    return -engine.state.metrics["loss"]


evaluator.add_event_handler(Events.COMPLETED, EarlyStopping(2, score, trainer))
objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "trainer": trainer}
saver = DiskSaver("runs/ignite", create_dir=True, require_empty=False)
best = Checkpoint(objects, saver, score_function=score, global_step_transform=global_step_from_engine(trainer))
evaluator.add_event_handler(Events.COMPLETED, best)
trainer.run(loader, max_epochs=3)
print("validation loss", evaluator.state.metrics["loss"])
