"""Resolves `hyperparam_search_config`: the trials of a search, each as a whole request of its own."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, ValidationError

from ..documented import Documented
from ..errors import InvalidRequest, InvalidRows
from ..specs.evaluations import HIGHER_IS_BETTER, METRICS
from ..specs.job import JobSpec
from ..specs.search import Direction, PruningSpec, SearchSpec
from .checks import nearest_choice, parse_fields
from .options import ProviderOptions
from .paths import resolve_job_uuid
from .settings import Request

FIELD = "hyperparam_search_config"
MOST_TRIALS = 256
_ETA = 3
_OPTIONS = "provider_options."
_FIXED = (
    *("job_uuid", "checkpoint_dir", "logger_config", FIELD),
    *(_OPTIONS + name for name in ("after", "cancel_with", "priority", "resume_from")),
)
"""Fields that are the same for all trials: names, and what concerns the search as a whole."""
_LONGEST_NAME = 128
"""Characters of a job_uuid."""
_LARGEST = 1e15
"""The largest bound of a range, its reciprocal the smallest of a logarithmic one: in between no number overflows."""
_DIGITS = 6
"""Significant digits of a number that a range gives."""


class PruningConfig(Documented):
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


class RangeConfig(Documented):
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


class SearchConfig(Documented):
    """`hyperparam_search_config`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    method: str
    """grid: every combination of the values. random: so many draws as `trials`."""
    parameters: Annotated[dict[str, Any], Field(min_length=1, max_length=32)]
    """Dotted path of a field -> its values, or {min, max, log}."""
    trials: int | None = Field(None, gt=0, le=MOST_TRIALS)
    """random: the number of trials."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """random: decides the draws. Default 0."""
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


class RequestedSearch(NamedTuple):
    config: SearchConfig
    trials: tuple[RequestedTrial, ...]

    def own_spec(self, job_uuid: str, first: JobSpec) -> JobSpec:
        """The specification of the search's own job, from that of its first trial.

        Raises:
            InvalidRequest: no evaluation of its trials yields the objective.
        """
        changes = {
            "job_uuid": resolve_job_uuid(job_uuid),
            "output_name": job_uuid if first.output_name == first.job_uuid else first.output_name,
            "checkpoint_dir": first.checkpoint_dir.with_name(job_uuid),
            "search": self._spec(first),
            **{"pruning": None, "after": (), "cancel_with": False, "bases": ()},
        }
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
            trials=len(self.trials),
            seed=(given.seed or 0) if given.method == "random" else None,
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
        """The job of a trial.

        Args:
            first: that of the first trial.

        Raises:
            InvalidRequest: it has no evaluations, or cannot be compared with the first one, or before its end.
        """
        if resolved.validation is None:
            hint = "nothing is evaluated: name a validation_dataset_id, or set train_split_percentage below 1"
            raise in_trial(trial, InvalidRequest(f"{FIELD}.objective", self.config.objective, hint))
        if self.pruning is not None and resolved.averaging is not None:
            hint = "trials could be compared at common weights only (averaging): leave one of them out"
            given = self.config.pruning and self.config.pruning.model_dump(exclude_unset=True)
            raise in_trial(trial, InvalidRequest(f"{FIELD}.pruning", given, hint))
        if resolved.algorithm != first.algorithm:
            hint = f"trial 1 trains {first.algorithm} and this one {resolved.algorithm}, which cannot be compared by it"
            raise in_trial(trial, InvalidRequest(f"{FIELD}.objective", self.config.objective, hint))
        if first.validation is None or resolved.validation.sha256 != first.validation.sha256:
            hint = "trials would be evaluated on different rows: name one validation_dataset_id"
            raise in_trial(trial, InvalidRequest(f"{FIELD}.objective", self.config.objective, hint))
        return resolved.model_copy(update={"pruning": self.pruning})


def resolve_search(request: Request, options: ProviderOptions) -> RequestedSearch | None:
    """The trials that a request asks for; None: it asks for no search.

    Raises:
        InvalidRequest: names the field of the search, or that of a trial.
    """
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
    drawn = _grid(values) if config.method == "grid" else _random(config, values)
    trials = tuple(_trial(type(request), number, values, body, given) for number, values in enumerate(drawn, 1))
    return RequestedSearch(config, trials)


def in_trial(trial: RequestedTrial, error: InvalidRequest) -> InvalidRequest:
    """An error of a trial, with the trial that has it."""
    if isinstance(error, InvalidRows):
        return error
    return _of_trial(trial.number, trial.values, error)


def trial_name(job_uuid: str, number: int) -> str:
    """The job_uuid of a trial."""
    return f"{job_uuid}-trial-{number}"


def _of_trial(number: int, values: Mapping[str, Any], error: InvalidRequest) -> InvalidRequest:
    shown = ", ".join(f"{path.rpartition('.')[2]}={json.dumps(value)}" for path, value in values.items())
    return InvalidRequest(error.field, error.value, f"{error.hint} (trial {number} of the search: {shown})")


def _check(config: SearchConfig) -> Mapping[str, list[Any] | RangeConfig]:
    """The values of each field. Raises InvalidRequest."""
    if config.method == "bayesian":
        hint = "this release searches by 'grid' and 'random': send one of them"
        raise InvalidRequest(f"{FIELD}.method", config.method, hint)
    if config.method not in ("grid", "random"):
        raise InvalidRequest(f"{FIELD}.method", config.method, nearest_choice(config.method, ("grid", "random")))
    for path in config.parameters:
        if path.partition(".")[0] in _FIXED or path in _FIXED or any(path.startswith(f"{one}.") for one in _FIXED):
            raise InvalidRequest(f"{FIELD}.parameters.{path}", path, "all trials have the same: leave it out")
        if above := next((one for one in config.parameters if path.startswith(f"{one}.")), None):
            hint = f"{above!r}, of which it is a part, is searched too: name one of them"
            raise InvalidRequest(f"{FIELD}.parameters.{path}", path, hint)
    found = {path: _values(config, path) for path in config.parameters}
    if config.pruning and config.pruning.min_steps and config.pruning.fraction:
        hint = f"min_steps asks for {config.pruning.min_steps}; send one of them"
        raise InvalidRequest(f"{FIELD}.pruning.fraction", config.pruning.fraction, hint)
    if config.method == "random":
        if config.trials is None:
            raise InvalidRequest(f"{FIELD}.trials", None, "a random search needs their number, such as 12")
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


def _values(config: SearchConfig, path: str) -> list[Any] | RangeConfig:
    """The values of a field, or the range that they are drawn from."""
    field, given = f"{FIELD}.parameters.{path}", config.parameters[path]
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
    if config.method == "grid":
        raise InvalidRequest(field, given, "a grid needs a list of values; a range is for 'random'")
    return found


def _grid(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All combinations; the last field changes first."""
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _random(config: SearchConfig, values: Mapping[str, list[Any] | RangeConfig]) -> Iterator[dict[str, Any]]:
    """The draws of the seed, the same in every release of Python."""
    source = random.Random(config.seed or 0)
    for _ in range(config.trials or 0):
        yield {path: _draw(those, source.random()) for path, those in values.items()}


def _draw(values: list[Any] | RangeConfig, share: float) -> Any:
    """The value at a share of a list or a range, from 0 to less than 1."""
    if isinstance(values, list):
        return values[int(share * len(values))]
    low, high = values.min, values.max
    if isinstance(low, int) and isinstance(high, int):
        if not values.log:
            return low + int(share * (high - low + 1))
        return min(high, int(low * math.pow((high + 1) / low, share)))
    drawn = low * math.pow(high / low, share) if values.log else low + share * (high - low)
    return min(max(float(f"{drawn:.{_DIGITS}g}"), float(low)), float(high))


def _trial(
    kind: type[Request], number: int, values: dict[str, Any], body: dict[str, Any], options: dict[str, Any]
) -> RequestedTrial:
    trees = json.loads(json.dumps({"body": body, "options": options}))
    try:
        for path, value in values.items():
            tree = trees["options"] if path.startswith(_OPTIONS) else trees["body"]
            _set(tree, path.removeprefix(_OPTIONS), value, path)
        trees["body"]["job_uuid"] = trial_name(body["job_uuid"], number)
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
        raise InvalidRequest(".".join(map(str, first["loc"])), first["input"], first["msg"]) from error
