"""Train Faster R-CNN as torchvision's references do: images of several sizes, boxes as
COCO has them."""

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.models.detection import fasterrcnn_resnet50_fpn


class Images(Dataset):
    """Images of 427 to 640 pixels, each with 7 objects, the mean of COCO."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        numbers = torch.Generator().manual_seed(index)
        height, width = (
            int(torch.randint(427, 641, (), generator=numbers)) for _ in range(2)
        )
        corners = 300 * torch.rand(7, 2, generator=numbers)
        labels = torch.randint(1, 91, (7,), generator=numbers)
        return torch.rand(3, height, width), {
            "boxes": torch.cat([corners, corners + 100], 1),
            "labels": labels,
        }


model = fasterrcnn_resnet50_fpn(
    weights=None, weights_backbone=None, num_classes=91, trainable_backbone_layers=3
)
model.cuda().train()
parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4)
loader = DataLoader(
    Images(),
    2,
    shuffle=True,
    num_workers=4,
    collate_fn=lambda rows: tuple(zip(*rows, strict=True)),
)
for images, targets in loader:
    images = [image.cuda() for image in images]
    targets = [
        {name: value.cuda() for name, value in target.items()} for target in targets
    ]
    losses = model(images, targets)
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print({name: value.item() for name, value in losses.items()}, flush=True)
