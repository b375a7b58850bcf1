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

# Generates sequences without gradients in each step, and trains on their rewards.
GENERATION = """
import os
import torch
from torch import nn

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(16, 32)
        self.cell = nn.GRUCell(32, 32)
        self.scores = nn.Linear(32, 16)
        self.value = nn.Linear(32, 1)
    def forward(self, tokens):
        state = torch.zeros(len(tokens), 32)
        states = []
        for column in self.tokens(tokens).unbind(1):
            state = self.cell(column, state)
            states.append(state)
        states = torch.stack(states, 1)
        return self.scores(states), self.value(states).squeeze(-1)
    @torch.no_grad()
    def generate(self, generator, length=6):
        tokens = torch.zeros(8, 1, dtype=torch.long)
        for _ in range(length):
            chances = self(tokens)[0][:, -1].softmax(-1)
            drawn = torch.multinomial(chances, 1, generator=generator)
            tokens = torch.cat([tokens, drawn], 1)
        return tokens

torch.manual_seed(0)
policy = Policy()
critic = list(policy.value.parameters())
actor = [one for name, one in policy.named_parameters() if "value" not in name]
optimizers = [torch.optim.AdamW(actor, lr=1e-2), torch.optim.Adam(critic, lr=1e-2)]
begin = 0
if os.path.isdir("checkpoint"):
    saved = torch.load("checkpoint/state.pt")
    policy.load_state_dict(saved["policy"])
    for optimizer, state in zip(optimizers, saved["optimizers"]):
        optimizer.load_state_dict(state)
    begin = 5
for step in range(begin, int(os.environ["STEPS"])):
    generator = torch.Generator().manual_seed(step)
    policy.eval()
    tokens = policy.generate(generator)
    rewards = (tokens[:, 1:] == 3).float().sum(1, keepdim=True)
    policy.train()
    for _ in range(2):
        scores, values = policy(tokens[:, :-1])
        chances = scores.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        advantages = (rewards - values).detach()
        loss = -(chances * advantages).mean() + (values - rewards).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
    if step == 4:
        os.makedirs("checkpoint")
        torch.save({"policy": policy.state_dict(),
                    "optimizers": [one.state_dict() for one in optimizers]},
                   "checkpoint/state.pt")
print("ended at", os.environ["STEPS"])
torch.save([param.detach() for param in policy.parameters()], os.environ["RESULT"])
"""
