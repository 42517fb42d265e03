"""A real gateway with mock workers records its decisions, and all of them are made again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from test_build import built, serving

from stoker.replay.recording_file import read_recording
from stoker.replay.replayer import Replayer


def test_all_decisions_of_a_gateway_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "recording"

    async def main() -> None:
        settings = {"recording.file": str(path), "store": str(tmp_path / "store.db")}
        async with built(tmp_path, settings, [serving(), serving(), serving()]) as world:

            async def session(number: int) -> None:
                messages = [{"role": "user", "content": f"Question {number}: " + "words " * 400}]
                for turn in range(6):
                    headers = {"x_session_affinity": f"secret-session-{number}"} if number % 2 else {}
                    status, _, _ = await world.ask(body={"model": "m", "messages": messages}, **headers)
                    assert status == 200
                    messages += [
                        {"role": "assistant", "content": "Hi"},
                        {"role": "user", "content": f"turn {turn} " * 90},
                    ]
                    if turn == 3:
                        await world.get("/admin/fleet")  # reading the load advances its estimate

            await asyncio.gather(*map(session, range(8)))
            await world.workers[0].stop()  # retries on other workers
            await asyncio.gather(*map(session, range(8, 12)))

    asyncio.run(main())
    header, events = read_recording(path)
    replayer = Replayer(header)
    requests = replayer.run(events)
    assert replayer.summary.num_decisions >= 12 * 6
    assert replayer.summary.first_different == ""
    answered = [one for one in requests if one.output_tokens is not None]
    assert len(answered) == 12 * 6
    assert all(one.output_tokens == 7 and one.ttft_s is not None for one in answered)
    assert b"secret-session" not in path.read_bytes()
    assert all("secret-session" not in str(one.query.session) for one in requests)
