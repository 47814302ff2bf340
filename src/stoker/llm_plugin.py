"""Stoker's models for Simon Willison's `llm`: `llm -m stoker/NAME "..."`, in the environment they share.

Every model that `stoker models` lists and that writes text is offered under `stoker/NAME`; the settings of
the engine, such as `STOKER_MODELS_DIR`, count. The engine starts with the first prompt and lives as long as
the program. What is heavy is imported when it is needed: `llm` loads this each time.
"""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING, Any

import llm
from pydantic import Field

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.ipc.usage import Usage
    from stoker.models.store import ModelFile
    from stoker.settings import EngineSettings
    from stoker.sync import Runtime

PREFIX = "stoker/"


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Offer every model here that answers a conversation; `llm` and its other models work in any case."""
    from stoker.errors import StokerError  # noqa: PLC0415 - see above
    from stoker.models.store import ModelStore  # noqa: PLC0415 - see above
    from stoker.settings import load_settings  # noqa: PLC0415 - see above

    try:
        engine, _ = load_settings({}, None)
    except StokerError as error:
        sys.stderr.write(f"stoker: no models are offered: {error.message}\n")
        return
    for file in ModelStore(engine.models_dir).list():
        if _answers(file):
            register(StokerModel(file.id, engine))


def _answers(file: ModelFile) -> bool:
    """Whether a model writes text; encoders do not, nor what was made to read images and has no projector.

    One that brings a chat template answers questions without images too.
    """
    from stoker.ipc.model import ModelClass, Pairing  # noqa: PLC0415 - see above

    described = file.description
    if described is None or described.model_class is ModelClass.ENCODER:
        return False
    needs_template = described.model_class is ModelClass.ENCODER_DECODER or described.pairing in {
        Pairing.NEEDS_PROJECTOR,
        Pairing.BROKEN,
    }
    return described.chat_template is not None or not needs_template


class StokerModel(llm.Model):
    """One model; its runtime is started by the first prompt.

    Args:
        name: of the model, as `stoker models` lists it.
        settings: of the engine it runs in.
    """

    can_stream = True
    supports_schema = True

    class Options(llm.Options):
        """What a prompt may set; what it does not is the server's default."""

        max_tokens: int | None = Field(default=None, ge=1, description="Tokens to answer with at most.")
        temperature: float | None = Field(default=None, ge=0, description="0 takes the likeliest token.")
        top_p: float | None = Field(default=None, ge=0, le=1, description="Nucleus of the likeliest tokens.")
        top_k: int | None = Field(default=None, description="So many of the likeliest tokens.")
        seed: int | None = Field(default=None, description="Same seed, same answer.")

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self.model_id = f"{PREFIX}{name}"
        self._name = name
        self._settings = settings
        self._runtime: Runtime | None = None

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:  # noqa: ARG002, FBT001 - the library's signature
        """Answer a prompt, with the conversation before it; without a chat template the text is continued."""
        usage: Usage | None = None
        fields = {name: value for name, value in prompt.options.model_dump().items() if value is not None}
        if prompt.schema:
            fields["schema"] = prompt.schema
        runtime, turns = self._started(), _messages(prompt, conversation)
        is_text = len(turns) == 1 and not runtime.resolve("default").takes_conversations
        for delta in runtime.generate(prompt.prompt, **fields) if is_text else runtime.chat(turns, **fields):
            usage = delta.usage or usage
            if delta.text:
                yield delta.text
        if usage is not None:
            response.set_usage(input=usage.prompt_tokens, output=usage.completion_tokens)

    def _started(self) -> Runtime:
        if self._runtime is None:
            from stoker.sync import Runtime  # noqa: PLC0415 - see above

            runtime = Runtime(settings=self._settings.replace(models=(self._name,)))
            runtime.start()
            atexit.register(runtime.close)
            self._runtime = runtime
        return self._runtime

    def close(self) -> None:
        """End the engine now rather than with the program; idempotent."""
        if self._runtime is not None:
            atexit.unregister(self._runtime.close)
            self._runtime.close()
            self._runtime = None


def _messages(prompt: Any, conversation: Any) -> list[dict[str, str]]:
    """The turns so far, as a chat template gets them; a system prompt that stays the same is said once."""
    turns: list[dict[str, str]] = []
    system = ""
    for former in conversation.responses if conversation is not None else ():
        system = _say_system(turns, former.prompt.system, system)
        turns.append({"role": "user", "content": former.prompt.prompt})
        turns.append({"role": "assistant", "content": former.text()})
    _say_system(turns, prompt.system, system)
    turns.append({"role": "user", "content": prompt.prompt})
    return turns


def _say_system(turns: list[dict[str, str]], text: str | None, said: str) -> str:
    if text and text != said:
        turns.append({"role": "system", "content": text})
        return text
    return said
