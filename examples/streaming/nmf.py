"""Non-negative matrix factorization of a matrix that is larger than the device's
memory, one pass per iteration.

    python -m examples.streaming.nmf --memory 24MB --tile-rows 512 --slots 3
    python -m examples.streaming.nmf --memory 24MB --trace nmf.ebb && ebbtide report nmf.ebb

Multiplicative updates (Lee and Seung, "Algorithms for Non-negative Matrix
Factorization", 2000). A pass updates the rows of W that belong to a tile and adds W' A
and W' W of the tile to sums, from which H is updated when the pass is over. W goes
through the slots with the tiles and is written back: with a third slot this overlaps
with the next fetch.
"""

from __future__ import annotations

import torch

from examples.streaming.command import (
    make_parser,
    open_device,
    open_stream,
    print_times,
    recording,
    run_command,
)
from examples.streaming.tile_stream import TileStream

# Keeps quotients finite.
EPSILON = 1e-9
# Largest relative difference from the result in memory: fp32 sums in another order,
# over the iterations.
TOLERANCE = 1e-4


def nmf(
    stream: TileStream, left: torch.Tensor, right: torch.Tensor, iterations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return W and H with W H close to the stream's matrix, in host memory.

    Args:
        stream: The matrix, non-negative; its factor has as many columns as W.
        left: The first W (rows, rank), positive.
        right: The first H (rank, columns), positive.
        iterations: Number of updates of W and H.
    """
    rank, columns = right.shape
    h, sum_wa, product = (stream.allocate(rank, columns) for _ in range(3))
    hh, sum_ww = stream.allocate(rank, rank), stream.allocate(rank, rank)
    numerator, denominator = (
        stream.allocate(stream.layout.tile_rows, rank) for _ in range(2)
    )

    def update_tile(tile: torch.Tensor, w: torch.Tensor) -> None:
        above, below = numerator[: len(w)], denominator[: len(w)]
        torch.mm(tile, h.T, out=above)
        torch.mm(w, hh, out=below)
        w.mul_(above).div_(below.add_(EPSILON))
        sum_wa.addmm_(w.T, tile)
        sum_ww.addmm_(w.T, w)

    def begin_pass() -> None:
        torch.mm(h, h.T, out=hh)
        sum_wa.zero_()
        sum_ww.zero_()

    def update_right() -> None:
        torch.mm(sum_ww, h, out=product)
        h.mul_(sum_wa).div_(product.add_(EPSILON))

    stream.upload(right, h)
    stream.load()
    stream.replace_factor(left)
    for number in range(iterations):
        with stream.prepare():
            if number:
                stream.compute(update_right)
            stream.compute(begin_pass)
        stream.run_pass(update_tile, fetch_factor=True, flush_factor=True)
    stream.compute(update_right)
    return stream.collect(), stream.download(h)


def nmf_in_memory(
    matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, iterations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return W and H after the same updates by torch, with the whole matrix at once."""
    w, h = left.clone(), right.clone()
    for _ in range(iterations):
        w = w * (matrix @ h.T) / (w @ (h @ h.T) + EPSILON)
        h = h * (w.T @ matrix) / ((w.T @ w) @ h + EPSILON)
    return w, h


def other_elements(columns: int, rank: int, tile_rows: int) -> int:
    """Return the number of fp32 elements that `nmf` allocates besides tiles."""
    return rank * (3 * columns + 2 * rank + 2 * tile_rows)


def make_problem(
    matrix: torch.Tensor, rank: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill a matrix with a random product of two non-negative factors and noise, and
    return the first W and H."""
    rows, columns = matrix.shape
    left, right = (
        torch.rand(*shape, generator=generator)
        for shape in ((rows, rank), (rank, columns))
    )
    torch.mm(left, right, out=matrix)
    matrix += 0.01 * torch.rand(rows, columns, generator=generator)
    return torch.rand(rows, rank, generator=generator), torch.rand(
        rank, columns, generator=generator
    )


def main() -> None:
    parser = make_parser(__doc__ or "", slots=3, rank=16)
    parser.add_argument(
        "--iterations", type=int, default=10, help="updates of W and H (default 10)"
    )
    options = parser.parse_args()
    device = open_device(options)
    matrix = device.allocate_host((options.rows, options.columns), torch.float32)
    left, right = make_problem(matrix, options.rank, torch.Generator().manual_seed(0))
    others = other_elements(
        options.columns, options.rank, min(options.tile_rows, options.rows)
    )
    with (
        recording(options) as tracer,
        open_stream(device, matrix, options.rank, others, options, tracer) as stream,
    ):
        w, h = nmf(stream, left, right, options.iterations)
        print_times(stream, device, options, (True, True))
    expected_w, expected_h = nmf_in_memory(matrix, left, right, options.iterations)
    distance = torch.linalg.norm(w @ h - expected_w @ expected_h) / torch.linalg.norm(
        expected_w @ expected_h
    )
    error = torch.linalg.norm(matrix - w @ h) / torch.linalg.norm(matrix)
    print(
        f"result   |A - WH| / |A| = {error:.2e}; WH differs by {distance:.1e} from "
        "that of torch in memory"
    )
    if distance > TOLERANCE:
        raise SystemExit(f"the results differ by more than {TOLERANCE}")


if __name__ == "__main__":
    run_command(main)
