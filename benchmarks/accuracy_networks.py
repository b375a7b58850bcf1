"""Networks of published jobs: a model, a function that makes a batch, and one that
returns the loss of it.

Those of libraries have the library's own layers; the others have the shapes that their
sources state, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Network = tuple[nn.Module, Callable[[], list[Tensor]], Callable[..., Tensor]]


def _images(job: Any, count: int | None = None) -> Tensor:
    shape = (count or job.batch, 3, job.size, job.size)
    images = torch.randn(shape)
    is_nhwc = "nhwc" in job.options
    return images.to(memory_format=torch.channels_last) if is_nhwc else images


def _labels(job: Any, classes: int = 1000) -> Tensor:
    return torch.randint(0, classes, (job.batch,))


def _tokens(job: Any, vocabulary: int, length: int | None = None) -> Tensor:
    return torch.randint(0, vocabulary, (job.batch, length or job.size))


def classifier(name: str, job: Any) -> Network:
    """A model of timm that classifies images."""
    import timm

    timm.layers.set_fused_attn(job.attention != "math")
    sizes = {"img_size": job.size} if "vit" in name or "swin" in name else {}
    model = timm.create_model(name, **sizes)

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels)

    return model, lambda: [_images(job), _labels(job)], loss


def _bert(name: str, job: Any, kind: str) -> nn.Module:
    import transformers

    large = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    config = transformers.BertConfig(**large if name == "large" else {})
    config._attn_implementation = "eager" if job.attention == "math" else "sdpa"
    model: nn.Module = getattr(transformers, f"BertFor{kind}")(config)
    return model


def bert_pretraining(name: str, job: Any) -> Network:
    """BERT with both of its losses."""

    def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        out = model(
            tokens,
            attention_mask=torch.ones_like(tokens),
            labels=tokens,
            next_sentence_label=labels,
        )
        return out.loss

    return (
        _bert(name, job, "PreTraining"),
        lambda: [_tokens(job, 30522), _labels(job, 2)],
        loss,
    )


def bert_masked(name: str, job: Any) -> Network:
    """BERT that predicts masked tokens."""

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        out = model(tokens, attention_mask=torch.ones_like(tokens), labels=tokens)
        return out.loss

    return _bert(name, job, "MaskedLM"), lambda: [_tokens(job, 30522)], loss


def bert_questions(name: str, job: Any) -> Network:
    """BERT that marks answers."""

    def loss(model: nn.Module, tokens: Tensor, start: Tensor) -> Tensor:
        out = model(
            tokens,
            attention_mask=torch.ones_like(tokens),
            start_positions=start,
            end_positions=start,
        )
        return out.loss

    return (
        _bert(name, job, "QuestionAnswering"),
        lambda: [_tokens(job, 30522), _labels(job, job.size)],
        loss,
    )


def bert_classifier(name: str, job: Any) -> Network:
    """BERT that classifies sequences."""

    def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return model(tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss

    return (
        _bert(name, job, "SequenceClassification"),
        lambda: [_tokens(job, 28996), _labels(job, 2)],
        loss,
    )


def unet_sd2(_: str, job: Any) -> Network:
    """The U-Net of Stable Diffusion 2 on latents of an eighth of the image's side."""
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=64,
        cross_attention_dim=1024,
        attention_head_dim=[5, 10, 20, 20],
        use_linear_projection=True,
    )
    side = job.size // 8

    def batch() -> list[Tensor]:
        noise = torch.randn(job.batch, 4, side, side)
        return [noise, _labels(job), torch.randn(job.batch, 77, 1024)]

    def loss(model: nn.Module, noise: Tensor, time: Tensor, text: Tensor) -> Tensor:
        return F.mse_loss(
            model(noise, time, text, return_dict=False)[0].float(), noise.float()
        )

    return model, batch, loss


class DiffusionBlock(nn.Module):
    """A block of a diffusion transformer, whose norms the condition scales."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        from timm.layers import Mlp
        from timm.models.vision_transformer import Attention

        self.norms = nn.ModuleList(
            nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)
        )
        self.attention = Attention(width, heads, qkv_bias=True)
        self.mlp = Mlp(width, 4 * width, act_layer=partial(nn.GELU, approximate="tanh"))
        self.scales = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.scales(condition).unsqueeze(1).chunk(6, 2)
        x = x + parts[2] * self.attention(self.norms[0](x) * (1 + parts[1]) + parts[0])
        return x + parts[5] * self.mlp(self.norms[1](x) * (1 + parts[4]) + parts[3])


class DiffusionTransformer(nn.Module):
    """A diffusion transformer on latents of 4 channels in patches of 2 x 2."""

    def __init__(
        self, width: int, depth: int, heads: int, is_checkpointed: bool
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads) for _ in range(depth))
        self.labels = nn.Embedding(1001, width)
        self.head = nn.Linear(width, 32)
        self.is_checkpointed = is_checkpointed

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(latents).flatten(2).transpose(1, 2)
        condition = self.labels(labels)
        for block in self.blocks:
            if self.is_checkpointed:
                x = checkpoint(block, x, condition, use_reentrant=False)
            else:
                x = block(x, condition)
        return self.head(x)


def dit_xl2(_: str, job: Any) -> Network:
    """DiT-XL/2 on latents, and its moving average."""
    import timm

    timm.layers.set_fused_attn(job.attention != "math")
    model = DiffusionTransformer(1152, 28, 16, "checkpoint" in job.options)

    def loss(model: nn.Module, latents: Tensor, labels: Tensor) -> Tensor:
        return model(latents, labels).float().square().mean()

    def batch() -> list[Tensor]:
        return [torch.randn(job.batch, 4, job.size // 8, job.size // 8), _labels(job)]

    return model, batch, loss


class Detector(nn.Module):
    """DETR: a ResNet-50, six layers that encode its last map, and six that decode 100
    queries."""

    def __init__(self) -> None:
        super().__init__()
        import timm

        self.backbone = timm.create_model(
            "resnet50", features_only=True, out_indices=(4,)
        )
        self.project = nn.Conv2d(2048, 256, 1)
        self.transformer = nn.Transformer(256, 8, 6, 6, 2048, 0.1, batch_first=True)
        self.queries = nn.Parameter(torch.randn(100, 256))
        self.classes, self.boxes = nn.Linear(256, 92), nn.Linear(256, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.project(self.backbone(images)[0]).flatten(2).transpose(1, 2)
        x = self.transformer(x, self.queries.expand(len(x), -1, -1))
        return self.classes(x), self.boxes(x)


def detr(_: str, job: Any) -> Network:
    """DETR on images of `size` x 4/3 `size` pixels, without its matching."""

    def batch() -> list[Tensor]:
        return [torch.randn(job.batch, 3, job.size, job.size * 4 // 3)]

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        classes, boxes = model(images)
        return classes.float().square().mean() + boxes.float().square().mean()

    return Detector(), batch, loss


class Contrast(nn.Module):
    """MoCo: a ResNet-50, and a copy without gradients whose outputs wait in a queue."""

    def __init__(self) -> None:
        super().__init__()
        import timm

        self.query, self.key = (
            timm.create_model("resnet50", num_classes=128) for _ in range(2)
        )
        for value in self.key.parameters():
            value.requires_grad = False
        self.register_buffer("queue", torch.randn(128, 65536))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        query = F.normalize(self.query(first))
        with torch.no_grad():
            pairs = zip(self.query.parameters(), self.key.parameters(), strict=True)
            for own, moving in pairs:
                moving.mul_(0.999).add_(own, alpha=0.001)
            key = F.normalize(self.key(second))
        positive = (query * key).sum(1, keepdim=True)
        return torch.cat([positive, query @ self.queue], 1)


def moco(_: str, job: Any) -> Network:
    """MoCo on two views of each image."""

    def loss(model: nn.Module, first: Tensor, second: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(first, second), labels)

    return Contrast(), lambda: [_images(job), _images(job), _labels(job)], loss


class Crops(nn.Module):
    """A backbone and its head on crops of two sizes; `teacher`: on the large ones,
    without gradients."""

    def __init__(
        self, backbone: nn.Module, head: nn.Module, teacher: nn.Module | None
    ) -> None:
        super().__init__()
        self.backbone, self.head, self.teacher = backbone, head, teacher
        for value in teacher.parameters() if teacher is not None else ():
            value.requires_grad = False

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        features = torch.cat([self.backbone(large), self.backbone(small)])
        loss = self.head(features).float().log_softmax(-1).mean()
        if self.teacher is not None:
            with torch.no_grad():
                pairs = zip(
                    self.backbone.parameters(), self.teacher.parameters(), strict=False
                )
                for own, moving in pairs:
                    moving.mul_(0.996).add_(own.detach(), alpha=0.004)
                target = self.teacher(large).float().mean()
            loss = loss + target
        return loss


def _crops(model: nn.Module, job: Any, small: int) -> Network:
    """Return a network on two crops of `size` pixels and some of 96 for an image."""

    def batch() -> list[Tensor]:
        return [_images(job, 2 * job.batch), torch.randn(small * job.batch, 3, 96, 96)]

    return model, batch, lambda model, *crops: model(*crops)


def swav(_: str, job: Any) -> Network:
    """SwAV with a ResNet-50 and 3,000 prototypes, on 2 + 6 crops."""
    import timm

    backbone = timm.create_model("resnet50", num_classes=0)
    head = nn.Sequential(
        nn.Linear(2048, 2048),
        nn.BatchNorm1d(2048),
        nn.ReLU(),
        nn.Linear(2048, 128),
        nn.Linear(128, 3000, bias=False),
    )
    return _crops(Crops(backbone, head, None), job, 6)


def dino(_: str, job: Any) -> Network:
    """DINO with ViT-S/16 and 65,536 outputs, on 2 + 8 crops."""
    import timm

    timm.layers.set_fused_attn(job.attention != "math")

    def make() -> tuple[nn.Module, nn.Module]:
        backbone = timm.create_model(
            "vit_small_patch16_224", num_classes=0, dynamic_img_size=True
        )
        head = nn.Sequential(
            nn.Linear(384, 2048),
            nn.GELU(),
            nn.Linear(2048, 2048),
            nn.GELU(),
            nn.Linear(2048, 256),
            nn.Linear(256, 65536, bias=False),
        )
        return backbone, head

    teacher = nn.Sequential(*make())
    return _crops(Crops(*make(), teacher), job, 8)


def barlow(_: str, job: Any) -> Network:
    """Barlow Twins: a ResNet-50 and three layers of 8,192, on two views."""
    import timm

    layers: list[nn.Module] = [
        timm.create_model("resnet50", num_classes=0),
        nn.Linear(2048, 8192, bias=False),
    ]
    for _layer in range(2):
        layers += [nn.BatchNorm1d(8192), nn.ReLU(), nn.Linear(8192, 8192, bias=False)]

    def loss(model: nn.Module, first: Tensor, second: Tensor) -> Tensor:
        one, other = (
            F.batch_norm(model(view), None, None, training=True)
            for view in (first, second)
        )
        return (one.T @ other).float().square().sum()

    return nn.Sequential(*layers), lambda: [_images(job), _images(job)], loss


class MaskedImages(nn.Module):
    """MAE: an encoder of a quarter of the patches, and eight layers of 512 on all."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import timm

        self.encoder = timm.create_model(name, num_classes=0)
        width = self.encoder.embed_dim
        self.project = nn.Linear(width, 512)
        decoder = timm.models.VisionTransformer(embed_dim=512, depth=8, num_heads=16)
        self.blocks, self.norm = decoder.blocks, nn.LayerNorm(512)
        self.head = nn.Linear(512, 768)

    def forward(self, images: Tensor) -> Tensor:
        x = self.encoder.patch_embed(images) + self.encoder.pos_embed[:, 1:]
        order = torch.rand(x.shape[:2], device=x.device).argsort(1)[:, :49, None]
        x = (
            torch.gather(x, 1, order.expand(-1, -1, x.shape[2]))
            + self.encoder.cls_token
        )
        x = self.project(self.encoder.norm(self.encoder.blocks(x)))
        x = torch.cat([x, x.new_zeros(len(x), 147, 512)], 1)
        return self.head(self.norm(self.blocks(x)))


def masked_images(name: str, job: Any) -> Network:
    """MAE's pre-training."""
    import timm

    timm.layers.set_fused_attn(job.attention != "math")

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        return model(images).float().square().mean()

    return MaskedImages(name), lambda: [_images(job)], loss


class Pair(nn.Module):
    """CLIP: a vision transformer, and 12 layers on 77 tokens."""

    def __init__(self, name: str, width: int, outputs: int) -> None:
        super().__init__()
        import timm

        self.image = timm.create_model(name, num_classes=outputs)
        layer = nn.TransformerEncoderLayer(
            width,
            width // 64,
            4 * width,
            0.0,
            "gelu",
            batch_first=True,
            norm_first=True,
        )
        self.text = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.embedding, self.project = (
            nn.Embedding(49408, width),
            nn.Linear(width, outputs),
        )

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(77, device=tokens.device)
        text = self.project(self.text(self.embedding(tokens), mask)[:, -1])
        return F.normalize(self.image(images)) @ F.normalize(text).T


def clip(name: str, job: Any) -> Network:
    """CLIP; its model, width of text and outputs, by hyphens."""
    import timm

    timm.layers.set_fused_attn(job.attention != "math")
    model, width, outputs = name.split("-")
    pair = Pair(model, int(width), int(outputs))
    if "checkpoint" in job.options:
        pair.image.set_grad_checkpointing()

    def loss(
        model: nn.Module, images: Tensor, tokens: Tensor, labels: Tensor
    ) -> Tensor:
        return F.cross_entropy(model(images, tokens), labels)

    def batch() -> list[Tensor]:
        return [_images(job), _tokens(job, 49408, 77), torch.arange(job.batch)]

    return pair, batch, loss


def translation(_: str, job: Any) -> Network:
    """A transformer of 6 + 6 layers of 1,024 that translates."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32000, 1024)
            self.layers = nn.Transformer(1024, 16, 6, 6, 1024, 0.1, batch_first=True)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            x = self.layers(self.embedding(source), self.embedding(target))
            return x @ self.embedding.weight.T

    def loss(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model(source, target).flatten(0, 1), target.flatten())

    return Translator(), lambda: [_tokens(job, 32000), _tokens(job, 32000)], loss


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [
            nn.Conv2d(width, outputs, 3, padding=1, bias=False),
            nn.InstanceNorm2d(outputs),
            nn.LeakyReLU(0.2),
            nn.Dropout2d(0.0),
        ]
    return nn.Sequential(*layers)


class Unet(nn.Module):
    """A U-Net of four steps that begins with 32 channels, as fastMRI has it."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        self.down = nn.ModuleList(map(_convolutions, (1, *widths[:-1]), widths))
        self.middle = _convolutions(256, 512)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * w, w, 2, 2, bias=False) for w in widths[::-1]
        )
        self.join = nn.ModuleList(_convolutions(2 * w, w) for w in widths[::-1])
        self.head = nn.Conv2d(32, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for part in self.down:
            x = part(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


def unet(_: str, job: Any) -> Network:
    """A U-Net that restores grey images."""

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        return F.l1_loss(model(images), images)

    return Unet(), lambda: [torch.randn(job.batch, 1, job.size, job.size)], loss


class MessagePassing(nn.Module):
    """A graph network of five steps on states of 256, with sums over edges."""

    def __init__(self) -> None:
        super().__init__()
        width = 256

        def mlp(inputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(inputs, width),
                nn.LayerNorm(width),
                nn.ReLU(),
                nn.Dropout(0.1),
            )

        self.nodes_in, self.edges_in = nn.Linear(9, width), nn.Linear(3, width)
        # Edges see both nodes and their graph; nodes sums of both directions.
        self.edges = nn.ModuleList(mlp(4 * width) for _ in range(5))
        self.nodes = nn.ModuleList(mlp(4 * width) for _ in range(5))
        self.globals = nn.ModuleList(mlp(3 * width) for _ in range(5))
        self.head = nn.Linear(width, 128)

    def forward(
        self,
        nodes: Tensor,
        edges: Tensor,
        ends: Tensor,
        graph: Tensor,
        graph_of_edge: Tensor,
        graphs: int,
    ) -> Tensor:
        x, e = self.nodes_in(nodes), self.edges_in(edges)
        whole = x.new_zeros(graphs, 256)
        for edge, node, around in zip(
            self.edges, self.nodes, self.globals, strict=True
        ):
            e = e + edge(
                torch.cat([e, x[ends[0]], x[ends[1]], whole[graph_of_edge]], 1)
            )
            sums = [
                torch.zeros_like(x).index_add(0, end, e.to(x.dtype)) for end in ends
            ]
            x = x + node(torch.cat([x, *sums, whole[graph]], 1))
            both = [
                torch.zeros_like(whole).index_add(0, graph, x),
                torch.zeros_like(whole).index_add(0, graph_of_edge, e.to(x.dtype)),
            ]
            whole = whole + around(torch.cat([whole, *both], 1))
        return self.head(whole)


def graphs(_: str, job: Any) -> Network:
    """A graph network on molecules of `size` atoms, with 2.2 edges an atom."""
    nodes = job.batch * job.size
    edges = int(2.2 * nodes)

    def batch() -> list[Tensor]:
        return [
            torch.randn(nodes, 9),
            torch.randn(edges, 3),
            torch.randint(0, nodes, (2, edges)),
            torch.randint(0, job.batch, (nodes,)),
            torch.randint(0, job.batch, (edges,)),
            torch.rand(job.batch, 128),
        ]

    def loss(model: nn.Module, *parts: Tensor) -> Tensor:
        out = model(*parts[:5], job.batch)
        return F.binary_cross_entropy_with_logits(out, parts[5])

    return MessagePassing(), batch, loss


class ConformerBlock(nn.Module):
    """A block of a Conformer: two halves of a feed-forward network around attention and
    a convolution over time."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()

        def feed_forward() -> nn.Sequential:
            return nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.SiLU(),
                nn.Dropout(0.1),
                nn.Linear(4 * width, width),
                nn.Dropout(0.1),
            )

        self.first, self.last = feed_forward(), feed_forward()
        self.norm, self.out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, 0.1, batch_first=True)
        self.widen = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GLU()
        )
        self.convolve = nn.Sequential(
            nn.Conv1d(width, width, 31, padding=15, groups=width, bias=False),
            nn.BatchNorm1d(width),
            nn.SiLU(),
            nn.Conv1d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.convolve(self.widen(x).transpose(1, 2)).transpose(1, 2)
        return self.out(x + 0.5 * self.last(x))


class Conformer(nn.Module):
    """A Conformer on frames of 80 values, of which it keeps every fourth."""

    def __init__(self, width: int, depth: int, heads: int, outputs: int) -> None:
        super().__init__()
        self.subsample = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 2, 1),
            nn.ReLU(),
        )
        self.project = nn.Linear(20 * width, width)
        self.blocks = nn.Sequential(
            *(ConformerBlock(width, heads) for _ in range(depth))
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.subsample(frames.unsqueeze(1)).transpose(1, 2).flatten(2)
        return self.head(self.blocks(self.project(x)))


def conformer(_: str, job: Any) -> Network:
    """A Conformer of four layers of 512 with CTC, on `size` frames."""

    def loss(model: nn.Module, frames: Tensor, labels: Tensor) -> Tensor:
        scores = model(frames).float().log_softmax(-1).transpose(0, 1)
        lengths = torch.full((job.batch,), len(scores), dtype=torch.int64)
        counts = torch.full((job.batch,), labels.shape[1], dtype=torch.int64)
        return F.ctc_loss(scores, labels, lengths, counts)

    def batch() -> list[Tensor]:
        return [
            torch.randn(job.batch, job.size, 80),
            torch.randint(1, 1024, (job.batch, 100)),
        ]

    return Conformer(512, 4, 8, 1024), batch, loss


def airbench(_: str, job: Any) -> Network:
    """The network of airbench94: 64, 256 and 256 channels, two convolutions each."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 2), nn.GELU()]
    inputs = 24
    for width in (64, 256, 256):
        layers += [
            nn.Conv2d(inputs, width, 3, padding=1, bias=False),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(width, affine=False),
            nn.GELU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width, affine=False),
            nn.GELU(),
        ]
        inputs = width
    layers += [nn.MaxPool2d(3), nn.Flatten(), nn.Linear(256, 10, bias=False)]

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images).float(), labels, reduction="sum")

    return nn.Sequential(*layers), lambda: [_images(job), _labels(job, 10)], loss


# Width, width of the feed-forward network, layers, heads, heads of keys, vocabulary.
DECODERS = {
    "llama-3b": (3072, 8192, 28, 24, 8, 128256),
    "llama-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama-8b": (4096, 14336, 32, 32, 8, 128256),
    "qwen-7b": (3584, 18944, 28, 28, 4, 152064),
}
# The layers that have updates of low rank, by what sources call them.
ADAPTED = {
    "peft": ("q_proj", "v_proj"),
    "fsdp_qlora": ("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"),
    "all": tuple(f"{name}_proj" for name in ["q", "k", "v", "o", "up", "down", "gate"]),
}


class LowRank(nn.Module):
    """A linear layer with an update of low rank beside it."""

    def __init__(self, linear: nn.Module, shape: tuple[int, int], rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(shape[0], rank, bias=False)
        self.up = nn.Linear(rank, shape[1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        update = self.up(self.down(x.to(self.down.weight.dtype)))
        return self.linear(x) + update.to(x.dtype)


def _four_bits(linear: nn.Linear) -> nn.Module:
    import bitsandbytes

    sizes = linear.in_features, linear.out_features
    return bitsandbytes.nn.Linear4bit(
        *sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
    )


def low_rank(name: str, job: Any) -> Network:
    """A decoder in bfloat16 with updates of low rank: its name, the rank (0: all
    weights are trained), the layers that have them, and `4bit`."""
    import transformers

    size, rank, *words = name.split()
    width, inner, layers, heads, keys, vocabulary = DECODERS[size]
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        tie_word_embeddings=size == "llama-3b",
        dtype="bfloat16",
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    if int(rank):
        model.requires_grad_(False)
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                _adapt(part, int(rank), words)
    if "checkpoint" in job.options:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(tokens, labels=tokens).loss

    return model, lambda: [_tokens(job, vocabulary)], loss


def _adapt(part: nn.Module, rank: int, words: list[str]) -> None:
    """Add updates to the linear layers of a part, and quantize all of them."""
    for name, linear in list(part.named_children()):
        if not isinstance(linear, nn.Linear):
            continue
        shape = linear.in_features, linear.out_features
        own = _four_bits(linear) if "4bit" in words else linear
        if name in ADAPTED[words[0]]:
            own = LowRank(own, shape, rank)
            if "half" in words:
                own.down.bfloat16()
                own.up.bfloat16()
        setattr(part, name, own)


def t5(_: str, job: Any) -> Network:
    """T5 base of version 1.1 on inputs of `size` tokens and targets of 114."""
    import transformers

    config = transformers.T5Config(
        d_model=768,
        d_ff=2048,
        d_kv=64,
        num_layers=12,
        num_heads=12,
        vocab_size=32128,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    model = transformers.T5ForConditionalGeneration(config)

    def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=labels).loss

    return model, lambda: [_tokens(job, 32128), _tokens(job, 32128, 114)], loss


class RetinaNet(nn.Module):
    """RetinaNet: a pyramid of five maps on a ResNet whose norms, and whose first two
    stages, are frozen."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import timm

        self.backbone = timm.create_model(
            name, features_only=True, out_indices=(2, 3, 4)
        )
        for key, value in self.backbone.named_parameters():
            is_first = key.startswith(("conv1", "layer1"))
            value.requires_grad = not (is_first or "bn" in key or "downsample.1" in key)
        widths = (512, 1024, 2048)
        self.lateral = nn.ModuleList(nn.Conv2d(width, 256, 1) for width in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in widths)
        self.p6 = nn.Conv2d(2048, 256, 3, 2, 1)
        self.p7 = nn.Conv2d(256, 256, 3, 2, 1)
        self.classes, self.boxes = (self._head(9 * values) for values in (80, 4))

    @staticmethod
    def _head(outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(256, outputs, 3, padding=1))

    def train(self, mode: bool = True) -> RetinaNet:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        maps = self.backbone(images)
        pyramid = [
            lateral(own) for lateral, own in zip(self.lateral, maps, strict=True)
        ]
        for index in (1, 0):
            above = F.interpolate(pyramid[index + 1], pyramid[index].shape[2:])
            pyramid[index] = pyramid[index] + above
        levels = [own(x) for own, x in zip(self.smooth, pyramid, strict=True)]
        levels.append(self.p6(maps[-1]))
        levels.append(self.p7(levels[-1].relu()))
        return [self.classes(x) for x in levels], [self.boxes(x) for x in levels]


def retinanet(name: str, job: Any) -> Network:
    """RetinaNet on images of `size` x 4/3 `size` pixels, without its matching."""

    def batch() -> list[Tensor]:
        return [torch.randn(job.batch, 3, job.size, job.size * 4 // 3)]

    def loss(model: nn.Module, images: Tensor) -> Tensor:
        classes, boxes = model(images)
        scores = torch.cat([own.flatten(1) for own in classes], 1)
        wanted = torch.zeros_like(scores)
        chance = scores.sigmoid()
        entropy = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        focal = (entropy * chance**2).sum()
        return focal + sum(own.abs().sum() for own in boxes)

    return RetinaNet(name), batch, loss


NETWORKS: dict[str, Callable[[str, Any], Network]] = {
    "timm": classifier,
    "bert-pretraining": bert_pretraining,
    "bert-masked": bert_masked,
    "bert-questions": bert_questions,
    "bert-classifier": bert_classifier,
    "unet-sd2": unet_sd2,
    "dit-xl2": dit_xl2,
    "detr": detr,
    "moco": moco,
    "swav": swav,
    "dino": dino,
    "barlow": barlow,
    "mae": masked_images,
    "clip": clip,
    "translation": translation,
    "unet": unet,
    "graphs": graphs,
    "conformer": conformer,
    "airbench": airbench,
    "low-rank": low_rank,
    "t5": t5,
    "retinanet": retinanet,
}
