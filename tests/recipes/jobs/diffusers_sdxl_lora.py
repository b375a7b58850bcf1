"""Train adapters on the UNet of Stable Diffusion XL at 1024 x 1024, as the LoRA script
of diffusers does."""

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from torch.nn import functional as F

unet = UNet2DConditionModel.from_config("stabilityai/stable-diffusion-xl-base-1.0/unet")
autoencoder = AutoencoderKL.from_config("stabilityai/stable-diffusion-xl-base-1.0/vae")
unet.requires_grad_(False).to("cuda", dtype=torch.float16)
autoencoder.requires_grad_(False).to("cuda", dtype=torch.float32)
unet.add_adapter(
    LoraConfig(
        r=4,
        lora_alpha=4,
        init_lora_weights="gaussian",
        target_modules=["to_k", "to_q", "to_v", "to_out.0"],
    )
)
unet.enable_gradient_checkpointing()
unet.train()
adapters = [parameter for parameter in unet.parameters() if parameter.requires_grad]
for parameter in adapters:
    parameter.data = parameter.to(torch.float32)
optimizer = torch.optim.AdamW(adapters, lr=1e-4)
scheduler = DDPMScheduler()
scaler = torch.amp.GradScaler("cuda")
while True:
    pixels = torch.randn(1, 3, 1024, 1024).to("cuda")
    with torch.no_grad():
        latents = (
            autoencoder.encode(pixels).latent_dist.sample()
            * autoencoder.config.scaling_factor
        )
    latents = latents.to(torch.float16)
    noise = torch.randn_like(latents)
    steps = torch.randint(0, scheduler.config.num_train_timesteps, (1,), device="cuda")
    noisy = scheduler.add_noise(latents, noise, steps)
    text = torch.randn(1, 77, 2048, device="cuda", dtype=torch.float16)
    conditions = {
        "text_embeds": torch.randn(1, 1280, device="cuda", dtype=torch.float16),
        "time_ids": torch.tensor([[1024, 1024, 0, 0, 1024, 1024]], device="cuda"),
    }
    with torch.autocast("cuda", torch.float16):
        predicted = unet(
            noisy, steps, text, added_cond_kwargs=conditions, return_dict=False
        )[0]
    loss = F.mse_loss(predicted.float(), noise.float())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(adapters, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
