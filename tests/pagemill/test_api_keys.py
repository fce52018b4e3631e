from __future__ import annotations

import pytest

from pagemill.api_keys import ApiKeys
from pagemill.errors import ConfigError, UnauthenticatedError


def test_without_keys_every_caller_is_the_common_tenant() -> None:
    keys = ApiKeys("")
    assert not keys
    assert keys.tenant("") == keys.tenant("Bearer EMPTY") == ""


def test_each_key_stands_for_its_tenant() -> None:
    keys = ApiKeys("a=one, b=two,three")
    assert keys.tenant("Bearer one") == "a"
    assert keys.tenant("bearer two") == "b"
    assert keys.tenant("Bearer three") not in ("", "a", "b")


@pytest.mark.parametrize("sent", ["", "one", "Basic one", "Bearer", "Bearer ", "Bearer four", "Bearer a=one"])
def test_a_missing_or_wrong_key_is_refused_without_an_echo(sent: str) -> None:
    with pytest.raises(UnauthenticatedError) as refusal:
        ApiKeys("a=one,b=two").tenant(sent)
    assert "four" not in refusal.value.message
    assert "one" not in refusal.value.message


@pytest.mark.parametrize("setting", ["a=", "a=same,b=same"])
def test_keys_that_tell_no_tenants_apart_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="api_key"):
        ApiKeys(setting)
