"""Components of torchtune for recipes whose tokenizer and data are not on this host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def make_tokenizer(max_seq_len: int) -> Any:
    """Return what recipes read of a tokenizer."""
    return SimpleNamespace(max_seq_len=max_seq_len, pad_id=0, eos_id=0, bos_id=0, stop_tokens=[0])


def make_data(tokenizer: Any, samples: int, packed: bool, pairs: bool) -> Any:
    """Return samples of `max_seq_len` tokens; `pairs`: a chosen and a rejected one in each."""
    from torch.utils.data import Dataset
    from torchtune.datasets import PackedDataset

    tokens = [1] * tokenizer.max_seq_len
    sample = {"tokens": tokens, "labels": tokens}
    if pairs:
        kinds = [f"{kind}_{part}" for kind in ("chosen", "rejected") for part in ("input_ids", "labels")]
        sample = dict.fromkeys(kinds, tokens)

    class Samples(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {name: list(values) for name, values in sample.items()}

    return PackedDataset(Samples(), max_seq_len=tokenizer.max_seq_len) if packed else Samples()
