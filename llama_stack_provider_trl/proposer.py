"""`python -m llama_stack_provider_trl.proposer`: chooses the next trials of a Bayesian search by Optuna's TPE sampler.

One question as JSON on standard input, one answer on standard output. It keeps nothing: the question has all trials so
far, and equal questions have equal answers. The process of its own keeps Optuna, its memory and its errors out of the
service.

Question: `space`, path of a field -> {"choices": how many} or {"min", "max", "log", "integer"}; `trials`, each with
its `numbers` (path -> position of its choice, or number in its range) and its `value`, null where it gave none;
`direction`; `count`; `seed`, below 2**32. Answer: a list of `count` trials, each path -> number. Tree-structured Parzen
estimator: Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

SECONDS = 120
"""This process ends after so many, also where the one that started it was killed."""


def main() -> None:
    signal.alarm(SECONDS)
    print(json.dumps(propose(json.load(sys.stdin))))


def propose(question: dict[str, Any]) -> list[dict[str, int | float]]:
    """The numbers of the next trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = {path: _distribution(optuna.distributions, given) for path, given in question["space"].items()}
    # The first trials were drawn already, so none is left to the sampler's own start.
    sampler = optuna.samplers.TPESampler(n_startup_trials=0, seed=question["seed"], constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction=question["direction"])
    state = optuna.trial.TrialState
    for trial in question["trials"]:
        value = trial["value"]
        found = {"state": state.FAIL} if value is None else {"state": state.COMPLETE, "value": value}
        study.add_trial(optuna.trial.create_trial(params=trial["numbers"], distributions=space, **found))
    return [study.ask(space).params for _ in range(question["count"])]


def _distribution(distributions: Any, given: dict[str, Any]) -> Any:
    if "choices" in given:
        return distributions.CategoricalDistribution(range(given["choices"]))
    kind = distributions.IntDistribution if given["integer"] else distributions.FloatDistribution
    return kind(given["min"], given["max"], log=given["log"])


if __name__ == "__main__":
    main()
