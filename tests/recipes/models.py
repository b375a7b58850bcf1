"""Models and data sets of the programs: published configurations, and columns with the
lengths of their texts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Model:
    """A model of the hub.

    Attributes:
        kind: `model_type` of transformers; None: no model of transformers, only
            `files`.
        config: Values of its config.json that differ from those of its class.
        positions: Longest text of its tokenizer.
        shards: Files of weights.
        tiktoken_tokens: Tokens of `original/tokenizer.model`, in the form of tiktoken;
            0: there is no such file.
        files: Other files, as JSON.
    """

    kind: str | None
    architecture: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    positions: int = 131_072
    shards: int = 1
    tiktoken_tokens: int = 0
    files: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """A data set of the hub: columns by name, with the number of words of a text,
    `(n,)` for a label below n, a list or a dictionary of these, or the value itself;
    `files`: others, as text or JSON."""

    columns: dict[str, Any]
    rows: int = 120
    splits: tuple[str, ...] = ("train", "test")
    files: dict[str, Any] = field(default_factory=dict)


def _llama(**config: Any) -> Model:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    return Model("llama", "LlamaForCausalLM", {"dtype": "bfloat16", **ids, **config})


def _qwen2(**config: Any) -> Model:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    return Model(
        "qwen2",
        "Qwen2ForCausalLM",
        {"dtype": "bfloat16", "rms_norm_eps": 1e-6, **ids, **config},
    )


_LLAMA_3_ROPE = {
    "rope_theta": 500_000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
}
_LLAMA_3_1_8B = _llama(
    vocab_size=128_256, hidden_size=4_096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131_072, rope_parameters=_LLAMA_3_ROPE, tie_word_embeddings=False,
)  # fmt: skip
_GPTQ = {
    "bits": 4, "quant_method": "gptq", "group_size": 128, "desc_act": True, "sym": True, "damp_percent": 0.1,
    "true_sequential": True, "checkpoint_format": "gptq",
}  # fmt: skip
_AWQ = {
    "bits": 4,
    "quant_method": "awq",
    "group_size": 128,
    "version": "gemm",
    "zero_point": True,
}
_QWEN2_0_5B = _qwen2(
    vocab_size=151_936, hidden_size=896, intermediate_size=4_864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True,
)  # fmt: skip
_SDXL_UNET = {
    "_class_name": "UNet2DConditionModel", "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20], "block_out_channels": [320, 640, 1280], "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"], "layers_per_block": 2,
    "projection_class_embeddings_input_dim": 2816, "sample_size": 128, "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"], "use_linear_projection": True,
}  # fmt: skip
_SDXL_AUTOENCODER = {
    "_class_name": "AutoencoderKL", "block_out_channels": [128, 256, 512, 512], "latent_channels": 4,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2,
    "sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True,
}  # fmt: skip
MODELS = {
    "meta-llama/Llama-3.1-8B": _LLAMA_3_1_8B,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": replace(
        _LLAMA_3_1_8B, shards=4, tiktoken_tokens=128_000
    ),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4": replace(
        _LLAMA_3_1_8B,
        config={
            **_LLAMA_3_1_8B.config,
            "dtype": "float16",
            "quantization_config": _GPTQ,
        },
    ),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": replace(
        _LLAMA_3_1_8B,
        config={
            **_LLAMA_3_1_8B.config,
            "dtype": "float16",
            "quantization_config": _AWQ,
        },
    ),
    "meta-llama/Llama-3.2-1B-Instruct": _llama(
        vocab_size=128_256,
        hidden_size=2_048,
        intermediate_size=8_192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rope_parameters={**_LLAMA_3_ROPE, "factor": 32.0},
        tie_word_embeddings=True,
    ),
    "Qwen/Qwen2.5-0.5B": _QWEN2_0_5B,
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN2_0_5B,
    "bigscience/mt0-large": Model(
        "mt5",
        "MT5ForConditionalGeneration",
        {
            "vocab_size": 250_112,
            "d_model": 1_024,
            "d_kv": 64,
            "d_ff": 2_816,
            "num_layers": 24,
            "num_decoder_layers": 24,
            "num_heads": 16,
            "tie_word_embeddings": False,
        },
        512,
    ),
    "microsoft/mpnet-base": Model(
        "mpnet",
        "MPNetForMaskedLM",
        {"vocab_size": 30_527, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2},
        512,
    ),
    "openai-community/gpt2-xl": Model(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "n_embd": 1_600,
            "n_head": 25,
            "n_layer": 48,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "stabilityai/stable-diffusion-xl-base-1.0": Model(
        None,
        files={"unet/config.json": _SDXL_UNET, "vae/config.json": _SDXL_AUTOENCODER},
    ),
    "Qwen/Qwen2-0.5B-Instruct": _QWEN2_0_5B,
    "google-bert/bert-base-cased": Model(
        "bert", "BertForMaskedLM", {"vocab_size": 28_996, "pad_token_id": 3}, 512
    ),
}

_TURNS = [{"role": "user", "content": 120}, {"role": "assistant", "content": 240}]
_ALPACA = {"instruction": 12, "input": 6, "output": 60}
DATA = {
    "llamafactory": Data(
        _ALPACA,
        300,
        ("train",),
        {"dataset_info.json": {"alpaca_en_demo": {"file_name": "train.jsonl"}}},
    ),
    "teknium/GPT4-LLM-Cleaned": Data(_ALPACA, 300, ("train",)),
    "allenai/c4": Data(
        {"text": 400, "timestamp": 1, "url": 1},
        300,
        ("train",),
        {
            "README.md": (
                "---\nconfigs:\n- config_name: en\n  data_files: train.jsonl\n---\n"
            )
        },
    ),
    "sentence-transformers/all-nli": Data(
        {"anchor": 14, "positive": 8, "negative": 8}, 300
    ),
    "yahma/alpaca-cleaned": Data({**_ALPACA, "output": 110}, 1_000, ("train",)),
    "trl-lib/Capybara": Data({"messages": _TURNS * 2}),
    "trl-lib/ultrafeedback_binarized": Data(
        {"prompt": _TURNS[:1], "chosen": _TURNS[1:], "rejected": _TURNS[1:]}
    ),
    "Yelp/yelp_review_full": Data({"text": 130, "label": (5,)}, 120),
    "nyu-mll/glue/mrpc": Data(
        {"sentence1": 22, "sentence2": 22, "label": (2,), "idx": (120,)},
        splits=("train", "validation"),
    ),
    "tatsu-lab/alpaca": Data({**_ALPACA, "text": 90}, 300, ("train",)),
}
