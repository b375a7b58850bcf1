"""Randomized SVD of a matrix that is larger than the device's memory, one pass over its
row tiles per power iteration.

    python -m examples.streaming.svd --memory 24MB --tile-rows 512 --slots 2
    python -m examples.streaming.svd --memory 24MB --trace svd.ebb && ebbtide report svd.ebb

A pass computes Y = A W and, from the same tile, Z = A' Y. Orthonormalized, Z is the
next W. With Y = Q R of the last pass, Z' = R' Q' A, so the SVD of R'^-1 Z' gives that
of A in q + 1 passes, not 2 q + 2 (Halko, Martinsson and Tropp, "Finding Structure with
Randomness", 2011, has the plain form). R is nearly singular for a random W, so this
needs a power iteration. `--plain` orthonormalizes Y too, and computes Z = A' Q in
passes of its own.
"""

from __future__ import annotations

import torch

from ebbtide.errors import UserError
from examples.streaming.command import (
    make_parser,
    open_device,
    open_stream,
    print_times,
    recording,
    run_command,
)
from examples.streaming.tile_stream import TileStream

# Columns of the random projection beyond the rank.
OVERSAMPLING = 8
# Largest relative difference of singular values from those of torch in memory.
TOLERANCE = 1e-4


def randomized_svd(
    stream: TileStream, rank: int, power: int, plain: bool = False, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the first `rank` singular vectors and values of the stream's matrix.

    Args:
        stream: The matrix; its factor has as many columns as the random projection.
        rank: Number of singular values.
        power: Number of power iterations; at least 1 unless `plain`.
        plain: Whether to orthonormalize Y as well, which takes two passes for each.
        seed: Seed of the random projection.

    Returns:
        U (rows, rank), S (rank), V (columns, rank), fp32, in host memory.

    Raises:
        UserError: There are too few power iterations.
    """
    if power < (0 if plain else 1):
        raise UserError(
            f"{power} power iterations are too few: choose --power 1 or more, or "
            "--plain with --power 0"
        )
    columns, width = stream.layout.columns, stream.layout.factor_columns
    basis, product = stream.allocate(columns, width), stream.allocate(columns, width)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(columns, width, generator=generator, dtype=torch.float64)
    stream.load()
    for number in range(power + 1):
        with stream.prepare():
            stream.upload(torch.linalg.qr(start)[0], basis)
            stream.compute(product.zero_)
        if plain:
            stream.run_pass(
                lambda tile, y: torch.mm(tile, basis, out=y), flush_factor=True
            )
            with stream.prepare():
                left, triangle = torch.linalg.qr(stream.collect().double())
                stream.replace_factor(left)
            stream.run_pass(
                lambda tile, q: product.addmm_(tile.T, q), fetch_factor=True
            )
        else:

            def multiply(tile: torch.Tensor, y: torch.Tensor) -> None:
                torch.mm(tile, basis, out=y)
                product.addmm_(tile.T, y)

            # Only the last Y is needed in host memory.
            stream.run_pass(multiply, flush_factor=number == power)
        start = stream.download(product).double()
    if plain:
        projected = start.T
    else:
        left, triangle = torch.linalg.qr(stream.collect().double())
        projected = torch.linalg.solve_triangular(triangle.T, start.T, upper=False)
    small, values, right = torch.linalg.svd(projected, full_matrices=False)
    return (
        (left @ small[:, :rank]).float(),
        values[:rank].float(),
        right[:rank].T.float(),
    )


def other_elements(columns: int, width: int) -> int:
    """Return the number of fp32 elements that `randomized_svd` allocates besides
    tiles."""
    return 2 * columns * width


def fill_matrix(matrix: torch.Tensor, rank: int, generator: torch.Generator) -> None:
    """Fill a matrix with random factors whose singular values halve from each to the
    next, and noise."""
    rows, columns = matrix.shape
    left, right = (
        torch.randn(rows, rank, generator=generator),
        torch.randn(rank, columns, generator=generator),
    )
    torch.mm(left * 0.8 ** torch.arange(rank), right, out=matrix)
    matrix += 1e-3 * torch.randn(rows, columns, generator=generator)


def main() -> None:
    parser = make_parser(__doc__ or "", slots=2, rank=16)
    parser.add_argument(
        "--power", type=int, default=2, help="power iterations (default 2)"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="orthonormalize Y too, in twice as many passes",
    )
    options = parser.parse_args()
    device = open_device(options)
    matrix = device.allocate_host((options.rows, options.columns), torch.float32)
    fill_matrix(matrix, options.rank, torch.Generator().manual_seed(0))
    width = min(options.rank + OVERSAMPLING, options.columns, options.rows)
    others = other_elements(options.columns, width)
    with (
        recording(options) as tracer,
        open_stream(device, matrix, width, others, options, tracer) as stream,
    ):
        left, values, right = randomized_svd(
            stream, options.rank, options.power, options.plain
        )
        print_times(stream, device, options, (False, False))
    expected = torch.svd_lowrank(matrix, width, options.power)[1][: options.rank]
    distance = ((values - expected).abs() / expected).max()
    error = torch.linalg.norm(matrix - (left * values) @ right.T) / torch.linalg.norm(
        matrix
    )
    print(
        f"result   |A - USV'| / |A| = {error:.2e}; S differs by {distance:.1e} from "
        "torch.svd_lowrank in memory"
    )
    if distance > TOLERANCE:
        raise SystemExit(f"the results differ by more than {TOLERANCE}")


if __name__ == "__main__":
    run_command(main)
