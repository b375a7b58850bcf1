"""The host that each GPU of the data sheets is assumed to be in."""

from __future__ import annotations

from dataclasses import dataclass

from ebbtide.machines.host import Host, parse_host


@dataclass(frozen=True)
class HostSheet:
    """A host and where it is described.

    Attributes:
        cpu: Its CPUs and the source of its description.
        host: Its parts.
    """

    cpu: str
    host: Host


def _sheet(cpu: str, spec: str) -> HostSheet:
    return HostSheet(cpu, parse_host(spec))


_EPYC_7543P = _sheet(
    "AMD EPYC 7543P, as in the nodes of ALCF Polaris", "ddr4-3200-8ch,32-cores,pcie4x16,512GiB,4-ranks"
)
_EPYC_9354 = _sheet("2 AMD EPYC 9354 (data sheet)", "ddr5-4800-24ch,64-cores,2-sockets,pcie5x16,768GiB,4-ranks")
_DGX_H100 = _sheet(
    "2 Intel Xeon Platinum 8480C, as in the NVIDIA DGX H100 and H200 (data sheets)",
    "ddr5-4800-16ch,112-cores,2-sockets,pcie5x16,2TiB,8-ranks",
)

DEFAULT_HOSTS: dict[str, HostSheet] = {
    "rtx3090": _sheet("AMD Ryzen 9 5950X (data sheet)", "ddr4-3200-2ch,16-cores,pcie4x16,128GiB,1-rank"),
    "rtx4090": _sheet("AMD Ryzen 9 7950X (data sheet)", "ddr5-5200-2ch,16-cores,pcie5x16,128GiB,1-rank"),
    "rtx5090": _sheet("AMD Ryzen 9 9950X (data sheet)", "ddr5-5600-2ch,16-cores,pcie5x16,192GiB,1-rank"),
    "a10": _EPYC_7543P,
    "l40s": _EPYC_9354,
    "a100-40gb-pcie": _EPYC_7543P,
    "a100-80gb-sxm": _sheet(
        "2 AMD EPYC 7742, as in the NVIDIA DGX A100 (data sheet)",
        "ddr4-3200-16ch,128-cores,2-sockets,pcie4x16,2TiB,8-ranks",
    ),
    "h100-80gb-pcie": _EPYC_9354,
    "h100-80gb": _DGX_H100,
    "h200": _DGX_H100,
    "gh200": _sheet(
        "NVIDIA Grace of the GH200 Grace Hopper Superchip (data sheet)",
        "lpddr5x-512GB/s,72-cores,nvlink-c2c,480GB,1-rank",
    ),
    "b200": _sheet(
        "2 Intel Xeon Platinum 8570, as in the NVIDIA DGX B200 (data sheet)",
        "ddr5-5600-16ch,112-cores,2-sockets,pcie5x16,2TiB,8-ranks",
    ),
    "mi300x": _sheet(
        "2 AMD EPYC 9374F, as in AMD's MLPerf Inference 4.1 system 8xMI300X_2xEPYC-9374F",
        "ddr5-4800-24ch,64-cores,2-sockets,pcie5x16,1536GiB,8-ranks",
    ),
}
