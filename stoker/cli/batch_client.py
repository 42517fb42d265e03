"""BatchClient: the calls of the Files and Batch API that `stoker batch` makes, over urllib."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from stoker.base.errors import ConfigError, StokerError

_ANSWER_S = 60.0
_UPLOAD_S = 600.0
_BUSY = frozenset({429, 502, 503, 504})
_MAX_ERROR_BYTES = 1 << 20


class GatewayBusy(StokerError):
    """The gateway does not answer, or refuses a request for now. It may be restarting."""

    code = "gateway_busy"


class BatchClient:
    """One gateway, with an API key or none."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def upload(self, file: Path) -> str:
        """Upload a batch's input file, and return its id."""
        boundary = secrets.token_hex(16)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
            'Content-Disposition: form-data; name="file"; filename="batch.jsonl"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        )
        body = b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode()))
        kind = f"multipart/form-data; boundary={boundary}"
        return str(self._json("POST", "/v1/files", body, kind, _UPLOAD_S)["id"])

    def delete_file(self, file_id: str) -> None:
        self._json("DELETE", f"/v1/files/{quote(file_id)}")

    def create(self, file_id: str, endpoint: str, window: str) -> Any:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return self._json("POST", "/v1/batches", json.dumps(body).encode())

    def get(self, batch_id: str) -> Any:
        return self._json("GET", f"/v1/batches/{quote(batch_id)}")

    def cancel(self, batch_id: str) -> Any:
        return self._json("POST", f"/v1/batches/{quote(batch_id)}/cancel", b"")

    def download(self, file_id: str, to: Path) -> None:
        """Write a file of the gateway to `to`, which is complete or not there."""
        part = to.with_name(f"{to.name}.part")
        with self._open("GET", f"/v1/files/{quote(file_id)}/content", timeout_s=_UPLOAD_S) as answer:
            try:
                with part.open("wb") as file:
                    shutil.copyfileobj(answer, file)
                if answer.length:  # urllib ends silently if the connection is lost
                    raise GatewayBusy(f"{self._url} closed the connection {answer.length} bytes too early")
                os.replace(part, to)
            except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
                raise GatewayBusy(f"{self._url} does not answer: {error}") from error
            except OSError as error:
                raise ConfigError(f"cannot write {to}: {error.strerror}; choose another --output") from error
            finally:
                part.unlink(missing_ok=True)

    def _json(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout_s: float = _ANSWER_S,
    ) -> Any:
        with self._open(method, path, body, content_type, timeout_s) as answer:
            try:
                found = json.loads(answer.read())
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise GatewayBusy(f"{self._url}{path} sent no complete answer: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{self._url}{path} is not the Batch API of a gateway")
        return found

    def _open(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout_s: float = _ANSWER_S,
    ) -> http.client.HTTPResponse:
        headers = self._headers | ({} if body is None else {"content-type": content_type})
        request = urllib.request.Request(self._url + path, data=body, headers=headers, method=method)
        try:
            answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
            return answer
        except urllib.error.HTTPError as refused:
            with refused:
                what = f"{self._url}{path} answered {refused.code}: {_message(refused)}"
            raise (GatewayBusy(what) if refused.code in _BUSY else ConfigError(what)) from refused
        except (OSError, http.client.HTTPException) as error:
            raise GatewayBusy(f"{self._url} does not answer: {error}") from error


def _message(refused: urllib.error.HTTPError) -> str:
    """Return the message of an error in OpenAI's shape."""
    try:
        return str(json.loads(refused.read(_MAX_ERROR_BYTES))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return str(refused.reason)
