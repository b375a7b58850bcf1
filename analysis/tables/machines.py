"""The table of machines that come with ebbtide."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from ebbtide.analysis.tables.table import (
    Column,
    Table,
    View,
    number,
    params_rate,
    rate,
    size,
    text,
)
from ebbtide.machines.accuracy import accuracy_of, card_text
from ebbtide.machines.machine import Machine

# Rates in which machines of one card differ, by their heading in the table.
_RATES = {
    "h2d": "h2d_bytes_per_s",
    "host": "host_memory_bytes_per_s",
    "CPU": "cpu_update_params_per_s",
    "GPU": "gpu_update_params_per_s",
}
_LEAST_RATIO = 1.05
_BASES = {
    "fitted": "fitted to measured runs",
    "data sheets": "from data sheets",
    "measured": "measured",
}


def catalog_view(machines: Sequence[Machine], with_sources: bool) -> View:
    """Return machines with their rates, the sources of these, and how far to trust
    them."""
    columns: list[Column] = [
        text("machine", "name"),
        size("memory", "gpu_memory_bytes"),
        rate(
            "h2d",
            lambda machine: None if machine.unified_memory else machine.h2d_bytes_per_s,
        ),
        rate(
            "host",
            lambda machine: (
                None if machine.unified_memory else machine.host_memory_bytes_per_s
            ),
        ),
        params_rate("CPU", _RATES["CPU"]),
        params_rate("GPU", _RATES["GPU"]),
        number("ranks", lambda machine: machine.box.ranks if machine.box else None),
        text("trust", lambda machine: accuracy_of(machine).short_text()),
    ]
    note = (
        "For one rank while all ranks of the host update: GPU memory, copies to the "
        "GPU, traffic with host memory "
        "(neither if GPU and CPU share one), 1e9 parameters updated a second on CPU "
        "and GPU. Trust: the largest error "
        "of an update on the runs that a machine was fitted to, or the factor within "
        "which the CPU's rate is known "
        "from data sheets."
    )
    yield Table(
        "machines", "Machines by name", columns, machines, note=note, max_rows=None
    )
    if with_sources:
        yield from _differences_of_twins(machines)
    for machine in machines if with_sources else ():
        source = machine.extra["source"]
        yield ""
        yield f"{machine.name}: {source['data']}"
        yield f"  {source['how']} ({source['date']})"
        yield f"  host: {machine.extra['host']['spec']}"
        if undetermined := accuracy_of(machine).undetermined:
            yield (
                "  not determined by these runs, as assumed before: "
                f"{', '.join(undetermined)}"
            )
        if price := machine.extra.get("price"):
            yield f"  price: ${price['usd']:,} {price['source']} ({price['date']})"
        yield (f"  iterations of `plan`: {card_text(machine.gpu_name)}")
        if machine.unified_memory:
            yield (
                "  GPU and CPU share one memory: offload frees none of it (--policy "
                "gpu-only)"
            )
        yield from _sources(source["figures"])
        for remark in source.get("notes", ()):
            yield f"  note: {remark}"
    if not with_sources:
        yield (
            "next: ebbtide machines NAME (sources, and what tells machines of one card "
            "apart)"
        )


def _sources(figures: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield each source of a machine's figures with what is from it."""
    by_source: dict[tuple[str, str], dict[str, None]] = {}
    for key, figure in figures.items():
        names = by_source.setdefault((figure["source"], figure["date"]), {})
        # The peaks of a GPU by type are one figure here.
        names[".".join(key.split(".")[:2])] = None
    for (source, date), names in by_source.items():
        yield f"  {', '.join(names)}: {source} ({date})"


def _differences_of_twins(machines: Sequence[Machine]) -> Iterator[str]:
    """Yield a line for every two machines of one card on the factors by which their
    rates differ, and why."""
    for one, other in combinations(machines, 2):
        if one.gpu is None or other.gpu is None or one.gpu.name != other.gpu.name:
            continue
        ranks = [
            machine.box.ranks for machine in (one, other) if machine.box is not None
        ]
        equal = [
            machine.for_ranks(min(ranks)) if len(ranks) == 2 else machine
            for machine in (one, other)
        ]
        rates = {
            label: [getattr(machine, key) for machine in equal]
            for label, key in _RATES.items()
        }
        ratios = {
            label: second / first
            for label, (first, second) in rates.items()
            if first and second
        }
        texts = [
            f"{label} {ratio:.2f}x"
            for label, ratio in ratios.items()
            if max(ratio, 1 / ratio) >= _LEAST_RATIO
        ]
        yield (
            f"{other.name} is the same card as {one.name}: "
            f"{', '.join(texts) or 'equal rates'}"
            f"{f' with {min(ranks)} ranks on the host of each' if len(ranks) == 2 else ''}. "
            f"{other.name} is {_basis(other)}, {one.name} {_basis(one)}."
        )


def _basis(machine: Machine) -> str:
    """Return where a machine's rates come from, and how many ranks share its host."""
    ranks = f" ({machine.box.ranks} ranks on a host)" if machine.box is not None else ""
    basis = accuracy_of(machine).basis
    return f"{_BASES.get(basis, 'of unknown origin')}{ranks}"
