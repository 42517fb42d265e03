"""The file of `--gateway-file`: URLs of gateways, one in each line."""

from __future__ import annotations

from pathlib import Path

from stoker.base.address import host_of_url
from stoker.base.errors import ConfigError


def listed_gateways(path: Path) -> list[str]:
    """Read the URLs in a file of gateways, one in each line. Raise ConfigError if it cannot be read or has another line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--gateway-file {path} cannot be read: {error}") from error
    urls = [line.strip() for line in lines if line.strip()]
    for url in urls:
        host_of_url(f"--gateway-file {path}:", url)
    return urls
