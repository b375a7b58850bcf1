"""Fine-tune BERT with the Trainer of transformers, as its tutorial does."""

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

dataset = load_dataset("Yelp/yelp_review_full")
tokenizer = AutoTokenizer.from_pretrained("google-bert/bert-base-cased")


def tokenize(examples):
    return tokenizer(examples["text"], padding="max_length", truncation=True)


dataset = dataset.map(tokenize, batched=True)
model = AutoModelForSequenceClassification.from_pretrained(
    "google-bert/bert-base-cased", num_labels=5
)
arguments = TrainingArguments(
    output_dir="yelp_review_classifier", eval_strategy="epoch"
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
)
trainer.train()
