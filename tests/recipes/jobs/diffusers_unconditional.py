"""Train a UNet that makes pictures of 128 x 128, as the tutorial of diffusers does."""

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SIZE, BATCH, EPOCHS = 128, 16, 50
model = UNet2DModel(
    sample_size=SIZE,
    in_channels=3,
    out_channels=3,
    layers_per_block=2,
    block_out_channels=(128, 128, 256, 256, 512, 512),
    down_block_types=(
        "DownBlock2D", "DownBlock2D", "DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D",
    ),
    up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D", "UpBlock2D", "UpBlock2D"),
)  # fmt: skip
loader = DataLoader(
    TensorDataset(torch.randn(64, 3, SIZE, SIZE)), batch_size=BATCH, shuffle=True
)
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = get_cosine_schedule_with_warmup(optimizer, 500, len(loader) * EPOCHS)
accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=1)
model, optimizer, loader, schedule = accelerator.prepare(
    model, optimizer, loader, schedule
)
for _ in range(EPOCHS):
    for (clean,) in loader:
        noise = torch.randn(clean.shape, device=clean.device)
        steps = torch.randint(
            0,
            noise_scheduler.config.num_train_timesteps,
            (len(clean),),
            device=clean.device,
        )
        noisy = noise_scheduler.add_noise(clean, noise, steps)
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(noisy, steps, return_dict=False)[0], noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss.detach().item()}, step=0)
