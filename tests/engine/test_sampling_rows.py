"""The reference sampler takes some rows at a time, to limit memory. The result must not depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import make_tiny

from stoker.base.config import EngineSettings
from stoker.engine import sampler
from stoker.engine.llm import LLM, LLMOutput
from stoker.sched.request import SamplingParams


def test_sampling_in_parts_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path, "llama")
    sampling = [
        SamplingParams(
            temperature=number % 3 * 0.5,
            seed=number,
            top_p=0.9,
            num_logprobs=[None, 0, 4][number % 3],
            frequency_penalty=0.5 * (number % 2),
        )
        for number in range(11)
    ]

    def answers() -> list[LLMOutput]:
        llm = LLM(tmp_path, EngineSettings(device="cpu", num_threads=1))
        return llm.generate([[number, 2, 3] for number in range(11)], sampling, max_new_tokens=6)

    whole = answers()
    monkeypatch.setattr(sampler, "SAMPLE_BATCH_ROWS", 3)
    assert answers() == whole
    assert [len(answer.logprobs) for answer in whole[:3]] == [0, 6, 6]
    assert [len(entry.top_ids) for entry in whole[2].logprobs] == [4] * 6
