"""Every error Stoker raises, split by whose fault it is.

    StokerError
    ├── CallerError               the request is wrong; nothing was lost, repeating it does not help
    │   ├── InvalidRequestError       400  a field is missing, malformed or out of range
    │   ├── ContextLengthError        400  the prompt does not fit the context
    │   ├── UnsupportedError          400  this model or build cannot do what was asked
    │   ├── WorkLimitError            400  a template or grammar takes longer, or more memory, than one may
    │   ├── AuthenticationError       401  no valid API key came with it
    │   ├── ForbiddenError            403  its Host or Origin is not allowed here
    │   ├── OperatorOnlyError         403  only who operates the server may ask for this
    │   ├── RequestTooLargeError      413  the body is over the limit
    │   ├── ModelNotFoundError        404  no model of that name is served or on disk
    │   ├── RequestNotFoundError      404  no live request has that id
    │   └── StateNotFoundError        404  no saved state has that id
    ├── MachineError              the machine cannot now; repeating it later may help
    │   ├── QueueFullError            429  the waiting line is at its bound
    │   ├── RequestTimeoutError       408  the deadline of the request passed
    │   ├── PreparationTimeoutError   503  tokenising its text, or compiling its constraint, took too long
    │   ├── NotReadyError             503  starting, restarting, stopping or loading
    │   ├── ModelInUseError           409  live requests need a model as it is loaded now
    │   ├── ServerBusyError           503  as many connections or bytes of bodies as are held at once
    │   ├── InsufficientMemoryError   503  a model does not fit beside what is in use now
    │   ├── TooHotError               503  the machine is too hot to load a model
    │   ├── DeviceBusyError           503  another process holds the accelerator
    │   ├── CacheFileError            500  a file of the prefix cache is damaged, gone or too large
    │   ├── KeptRequestDamagedError   410  what was kept of a suspended request cannot be read any more
    │   └── MachineSetupError         500  a port in use, a folder that cannot be written, no compiler, ...
    ├── ModelError                the model file is at fault
    │   ├── ModelFileError            422  missing, truncated, corrupt or foreign file
    │   ├── ModelTooLargeError        422  it does not fit this machine's limit, however it is cut down
    │   ├── ReadingError              422  its answer about pictures is not of the form that was asked for
    │   ├── ModelLoadError            503  the native library refused it
    │   │   └── LoadCrashedError      503  the native library crashed on it, twice
    │   └── DownloadError             503  a download failed, was corrupt or there is no network
    └── EngineError               Stoker is at fault
        ├── WorkerLostError           500  the process for templates and grammars died twice on this request
        ├── StepFailedError           500  the native decode failed for this sequence alone
        ├── PoolFullError             503  no KV cells are free (never reaches a caller that fits alone)
        ├── EngineCrashedError        500  the engine died three times on this request
        └── SchedulerStalledError     500  work exists and no step can be planned

Errors cross the process boundary as `ErrorInfo` and are raised again as their own class.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as a value: what crosses a process boundary and what HTTP bodies are made of."""

    code: str
    message: str
    http_status: int = 500
    param: str | None = None
    retry_after_s: float | None = None
    details: dict[str, Any] = {}


class StokerError(Exception):
    """Base of the tree.

    Args:
        message: one sentence with the numbers that explain it.
        param: name of the request field at fault, if one is.
        retry_after_s: seconds after which repeating may work.
        details: the numbers of the message, by name.
    """

    code: ClassVar[str] = "stoker_error"
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from_info, (self.info(),)

    def info(self) -> ErrorInfo:
        """This error as a value that can be sent."""
        return ErrorInfo(
            code=self.code,
            message=self.message,
            http_status=self.http_status,
            param=self.param,
            retry_after_s=self.retry_after_s,
            details=self.details,
        )


class CallerError(StokerError):
    """The request is wrong."""

    code = "invalid_request"
    http_status = 400


class InvalidRequestError(CallerError):
    """A field is missing, malformed or out of range; `param` names it."""


class ContextLengthError(CallerError):
    """The prompt does not fit; details carry `num_tokens` and `n_ctx`."""

    code = "context_length_exceeded"

    @classmethod
    def over(
        cls, what: str, num_tokens: int, n_ctx: int, *, param: str = "prompt", is_least: bool = False
    ) -> ContextLengthError:
        """The error of a text of `num_tokens`, at the least, for a context of `n_ctx`; `what` names the text.

        The first sentence is OpenAI's: clients and gateways look for it to shorten a conversation.
        """
        has = f"{what} has {'at least ' if is_least else ''}{num_tokens} tokens"
        return cls(_overflow(has, n_ctx), param=param, num_tokens=num_tokens, n_ctx=n_ctx)

    @classmethod
    def over_chars(
        cls, what: str, num_chars: int, max_chars: int, n_ctx: int, *, param: str = "prompt"
    ) -> ContextLengthError:
        """The error of a text of more characters than are read for a context of `n_ctx`."""
        has = f"{what} has {num_chars} characters or more, of which at most {max_chars} are read for it"
        return cls(_overflow(has, n_ctx), param=param, num_chars=num_chars, max_chars=max_chars, n_ctx=n_ctx)


def _overflow(has: str, n_ctx: int) -> str:
    context = f"This model's maximum context length is {n_ctx} tokens."
    return f"{context} However, {has}. Shorten it, or serve the model with a larger context"


class UnsupportedError(CallerError):
    """The model or build lacks what was asked for."""

    code = "unsupported"


class WorkLimitError(CallerError):
    """Laying out or translating takes more than one request may have; details: `limit_s` or `limit_bytes`."""

    code = "work_limit_exceeded"


class AuthenticationError(CallerError):
    """No valid API key came with the request."""

    code = "invalid_api_key"
    http_status = 401


class ForbiddenError(CallerError):
    """The request's Host or Origin is not allowed here."""

    code = "forbidden"
    http_status = 403


class OperatorOnlyError(CallerError):
    """Only who operates the server may ask for this; the message says which setting or key allows it."""

    code = "operator_only"
    http_status = 403


class RequestTooLargeError(CallerError):
    """The body is over the limit."""

    code = "request_too_large"
    http_status = 413


class ModelNotFoundError(CallerError):
    """No such model is served or on disk."""

    code = "model_not_found"
    http_status = 404


class RequestNotFoundError(CallerError):
    """No live request has that id."""

    code = "request_not_found"
    http_status = 404


class RequestCancelledError(CallerError):
    """The call was cancelled by its id before it had its answer."""

    code = "request_cancelled"
    http_status = 499


class StateNotFoundError(CallerError):
    """No saved state of the caller has that id."""

    code = "state_not_found"
    http_status = 404


class MachineError(StokerError):
    """The machine cannot now."""

    code = "machine_error"
    http_status = 503


class QueueFullError(MachineError):
    """The waiting line is at its bound."""

    code = "queue_full"
    http_status = 429


class RequestTimeoutError(MachineError):
    """The request's own deadline passed."""

    code = "request_timeout"
    http_status = 408


class PreparationTimeoutError(MachineError):
    """Turning the request into tokens took over `max_prepare_s`; details carry it."""

    code = "preparation_timeout"


class NotReadyError(MachineError):
    """Starting, restarting, stopping or loading."""

    code = "not_ready"


class ServerBusyError(MachineError):
    """The server holds as many connections, or bytes of unfinished bodies, as it may; details carry which."""

    code = "server_busy"


class ModelInUseError(MachineError):
    """Live requests need a model as it is loaded now, so it is not loaded otherwise.

    Details carry `num_requests`, how many, and for want of context `n_ctx`, what they need of it.
    """

    code = "model_in_use"
    http_status = 409


class InsufficientMemoryError(MachineError):
    """A model does not fit beside what is in use now.

    Details carry `needed`, `free`, `margin` and `evictable`, in bytes.
    """

    code = "insufficient_memory"


class TooHotError(MachineError):
    """The machine is too hot to load a model; details carry `heat`."""

    code = "too_hot"


class DeviceBusyError(MachineError):
    """Another process holds the accelerator; details carry `device`."""

    code = "device_busy"


class CacheFileError(MachineError):
    """One file of the prefix cache is damaged, gone or too large; the others are not concerned."""

    code = "cache_file"
    http_status = 500


class KeptRequestDamagedError(MachineError):
    """The file of a suspended request is damaged: it does not go on; the message names where it was put."""

    code = "kept_request_damaged"
    http_status = 410


class MachineSetupError(MachineError):
    """Something outside has to be put right by the owner of the machine."""

    code = "machine_setup"
    http_status = 500


class ModelError(StokerError):
    """The model file is at fault."""

    code = "model_error"
    http_status = 503


class ModelFileError(ModelError):
    """Missing, truncated, corrupt or foreign file; the message names the file and the reason."""

    code = "model_file_invalid"
    http_status = 422


class ModelTooLargeError(ModelError):
    """It does not fit this machine's limit, however it is cut down; details carry `needed` and `limit`."""

    code = "model_too_large"
    http_status = 422


class ReadingError(ModelError):
    """What the model read is not of the form asked for, tried again too; details carry `text`, `attempts`."""

    code = "reading_failed"
    http_status = 422


class ModelLoadError(ModelError):
    """The native library refused the model."""

    code = "model_load_failed"


class LoadCrashedError(ModelLoadError):
    """The native library crashed on the model; it is not loaded again unasked, until its file is replaced.

    The message quotes what the library said; details carry `crashes` where the engine itself crashed.
    """

    code = "model_load_crashed"


class DownloadError(ModelError):
    """A download failed, was corrupt, or there is no network."""

    code = "download_failed"


class EngineError(StokerError):
    """Stoker is at fault."""

    code = "engine_error"


class WorkerLostError(EngineError):
    """The process for templates and grammars ended, each time it was given this."""

    code = "worker_lost"


class StepFailedError(EngineError):
    """The native decode failed for this sequence alone."""

    code = "step_failed"


class PoolFullError(EngineError):
    """No KV cells are free; the step changed nothing."""

    code = "kv_pool_full"
    http_status = 503


class EngineCrashedError(EngineError):
    """The engine died repeatedly on this request, without a token of progress in between."""

    code = "engine_crashed"


class SchedulerStalledError(EngineError):
    """Work exists and no step can be planned: a bug, reported with every counter."""

    code = "scheduler_stalled"


def _tree(cls: type[StokerError]) -> list[type[StokerError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _tree(child))]


def error_from_info(info: ErrorInfo) -> StokerError:
    """The exception that `info` was made from; an unknown code becomes an `EngineError`."""
    classes = {cls.code: cls for cls in reversed(_tree(StokerError)) if cls is not CallerError}
    cls = classes.get(info.code, EngineError)
    return cls(info.message, param=info.param, retry_after_s=info.retry_after_s, **info.details)
