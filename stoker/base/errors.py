"""The exception classes. Each error has a stable code. `proto/openai/errors.py` turns errors into HTTP responses."""

from __future__ import annotations


class StokerError(Exception):
    """Base class of expected errors. `code` is stable and machine-readable; the message has the details for the user."""

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(StokerError):
    """A setting is invalid, or two settings contradict each other."""

    code = "config_error"


class ModelFilesError(StokerError):
    """A model's files are missing, damaged or not supported. The message says which file, and what to do."""

    code = "model_files_error"


class InvalidRequest(StokerError):
    """The client's request is invalid. `param` is the name of the field."""

    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    """The prompt and the requested output do not fit into the model's context."""

    code = "context_length_exceeded"


class NotFound(StokerError):
    """The requested model, endpoint or object does not exist."""

    code = "not_found"


class Overloaded(StokerError):
    """The request cannot be accepted now: the queue is full, or the worker is draining."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(StokerError):
    """The request's deadline passed before it was finished."""

    code = "deadline_exceeded"


class EngineDied(StokerError):
    """The engine process ended during this request."""

    code = "engine_died"
