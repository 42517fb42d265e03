"""The error tree. Each error has a stable code and a message. `proto/openai/errors.py` turns errors into HTTP answers."""

from __future__ import annotations


class StokerError(Exception):
    """Something that we can answer for. `code` is stable and machine-readable; the message carries the numbers."""

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(StokerError):
    """A setting, or two settings together, cannot work."""

    code = "config_error"


class ModelFilesError(StokerError):
    """A model's files are missing, corrupt or not what their names promise; the message says which file and what to do."""

    code = "model_files_error"


class InvalidRequest(StokerError):
    """The client's request is wrong; `param` names the field."""

    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class NotFound(StokerError):
    code = "not_found"


class Overloaded(StokerError):
    """Not now: the queue is full, or the worker is draining."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(StokerError):
    code = "deadline_exceeded"


class EngineDied(StokerError):
    """The engine process ended while it worked on this request."""

    code = "engine_died"
