"""Tiny models of transformers with random weights and options, and their training with
ebbtide or without."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ebbtide.features.layers.engine.model_layers import layer_modules
from ebbtide.interleave import (
    InterleavedOptimizer,
    move_layers,
    offload_activations,
    stream_weights,
)
from ebbtide.interleave.engine.devices.emulated import EmulatedDevice
from tests.interleave.engine.grid.draw import ACTIVATIONS, MOVES, WEIGHTS
from tests.interleave.engine.grid.models import add_adapters
from tests.interleave.engine.grid.reference import ReferenceOptimizer
from tests.interleave.engine.grid.training import Results, deterministic
from tests.interleave.engine.training import MACHINE

STEPS = 8
VOCABULARY, LENGTH, BATCH = 40, 8, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "n_positions": 32,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    **{
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 3), ("ffn_dim", 24))
    },
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 3,
    "num_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 5}
VIT = {
    **{name: SIZES[name] for name in SIZES if "size" in name or "num_" in name},
    **IMAGES,
}
CONVNEXT = {
    "num_channels": 3,
    "patch_size": 2,
    "depths": [2, 3],
    "hidden_sizes": [8, 16],
    "num_stages": 2,
}
SPEECH = {
    **SIZES,
    "conv_dim": (8, 8),
    "conv_kernel": (5, 3),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "feat_extract_norm": "layer",
    "ctc_loss_reduction": "mean",
}
WHISPER = {
    **BART,
    "num_mel_bins": 4,
    "max_source_positions": 8,
    "max_target_positions": 16,
}
EXPERTS = {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2}
QWEN_EXPERTS = {
    **GROUPED,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "state_size": 4,
    "pad_token_id": 0,
}

# By name: the class of the model, its configuration and the kind of its inputs.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Bert": ("BertForMaskedLM", SIZES, "text"),
    "Roberta": ("RobertaForMaskedLM", SIZES, "text"),
    "Electra": ("ElectraForMaskedLM", {**SIZES, "embedding_size": 16}, "text"),
    "GPT2": ("GPT2LMHeadModel", GPT2, "text"),
    "GPTNeoX": ("GPTNeoXForCausalLM", SIZES, "text"),
    "Llama": ("LlamaForCausalLM", GROUPED, "text"),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED, "text"),
    "Gemma2": (
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": 8, "sliding_window": 4},
        "text",
    ),
    "Phi": ("PhiForCausalLM", GROUPED, "text"),
    "Bloom": ("BloomForCausalLM", {**GPT2, "hidden_size": 16}, "text"),
    "T5": ("T5ForConditionalGeneration", T5, "text"),
    "Bart": ("BartForConditionalGeneration", BART, "text"),
    "Mixtral": ("MixtralForCausalLM", EXPERTS, "text"),
    "Qwen2Moe": ("Qwen2MoeForCausalLM", QWEN_EXPERTS, "text"),
    "Mamba": ("MambaForCausalLM", MAMBA, "text"),
    "ViT": ("ViTForImageClassification", VIT, "image"),
    "ConvNext": ("ConvNextForImageClassification", CONVNEXT, "image"),
    "Wav2Vec2": ("Wav2Vec2ForCTC", SPEECH, "speech"),
    "Hubert": ("HubertForCTC", SPEECH, "speech"),
    "Whisper": ("WhisperForConditionalGeneration", WHISPER, "spectrum"),
}


@dataclass(frozen=True)
class ModelJob:
    """A model of transformers, and how it is trained."""

    seed: int
    family: str
    dtype: torch.dtype
    tied: bool
    checkpointed: bool
    trained: str
    weights: str
    activations: str
    overlap: str
    gradients: str
    memory_budget: float | None
    moves: str

    def model(self) -> Any:
        import transformers

        torch.manual_seed(self.seed)
        name, options, kind = FAMILIES[self.family]
        model_class = getattr(transformers, name)
        tied = {"tie_word_embeddings": self.tied} if kind == "text" else {}
        model = model_class(model_class.config_class(**options, **tied)).to(self.dtype)
        if self.checkpointed and model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self._freeze(model)
        return model.train()

    def _freeze(self, model: Any) -> None:
        """Leave some layers, or adapters of all of them, to be trained."""
        layers = [*layer_modules(model).values()]
        if self.trained == "last layers":
            model.requires_grad_(False)
            layers[-1].requires_grad_(True)
        elif self.trained == "adapters":
            model.requires_grad_(False)
            for layer in layers:
                add_adapters(layer)
            model.to(self.dtype)

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        kind = FAMILIES[self.family][2]
        tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
        if kind == "image":
            images = torch.randn(BATCH, 3, 8, 8, generator=generator).to(self.dtype)
            return {"pixel_values": images, "labels": torch.arange(BATCH)}
        if kind == "speech":
            sound = torch.randn(BATCH, 160, generator=generator).to(self.dtype)
            return {"input_values": sound, "labels": tokens[:, :3]}
        if kind == "spectrum":
            spectrum = torch.randn(BATCH, 4, 16, generator=generator).to(self.dtype)
            return {"input_features": spectrum, "labels": tokens}
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[1, :2] = 0
        return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}

    def train(self, is_plain: bool) -> Results:
        """Return losses, parameters and buffers."""
        model, generator = self.model(), torch.Generator().manual_seed(self.seed)
        results: Results = []
        with ExitStack() as stack, deterministic():
            optimizer = self._open(model, is_plain, stack)
            torch.manual_seed(self.seed + 1)
            for _ in range(STEPS):
                loss = model(**self.batch(generator)).loss
                results.append(("loss", loss.detach().clone()))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            results += [
                (name, value.detach().clone())
                for name, value in model.state_dict().items()
            ]
        return results

    def _open(self, model: Any, is_plain: bool, stack: ExitStack) -> Any:
        params = [
            {
                "params": [
                    param for param in model.parameters() if param.requires_grad
                ],
                "lr": 1e-2,
            }
        ]
        if is_plain:
            return ReferenceOptimizer(params, "adamw")
        device = EmulatedDevice(None, 2e7, 2e7)
        stack.callback(device.close)
        options = {
            "activations": self.activations,
            "memory_budget": self.memory_budget,
            "device": device,
        }
        calls = [
            partial(stream_weights, weights=self.weights, device=device),
            partial(offload_activations, **options),
        ]
        if self.moves == "one call":
            calls = [partial(move_layers, weights=self.weights, **options)]
        elif self.moves == "activations first":
            calls.reverse()
        for call in calls:
            stack.enter_context(call(model))
        optimizer = InterleavedOptimizer(
            params,
            policy="pipelined",
            machine=MACHINE,
            subgroup_params=1000,
            overlap=self.overlap,
            gradients=self.gradients,
            model=model,
            device=device,
            threads=1,
        )
        stack.callback(optimizer.close)
        return optimizer


def random_model_job(seed: int) -> ModelJob:
    """Return the job of a seed; seeds in order have all families in turn."""
    source = random.Random(seed)
    draw: Callable[..., Any] = source.choice
    gradients = draw(("kept", "streamed"))
    trained, weights = (
        draw(("all", "all", "last layers", "adapters")),
        draw(("streamed:1", "streamed:2", "streamed")),
    )
    moves = draw(MOVES)
    return ModelJob(
        seed=seed,
        family=[*FAMILIES][seed % len(FAMILIES)],
        dtype=draw((torch.float32, torch.bfloat16)),
        tied=source.random() < 0.5,
        checkpointed=source.random() < 0.3,
        trained=trained,
        weights=weights if draw(("auto", "fixed")) == "fixed" else draw(WEIGHTS),
        activations=draw(ACTIVATIONS[:-1]),
        overlap="forward"
        if gradients == "kept"
        else draw(("forward", "backward", "both")),
        gradients=gradients,
        memory_budget=draw((None, 5e4)),
        moves=moves,
    )
