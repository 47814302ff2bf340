"""Every error Stoker raises, split by whose fault it is.

`CallerError`: the request is wrong; repeating it does not help. `MachineError`: the machine cannot now;
repeating it later may help. `ModelError`: the model's file is at fault. `EngineError`: Stoker is at fault.
Each class has a stable `code`, an HTTP status, and the numbers that explain it as `details`.

Errors cross the process boundary as `ErrorInfo` and are raised again as their own class.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

__all__ = [
    "AnswerInvalidError",
    "AuthenticationError",
    "BackendChangedError",
    "BackendUnavailableError",
    "CacheFileError",
    "CallerError",
    "ContentEncodingError",
    "ContextLengthError",
    "DeviceBusyError",
    "DownloadError",
    "EngineCrashedError",
    "EngineError",
    "ErrorInfo",
    "ForbiddenError",
    "InsufficientMemoryError",
    "InvalidRequestError",
    "KeptRequestDamagedError",
    "KeyForbidsError",
    "LoadCrashedError",
    "MachineError",
    "MachineSetupError",
    "ModelError",
    "ModelFileError",
    "ModelInUseError",
    "ModelLoadError",
    "ModelNotFoundError",
    "ModelReadError",
    "ModelTooLargeError",
    "NoMachineError",
    "NotReadyError",
    "OperatorOnlyError",
    "PoolFullError",
    "PreparationTimeoutError",
    "PreviousResponseError",
    "QueueFullError",
    "RateLimitError",
    "ReadingError",
    "RequestCancelledError",
    "RequestNotFoundError",
    "RequestTimeoutError",
    "RequestTooLargeError",
    "ResponseNotFoundError",
    "SchedulerStalledError",
    "ServerBusyError",
    "ServerLostError",
    "StateNotFoundError",
    "StepAbortedError",
    "StepFailedError",
    "StepMemoryError",
    "StokerError",
    "TextNotKeptError",
    "TextsOffError",
    "TooHotError",
    "UnsupportedError",
    "VocabularyMismatchError",
    "WorkLimitError",
    "WorkerLostError",
    "error_from_info",
]


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

    def __init_subclass__(cls, *, code: str | None = None, http_status: int | None = None) -> None:
        """A class has its own code and status, or those of the class above it."""
        super().__init_subclass__()
        cls.code = code or cls.code
        cls.http_status = http_status or cls.http_status

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


class CallerError(StokerError, code="invalid_request", http_status=400):
    """The request is wrong."""


class InvalidRequestError(CallerError):
    """A field is missing, malformed or out of range; `param` names it."""


class ContextLengthError(CallerError, code="context_length_exceeded"):
    """The prompt does not fit; details carry `num_tokens` and `n_ctx`."""

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
        has = f"{what} has {num_chars} characters, of which at most {max_chars} are read for it"
        return cls(_overflow(has, n_ctx), param=param, num_chars=num_chars, max_chars=max_chars, n_ctx=n_ctx)

    def bounded_by(self, field: str) -> ContextLengthError:
        """The same error where that field of the request made the context smaller than the model's."""
        text = self.message.replace(_LARGER_CONTEXT, f"raise {field}")
        return ContextLengthError(text, param=self.param, **self.details)


_LARGER_CONTEXT = "serve the model with a larger context"


def _overflow(has: str, n_ctx: int) -> str:
    context = f"This model's maximum context length is {n_ctx} tokens."
    return f"{context} However, {has}. Shorten it, or {_LARGER_CONTEXT}"


class UnsupportedError(CallerError, code="unsupported"):
    """The model or build lacks what was asked for."""


class WorkLimitError(CallerError, code="work_limit_exceeded"):
    """A template, grammar or document takes more than it may; details carry the limits."""


class AuthenticationError(CallerError, code="invalid_api_key", http_status=401):
    """No valid API key came with the request."""


class ForbiddenError(CallerError, code="forbidden", http_status=403):
    """The request's Host or Origin is not allowed here."""


class OperatorOnlyError(CallerError, code="operator_only", http_status=403):
    """Only operators of the server may ask for this; the message says which setting or key allows it."""


class KeyForbidsError(CallerError, code="key_forbids", http_status=403):
    """The key that it came with may not use that class or model; details carry what it may use."""


class RequestTooLargeError(CallerError, code="request_too_large", http_status=413):
    """The body is over the limit."""


class ContentEncodingError(CallerError, code="unsupported_content_encoding", http_status=415):
    """The body is compressed; bodies are taken as they are alone."""


class ModelNotFoundError(CallerError, code="model_not_found", http_status=404):
    """No such model is served or on disk."""


class RequestNotFoundError(CallerError, code="request_not_found", http_status=404):
    """No live request has that id."""


class RequestCancelledError(CallerError, code="request_cancelled", http_status=499):
    """The call was cancelled by its id before it had its answer."""


class TextsOffError(CallerError, code="texts_off", http_status=403):
    """Nobody may read texts of requests here; the message names the setting that allows it."""


class TextNotKeptError(CallerError, code="text_not_kept", http_status=409):
    """The request is known and its text is not: a call of several requests, or it has ended long ago."""


class ResponseNotFoundError(CallerError, code="response_not_found", http_status=404):
    """No response is stored under that id."""


class PreviousResponseError(CallerError, code="previous_response_not_found"):
    """The response that is to be continued is not stored."""


class StateNotFoundError(CallerError, code="state_not_found", http_status=404):
    """No saved state of the caller has that id."""


class MachineError(StokerError, code="machine_error", http_status=503):
    """The machine cannot now."""


class QueueFullError(MachineError, code="queue_full", http_status=429):
    """The queue is at its bound."""


class RateLimitError(MachineError, code="rate_limit_exceeded", http_status=429):
    """The key that it came with has used what it may in a minute; details carry `limit` and `per_minute`."""


class RequestTimeoutError(MachineError, code="request_timeout", http_status=408):
    """The request's own deadline passed."""


class PreparationTimeoutError(MachineError, code="preparation_timeout"):
    """Tokenising the text or compiling the constraint took over `max_prepare_s`; details carry it."""


class NotReadyError(MachineError, code="not_ready"):
    """Starting, restarting, stopping or loading."""


class NoMachineError(MachineError, code="no_machine"):
    """No machine of the site may take a request now; details carry `machines`: of each, why not."""


class ServerBusyError(MachineError, code="server_busy"):
    """The server holds as many connections, or bytes of unfinished bodies, as it may; details carry which."""


class ServerLostError(MachineError, code="server_lost"):
    """No server answers where one was asked, or it went away during a call; details carry `url`."""


class ModelInUseError(MachineError, code="model_in_use", http_status=409):
    """Live requests need a model as it is loaded now, so it is not loaded otherwise.

    Details carry `num_requests`, how many, and for want of context `n_ctx`, what they need of it.
    """


class InsufficientMemoryError(MachineError, code="insufficient_memory"):
    """A model does not fit beside what is in use now.

    Details carry `needed`, `free`, `margin` and `evictable`, in bytes.
    """


class TooHotError(MachineError, code="too_hot"):
    """The machine is too hot to load a model; details carry `heat`."""


class DeviceBusyError(MachineError, code="device_busy"):
    """Another process holds the accelerator; details carry `device` and, if known, `pid` and `models`."""


class BackendUnavailableError(MachineError, code="backend_unavailable"):
    """A backend cannot compute here: not installed, or its trial failed; details carry `backend`."""


class BackendChangedError(MachineError, code="backend_changed"):
    """Another backend serves the model now, and its tokens are others: ask again; details carry both."""


class CacheFileError(MachineError, code="cache_file", http_status=500):
    """One file of the prefix cache is damaged, gone or too large."""


class KeptRequestDamagedError(MachineError, code="kept_request_damaged", http_status=410):
    """The file of a suspended request is damaged: it does not go on; the message names where it was put."""


class MachineSetupError(MachineError, code="machine_setup", http_status=500):
    """To be mended by the machine's owner: a port in use, a folder not writable, no compiler."""


class ModelError(StokerError, code="model_error", http_status=503):
    """The model file is at fault."""


class ModelFileError(ModelError, code="model_file_invalid", http_status=422):
    """Missing, truncated, corrupt or foreign file; the message names the file and the reason."""


class ModelTooLargeError(ModelError, code="model_too_large", http_status=422):
    """It does not fit this machine's limit, however it is cut down; details carry `needed` and `limit`."""


class ReadingError(ModelError, code="reading_failed", http_status=422):
    """The answer about images is not of the form asked for, twice; details carry `text`, `attempts`."""


class AnswerInvalidError(ModelError, code="answer_invalid", http_status=422):
    """The answer is not of the schema that was asked for; details carry its `text`."""


class ModelLoadError(ModelError, code="model_load_failed"):
    """The native library refused the model."""


class LoadCrashedError(ModelLoadError, code="model_load_crashed"):
    """The native library crashed on the model twice: it is loaded again when asked for or replaced.

    The message quotes what the library said; details carry `crashes` where the engine itself crashed.
    """


class ModelReadError(ModelError, code="model_read_failed"):
    """A page of a mapped model file could not be read (SIGBUS): the disk fails, or the file was cut.

    The message names the files it may be; details carry `crashes`, the engines that ended of it, and `first`,
    what was said of the first one.
    """


class VocabularyMismatchError(ModelError, code="vocabulary_mismatch", http_status=409):
    """A request has tokens of another vocabulary than the model of that name has here; it cannot go on."""


class DownloadError(ModelError, code="download_failed"):
    """A download failed, was corrupt, or there is no network."""


class EngineError(StokerError, code="engine_error"):
    """Stoker is at fault."""


class WorkerLostError(EngineError, code="worker_lost"):
    """The process for templates, grammars and documents ended twice on this request."""


class StepFailedError(EngineError, code="step_failed"):
    """The native decode failed for this sequence alone."""


class StepMemoryError(StepFailedError, code="step_out_of_memory", http_status=503):
    """A device has no memory left to compute a step of one token: another program took it, or a model did."""


class StepAbortedError(StepFailedError, code="step_aborted"):
    """A step was ended because something has arrived; it is computed again, and no request ends by it."""


class PoolFullError(EngineError, code="kv_pool_full", http_status=503):
    """No KV cells are free; the step changed nothing. Never the error of a request that fits alone."""


class EngineCrashedError(EngineError, code="engine_crashed"):
    """The engine died three times on this request, without a token of progress in between."""


class SchedulerStalledError(EngineError, code="scheduler_stalled"):
    """Work exists and no step can be planned: a bug, reported with every counter."""


def _tree(cls: type[StokerError]) -> list[type[StokerError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _tree(child))]


def error_from_info(info: ErrorInfo) -> StokerError:
    """The exception that `info` was made from; an unknown code becomes an `EngineError`."""
    classes = {cls.code: cls for cls in reversed(_tree(StokerError)) if cls is not CallerError}
    cls = classes.get(info.code, EngineError)
    return cls(info.message, param=info.param, retry_after_s=info.retry_after_s, **info.details)
