"""Checks of the GPUs and of their links to the host."""

from collections.abc import Iterator

from ebbtide.features.doctor.check import Answer, check
from ebbtide.features.doctor.host import Card, JobHost
from ebbtide.machines.sheets import shares_host_memory
from ebbtide.units import rate_text


@check("gpu")
def gpu(host: JobHost) -> Iterator[Answer]:
    """List the GPUs that the job may use."""
    if host.cards:
        yield "ok", ", ".join(card.title for card in host.cards)
    if host.missing_cards:
        yield "unknown", host.missing_cards
    elif not host.cards:
        text = (
            f"CUDA_VISIBLE_DEVICES={host.job.environment.get('CUDA_VISIBLE_DEVICES')} "
            "leaves the job no GPU"
        )
        yield "warning", text, "unset CUDA_VISIBLE_DEVICES"


@check("link")
def link(host: JobHost) -> Iterator[Answer]:
    """Compare each link's lanes and generation with what card and slot have.

    Lanes are compared with those of card and slot, the generation (lower at rest) with
    the slot's.
    """
    if not host.cards:
        yield "unknown", "no GPU, no link"
    for card in host.cards:
        state = card.device["link"]
        width, most, generation = (
            state["width"],
            state["max_width"],
            state["max_generation"],
        )
        if card.obstacle is not None:
            yield "ok", f"{card.title}: {card.obstacle}"
        elif not width or not most:
            yield (
                "unknown",
                f"{card.title}: the driver does not tell generation and width",
            )
        elif width < most:
            text = (
                f"{card.title}: {width} of {most} lanes, so copies run at "
                f"{100 * width / most:.0f} %"
            )
            yield (
                "warning",
                text,
                "check how the card sits, its riser, and the slot's lanes in the BIOS",
            )
        else:
            rate = (
                rate_text(state["peak_bytes_per_s"])
                if state["peak_bytes_per_s"]
                else ""
            )
            yield (
                "ok",
                f"{card.title}: PCIe {generation} x{width}"
                + (f", {rate} a direction" if rate else ""),
            )


@check("unified-memory")
def unified_memory(host: JobHost) -> Iterator[Answer]:
    """Check for GPUs that share the memory of the host.

    Offload moves nothing out of that memory.
    """
    shared = [card for card in host.cards if _shares_host_memory(card)]
    for card in shared:
        text = (
            "GPU and CPU share one memory: offloaded state takes the same bytes, and "
            "copies are in vain"
        )
        remedy = (
            "keep optimizer state on the GPU: no offload_optimizer, "
            "torch.optim.AdamW(fused=True)"
        )
        yield "warning", f"{card.title}: {text}", remedy
    if host.cards and not shared:
        yield "ok", "GPU and host have memories of their own"


def _shares_host_memory(card: Card) -> bool:
    """Return whether a GPU has the memory of the CPU, by the data sheet of its name,
    else by what is not reported."""
    is_shared = shares_host_memory(card.device["name"])
    if is_shared is not None:
        return is_shared
    return (
        card.device["capacity_bytes"] is None
        and card.device["link"]["max_width"] is None
    )
