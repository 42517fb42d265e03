"""A timeline says of each stage when it began and how long it took, from the process's start on."""

from __future__ import annotations

import time

from stoker.base.timeline import Timeline, process_start_s


def test_stages_are_told_from_the_origin_on() -> None:
    timeline = Timeline(origin_s=100.0)
    timeline.add("import", 103.0, 104.5)
    [stage] = timeline.stages
    assert (stage.name, stage.start_s, stage.seconds) == ("import", 3.0, 1.5)


def test_a_stage_that_fails_is_told_too() -> None:
    timeline = Timeline()
    try:
        with timeline.stage("weights"):
            raise RuntimeError
    except RuntimeError:
        pass
    assert [stage.name for stage in timeline.stages] == ["weights"]


def test_a_process_starts_before_now_and_not_long_ago() -> None:
    assert time.time() - 3600 < process_start_s() <= time.time() + 0.1
