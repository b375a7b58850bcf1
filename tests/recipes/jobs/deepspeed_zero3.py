"""Train Llama 3.1 8B with the Trainer of transformers under ZeRO stage 3, as the page
about DeepSpeed does."""

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

NAME = "meta-llama/Llama-3.1-8B"
arguments = TrainingArguments(
    output_dir="llama-zero3",
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    bf16=True,
    deepspeed="jobs/zero3.json",
)
tokenizer = AutoTokenizer.from_pretrained(NAME)
model = AutoModelForCausalLM.from_pretrained(NAME)
dataset = load_dataset("tatsu-lab/alpaca", split="train")
dataset = dataset.map(
    lambda row: tokenizer(
        row["text"], padding="max_length", max_length=2_048, truncation=True
    ),
    remove_columns=dataset.column_names,
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(
    model=model, args=arguments, train_dataset=dataset, data_collator=collator
).train()
