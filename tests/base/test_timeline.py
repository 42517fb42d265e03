"""A timeline records the start and the duration of each stage."""

from __future__ import annotations

import time

from stoker.base.timeline import Timeline, process_start_s


def test_stages_are_relative_to_the_origin() -> None:
    timeline = Timeline(origin_s=100.0)
    timeline.add("import", 103.0, 104.5)
    [stage] = timeline.stages
    assert (stage.name, stage.start_s, stage.seconds) == ("import", 3.0, 1.5)


def test_a_failed_stage_is_recorded() -> None:
    timeline = Timeline()
    try:
        with timeline.stage("weights"):
            raise RuntimeError
    except RuntimeError:
        pass
    assert [stage.name for stage in timeline.stages] == ["weights"]


def test_a_process_starts_before_now_and_not_long_ago() -> None:
    assert time.time() - 3600 < process_start_s() <= time.time() + 0.1
