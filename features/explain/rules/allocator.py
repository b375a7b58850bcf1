"""Rules about the figures of torch's allocator."""

from collections.abc import Iterator

from ebbtide.features.explain.answer import Answer, Result, rule
from ebbtide.features.explain.readers.allocator import AllocatorFigures
from ebbtide.features.explain.record import Place, Records
from ebbtide.units import bytes_text, counted

# Shares of the reserved memory below which nothing is said.
_MIN_WAITING, _MIN_CACHED = 0.05, 0.2


@rule(20)
def explain_waiting_blocks(records: Records) -> Iterator[Result]:
    for figures in records.of(AllocatorFigures):
        pools = figures.current_bytes
        if not {"active", "allocated", "reserved"} <= pools.keys():
            continue
        waiting = pools["active"] - pools["allocated"]
        if waiting >= _MIN_WAITING * pools["reserved"]:
            yield Answer(
                rule="waiting-blocks",
                title=f"{bytes_text(waiting)} are freed by the program and still "
                "active: blocks that wait for another stream",
                evidence=(
                    f"active {bytes_text(pools['active'])}, allocated "
                    f"{bytes_text(pools['allocated'])}: this is not fragmentation",
                ),
                advice="record_stream keeps them until that stream has passed: let it "
                "wait less far behind (FSDP: limit_all_gathers, FSDP2 needs none), or "
                "free them after an event",
                places=(figures.place,),
            )


@rule(21)
def explain_cached_memory(records: Records) -> Iterator[Result]:
    for figures in records.of(AllocatorFigures):
        pools = figures.current_bytes
        if not {"allocated", "reserved"} <= pools.keys():
            continue
        used = pools.get("active", pools["allocated"])
        cached = pools["reserved"] - used
        split = pools.get("inactive_split")
        if cached < _MIN_CACHED * pools["reserved"]:
            continue
        peak = figures.peak_bytes.get("allocated")
        evidence = [
            f"reserved {bytes_text(pools['reserved'])}, in use {bytes_text(used)}"
        ]
        if peak is not None:
            evidence.append(f"peak of what tensors had: {bytes_text(peak)}")
        if split is not None:
            evidence.append(f"{bytes_text(split)} of it lie between tensors in use")
        yield Answer(
            rule="cached-memory",
            title=f"torch keeps {bytes_text(cached)} that no tensor uses",
            evidence=tuple(evidence),
            advice="this is its cache, not a leak: torch.cuda.empty_cache() returns "
            "whole segments to other processes; expandable_segments:True keeps less in "
            "pieces",
            places=(figures.place,),
        )


@rule(22)
def explain_retries(records: Records) -> Iterator[Result]:
    for figures in records.of(AllocatorFigures):
        if figures.retries:
            errors = counted(figures.errors or 0, "out-of-memory error")
            yield retries_answer(figures.retries, (errors,), figures.place)


def retries_answer(count: int, evidence: tuple[str, ...], place: Place) -> Answer:
    """Return the answer to allocations that torch has tried anew."""
    return Answer(
        rule="retries",
        title=f"memory was full {counted(count, 'time')}: torch flushed its cache and "
        "allocated anew",
        evidence=evidence,
        advice="each of them waits for the GPU: a little less memory (batch, "
        "sequence, checkpointing) makes steps faster",
        places=(place,),
    )
