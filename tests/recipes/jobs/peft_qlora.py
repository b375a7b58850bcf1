"""Fine-tune Llama 3.1 8B by QLoRA: 4-bit weights of bitsandbytes under adapters of
PEFT, with a paged optimizer."""

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

NAME = "meta-llama/Llama-3.1-8B"
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
tokenizer = AutoTokenizer.from_pretrained(NAME)
model = AutoModelForCausalLM.from_pretrained(
    NAME, quantization_config=quantization, device_map="auto"
)
model = prepare_model_for_kbit_training(model)
adapters = LoraConfig(
    r=16,
    lora_alpha=8,
    target_modules="all-linear",
    lora_dropout=0.05,
    task_type="CAUSAL_LM",
)
model = get_peft_model(model, adapters)
model.print_trainable_parameters()

dataset = load_dataset("tatsu-lab/alpaca", split="train")
dataset = dataset.map(
    lambda row: tokenizer(
        row["text"], padding="max_length", max_length=512, truncation=True
    ),
    remove_columns=dataset.column_names,
)
arguments = TrainingArguments(
    output_dir="llama-qlora",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    learning_rate=2e-4,
    bf16=True,
    optim="paged_adamw_8bit",
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(
    model=model, args=arguments, train_dataset=dataset, data_collator=collator
).train()
