"""The layers of a model by the names of its modules."""

import re
from collections import Counter
from collections.abc import Iterable

# The module of a list, or of a Sequential, whose entries are layers: up to the first
# number in its name.
_ENTRY = re.compile(r"(?P<list>(?:[^.]+\.)*?)\d+(?=\.|$)")


def layer_names(
    modules: Iterable[str], parameters: Iterable[tuple[str, int]]
) -> dict[str, str]:
    """Return the layer of each module that is in one.

    Layers are the entries of the list of modules with most parameters.

    `parameters` are the module and the bytes of each parameter."""
    matches = {module: _ENTRY.match(module) for module in modules}
    lists: Counter[str] = Counter()
    for module, nbytes in parameters:
        if (match := matches[module]) is not None:
            lists[match["list"]] += int(nbytes)
    chosen = max(lists, key=lists.__getitem__, default=None)
    return {
        module: match[0]
        for module, match in matches.items()
        if match and match["list"] == chosen
    }
