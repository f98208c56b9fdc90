"""A training run with Hugging Face's Trainer; see docs/migration.md."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

torch.manual_seed(0)
x = torch.randn(96, 4)
data = [{"x": a, "labels": b} for a, b in zip(x, (x @ torch.randn(4, 3)).argmax(1), strict=True)]


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)

    def forward(self, x, labels):
        scores = self.net(x)
        return {"loss": cross_entropy(scores, labels), "logits": scores}


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
arguments = TrainingArguments(
    "runs/trainer",
    num_train_epochs=3,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=32,
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    train_sampling_strategy="sequential",
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    report_to="none",
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=data,
    eval_dataset=data,
    optimizers=(optimizer, CosineAnnealingLR(optimizer, T_max=18)),
    callbacks=[EarlyStoppingCallback(2)],
)
trainer.train()
print("validation loss", trainer.evaluate()["eval_loss"])
