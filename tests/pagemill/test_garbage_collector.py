"""The garbage collector's settings are left as they were found in processes of others."""

from __future__ import annotations

import gc

import pytest

from pagemill.garbage_collector import collecting_rarely


def test_thresholds_rise_for_a_while_and_come_back_also_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), collecting_rarely():
        inside = gc.get_threshold()
        raise ZeroDivisionError
    assert inside[0] > before[0]
    assert gc.get_threshold() == before
    assert gc.isenabled()


def test_it_may_be_nested() -> None:
    before = gc.get_threshold()
    with collecting_rarely():
        with collecting_rarely():
            pass
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before
