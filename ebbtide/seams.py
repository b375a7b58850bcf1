"""The seams of the core: every registry that features plug into, and how features are
loaded.

A feature is a package in `ebbtide.features`, or one of another distribution, which
names it in the entry-point group `ebbtide.features`. Its `__init__` has a `FEATURE` and
imports nothing else. Objects are imported when they are used, so that a command loads
what it needs alone.

| seam | object | used by |
| --- | --- | --- |
| baselines | a `Baseline`: an optimizer that is not ebbtide's | `compare --against` |
| commands | a module with the function of a command, decorated with `cli.command.command` | the command line |
| findings | a module of rules, decorated with `analysis.findings.rule.rule` | `all_rules` |
| frames | a pattern (`re`) of the lines of a stack that are in an optimizer | categories of memory |
| gates | `gates(model, wait)`: has `params` whose gathers wait, a `title` of them, and `remove` | `ForwardGates` |
| importers | a list of `Importer` | `import_trace` |
| kinds | a list of `Kind`, of the operations of plans | `interleave.model.kinds` |
| lanes | `lanes(machine)`, which yields each `Lane` and `Pool` | `interleave.simulation.lanes` |
| leads | `lead(trace)`: what a summary says first, as a `View`; nothing where it does not apply | `summary_view` |
| names | an object that the core's packages offer as their own: `interleave.offload_activations` | `public_name` |
| plan-checks | `check(plan, workload)`: raises PlanError | `Plan.validate` |
| plan-passes | a `PlanPass`: it changes the plans of policies | `Policy.plan` |
| plots | a `PlotKind` | `ebbtide plot` |
| policies | a module of policies, decorated with `policies.registry.policy` | `interleave.policies` |
| rates | an `ObservedRates`: rates of a machine that the steps of a job show | `engine.adaptive.rates` |
| recover | `recover(path) -> Trace`, for a trace that is not complete | `open_trace` |
| rules | a module of update rules, registered by `rules.rule.register` | `engine.rules` |
| services | a function that the core calls by name, below | `service` |
| setups | `read(section) -> FrameworkSetup`, by the key of its section in meta.json | `framework_setup` |
| sources | the name of the command that makes traces of a source, by the source in meta.json | `next_line` |
| splits | `split(version) -> StateSplit`, by the same key: which state a framework keeps on the device | `split_of` |
| step-hooks | `make(calls, model)`: returns a `StepHooks`, or None | `StepCalls`, of an optimizer |

| service | signature |
| --- | --- |
| adviser | `TraceAdviser(trace)`: advice that was simulated, for findings and reports |
| beside-step | `beside_step(plan, workload, assignment, overlap) -> Plan`: with updates in other phases |
| calibrate | `calibrate_alone(seconds, name) -> Machine` |
| cycle | `cycle(trace) -> dict` or None: count, time and parts of what the job repeats, for JSON |
| exchange | `exchange(params, are_whole) -> Exchange`: of parameters that rules update as a whole |
| fit | a module with `FitRequest` and `print_fit`: the levers of memory, for `plan --model` |
| job-comparison | a module with `compare_and_print(words, ...)`, for `compare -- CMD` |
| layer-comparison | a module like `interleave.compare.comparison`, for `compare --layers` |
| measure-cpu | `measure_cpu(params, threads) -> Machine` |
| metrics-server | `serve_metrics(text) -> MetricsServer`: listens on `[HOST:]PORT` |
| profile-view | `profile_and_show(job) -> int`, for `profile --watch` |
| recommendation | the module `replay_advice`: makes and prints a `Recommendation`, for `replay --recommend` |
| redone-plan | `redone(plan) -> Plan`: that of a step in which clipping changes what was speculated |
| remote-files | `RemoteFiles(url, ranks)`: the files of a trace at a URL, as `profiler.trace.untrusted.TraceFiles` |
| remote-spools | `copy_spools(url, folder)`: those of a recording at a URL |
| repeats | `repeats(trace) -> str` or None: what the job repeats, that makes some iterations long |
| replayed-offload | `with_replayed_offload(trace, error) -> OutOfMemory`: its remedy is replayed |
| slices | a module with `attach_to`, for `profile --attach`; its agent records details |
| storage | `Backing(storage, host_memory_budget)`: for state that host memory does not hold |
| upload | `Upload(url, folder, force)`: the copy of a recording at a URL |
| trace-layers | `with_trace_layers(workload, trace) -> Workload` |

Hooks of the agent run in jobs that have no ebbtide. They are no objects: a folder
`agent` in a feature, which the agent loads by its path.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

from ebbtide.errors import UserError

SEAMS = (
    "baselines",
    "commands",
    "findings",
    "frames",
    "gates",
    "importers",
    "kinds",
    "lanes",
    "leads",
    "names",
    "plan-checks",
    "plan-passes",
    "plots",
    "policies",
    "rates",
    "recover",
    "rules",
    "services",
    "setups",
    "sources",
    "splits",
    "step-hooks",
)
_GROUP = "ebbtide.features"


@dataclass(frozen=True)
class Feature:
    """A package that plugs into the core.

    Attributes:
        name: The name of its folder.
        seams: By seam and key, the object: `module` or `module:name`, relative to the
            package.
        needs: The names of features without which it plugs in nothing.
    """

    name: str
    seams: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := sorted({*self.seams}.difference(SEAMS)):
            raise UserError(
                f"feature {self.name}: {unknown[0]!r} is no seam: {', '.join(SEAMS)}"
            )


class Plug(NamedTuple):
    """An object of a feature in a seam, which is imported by `load`."""

    package: str
    target: str

    def load(self) -> Any:
        """Import the object and return it."""
        module, _, name = self.target.partition(":")
        loaded = import_module(f"{self.package}.{module}")
        return getattr(loaded, name) if name else loaded


# The core's own objects that its lower layers need.
_CORE = Feature(
    "core",
    {
        "plan-checks": {"data-flow": "interleave.model.data_flow:check_data_flow"},
        "recover": {"spools": "profiler.recording.spools.recovery:unfinished_trace"},
    },
)


@cache
def features() -> dict[str, Feature]:
    """Return the features by the name of their package."""
    # It takes a tenth of the time of a short command to import.
    from importlib.metadata import entry_points

    packages = [f"{_GROUP}.{module.name}" for module in iter_modules(_own_folders())]
    packages += [entry.value for entry in entry_points(group=_GROUP)]
    present = {package: import_module(package).FEATURE for package in packages}
    return with_needs(present)


def with_needs(present: dict[str, Feature]) -> dict[str, Feature]:
    """Return those features, by package, that have all features that they need."""
    names = {feature.name for feature in present.values()}
    usable = {
        package: feature
        for package, feature in present.items()
        if names.issuperset(feature.needs)
    }
    return present if len(usable) == len(present) else with_needs(usable)


def _own_folders() -> list[str]:
    try:
        return [*import_module(_GROUP).__path__]
    except ModuleNotFoundError:
        return []


def plugs(seam: str) -> dict[str, Plug]:
    """Return what features plug into a seam by its key, in the order of features and
    lines.

    Raises UserError where two have the same key."""
    plugged: dict[str, Plug] = {}
    for package, feature in (("ebbtide", _CORE), *features().items()):
        for key, target in feature.seams.get(seam, {}).items():
            if key in plugged:
                raise UserError(
                    f"features {plugged[key].package} and {package} both have {key!r} "
                    f"in the seam {seam}"
                )
            plugged[key] = Plug(package, target)
    return plugged


def load_all(seam: str) -> list[Any]:
    """Import all objects of a seam and return them."""
    return [plug.load() for plug in plugs(seam).values()]


def find_service(name: str) -> Any:
    """Import a function that a feature offers to the core and return it.

    Return None where that feature is not there.
    """
    plug = plugs("services").get(name)
    return None if plug is None else plug.load()


def service(name: str) -> Any:
    """Return what `find_service` does. Raises UserError where the feature is not
    there."""
    return require_service(name).load()


def require_service(name: str) -> Plug:
    """Return the plug of a service. Raises UserError where no feature offers it."""
    plug = plugs("services").get(name)
    if plug is None:
        raise UserError(
            f"this needs the feature that offers {name!r}, which is not installed"
        )
    return plug


def public_name(module: str, name: str) -> Any:
    """Return an object of a feature that a module of the core offers as its own. Raises
    AttributeError."""
    key = f"{module}.{name}".removeprefix("ebbtide.")
    plug = plugs("names").get(key)
    if plug is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return plug.load()
