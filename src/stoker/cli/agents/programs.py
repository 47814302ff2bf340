"""What coding agents have to be told to ask this server: variables of the environment, and arguments.

Pure: a server in, a command out. `launch` finds the server and starts the program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

NO_KEY = "none"
"""Sent where the server asks for no key: most clients refuse to start without one."""


@dataclass(frozen=True, slots=True)
class AskedServer:
    """The server that a program is to ask.

    Attributes:
        url: without `/v1`.
        model: id of the model.
        n_ctx: tokens that one request may have.
        api_key: as the server takes it.
    """

    url: str
    model: str
    n_ctx: int
    api_key: str = NO_KEY


@dataclass(frozen=True, slots=True)
class Launch:
    """How a program is started.

    Attributes:
        program: its name on the PATH.
        variables: what is set in its environment.
        unset: variables that would lead it elsewhere.
        args: those that come before the user's own.
    """

    program: str
    variables: dict[str, str]
    unset: tuple[str, ...] = ()
    args: Sequence[str] = field(default_factory=list)


def _claude(server: AskedServer) -> Launch:
    sizes = [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("HAIKU", "SONNET", "OPUS")]
    names = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", *sizes]
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.api_key,
        **dict.fromkeys(names, server.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Launch("claude", variables, unset=("ANTHROPIC_API_KEY",))


def _codex(server: AskedServer) -> Launch:
    provider = {
        "name": "Stoker",
        "base_url": f"{server.url}/v1",
        "env_key": "STOKER_API_KEY",
        "wire_api": "responses",
    }
    settings = {
        "model": server.model,
        "model_provider": "stoker",
        **({"model_context_window": server.n_ctx} if server.n_ctx else {}),
        **{f"model_providers.stoker.{name}": value for name, value in provider.items()},
    }
    args = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Launch("codex", {"STOKER_API_KEY": server.api_key}, args=args)


def _aider(server: AskedServer) -> Launch:
    variables = {
        "OPENAI_API_BASE": f"{server.url}/v1",
        "OPENAI_API_KEY": server.api_key,
        "AIDER_MODEL": f"openai/{server.model}",
    }
    return Launch("aider", variables)


def _opencode(server: AskedServer) -> Launch:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Stoker",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.api_key},
        "models": {server.model: {"name": server.model}},
    }
    config = {"model": f"stoker/{server.model}", "provider": {"stoker": provider}}
    return Launch("opencode", {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


PROGRAMS: dict[str, Callable[[AskedServer], Launch]] = {
    "claude": _claude,
    "codex": _codex,
    "aider": _aider,
    "opencode": _opencode,
}
"""Those that are known, by name."""
