"""A training run with Accelerate; see docs/migration.md."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 4)
data = TensorDataset(x, (x @ torch.randn(4, 3)).argmax(1))
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
schedule = CosineAnnealingLR(optimizer, T_max=18)

accelerator = Accelerator(gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
loader, held_out = DataLoader(data, batch_size=8), DataLoader(data, batch_size=32)
model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
best = float("inf")
for epoch in range(3):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
    model.eval()
    losses, number = torch.zeros(()), 0
    for x, y in held_out:
        with torch.no_grad():
            scores, targets = accelerator.gather_for_metrics((model(x), y))
        losses, number = losses + cross_entropy(scores, targets, reduction="sum"), number + len(targets)
    loss = float(losses / number)
    accelerator.save_state("runs/accelerate/last")
    if loss < best:
        best = loss
        accelerator.save_state("runs/accelerate/best")
print("validation loss", loss)
