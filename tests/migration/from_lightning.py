"""A training run with Lightning; see docs/migration.md."""

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 4)
data = TensorDataset(x, (x @ torch.randn(4, 3)).argmax(1))
loader, held_out = DataLoader(data, batch_size=8), DataLoader(data, batch_size=32)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)

    def training_step(self, batch, index):
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        scores = self.net(x)
        self.log("val_loss", cross_entropy(scores, y))
        self.log("val_accuracy", (scores.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        schedule = CosineAnnealingLR(optimizer, T_max=18)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


best = ModelCheckpoint("runs/lightning", monitor="val_loss", save_last=True)
trainer = L.Trainer(
    max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=[best, EarlyStopping("val_loss", patience=2)]
)
trainer.fit(Classifier(), loader, held_out, ckpt_path="last")
print("validation loss", float(trainer.callback_metrics["val_loss"]))
