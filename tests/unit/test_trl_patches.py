"""An attempt ends at once where a library lacks the private names that the recipes use."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.trainer.trl_patches import (
    OVERRIDDEN,
    OVERRIDDEN_DPO,
    OVERRIDDEN_KTO,
    OVERRIDDEN_REWARD,
    require_releases,
)
from llama_stack_provider_trl.specs.events import Reason


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for trl and transformers that have all the names."""
    trainer: Any = type("Trainer", (), dict.fromkeys(OVERRIDDEN))
    dpo: Any = type("DPOTrainer", (), dict.fromkeys(OVERRIDDEN_DPO))
    reward: Any = type("RewardTrainer", (), dict.fromkeys(OVERRIDDEN_REWARD))
    kto: Any = type("KTOTrainer", (), dict.fromkeys(OVERRIDDEN_KTO))
    found = SimpleNamespace(
        trl=SimpleNamespace(__version__="1.16.3", DPOTrainer=dpo, RewardTrainer=reward, KTOTrainer=kto),
        transformers=SimpleNamespace(__version__="5.23.0", Trainer=trainer),
    )
    monkeypatch.setitem(sys.modules, "trl", found.trl)
    monkeypatch.setitem(sys.modules, "transformers", found.transformers)
    return found


def test_the_expected_releases_are_accepted(libraries: SimpleNamespace) -> None:
    require_releases()


@pytest.mark.parametrize(
    ("library", "version"),
    [("trl", "1.17.0"), ("trl", "1.160.0"), ("transformers", "6.0.0"), ("transformers", "5.17.1")],
)
def test_another_release_is_refused_with_the_expected_one(
    libraries: SimpleNamespace, library: str, version: str
) -> None:
    getattr(libraries, library).__version__ = version
    with pytest.raises(JobFailure, match=f"{library} {version} is installed, .* written for {library}") as raised:
        require_releases()
    assert raised.value.reason is Reason.launch_failed


def test_a_method_that_is_overridden_and_gone_is_named(libraries: SimpleNamespace) -> None:
    del libraries.transformers.Trainer._save_rng_state
    with pytest.raises(JobFailure, match="Trainer has no _save_rng_state, which the recipes override"):
        require_releases()
