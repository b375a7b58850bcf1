"""Scripts of jobs of frameworks, which resume from their last checkpoint.

The environment has the number of steps in STEPS, and the file of the result in RESULT.
"""

from __future__ import annotations

TRAINER = """
import os
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
torch.manual_seed(0)
model = GPT2LMHeadModel(config)
rows = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in rows]
arguments = TrainingArguments(
    output_dir="checkpoints", max_steps=10, per_device_train_batch_size=4,
    logging_steps=1, report_to=[], use_cpu=True, save_steps=5, warmup_steps=3,
    optim="adamw_torch_fused", gradient_accumulation_steps=2, disable_tqdm=True)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
if os.environ["STEPS"] == "5":
    from transformers import TrainerCallback
    class Stop(TrainerCallback):
        def on_step_end(self, arguments, state, control, **others):
            control.should_training_stop = state.global_step == 5
    trainer.add_callback(Stop())
begin = "checkpoints/checkpoint-5"
trainer.train(resume_from_checkpoint=begin if os.path.isdir(begin) else None)
print("ended at", trainer.state.global_step)
torch.save([param.detach() for param in model.parameters()], os.environ["RESULT"])
"""

ACCELERATE = """
import os
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(),
                            torch.nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
rows = torch.randn(80, 16, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.DataLoader(list(rows), batch_size=4, num_workers=1)
model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
begin = 0
if os.path.isdir("checkpoint"):
    accelerator.load_state("checkpoint")
    begin = 5
for number, batch in enumerate(data):
    if number < 2 * begin:
        continue
    with accelerator.accumulate(model):
        accelerator.backward((model(batch) - batch).square().mean())
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if number == 9:
        accelerator.save_state("checkpoint")
        if os.environ["STEPS"] == "5":
            break
print("ended at", (number + 1) // 2)
torch.save([param.detach() for param in model.parameters()], os.environ["RESULT"])
"""

LIGHTNING = """
import os
import torch
import pytorch_lightning as lightning
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(),
                                       torch.nn.Linear(64, 16))
    def training_step(self, batch, number):
        return (self.net(batch) - batch).square().mean()
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
torch.manual_seed(0)
model = Model()
rows = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.DataLoader(list(rows), batch_size=4)
trainer = lightning.Trainer(
    max_epochs=int(os.environ["STEPS"]) // 5, accelerator="cpu", logger=False,
    enable_progress_bar=False, enable_checkpointing=False, gradient_clip_val=0.5)
begin = "checkpoint.ckpt"
trainer.fit(model, data, ckpt_path=begin if os.path.exists(begin) else None)
if os.environ["STEPS"] == "5":
    trainer.save_checkpoint(begin)
print("ended at", trainer.global_step)
torch.save([param.detach() for param in model.parameters()], os.environ["RESULT"])
"""
