"""Train a decoder with Lightning's FSDP strategy, as its page about billions of
parameters does."""

import lightning as L
import torch
from lightning.pytorch.demos import Transformer
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 33_278  # of WikiText-2
LENGTH = 35


class LanguageModel(L.LightningModule):
    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary = vocabulary
        self.model = None

    def configure_model(self):
        if self.model is None:
            self.model = Transformer(
                vocab_size=self.vocabulary, nlayers=32, nhid=4096, ninp=1024, nhead=64
            )

    def training_step(self, batch, batch_index):
        inputs, target = batch
        output = self.model(inputs, target)
        loss = F.nll_loss(output, target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


torch.manual_seed(42)
texts = torch.randint(VOCABULARY, (2_000, LENGTH + 1))
loader = DataLoader(TensorDataset(texts[:, :-1], texts[:, 1:]), batch_size=20)
policy = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
strategy = FSDPStrategy(auto_wrap_policy=policy, activation_checkpointing_policy=policy)
trainer = L.Trainer(
    accelerator="cuda",
    devices=4,
    strategy=strategy,
    precision="bf16-mixed",
    max_epochs=1,
)
trainer.fit(LanguageModel(VOCABULARY), loader)
