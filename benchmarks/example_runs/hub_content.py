"""Models and data sets of a hub, by the names that examples use, with random content.

Models have their published shapes and weights without content.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.recipes import hub
from tests.recipes.models import DATA, MODELS, Data, Model

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
_IMAGES = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "size": {"height": 224, "width": 224},
}
_SOUNDS = {
    "feature_extractor_type": "Wav2Vec2FeatureExtractor",
    "feature_size": 1,
    "sampling_rate": 16_000,
    "padding_value": 0.0,
    "do_normalize": True,
    "return_attention_mask": False,
}


def _bert(architecture: str = "BertForMaskedLM", **config: Any) -> Model:
    return Model("bert", architecture, {"pad_token_id": 3, **config}, 512)


def _roberta(layers: int = 12, **config: Any) -> Model:
    values = {"num_hidden_layers": layers, "vocab_size": 50_265, **_IDS, **config}
    values["max_position_embeddings"] = 520
    return Model("roberta", "RobertaForMaskedLM", values, 512)


def _neox(architecture: str, **config: Any) -> Model:
    values = {
        "hidden_size": 2_048,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "intermediate_size": 8_192,
        "vocab_size": 50_304,
        "dtype": "bfloat16",
    }
    return Model("gpt_neox", architecture, values | _IDS | config, 2_048)


def _qwen(kind: str, width: int, layers: int, **config: Any) -> Model:
    values = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "vocab_size": 151_936,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    name = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    return Model(kind, name, values | _IDS | config)


_MINI = _bert(
    vocab_size=30_522,
    hidden_size=384,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=1_536,
)
_BERT = _bert()
_DISTILBERT = Model("distilbert", "DistilBertForMaskedLM", {"pad_token_id": 3}, 512)
_QWEN3 = _qwen(
    "qwen3",
    1_024,
    28,
    intermediate_size=3_072,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)
_PYTHIA = _neox("GPTNeoXForCausalLM")
_REWARD = _neox("GPTNeoXForSequenceClassification", num_labels=1)
_VIT = Model("vit", "ViTForImageClassification", {}, 512)
_OWN_MODELS = {
    "bert-base-cased": MODELS["google-bert/bert-base-cased"],
    "google-bert/bert-base-uncased": _BERT,
    "distilbert/distilbert-base-uncased": _DISTILBERT,
    "naver/splade-cocondenser-ensembledistil": _BERT,
    "distilbert/distilroberta-base": _roberta(6),
    "FacebookAI/roberta-base": _roberta(),
    "roberta-base": _roberta(),
    "microsoft/MiniLM-L12-H384-uncased": _MINI,
    "nreimers/MiniLM-L6-H384-uncased": replace(
        _MINI, config={**_MINI.config, "num_hidden_layers": 6}
    ),
    "gpt2": Model("gpt2", "GPT2LMHeadModel", {}, 1_024),
    "openai-community/gpt2": Model("gpt2", "GPT2LMHeadModel", {}, 1_024),
    "google-t5/t5-small": Model(
        "t5",
        "T5ForConditionalGeneration",
        {"decoder_start_token_id": 0, "vocab_size": 32_128},
        512,
    ),
    "xlnet/xlnet-base-cased": Model(
        "xlnet", "XLNetLMHeadModel", {"n_layer": 12, "d_model": 768, "n_head": 12}, 512
    ),
    "HuggingFaceTB/SmolLM-360M": Model(
        "llama",
        "LlamaForCausalLM",
        {
            "vocab_size": 49_152,
            "hidden_size": 960,
            "intermediate_size": 2_560,
            "num_hidden_layers": 32,
            "num_attention_heads": 15,
            "num_key_value_heads": 5,
            "tie_word_embeddings": True,
        }
        | _IDS,
        2_048,
    ),
    "facebook/opt-350m": Model(
        "opt",
        "OPTForCausalLM",
        {"hidden_size": 1_024, "ffn_dim": 4_096, "num_hidden_layers": 24} | _IDS,
        2_048,
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen(
        "qwen2",
        1_536,
        28,
        intermediate_size=8_960,
        num_attention_heads=12,
        num_key_value_heads=2,
    ),
    "trl-lib/qwen1.5-1.8b-sft": _qwen(
        "qwen2",
        2_048,
        24,
        intermediate_size=5_504,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen3-0.6B": _QWEN3,
    "EleutherAI/pythia-1b-deduped": _PYTHIA,
    "trl-lib/pythia-1b-deduped-tldr-sft": _PYTHIA,
    "trl-lib/pythia-1b-deduped-tldr-rm": _REWARD,
    "google/vit-base-patch16-224-in21k": replace(
        _VIT,
        files={
            "preprocessor_config.json": {"image_processor_type": "ViTImageProcessor"}
            | _IMAGES
        },
    ),
    "nvidia/mit-b0": Model(
        "segformer",
        "SegformerForSemanticSegmentation",
        {},
        512,
        files={
            "preprocessor_config.json": _IMAGES
            | {"image_processor_type": "SegformerImageProcessor"}
            | {"size": {"height": 512, "width": 512}}
        },
    ),
    "facebook/wav2vec2-base": Model(
        "wav2vec2",
        "Wav2Vec2ForPreTraining",
        {},
        512,
        files={"preprocessor_config.json": _SOUNDS},
    ),
}
_MT0 = MODELS["bigscience/mt0-large"]
_OWN_MODELS["bigscience/mt0-small"] = replace(
    _MT0,
    config=_MT0.config
    | {"d_model": 512, "d_ff": 1_024, "num_heads": 6}
    | {"num_layers": 8, "num_decoder_layers": 8},
)
_OWN_MODELS["Qwen/Qwen2-1.5B-Instruct"] = _OWN_MODELS["Qwen/Qwen2.5-1.5B-Instruct"]
_OWN_MODELS["microsoft/mpnet-base"] = MODELS["microsoft/mpnet-base"]
_OWN_MODELS["Qwen/Qwen2-0.5B"] = MODELS["Qwen/Qwen2-0.5B-Instruct"]


def _turns(*words: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": count} for n, count in enumerate(words)]


_PAIRS = Data(
    {"prompt": _turns(40), "chosen": _turns(0, 60)[1:], "rejected": _turns(0, 60)[1:]}
)
_PROMPTS = Data({"prompt": 120, "completion": 30}, 400, ("train", "test", "validation"))
_ALPACA = {"instruction": 20, "input": 12, "output": 60, "text": 90}
_STS = Data(
    {"sentence1": 12, "sentence2": 12, "score": 0.4},
    400,
    ("train", "validation", "test"),
)
_OWN_DATA = {
    "trl-lib/ultrafeedback_binarized": _PAIRS,
    "trl-internal-testing/hh-rlhf-helpful-base-trl-style": _PAIRS,
    "trl-lib/kto-mix-14k": Data(
        {"prompt": _turns(40), "completion": _turns(0, 60)[1:], "label": (2,)}
    ),
    "trl-lib/ultrafeedback-gpt-3.5-turbo-helpfulness": Data(
        {"prompt": _turns(40), "completion": _turns(0, 60)[1:], "label": (2,)}
    ),
    "trl-lib/prm800k": Data(
        {"prompt": 60, "completions": [20, 20, 20], "labels": [(2,), (2,), (2,)]}
    ),
    "trl-lib/tldr": _PROMPTS,
    "trl-lib/chatbot_arena_completions": Data({"messages": _turns(40, 120)}, 200),
    "trl-lib/ultrafeedback-prompt": Data({"prompt": _turns(40)}, 200),
    "trl-lib/Capybara": DATA["trl-lib/Capybara"],
    "tpo-alignment/triple-preference-ultrafeedback-40K": Data(
        {
            "prompt": _turns(40),
            "reference": _turns(0, 60)[1:],
            "chosen": _turns(0, 60)[1:],
            "rejected": _turns(0, 60)[1:],
        }
    ),
    "AI-MO/NuminaMath-TIR": Data({"problem": 60, "solution": 80}, 2_000),
    "timdettmers/openassistant-guanaco": Data({"text": 200}, 300),
    "yahma/alpaca-cleaned": Data(_ALPACA, 2_500, ("train",)),
    "imdb": Data({"text": 200, "label": (2,)}, 2_000),
    "gtfintechlab/financial_phrasebank_sentences_allagree": Data(
        {"sentence": 25, "label": (3,)}, 2_500, ("train",)
    ),
    "nyu-mll/glue": Data(
        {"sentence1": 22, "sentence2": 22, "label": (2,), "idx": (9_999,)},
        400,
        ("train", "validation", "test"),
    ),
    "sentence-transformers/stsb": _STS,
    "sentence-transformers/all-nli": Data(
        {"anchor": 12, "positive": 10, "negative": 10}, 12_000, ("train", "dev", "test")
    ),
    "sentence-transformers/all-nli@pair-score": Data(
        {"sentence1": 12, "sentence2": 10, "score": 0.5}, 12_000, ("train", "dev")
    ),
    "sentence-transformers/all-nli@pair-class": Data(
        {"premise": 12, "hypothesis": 10, "label": (3,)},
        100_000,
        ("train", "dev", "test"),
    ),
    "sentence-transformers/quora-duplicates": Data({"text": 12}, 2, ("train",)),
    "sentence-transformers/quora-duplicates@pair-class": Data(
        {"sentence1": 12, "sentence2": 12, "label": (2,)}, 12_000, ("train",)
    ),
    "sentence-transformers/wiki1m-for-simcse": Data({"text": 20}, 12_000, ("train",)),
    "sentence-transformers/askubuntu": Data(
        {"query": 12, "positive": [10, 10], "negative": [10, 10, 10]},
        50,
        ("test", "dev"),
    ),
    "sentence-transformers/askubuntu-questions": Data({"text": 12}, 3_000, ("train",)),
}
# Data sets whose columns have named classes.
_CLASSES: dict[str, dict[str, Any]] = {
    "nyu-mll/glue": {"label": {"class_label": {"names": {"0": "no", "1": "yes"}}}}
}
# A measure of the evaluate library.
_MEASURE = """
import datasets
import evaluate


class Measure(evaluate.Metric):
    def _info(self):
        number = datasets.Value("float64")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references, **kwargs):
        right = sum(map(float.__eq__, map(float, predictions), map(float, references)))
        return {"accuracy": right / max(len(predictions), 1), "f1": 0.5}
"""


def make(name: str, target: Path) -> None:
    """Make a model, a data set, or a measure (`measure/NAME`)."""
    target.mkdir(parents=True)
    if name.startswith("measure/"):
        (target / f"{target.name}.py").write_text(_MEASURE)
    elif name == "runwayml/stable-diffusion-v1-5":
        _write_stable_diffusion(target)
    elif name in _OWN_MODELS:
        model = _OWN_MODELS[name]
        config = {"dtype": "float32", **model.config}
        hub._write_model(target, replace(model, config=config))
        _let_all_versions_read(target)
    elif name in _OWN_DATA:
        _write_data(name, target, _OWN_DATA[name])
    elif name in MODELS:
        hub._write_model(target, MODELS[name])
        _let_all_versions_read(target)
    else:
        hub._write_data(target, DATA[name])


def _let_all_versions_read(target: Path) -> None:
    """Name the class of a tokenizer as transformers 4 does, and write the vocabulary
    for its tokenizers in Python."""
    path = target / "tokenizer_config.json"
    if not path.exists():
        return
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    kind = json.loads((target / "config.json").read_text())["model_type"]
    if kind not in ("bert", "xlnet"):
        settings["model_input_names"] = ["input_ids", "attention_mask"]
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    path.write_text(json.dumps(settings))
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    (target / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    (target / "merges.txt").write_text("#version: 0.2\n")


def _write_stable_diffusion(target: Path) -> None:
    """Write a pipeline of Stable Diffusion 1.5's shape."""
    import diffusers
    import torch
    import transformers

    scheduler = diffusers.PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"
    )
    scheduler.save_pretrained(target / "scheduler")
    with torch.device("meta"):
        text = transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                hidden_size=768, intermediate_size=3_072, num_attention_heads=12
            )
        )
        unet = diffusers.UNet2DConditionModel(
            cross_attention_dim=768, attention_head_dim=8, sample_size=64
        )
        blocks = (128, 256, 512, 512)
        vae = diffusers.AutoencoderKL(
            block_out_channels=blocks,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            sample_size=512,
        )
    text.config.dtype = torch.float32
    text.config.architectures = ["CLIPTextModel"]
    text.config.save_pretrained(target / "text_encoder")
    unet.save_config(target / "unet")
    vae.save_config(target / "vae")
    names = ("diffusion_pytorch_model", "diffusion_pytorch_model", "model")
    folders = ("unet", "vae", "text_encoder")
    for folder, name, module in zip(folders, names, (unet, vae, text), strict=True):
        tensors = {
            key: tuple(value.shape) for key, value in module.state_dict().items()
        }
        path = target / folder / f"{name}.safetensors"
        hub.write_sparse_safetensors(path, tensors)
    letters = [*map(chr, range(97, 123))]
    words = ["<|startoftext|>", "<|endoftext|>", *letters]
    words += [f"{letter}</w>" for letter in letters]
    (target / "tokenizer").mkdir()
    vocabulary = {word: number for number, word in enumerate(words)}
    (target / "tokenizer" / "vocab.json").write_text(json.dumps(vocabulary))
    (target / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    settings = {"model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    path = target / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(settings))
    parts = {
        "scheduler": ["diffusers", "PNDMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "feature_extractor": [None, None],
        "image_encoder": [None, None],
        "safety_checker": [None, None],
    }
    index = {"_class_name": "StableDiffusionPipeline", **parts}
    (target / "model_index.json").write_text(json.dumps(index))


def _write_data(name: str, target: Path, data: Data) -> None:
    """Write a data set: its configurations of other columns (`NAME@CONFIGURATION`), and
    common names of configurations, which are all the same."""
    hub._write_data(target, data)
    files = _split_files(data.splits)
    configurations = [
        {"config_name": each, "data_files": files}
        for each in ("default", "triplet", "mrpc", "cola", "sst2", "5768", "pair")
    ]
    for key, other in _OWN_DATA.items():
        owner, _, configuration = key.partition("@")
        if owner == name and configuration:
            (target / configuration).mkdir()
            hub._write_data(target / configuration, other)
            files = _split_files(other.splits, f"{configuration}/")
            row = {"config_name": configuration, "data_files": files}
            configurations.append(row)
    head = {"configs": configurations}
    if name in _CLASSES:
        features = [
            {"name": key, "dtype": _CLASSES[name].get(key, _type_of(kind))}
            for key, kind in data.columns.items()
        ]
        head["dataset_info"] = [
            {"config_name": each["config_name"], "features": features}
            for each in configurations
        ]
    (target / "README.md").write_text(f"---\n{json.dumps(head)}\n---\n")


def _type_of(kind: Any) -> str:
    return "int64" if isinstance(kind, tuple) else "string"


def _split_files(splits: tuple[str, ...], folder: str = "") -> list[dict[str, str]]:
    return [{"split": each, "path": f"{folder}{each}.jsonl"} for each in splits]
