"""Fine-tune Llama 3.1 8B with Unsloth: 4-bit weights, its patched layers, and TRL's SFT, as its notebooks do."""

from unsloth import FastLanguageModel  # isort: skip (it patches the others)

from pathlib import Path

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

# Of a name it would take weights of its own from the hub.
NAME = str(Path("meta-llama/Llama-3.1-8B").resolve())
model, tokenizer = FastLanguageModel.from_pretrained(NAME, max_seq_length=2_048, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=16,
    lora_dropout=0,
    bias="none",
    use_gradient_checkpointing="unsloth",
    random_state=3407,
)
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=load_dataset("tatsu-lab/alpaca", split="train"),
    args=SFTConfig(
        dataset_text_field="text",
        max_length=2_048,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        warmup_steps=5,
        max_steps=60,
        learning_rate=2e-4,
        logging_steps=1,
        optim="adamw_8bit",
        output_dir="outputs",
        report_to="none",
    ),
)
trainer.train()
