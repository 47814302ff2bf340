"""A running server as the commands see it: ask, get an answer or a typed error.

Owns the connection, the API key and how errors come back. `stoker.cli.target` finds the server; each command
decides what is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from stoker.errors import (
    AuthenticationError,
    ErrorInfo,
    InvalidRequestError,
    MachineSetupError,
    OperatorOnlyError,
    error_from_info,
)

if TYPE_CHECKING:
    from types import TracebackType

    import httpx

_GIVE_KEY = " (a command takes a key from --api-key or STOKER_API_KEY)"
_HINTS = {AuthenticationError.code: _GIVE_KEY, OperatorOnlyError.code: _GIVE_KEY}
"""What a command adds to what the server says, by the error's code."""
CONNECT_S = 5.0
ANSWER_S = 10.0


class RemoteServer:
    """One server, from `with` to its end.

    Args:
        url: of the server, without a path.
        api_key: None: it asks for none.

    Raises:
        InvalidRequestError: the URL is none.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        import httpx

        self._url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        try:
            # A proxy of the environment is for the network, not for this machine.
            self._http = httpx.Client(base_url=self._url, headers=headers, timeout=timeout, trust_env=False)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidRequestError(f"{url!r} is not the URL of a server: {error}", param="url") from None

    def __repr__(self) -> str:
        return f"RemoteServer({self._url})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str) -> dict[str, Any]:
        """The document at `path`.

        Raises:
            StokerError: what the server said is wrong.
            MachineSetupError: there is no server, or it is not ours.
        """
        import httpx

        try:
            return self._read(self._http.get(path))
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._no_answer(error) from None

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to `body`, however long it takes. Raises as `get` does."""
        import httpx

        try:
            return self._read(
                self._http.post(path, json=body, timeout=httpx.Timeout(None, connect=CONNECT_S))
            )
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise self._no_answer(error) from None

    def _no_answer(self, error: Exception) -> MachineSetupError:
        reason = str(error) or type(error).__name__
        return MachineSetupError(
            f"no server answers at {self._url} ({reason}); "
            "start one with `stoker serve`, or say where it is with --url or STOKER_URL",
            param="url",
        )

    def _read(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            document = answer.json()
            if answer.is_success and isinstance(document, dict):
                return document
            error = document["error"]
            info = ErrorInfo(
                code=str(error["code"]),
                message=str(error["message"]) + _HINTS.get(str(error["code"]), ""),
                http_status=answer.status_code,
            )
        except (ValueError, KeyError, TypeError):
            raise MachineSetupError(
                f"what listens at {self._url} is no Stoker: it answered {answer.status_code}", param="url"
            ) from None
        raise error_from_info(info)
