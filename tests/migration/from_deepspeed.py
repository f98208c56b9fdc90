"""A training run with DeepSpeed; see docs/migration.md."""

import deepspeed
import torch
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

config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
best = float("inf")
for epoch in range(3):
    engine.train()
    for x, y in loader:
        engine.backward(cross_entropy(engine(x), y))
        engine.step()
    engine.eval()
    losses, number = torch.zeros(()), 0
    for x, y in held_out:
        with torch.no_grad():
            losses, number = losses + cross_entropy(engine(x), y, reduction="sum"), number + len(y)
    loss = float(losses / number)
    engine.save_checkpoint("runs/deepspeed/last")
    if loss < best:
        best = loss
        engine.save_checkpoint("runs/deepspeed/best")
print("validation loss", loss)
