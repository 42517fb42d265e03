"""Where the store lies: the value of the setting `store`, and the store that it names."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from stoker.base.errors import ConfigError
from stoker.gateway.store.sqlite import SqliteStore
from stoker.gateway.store.store import Store
from stoker.gateway.store.watched import WatchedStore

SETTING = "store"
_POSTGRES = ("postgresql", "postgres")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A SQLite file or a PostgreSQL URL. `state_dir` is the folder for what this machine keeps beside a remote store."""

    text: str
    state_dir: Path

    def __post_init__(self) -> None:
        scheme = _URL.match(self.text)
        if scheme is not None and scheme[1] not in _POSTGRES:
            raise ConfigError(
                f"{SETTING}={self.name}: give the path of a SQLite file, a URL that begins with postgresql://, or none"
            )

    @property
    def is_url(self) -> bool:
        return _URL.match(self.text) is not None

    @property
    def name(self) -> str:
        """The location without a password."""
        return without_password(self.text) if self.is_url else self.text

    @property
    def exists(self) -> bool:
        """False if opening the store would create its file."""
        return self.is_url or Path(self.text).expanduser().exists()

    @property
    def slots_path(self) -> Path:
        """The write-ahead files of this store on this machine are this path and `-N`."""
        if self.is_url:
            digest = hashlib.sha256(self.name.encode()).hexdigest()[:12]
            return self.state_dir / f"store-{digest}-inflight"
        path = Path(self.text).expanduser()
        return path.with_name(path.name + "-inflight")

    def open(self) -> WatchedStore:
        """Open the store. Raises ConfigError if it cannot be used."""
        return WatchedStore(self._open())

    def _open(self) -> Store:
        if self.is_url:
            from stoker.gateway.store.postgres import PostgresStore  # only here, because psycopg is optional

            return PostgresStore(self.text, self.name, SETTING)
        return SqliteStore(Path(self.text).expanduser(), SETTING)


def without_password(url: str) -> str:
    """Return the URL with `***` in place of its password, also of one in the query string."""
    try:
        parts = urlsplit(url)
        user, colon, _ = parts.netloc.rpartition("@")[0].partition(":")
        hosts = parts.netloc.rpartition("@")[2]
    except ValueError:
        return f"{url.partition('://')[0]}://***"
    netloc = f"{user}{':***' if colon else ''}@{hosts}" if "@" in parts.netloc else hosts
    query = re.sub(r"(?i)(password=)[^&]*", r"\1***", parts.query)
    return urlunsplit((parts.scheme, netloc, parts.path, query, ""))
