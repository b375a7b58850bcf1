"""Train ViT-B/16 of timm on pictures of 224 x 224 with its optimizers, losses and
averages of weights."""

import torch
from timm import create_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

model = create_model(
    "vit_base_patch16_224", pretrained=False, num_classes=1_000, drop_path_rate=0.1
).to("cuda")
average = ModelEmaV3(model, decay=0.9998)
optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-4, weight_decay=0.05)
schedule = CosineLRScheduler(optimizer, t_initial=300, warmup_t=5)
mix = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=1_000, label_smoothing=0.1)
criterion = SoftTargetCrossEntropy()
scaler = torch.amp.GradScaler("cuda")
for epoch in range(300):
    model.train()
    for _ in range(100):
        pictures = torch.randn(128, 3, 224, 224).to("cuda")
        pictures, targets = mix(pictures, torch.randint(1_000, (128,), device="cuda"))
        with torch.autocast("cuda"):
            loss = criterion(model(pictures), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update(model)
    schedule.step(epoch + 1)
