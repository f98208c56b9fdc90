"""The same training run with ignite_train; see docs/migration.md."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from ignite_train import ForwardOutput, attach_defaults, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, EarlyStopping, LearningRateSchedule, Validation

torch.manual_seed(0)
x = torch.randn(96, 4)
data = TensorDataset(x, (x @ torch.randn(4, 3)).argmax(1))
loader, held_out = DataLoader(data, batch_size=8), DataLoader(data, batch_size=32)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def forward(model, batch):
    x, y = batch
    scores = model(x)
    loss = cross_entropy(scores, y, reduction="sum")
    return ForwardOutput(loss, sample_size=len(y), logs={"accuracy": (scores.argmax(1) == y).sum()})


trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, max_grad_norm=1.0)
evaluator = create_evaluator(model, forward)
Validation(evaluator, held_out).attach(trainer)
EarlyStopping(evaluator, "loss", patience=2).attach(trainer)
total = trainer.total_updates(loader, max_epochs=3)
LearningRateSchedule(CosineAnnealingLR(optimizer, T_max=total)).attach(trainer)
Checkpoint("runs/ours", score="loss", keep=1).attach(trainer, evaluator=evaluator)
attach_defaults(trainer, evaluator=evaluator, directory="runs/ours")
trainer.run(loader, max_epochs=3)
print("validation loss", evaluator.state.metrics["loss"])
