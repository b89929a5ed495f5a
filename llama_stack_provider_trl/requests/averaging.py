"""Training with periodic averaging: whether a job can, and the steps after which it saves and logs then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequest
from ..specs.averaging import AveragingSpec
from ..specs.methods import METHODS
from .options import ProviderOptions
from .settings import Settings

_FIELD = "provider_options.averaging"


def resolve_averaging(options: ProviderOptions, settings: Settings, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job whose workers' weights are averaged. Raises InvalidRequest: the job has one worker, or trains
    or saves in a way that averaging excludes.

    Args:
        fields: of its JobSpec, resolved without averaging.
    """
    given = options.averaging
    if given is None:
        return {}
    nesterov = given.outer_momentum > 0 if given.nesterov is None else given.nesterov
    averaging = AveragingSpec(**{**given.model_dump(), "nesterov": nesterov})
    _check_workers(averaging, settings, fields)
    _check_method(averaging, fields)
    interval = averaging.interval
    for name in ("save_steps", "eval_steps"):
        steps = getattr(options, name)
        if steps is not None and steps % interval:
            hint = (
                f"the workers hold the same weights after every {interval} steps only (averaging.interval): send "
                f"{-(-steps // interval) * interval}"
            )
            raise InvalidRequest(f"provider_options.{name}", steps, hint)
    found: dict[str, Any] = {"averaging": averaging}
    if fields["save_steps"] is not None:  # the configuration's
        found["save_steps"] = -(-fields["save_steps"] // interval) * interval
    if "logging_steps" not in options.model_fields_set:  # each point waits for all workers
        found["logging_steps"] = interval
    return found


def _check_workers(averaging: AveragingSpec, settings: Settings, fields: Mapping[str, Any]) -> None:
    given = averaging.model_dump()
    if settings.sharding is None:
        hint = "this provider trains in one process; leave it out, or use the service (remote::trl_remote)"
        raise InvalidRequest(_FIELD, given, hint)
    ranks, resources = fields["ranks"], fields["resources"]
    if ranks == 1:
        hint = "one rank has no other to average with: set nproc_per_node or resources.nodes, or leave it out"
        raise InvalidRequest(_FIELD, given, hint)
    strategy, nodes = settings.sharding.strategy, resources.nodes if resources else 1
    if strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        hint = (
            f"sharding_strategy is {strategy}, under which all ranks train one copy of the model: set the provider "
            "option fsdp_config.sharding_strategy to NO_SHARD (each rank is a worker), or HYBRID_SHARD (each node is)"
        )
        raise InvalidRequest(_FIELD, given, hint)
    if strategy == "HYBRID_SHARD" and (nodes == 1 or ranks == nodes):
        found = "on one node, which is one worker" if nodes == 1 else "with one rank on each node, which shards nothing"
        hint = f"sharding_strategy is HYBRID_SHARD, and this job trains {found}: use NO_SHARD"
        raise InvalidRequest(_FIELD, given, hint)


def _check_method(averaging: AveragingSpec, fields: Mapping[str, Any]) -> None:
    method = METHODS[fields["method"].algorithm]
    if not method.averages:
        hint = f"{method.title} has means over all ranks in each step, which averaging keeps apart; leave it out"
        raise InvalidRequest(_FIELD, averaging.model_dump(), hint)
    if fields["dtype"] == "fp16":
        hint = "each worker would find a loss scale of its own (averaging); send 'bf16'"
        raise InvalidRequest("training_config.dtype", "fp16", hint)
    if fields["method"].has_batch_means:
        hint = "its loss has means over the pairs of all ranks, which averaging keeps apart; send 'sigmoid'"
        raise InvalidRequest("algorithm_config.loss_type", "kto_pair", hint)
