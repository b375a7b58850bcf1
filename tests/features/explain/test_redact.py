"""Texts without what identifies people and machines."""

from __future__ import annotations

from ebbtide.features.explain.redact import redacted

TEXT = """\
alice@gpu-node17:~/runs$ HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz python train.py
  File "/home/alice/work/secret-project/train.py", line 12, in main
  File "/data/envs/alice/lib/python3.12/site-packages/torch/_tensor.py", line 647
gpu-node17:4411:4500 [0] NCCL INFO Bootstrap : Using eth0:10.12.0.7<0>
MASTER_ADDR=gpu-node17 export WANDB_API_KEY: 'aaaaaaaaaabbbbbbbbbbccccccccccdddddddddd'
mail bob.b@example.org, https://user:pa55word@git.example.org/x.git
see https://pytorch.org/docs/stable/notes/cuda.html
C:\\Users\\Carol\\models\\llama\\train.py
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""
PRIVATE = (
    "alice",
    "gpu-node17",
    "hf_abc",
    "secret-project",
    "10.12.0.7",
    "aaaaaaaaaabbbbb",
    "bob.b",
    "pa55word",
    "git.example",
    "Carol",
)


def test_redacted__names_nobody_and_still_reads() -> None:
    text = redacted(TEXT)
    for private in PRIVATE:
        assert private not in text, text
    kept = (
        "train.py",
        "site-packages/torch/_tensor.py",
        "https://pytorch.org/docs/stable/notes/cuda.html",
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "line 647",
    )
    for part in kept:
        assert part in text, text


def test_redacted__gives_one_value_one_name() -> None:
    text = redacted("ssh host=node-a\nssh host=node-b\nssh host=node-a")
    assert text == "ssh host=HOST1\nssh host=HOST2\nssh host=HOST1"
