"""Resolves `hyperparam_search_config`: the trials of a search, each as a whole request of its own."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, ValidationError

from ..documented import Documented
from ..errors import InvalidRequest, InvalidRows
from ..specs.evaluations import HIGHER_IS_BETTER, METRICS
from ..specs.job import JobSpec
from ..specs.names import CheckedNames
from ..specs.search import BETWEEN, Direction, PruningSpec, SearchSpec, Submitted
from .bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest
from .checks import parse_fields
from .choices import nearest_choice, problem_of
from .options import ProviderOptions
from .paths import resolve_job_uuid
from .settings import Request

FIELD = "hyperparam_search_config"
METHODS = ("grid", "random", "bayesian")
MOST_TRIALS = 256
_MOST_TEXT = 16 << 20
"""Characters of the requests of all trials, each of which is stored: a chat template of 200 kB took 100 MB of the job
database with 256 trials."""
_ETA = 3
_OPTIONS = "provider_options."
_FIXED = (
    *("job_uuid", "checkpoint_dir", "logger_config", FIELD),
    *(_OPTIONS + name for name in ("after", "cancel_with", "evaluate", "priority", "resume_from")),
)
"""Fields that are the same for all trials: names, and what concerns the search as a whole."""
_OF_EVERY_JOB = ("job_uuid", "checkpoint_dir", "output_name")
"""Settings that differ between any two jobs."""
_LONGEST_NAME = 128
"""Characters of a job_uuid."""
_LARGEST = 1e15
"""The largest bound of a range, its reciprocal the smallest of a logarithmic one: in between no number overflows."""
_KINDS: Mapping[str, type[Request]] = {
    one.__name__: one for one in (SupervisedFineTuneRequest, PreferenceOptimizeRequest)
}
_DIGITS = 6
"""Significant digits of a number that a range gives."""


class PruningConfig(Documented, CheckedNames):
    """When trials are compared, and how many continue."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    method: Literal["successive_halving"]
    """successive_halving."""
    min_steps: int | None = Field(None, gt=0, le=10**9)
    """Optimizer steps of a trial before the first comparison."""
    fraction: float | None = Field(None, gt=0, lt=1)
    """In place of min_steps: the same as a share of its steps. Default: 1 / eta²."""
    eta: int = Field(_ETA, ge=2, le=MOST_TRIALS)
    """At each comparison the best 1/eta continue; the next one is at eta times the steps."""


class RangeConfig(Documented, CheckedNames):
    """The values of a field, as a range to draw from or as a list."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    min: Any = None
    """The lowest value. Both integers: integers are drawn."""
    max: Any = None
    """The highest value."""
    log: bool = False
    """Draw the logarithm uniformly."""
    values: list[Any] | None = Field(None, min_length=1, max_length=1000)
    """In place of a range: these values."""

    @property
    def is_integer(self) -> bool:
        return isinstance(self.min, int) and isinstance(self.max, int)


class SearchConfig(Documented, CheckedNames):
    """`hyperparam_search_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    method: str
    """grid: every combination of the values. random: so many draws as `trials`. bayesian: Optuna's TPE chooses."""
    parameters: Annotated[dict[str, Any], Field(min_length=1, max_length=32)]
    """Dotted path of a field -> its values, or {min, max, log}."""
    trials: int | None = Field(None, gt=0, le=MOST_TRIALS)
    """random and bayesian: the number of trials."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """random and bayesian: decides the draws. Default 0."""
    parallel: int | None = Field(None, gt=0, le=MOST_TRIALS)
    """bayesian: trials that are queued at once; the next ones are chosen when all have ended. Default 1."""
    objective: str = "eval_loss"
    """A metric of the evaluations, by which trials are compared."""
    direction: Direction | None = None
    """minimize or maximize. Default: what is better for the metric."""
    pruning: PruningConfig | None = None
    """None: every trial is trained to its end."""


class RequestedTrial(NamedTuple):
    """One trial of a search, as if it had been requested by itself."""

    number: int
    """From 1."""
    values: dict[str, Any]
    """Path of a field -> its value in this trial."""
    request: Request
    options: ProviderOptions


class Probe(NamedTuple):
    """A request with one possible value of a field, which no trial may have."""

    path: str
    trial: RequestedTrial

    def refuse_other_rows(self, resolved: JobSpec, first: JobSpec) -> None:
        """Later trials train as the first one does, on its rows. Raises InvalidRequest."""
        same = ("dataset", "validation", "share", "mixed_with", "algorithm", "data_format")
        is_split = getattr(self.trial.request.training_config.data_config, "validation_dataset_id", None) is None
        if any(resolved.value(name) != first.value(name) for name in (*same, *(("seed",) if is_split else ()))):
            hint = "it decides on the rows or the method of a trial, which all of a bayesian search have in common"
            field = f"{FIELD}.parameters.{self.path}"
            raise InvalidRequest(field, self.trial.values[self.path], f"{hint}: leave it out, or use grid or random")


class RequestedSearch(NamedTuple):
    config: SearchConfig
    trials: tuple[RequestedTrial, ...]
    """Those of the first generation."""
    probes: tuple[Probe, ...] = ()
    """bayesian: every value of a list, and both ends of every range."""
    submitted: Submitted | None = None
    """bayesian."""

    def names(self, job_uuid: str) -> list[str]:
        """The job_uuids of all trials, of later generations too."""
        return [trial_name(job_uuid, number) for number in range(1, self._number + 1)]

    @property
    def _number(self) -> int:
        return self.config.trials or len(self.trials)

    def own_spec(self, job_uuid: str, first: JobSpec, others: Sequence[JobSpec] = ()) -> JobSpec:
        """The specification of the search's own job, from that of its first trial. Raises InvalidRequest: no evaluation
        of its trials yields the objective.

        Args:
            others: of the other trials, and what the probes were resolved to.
        """
        changes: dict[str, Any] = {
            "job_uuid": resolve_job_uuid(job_uuid),
            "output_name": job_uuid if first.output_name == first.job_uuid else first.output_name,
            "checkpoint_dir": first.checkpoint_dir.with_name(job_uuid),
            **{"pruning": None, "cancel_with": False},
        }
        # The jobs that later trials may need are not deleted before.
        needing = () if self.submitted is None else (first, *others)
        changes["after"] = tuple(dict.fromkeys(name for spec in needing for name in spec.after))
        reads = tuple(dict.fromkeys(job for spec in needing for job in spec.jobs_read))
        found = {"reads": reads, "settings": _differing([first, *others])}
        changes["search"] = self._spec(first).model_copy(update=found)
        return first.model_copy(update=changes)

    def _spec(self, first: JobSpec) -> SearchSpec:
        given = self.config
        known = METRICS[first.algorithm]
        objective = given.objective if given.objective.startswith("eval_") else f"eval_{given.objective}"
        if objective not in known:
            hint = f"no evaluation of this job yields it: {nearest_choice(objective, known)}"
            raise InvalidRequest(f"{FIELD}.objective", given.objective, hint)
        best = "maximize" if HIGHER_IS_BETTER[objective] else "minimize"
        return SearchSpec(
            method=given.method,  # type: ignore[arg-type]
            parameters=given.parameters,
            trials=self._number,
            seed=None if given.method == "grid" else given.seed or 0,
            parallel=given.parallel or 1,
            submitted=self.submitted,
            objective=objective,
            direction=given.direction or best,  # type: ignore[arg-type]
            pruning=self.pruning,
        )

    @property
    def pruning(self) -> PruningSpec | None:
        given = self.config.pruning
        if given is None:
            return None
        default = None if given.min_steps else 1 / given.eta**2
        return PruningSpec(eta=given.eta, min_steps=given.min_steps, fraction=given.fraction or default)

    def trial_spec(self, trial: RequestedTrial, resolved: JobSpec, first: JobSpec) -> JobSpec:
        """The job of a trial. Raises InvalidRequest: it has no evaluations, or cannot be compared with the first one,
        or before its end.

        Args:
            first: that of the first trial.
        """
        if resolved.data.validation is None:
            hint = "nothing is evaluated: name a validation_dataset_id, or set train_split_percentage below 1"
            raise in_trial(trial, InvalidRequest(f"{FIELD}.objective", self.config.objective, hint))
        if self.pruning is not None and resolved.train.averaging is not None:
            hint = "trials could be compared at common weights only (averaging): leave one of them out"
            given = self.config.pruning and self.config.pruning.model_dump(exclude_unset=True)
            raise in_trial(trial, InvalidRequest(f"{FIELD}.pruning", given, hint))
        if resolved.algorithm != first.algorithm:
            hint = f"trial 1 trains {first.algorithm} and this one {resolved.algorithm}, which cannot be compared by it"
            raise in_trial(trial, InvalidRequest(f"{FIELD}.objective", self.config.objective, hint))
        if _held_out(resolved) != _held_out(first):
            hint = "trials would be evaluated on different rows: name one validation_dataset_id"
            raise in_trial(trial, InvalidRequest(f"{FIELD}.objective", self.config.objective, hint))
        return resolved.model_copy(update={"pruning": self.pruning})


def _differing(specs: Iterable[JobSpec]) -> tuple[str, ...]:
    """Dotted names of the settings that have several values in some jobs."""
    found = [dict(_leaves(spec.flat())) for spec in specs]
    names = dict.fromkeys(name for one in found for name in one if name not in _OF_EVERY_JOB)
    return tuple(name for name in names if any(one.get(name) != found[0].get(name) for one in found))


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _held_out(spec: JobSpec) -> list[str | None]:
    """The digests of the rows that a job is evaluated on."""
    return [one.validation.sha256 if one.validation else None for one in spec.data.mixed]


def resolve_search(request: Request, options: ProviderOptions) -> RequestedSearch | None:
    """The trials that a request asks for; None: it asks for no search. Raises InvalidRequest: names the field of the
    search, or that of a trial."""
    if not request.hyperparam_search_config:
        return None
    config = parse_fields(SearchConfig, request.hyperparam_search_config, FIELD)
    values = _check(config)
    if len(trial_name(request.job_uuid, MOST_TRIALS)) > _LONGEST_NAME:
        hint = f"its trials are named {trial_name('NAME', 1)} and so on: use at most {_LONGEST_NAME - 10} characters"
        raise InvalidRequest("job_uuid", request.job_uuid, hint)
    if options.resume_from is not None:
        hint = "a search begins with a model: send model job:NAME/checkpoint-N, or no hyperparam_search_config"
        raise InvalidRequest("provider_options.resume_from", options.resume_from, hint)
    body = request.model_dump(mode="json", exclude_unset=True, exclude={FIELD})
    given = options.model_dump(mode="json", exclude_unset=True)
    submitted = Submitted(call=type(request).__name__, body=body, options=given)
    _refuse_large(submitted, config, values)
    drawn = _grid(values) if config.method == "grid" else random_draws(values, config.seed or 0)
    is_bayesian = config.method == "bayesian"
    first = min(config.trials or 0, config.parallel or 1) if is_bayesian else config.trials
    trials = tuple(make_trial(submitted, number, one) for number, one in enumerate(itertools.islice(drawn, first), 1))
    if not is_bayesian:
        return RequestedSearch(config, trials)
    probes = tuple(Probe(path, make_trial(submitted, 0, one)) for path, one in _probed(values))
    return RequestedSearch(config, trials, probes, submitted)


def _refuse_large(submitted: Submitted, config: SearchConfig, values: Mapping[str, list[Any] | RangeConfig]) -> None:
    """Raises InvalidRequest: the trials repeat more text than a search may store."""
    lists = [one for one in values.values() if isinstance(one, list)]
    count = config.trials or math.prod(map(len, lists))
    longest = sum(max(len(json.dumps(value)) for value in one) for one in lists)
    size = len(json.dumps([submitted.body, submitted.options])) + longest
    if size * count > _MOST_TEXT:
        hint = f"each trial stores a request of {size} characters, and all {count} at most {_MOST_TEXT}"
        raise InvalidRequest(f"{FIELD}.trials", count, f"{hint}: send fewer trials, or shorter texts")


def in_trial(trial: RequestedTrial, error: InvalidRequest) -> InvalidRequest:
    """An error of a trial, with the trial that has it."""
    if isinstance(error, InvalidRows):
        return error
    return _of_trial(trial.number, trial.values, error)


def trial_name(job_uuid: str, number: int) -> str:
    """The job_uuid of a trial."""
    return f"{job_uuid}{BETWEEN}{number}"


def _of_trial(number: int, values: Mapping[str, Any], error: InvalidRequest) -> InvalidRequest:
    shown = ", ".join(f"{path.rpartition('.')[2]}={json.dumps(value)}" for path, value in values.items())
    which = f"trial {number} of the search" if number else "tried for the search"
    return InvalidRequest(error.field, error.value, f"{error.hint} ({which}: {shown})")


def _check(config: SearchConfig) -> Mapping[str, list[Any] | RangeConfig]:
    """The values of each field. Raises InvalidRequest."""
    if config.method not in METHODS:
        raise InvalidRequest(f"{FIELD}.method", config.method, nearest_choice(config.method, METHODS))
    for path in config.parameters:
        if path.partition(".")[0] in _FIXED or path in _FIXED or any(path.startswith(f"{one}.") for one in _FIXED):
            raise InvalidRequest(f"{FIELD}.parameters.{path}", path, "all trials have the same: leave it out")
        if above := next((one for one in config.parameters if path.startswith(f"{one}.")), None):
            hint = f"{above!r}, of which it is a part, is searched too: name one of them"
            raise InvalidRequest(f"{FIELD}.parameters.{path}", path, hint)
    found = {path: values_of(path, given, config.method) for path, given in config.parameters.items()}
    if config.method == "bayesian":
        _check_bayesian(config, found)
    elif config.parallel is not None:
        hint = f"all trials of a {config.method} search are queued at once: leave it out, or use 'bayesian'"
        raise InvalidRequest(f"{FIELD}.parallel", config.parallel, hint)
    if config.pruning and config.pruning.min_steps and config.pruning.fraction:
        hint = f"min_steps asks for {config.pruning.min_steps}; send one of them"
        raise InvalidRequest(f"{FIELD}.pruning.fraction", config.pruning.fraction, hint)
    if config.method != "grid":
        if config.trials is None:
            raise InvalidRequest(f"{FIELD}.trials", None, f"a {config.method} search needs their number, such as 12")
        return found
    if config.seed is not None:
        raise InvalidRequest(f"{FIELD}.seed", config.seed, "a grid draws nothing: leave it out, or use 'random'")
    count = math.prod(len(values) for values in found.values() if isinstance(values, list))
    if count > MOST_TRIALS:
        hint = f"the grid has {count} combinations, at most {MOST_TRIALS} can be tried: use fewer values, or 'random'"
        raise InvalidRequest(f"{FIELD}.parameters", list(config.parameters), hint)
    if config.trials not in (None, count):
        hint = f"the grid has {count} combinations, and all are tried: send {count}, or leave it out"
        raise InvalidRequest(f"{FIELD}.trials", config.trials, hint)
    return found


def optuna_is_installed() -> bool:
    return find_spec("optuna") is not None


def _check_bayesian(config: SearchConfig, values: Mapping[str, list[Any] | RangeConfig]) -> None:
    if not optuna_is_installed():
        hint = "Optuna is not installed here: pip install 'llama_stack_provider_trl[search]', or use 'random'"
        raise InvalidRequest(f"{FIELD}.method", config.method, hint)
    if config.pruning is not None:
        given = config.pruning.model_dump(exclude_unset=True)
        hint = "the next trials are chosen by results of whole ones: leave it out, or use 'grid' or 'random'"
        raise InvalidRequest(f"{FIELD}.pruning", given, hint)
    if config.trials is not None and (config.parallel or 1) > config.trials:
        hint = f"there are {config.trials} trials in all, so no result would decide on one: use fewer, or 'random'"
        raise InvalidRequest(f"{FIELD}.parallel", config.parallel, hint)
    if (count := sum(1 for _ in _probed(values))) > MOST_TRIALS:
        hint = f"there are {count} values and ends of ranges, at most {MOST_TRIALS} are checked: use fewer, or ranges"
        raise InvalidRequest(f"{FIELD}.parameters", list(config.parameters), hint)


def values_of(path: str, given: Any, method: str) -> list[Any] | RangeConfig:
    """The values of a field, or the range that they are drawn from. Raises InvalidRequest."""
    field = f"{FIELD}.parameters.{path}"
    if isinstance(given, list):
        given = {"values": given}
    if not isinstance(given, dict):
        raise InvalidRequest(field, given, "send a list of values, or {min, max, log}")
    found = parse_fields(RangeConfig, given, field)
    if found.values is not None:
        if found.min is not None or found.max is not None or found.log:
            raise InvalidRequest(field, given, "`values` and a range exclude each other: send one of them")
        texts = [json.dumps(value, sort_keys=True) for value in found.values]
        if len(set(texts)) < len(texts):
            twice = Counter(texts).most_common(1)[0][0]
            raise InvalidRequest(field, given, f"the value {twice} is there twice: name each once")
        return found.values
    for name, bound in (("min", found.min), ("max", found.max)):
        is_number = isinstance(bound, int | float) and not isinstance(bound, bool) and abs(bound) <= _LARGEST
        if bound is not None and not is_number:
            raise InvalidRequest(f"{field}.{name}", str(bound)[:40], f"send a number of at most {_LARGEST:g}")
    if found.min is None or found.max is None:
        raise InvalidRequest(field, given, "send a list of values, or both `min` and `max`")
    if found.min >= found.max:
        raise InvalidRequest(field, given, "`min` must be below `max`")
    if found.log and found.min <= 0:
        raise InvalidRequest(field, given, "`log` needs a `min` above 0")
    if found.log and found.min < 1 / _LARGEST:
        raise InvalidRequest(f"{field}.min", found.min, f"with `log` send a number of at least {1 / _LARGEST:g}")
    if method == "grid":
        raise InvalidRequest(field, given, "a grid needs a list of values; a range is for 'random' and 'bayesian'")
    return found


def _grid(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All combinations; the last field changes first."""
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def random_draws(values: Mapping[str, list[Any] | RangeConfig], seed: int) -> Iterator[dict[str, Any]]:
    """The draws of a seed, the same in every release of Python, without end."""
    source = random.Random(seed)
    while True:
        yield {path: _draw(those, source.random()) for path, those in values.items()}


def _probed(values: Mapping[str, list[Any] | RangeConfig]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every value of a list and both ends of a range, each with the first values of the other fields."""
    ends = {path: those if isinstance(those, list) else [those.min, those.max] for path, those in values.items()}
    first = {path: those[0] for path, those in ends.items()}
    for path, those in ends.items():
        yield from ((path, {**first, path: value}) for value in those)


def _draw(values: list[Any] | RangeConfig, share: float) -> Any:
    """The value at a share of a list or a range, from 0 to less than 1."""
    if isinstance(values, list):
        return values[int(share * len(values))]
    low, high = values.min, values.max
    if values.is_integer:
        if not values.log:
            return low + int(share * (high - low + 1))
        return min(high, int(low * math.pow((high + 1) / low, share)))
    return rounded(values, low * math.pow(high / low, share) if values.log else low + share * (high - low))


def rounded(values: RangeConfig, drawn: float) -> float:
    """A number of a range with 6 digits, within its bounds."""
    return min(max(float(f"{drawn:.{_DIGITS}g}"), float(values.min)), float(values.max))


def make_trial(submitted: Submitted, number: int, values: dict[str, Any]) -> RequestedTrial:
    """The request of a trial, with its values in their places. Raises InvalidRequest: a field that does not exist, or a
    value that it does not accept.

    Args:
        number: 0: no trial, only values that are tried.
    """
    trees = json.loads(json.dumps({"body": submitted.body, "options": submitted.options}))
    kind = _KINDS[submitted.call]
    try:
        for path, value in values.items():
            tree = trees["options"] if path.startswith(_OPTIONS) else trees["body"]
            _set(tree, path.removeprefix(_OPTIONS), value, path)
        trees["body"]["job_uuid"] = trial_name(submitted.body["job_uuid"], number)
        return RequestedTrial(number, values, _parsed(kind, trees["body"]), ProviderOptions.parse(trees["options"]))
    except InvalidRequest as error:
        raise _of_trial(number, values, error) from error


def _set(tree: dict[str, Any], path: str, value: Any, whole: str) -> None:
    *above, name = path.split(".")
    if not all((*above, name)):
        raise InvalidRequest(
            f"{FIELD}.parameters.{whole}", whole, "it is no path of a field, such as algorithm_config.rank"
        )
    for part in above:
        below = tree.get(part)
        if below is None:
            below = tree[part] = {}
        if not isinstance(below, dict):
            raise InvalidRequest(f"{FIELD}.parameters.{whole}", whole, f"`{part}` is a value and has no fields")
        tree = below
    tree[name] = value


def _parsed(kind: type[Request], body: dict[str, Any]) -> Request:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidRequest(".".join(map(str, first["loc"])), first["input"], problem_of(first, kind)) from error
