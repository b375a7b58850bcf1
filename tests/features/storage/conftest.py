from tests.interleave.engine.conftest import (
    kernel,
    one_thread,
    own_linear,
    speculating_policy,
)

__all__ = ["kernel", "one_thread", "own_linear", "speculating_policy"]
