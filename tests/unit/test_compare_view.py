"""The difference of jobs' configurations."""

from __future__ import annotations

from llama_stack_provider_trl_remote.service.pages.compare_view import compared
from llama_stack_provider_trl_remote.service.pages.job_view import Setting


def test_settings_are_beside_each_other_and_those_that_differ_are_known() -> None:
    one = [Setting("job_uuid", "one", ""), Setting("seed", "1", ""), Setting("batch", "4", "2"), Setting("lr", "1", "")]
    other = [
        Setting("job_uuid", "two", ""),
        Setting("seed", "1", ""),
        Setting("batch", "2", ""),
        Setting("dora", "a", ""),
    ]
    found = {setting.name: setting for setting in compared([one, other])}
    assert [*found] == ["seed", "batch", "lr", "dora"]
    assert [name for name, setting in found.items() if setting.differs] == ["lr", "dora"]
    assert (found["lr"].values, found["dora"].values) == (["1", ""], ["", "a"])


def test_a_job_alone_differs_from_nothing() -> None:
    assert not [one for one in compared([[Setting("seed", "1", "")]]) if one.differs]
    assert compared([]) == []
