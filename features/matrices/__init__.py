"""Update rules of whole matrices, as Muon, also of matrices that ranks share."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "matrices",
    {
        "rules": {"muon": "muon"},
        "services": {"exchange": "sharded_matrices:sharded_matrices"},
    },
)
