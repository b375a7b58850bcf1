"""Train adapters of PEFT on Llama 3.1 8B, whose weights bitsandbytes holds in 8
bits."""

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
tokenizer = AutoTokenizer.from_pretrained(NAME)
model = AutoModelForCausalLM.from_pretrained(
    NAME, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map="auto"
)
model = prepare_model_for_kbit_training(model)
adapters = LoraConfig(
    r=16,
    lora_alpha=32,
    target_modules=["q_proj", "v_proj"],
    lora_dropout=0.05,
    bias="none",
    task_type="CAUSAL_LM",
)
model = get_peft_model(model, adapters)
dataset = load_dataset("tatsu-lab/alpaca", split="train").map(
    lambda rows: tokenizer(rows["text"], truncation=True, max_length=512), batched=True
)
arguments = TrainingArguments(
    output_dir="outputs",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    warmup_steps=100,
    max_steps=200,
    learning_rate=2e-4,
    fp16=True,
    logging_steps=1,
    optim="adamw_bnb_8bit",
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(
    model=model, train_dataset=dataset, args=arguments, data_collator=collator
).train()
