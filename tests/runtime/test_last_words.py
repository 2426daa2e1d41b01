"""What ended a process of ours is where the kubelet looks for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from refit_api.errors import PlanError, SpecError
from refit_runtime import last_words


def test_an_error_that_ends_a_process_is_its_termination_message(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    with pytest.raises(SpecError), last_words.fatal(file=log):
        raise SpecError("the arena needs 2 bytes and 1 is free")
    assert log.read_text() == "refit: SpecError: the arena needs 2 bytes and 1 is free\n"


def test_other_errors_are_not_the_last(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    with pytest.raises(SpecError), last_words.fatal(PlanError, log):
        raise SpecError("asked again")
    assert log.read_text() == ""


def test_a_long_message_is_cut_and_a_missing_file_is_no_error(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    last_words.say("nobody looks", log)
    assert not log.exists()
    log.touch()
    last_words.say("x" * 10_000, log)
    assert log.stat().st_size == last_words.MOST
