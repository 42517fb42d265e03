"""What a worker knows and others must not: nothing of it is on a command line, where every user of the machine can read it."""

from __future__ import annotations

from pathlib import Path

from real import serving

SECRET = "correct-horse-battery-staple"


def test_the_secret_is_on_no_command_line(tiny_folder: Path, tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text(SECRET)
    with serving(tiny_folder, tmp_path / "log", "--secret-file", str(secret_file), "--role", "prefill"):
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert any(str(secret_file).encode() in line for line in lines), "the worker was there to be seen"
    assert not any(SECRET.encode() in line for line in lines)
