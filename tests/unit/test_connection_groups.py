"""Which connection ends when they are short."""

from __future__ import annotations

import random
from typing import Any

from llama_stack_provider_trl_remote.service.http.acceptor import _Groups
from llama_stack_provider_trl_remote.service.http.connections import network_of


def test_the_largest_group_is_found_whatever_comes_and_goes() -> None:
    chosen = random.Random(5)
    groups, kept = _Groups(), dict[Any, str]()
    for number in range(2000):
        if kept and chosen.random() < 0.48:
            connection = chosen.choice(list(kept))
            groups.remove(kept.pop(connection), connection)
        else:
            kept[number] = f"caller {chosen.randrange(12)}"
            groups.add(kept[number], number)  # type: ignore[arg-type]
        assert groups.count == len(kept)
        if kept:
            key, members = groups.largest()
            callers = list(kept.values())
            assert callers.count(key) == max(map(callers.count, callers)) == len(list(members))  # type: ignore[arg-type]
            assert next(iter(members)) == next(one for one, caller in kept.items() if caller == key)


def test_addresses_of_one_host_are_one_caller() -> None:
    assert network_of("192.0.2.7") == "192.0.2.7"
    assert network_of("2001:db8::1") == network_of("2001:db8::2%eth0") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert network_of("no address") == "no address"
