"""The programs: each one row of data, started as the page named beside it starts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A program of a framework.

    Attributes:
        framework: The framework, and the package whose version is shown.
        shape: The job in a few words: model, method, batch and length.
        command: What follows `ebbtide dry-run --`; `jobs/` has scripts and
            configurations.
        source: Page of the documentation.
        needs: Models and data sets, by their names on the hub.
        gpu: Preset of the machine.
        ranks: Ranks where the command does not state them.
        environment: Environment that it runs in, by the name of its file
            `requirements-NAME.txt`.
        steps: Iterations: 1 where the program does not get further with this torch.
    """

    name: str
    framework: tuple[str, str]
    shape: str
    command: str
    source: str
    needs: tuple[str, ...] = ()
    gpu: str = "h100-80gb"
    ranks: int | None = None
    environment: str = "main"
    steps: int = 2


_TRL = ("TRL", "trl")
_DEEPSPEED = ("DeepSpeed", "deepspeed")
_MEGATRON = ("Megatron-core", "megatron-core")
_MEGATRON_PAGE = "https://docs.nvidia.com/megatron-core/developer-guide/latest/get-started/quickstart.html"
_QUANTIZATION_PAGE = "https://huggingface.co/docs/peft/developer_guides/quantization"
_TORCHTUNE, _TORCHTUNE_PAGE = (
    ("torchtune", "torchtune"),
    "https://github.com/meta-pytorch/torchtune",
)
_TORCHTUNE_NEEDS = ("meta-llama/Meta-Llama-3.1-8B-Instruct", "yahma/alpaca-cleaned")
# Where the model is; the configurations of torchtune name a folder below /tmp.
_LLAMA_3_1 = (
    "checkpointer.checkpoint_dir=meta-llama/Meta-Llama-3.1-8B-Instruct "
    "tokenizer.path=meta-llama/Meta-Llama-3.1-8B-Instruct/original/tokenizer.model"
)
PROGRAMS = (
    Program(
        "trl-sft",
        _TRL,
        "Qwen2.5-0.5B, full, packed, 8 x 1,024",
        "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name "
        "trl-lib/Capybara --packing "
        "--output_dir Qwen2.5-0.5B-SFT",
        "https://huggingface.co/docs/trl/clis",
        ("Qwen/Qwen2.5-0.5B", "trl-lib/Capybara"),
    ),
    Program(
        "trl-dpo",
        _TRL,
        "Qwen2-0.5B, LoRA 32, 2 x 8 x 1,024",
        "trl dpo --model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name "
        "trl-lib/ultrafeedback_binarized "
        "--learning_rate 5.0e-6 --num_train_epochs 1 --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 8 "
        "--eval_strategy steps --eval_steps 50 --use_peft --lora_r 32 --lora_alpha 16 "
        "--output_dir Qwen2-0.5B-DPO",
        "https://huggingface.co/docs/trl/dpo_trainer",
        ("Qwen/Qwen2-0.5B-Instruct", "trl-lib/ultrafeedback_binarized"),
    ),
    Program(
        "transformers-trainer",
        ("transformers", "transformers"),
        "BERT base, full, 8 x 512",
        "python jobs/hf_trainer.py",
        "https://huggingface.co/docs/transformers/training",
        ("google-bert/bert-base-cased", "Yelp/yelp_review_full"),
        "a100-40gb-pcie",
    ),
    Program(
        "peft-qlora",
        ("bitsandbytes", "bitsandbytes"),
        "Llama-3.1-8B, QLoRA (NF4, double), 4 x 512, paged 8-bit AdamW",
        "python jobs/peft_qlora.py",
        _QUANTIZATION_PAGE,
        ("meta-llama/Llama-3.1-8B", "tatsu-lab/alpaca"),
        "rtx4090",
    ),
    Program(
        "accelerate-nlp",
        ("accelerate", "accelerate"),
        "BERT base, full, bf16, 16 x 128 on each of 2 ranks",
        "accelerate launch --num_processes 2 --mixed_precision bf16 "
        "jobs/accelerate_nlp.py",
        "https://huggingface.co/docs/accelerate/basic_tutorials/launch",
        ("google-bert/bert-base-cased", "nyu-mll/glue/mrpc"),
        "a100-40gb-pcie",
    ),
    Program(
        "trl-reward",
        _TRL,
        "Qwen2.5-0.5B, full, 8 pairs",
        "trl reward --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name "
        "trl-lib/ultrafeedback_binarized "
        "--output_dir Qwen2.5-0.5B-Reward",
        "https://huggingface.co/docs/trl/reward_trainer",
        ("Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/ultrafeedback_binarized"),
    ),
    Program(
        "peft-lora",
        ("peft", "peft"),
        "mt0-large, LoRA 8, 8 x 128",
        "python jobs/peft_lora.py",
        "https://huggingface.co/docs/peft/quicktour",
        ("bigscience/mt0-large", "tatsu-lab/alpaca"),
        "a100-40gb-pcie",
    ),
    Program(
        "peft-int8",
        ("bitsandbytes", "bitsandbytes"),
        "Llama-3.1-8B, int8 with LoRA 16, 4 x 512, 8-bit AdamW",
        "python jobs/peft_int8.py",
        _QUANTIZATION_PAGE,
        ("meta-llama/Llama-3.1-8B", "tatsu-lab/alpaca"),
        "a100-40gb-pcie",
    ),
    Program(
        "lightning-fsdp",
        ("Lightning", "lightning"),
        "encoder and decoder of 32 layers x 1,024, FSDP on 4 ranks, 20 x 35",
        "python jobs/lightning_fsdp.py",
        "https://lightning.ai/docs/pytorch/stable/advanced/model_parallel/fsdp.html",
        ranks=4,
    ),
    Program(
        "torchtune-full",
        _TORCHTUNE,
        "Llama-3.1-8B, full, 2, PagedAdamW8bit",
        "tune run full_finetune_single_device --config llama3_1/8B_full_single_device "
        + _LLAMA_3_1,
        _TORCHTUNE_PAGE,
        _TORCHTUNE_NEEDS,
        "rtx4090",
        environment="torchtune",
    ),
    Program(
        "torchtune-lora",
        _TORCHTUNE,
        "Llama-3.1-8B, LoRA 8, 2",
        "tune run lora_finetune_single_device --config llama3_1/8B_lora_single_device "
        + _LLAMA_3_1,
        _TORCHTUNE_PAGE,
        _TORCHTUNE_NEEDS,
        "rtx4090",
        environment="torchtune",
    ),
    Program(
        "torchtune-qlora",
        _TORCHTUNE,
        "Llama-3.1-8B, QLoRA 8, 2",
        "tune run lora_finetune_single_device --config llama3_1/8B_qlora_single_device "
        + _LLAMA_3_1,
        _TORCHTUNE_PAGE,
        _TORCHTUNE_NEEDS,
        "rtx4090",
        environment="torchtune",
    ),
    Program(
        "torchtune-packed",
        _TORCHTUNE,
        "Llama-3.1-8B, LoRA 8, packed, 2 x 4,096",
        "tune run lora_finetune_single_device --config llama3_1/8B_lora_single_device "
        "dataset.packed=True "
        "tokenizer.max_seq_len=4096 " + _LLAMA_3_1,
        "https://meta-pytorch.org/torchtune/stable/basics/packing.html",
        _TORCHTUNE_NEEDS,
        environment="torchtune",
    ),
    Program(
        "torchtune-distributed",
        _TORCHTUNE,
        "Llama-3.1-8B, full, FSDP2 on 4 ranks, 2",
        "tune run --nproc_per_node 4 full_finetune_distributed --config "
        "llama3_1/8B_full " + _LLAMA_3_1,
        _TORCHTUNE_PAGE,
        _TORCHTUNE_NEEDS,
        environment="torchtune",
    ),
    Program(
        "deepspeed-zero1",
        _DEEPSPEED,
        "GPT-2 XL, fp16, ZeRO-1 on 8 ranks, 8 x 1,024",
        "deepspeed --num_gpus 8 jobs/deepspeed_zero.py --deepspeed --deepspeed_config "
        "jobs/zero1.json",
        "https://www.deepspeed.ai/tutorials/zero/",
        ("openai-community/gpt2-xl",),
        "a100-40gb-pcie",
    ),
    Program(
        "deepspeed-zero2-offload",
        _DEEPSPEED,
        "GPT-2 XL, fp16, ZeRO-2 with the optimizer on the host, 8 ranks, 8 x 1,024",
        "deepspeed --num_gpus 8 jobs/deepspeed_zero.py --deepspeed --deepspeed_config "
        "jobs/zero2.json",
        "https://www.deepspeed.ai/tutorials/zero-offload/",
        ("openai-community/gpt2-xl",),
        "a100-40gb-pcie",
    ),
    Program(
        "deepspeed-zero3-trainer",
        _DEEPSPEED,
        "Llama-3.1-8B, full, bf16, Trainer under ZeRO-3 on 8 ranks, 1 x 2,048",
        "torchrun --nproc-per-node 8 jobs/deepspeed_zero3.py",
        "https://huggingface.co/docs/transformers/deepspeed",
        ("meta-llama/Llama-3.1-8B", "tatsu-lab/alpaca"),
    ),
    Program(
        "fsdp2",
        ("FSDP2", "torch"),
        "Llama-3.1-8B, full, bf16 over fp32, 8 ranks, 1 x 8,192",
        "torchrun --nproc_per_node 8 jobs/fsdp2.py",
        "https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html",
        ("meta-llama/Llama-3.1-8B",),
    ),
    Program(
        "torchtitan",
        ("torchtitan", "torchtitan"),
        "Llama-3.1-8B, full, 8 ranks, 1 x 8,192",
        "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config "
        "llama3_8b "
        "--parallelism.spmd_backend partial_dtensor --training.disable_cuda_graphs "
        "--hf_assets_path meta-llama/Llama-3.1-8B --dataloader.dataset_path allenai/c4",
        "https://github.com/pytorch/torchtitan",
        ("meta-llama/Llama-3.1-8B", "allenai/c4"),
        steps=1,
    ),
    Program(
        "sentence-transformers",
        ("sentence-transformers", "sentence-transformers"),
        "mpnet-base, fp16, 16 triplets",
        "python jobs/sentence_transformer.py",
        "https://sbert.net/docs/sentence_transformer/training_overview.html",
        ("microsoft/mpnet-base", "sentence-transformers/all-nli"),
        "a100-40gb-pcie",
    ),
    Program(
        "diffusers-unconditional",
        ("diffusers", "diffusers"),
        "UNet of 114 M parameters, fp16, 16 x 128 x 128",
        "accelerate launch jobs/diffusers_unconditional.py",
        "https://huggingface.co/docs/diffusers/tutorials/basic_training",
        gpu="a100-40gb-pcie",
    ),
    Program(
        "diffusers-sdxl-lora",
        ("diffusers", "diffusers"),
        "Stable Diffusion XL, LoRA 4, fp16, 1 x 1,024 x 1,024",
        "python jobs/diffusers_sdxl_lora.py",
        "https://huggingface.co/docs/diffusers/training/sdxl",
        ("stabilityai/stable-diffusion-xl-base-1.0",),
        "a100-40gb-pcie",
    ),
    Program(
        "liger",
        ("Liger", "liger-kernel"),
        "Llama-3.1-8B, full, bf16, 8 x 2,048, checkpointing",
        "python jobs/liger_full.py",
        "https://github.com/linkedin/Liger-Kernel",
        ("meta-llama/Llama-3.1-8B",),
    ),
    Program(
        "torchao-float8",
        ("torchao", "torchao"),
        "Llama-3.2-1B, float8, 8-bit AdamW, 4 x 2,048",
        "python jobs/torchao_float8.py",
        "https://docs.pytorch.org/ao/stable/pretraining.html",
        ("meta-llama/Llama-3.2-1B-Instruct",),
    ),
    Program(
        "torchao-int8-lora",
        ("torchao", "torchao"),
        "Llama-3.1-8B, int8 weights with LoRA 8, 1 x 2,048",
        "python jobs/torchao_int8_lora.py",
        _QUANTIZATION_PAGE,
        ("meta-llama/Llama-3.1-8B",),
        "a100-40gb-pcie",
    ),
    Program(
        "hqq-lora",
        ("HQQ", "hqq"),
        "Llama-3.1-8B, 4-bit HQQ with LoRA 32, 1 x 2,048",
        "python jobs/hqq_lora.py",
        "https://github.com/dropbox/hqq",
        ("meta-llama/Llama-3.1-8B",),
        "a100-40gb-pcie",
    ),
    Program(
        "peft-gptq",
        ("GPTQModel", "gptqmodel"),
        "Llama-3.1-8B, 4-bit GPTQ with LoRA 16, fp16, 1 x 2,048, checkpointing",
        "python jobs/peft_quantized.py "
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4",
        _QUANTIZATION_PAGE,
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4",),
        "rtx4090",
        environment="gptq",
    ),
    Program(
        "peft-awq",
        ("GPTQModel", "gptqmodel"),
        "Llama-3.1-8B, 4-bit AWQ with LoRA 16, fp16, 1 x 2,048, checkpointing",
        "python jobs/peft_quantized.py "
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
        _QUANTIZATION_PAGE,
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",),
        "rtx4090",
        environment="gptq",
    ),
    Program(
        "megatron-gpt3",
        _MEGATRON,
        "GPT-3 175 B, bf16, tensors on 8 and pipeline on 16 ranks (1F1B), 16 x 1 x "
        "2,048",
        "torchrun --nproc_per_node 8 --nnodes 16 jobs/megatron_gpt.py",
        _MEGATRON_PAGE,
    ),
    Program(
        "megatron-interleaved",
        _MEGATRON,
        "GPT-3 175 B, as above, 3 chunks a rank (interleaved 1F1B)",
        "torchrun --nproc_per_node 8 --nnodes 16 jobs/megatron_gpt.py "
        "--virtual-stages 3",
        _MEGATRON_PAGE,
    ),
    Program(
        "megatron-offload",
        _MEGATRON,
        "GPT-3 175 B, as in megatron-gpt3, all updates on the host",
        "torchrun --nproc_per_node 8 --nnodes 16 jobs/megatron_gpt.py "
        "--optimizer-cpu-offload",
        _MEGATRON_PAGE,
    ),
    Program(
        "ray-train",
        ("Ray Train", "ray"),
        "BERT base, Trainer, 2 ranks, 8 x 512",
        "python jobs/ray_train.py",
        "https://docs.ray.io/en/latest/train/getting-started-transformers.html",
        ("google-bert/bert-base-cased", "Yelp/yelp_review_full"),
        "a100-40gb-pcie",
    ),
    Program(
        "timm-vit",
        ("timm", "timm"),
        "ViT-B/16, fp16, 128 x 224 x 224, EMA",
        "python jobs/timm_vit.py",
        "https://huggingface.co/docs/timm/training_script",
        gpu="a100-40gb-pcie",
        environment="vision",
    ),
    Program(
        "torchvision-detection",
        ("torchvision", "torchvision"),
        "Faster R-CNN with ResNet-50, fp32, 2 images of 427 to 640 pixels",
        "python jobs/torchvision_detection.py",
        "https://github.com/pytorch/vision/tree/main/references/detection",
        gpu="rtx4090",
        environment="vision",
    ),
    Program(
        "axolotl-lora",
        ("Axolotl", "axolotl"),
        "Llama-3.2-1B, LoRA 16, packed, 2 x 2,048",
        "axolotl train jobs/axolotl_lora.yml",
        "https://docs.axolotl.ai/docs/getting-started.html",
        ("meta-llama/Llama-3.2-1B-Instruct", "teknium/GPT4-LLM-Cleaned"),
        "rtx4090",
        environment="axolotl",
    ),
    Program(
        "llamafactory-lora",
        ("LLaMA-Factory", "llamafactory"),
        "Llama-3.1-8B, LoRA 8, 1 x 2,048",
        "llamafactory-cli train jobs/llamafactory_lora.yaml",
        "https://llamafactory.readthedocs.io/en/latest/getting_started/sft.html",
        ("meta-llama/Llama-3.1-8B", "llamafactory"),
        "rtx4090",
        environment="factory",
    ),
)
