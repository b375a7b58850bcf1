"""Fingerprints of tensors: the compiled loop has the values of the definition, and
changes show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed.tensor

from ebbtide.interleave.engine.numerics import tensor_fingerprint
from ebbtide.interleave.engine.numerics.tensor_fingerprint import (
    fingerprint_tensor,
    of_words,
)


def printed(tensor: torch.Tensor) -> torch.Tensor:
    result = fingerprint_tensor(tensor)
    assert result is not None
    return result


@pytest.mark.parametrize("words", [0, 1, 1023, 1024, 5000, 2**19 + 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_fingerprint_tensor__has_the_values_of_the_definition(
    words: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tensor = torch.randint(-(2**63), 2**63 - 1, (words,))
    assert torch.equal(printed(tensor), of_words(tensor))


def test_fingerprint_tensor__reads_the_elements_of_views_alone() -> None:
    whole = torch.randn(40, 30)
    for view in (
        whole[:, ::2],
        whole.t(),
        whole[3:, 5:],
        whole[0].expand(7, -1),
        whole[::3],
    ):
        before, others = printed(view), whole.clone()
        mask = torch.zeros(40, 30, dtype=torch.bool).as_strided(
            view.size(), view.stride(), view.storage_offset()
        )
        mask.fill_(True)
        outside = ~mask._base if mask._base is not None else ~mask
        whole[outside] += 1
        assert torch.equal(printed(view), before)
        with torch.no_grad():
            view.as_strided((1,), (1,), view.storage_offset()).add_(1)
        assert not torch.equal(printed(view), before)
        whole.copy_(others)


def test_fingerprint_tensor__knows_what_it_cannot_read() -> None:
    assert fingerprint_tensor(torch.eye(3).to_sparse()) is None
    assert fingerprint_tensor(torch.empty(3, device="meta")) is None
    conjugated = torch.randn(3, dtype=torch.complex64).conj()
    assert torch.equal(printed(conjugated), printed(conjugated.resolve_conj()))


def test_of_words__parts_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (5000,))
    expected = of_words(words)
    monkeypatch.setattr(tensor_fingerprint, "_PART_WORDS", 2048)
    assert torch.equal(of_words(words), expected)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Groups of one rank. Tests of DeepSpeed keep theirs to the end of the process."""
    distributed = torch.distributed
    if distributed.is_initialized():
        yield
        return
    store = distributed.HashStore()
    distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    distributed.destroy_process_group()


def test_fingerprint_tensor__is_of_the_local_part_of_a_dtensor(one_rank: None) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    tensor = torch.randn(4, 3)
    whole = torch.distributed.tensor.distribute_tensor(tensor, mesh)
    assert torch.equal(printed(whole), of_words(printed(tensor)))
