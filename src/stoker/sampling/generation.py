"""Decode state of one choice: which tokens it has, what they say and when it ends.

The sampler draws, `TextAssembler` makes text of bytes that is valid UTF-8 at every moment, `StopGate` finds
stop strings in it (SPEC D3); `Generation` orders them and decides the finish reason (SPEC D4).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from stoker.backends.protocol.backend import Candidates, Rows, Vocabulary
from stoker.errors import StokerError
from stoker.grammar.matcher import ConstraintState
from stoker.ipc.events import Delta
from stoker.ipc.request import FinishReason, GenerateRequest
from stoker.ipc.usage import TokenLogprob
from stoker.sampling.logit_edits import DryPenalty, EarlyEndBan, LogitBias, LogitEdit, RepeatPenalty
from stoker.sampling.logprobs import token_logprob
from stoker.sampling.sampler import Sampler
from stoker.sampling.together import draw_together
from stoker.sampling.truncation import Workspace


class TextAssembler:
    """Incremental UTF-8 decoder: holds the bytes of a character until it is whole.

    Bytes that can no longer become a character turn into U+FFFD.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False

    def __repr__(self) -> str:
        return f"TextAssembler(held={self._decoder.getstate()[0]!r})"

    def push(self, piece: bytes) -> str:
        """The characters that `piece` completes."""
        if not self._holds and piece.isascii():  # the decoder is several calls of Python
            return piece.decode("ascii")
        text = self._decoder.decode(piece)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """U+FFFD if a character is incomplete, else nothing; the assembler is empty afterwards."""
        self._holds = False
        return self._decoder.decode(b"", final=True)


class StopGate:
    """Lets text through up to a stop string and holds back only what may still become one.

    The text is read character by character, however it was cut into pieces: the first stop string to be
    complete ends it; of several complete at one character the one that began first counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""

    def __repr__(self) -> str:
        return f"StopGate(stops={self._stops!r}, held={self._held!r})"

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text.

        Returns:
            The text that is safe to deliver, and the stop string that was found. Text from that string on
            is dropped.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        match = self._first_match(buffer)
        if match is not None:
            self._held = ""
            start, stop = match
            return buffer[:start], stop
        cut = len(buffer) - self._held_length(buffer)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """The held text, when nothing can follow any more."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        found = [(buffer.find(stop), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _held_length(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class Generation:
    """One choice of a request. Built on any thread, used by one thread at a time.

    Args:
        request: what the caller asked for.
        key: the request's id, and which of its `n` choices this is.
        vocabulary: the model's tokenizer.
        prompt: token ids of the prompt, which penalties look back over.
        workspace: buffers of the model, used by `advance`.

    Attributes:
        tokens: ids generated so far, one that ended the generation included.
        finish_reason: why it ended, None while it runs.
        stop_text: the stop string that ended it.
        sampler: what draws its tokens.
        workspace: as given.

    Raises:
        InvalidRequestError: a setting that only the vocabulary shows to be wrong.
    """

    def __init__(
        self,
        request: GenerateRequest,
        key: tuple[str, int],
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        workspace: Workspace,
    ) -> None:
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_text: str | None = None
        self._request = request
        self._request_id, self._index = key
        self._vocabulary = vocabulary
        self.workspace = workspace
        self._ends = frozenset(vocabulary.eog_tokens)
        self._assembler = TextAssembler()
        self._gate = StopGate(request.stop)
        self._has_stops = bool(request.stop)
        self._drawn: tuple[int, Rows | None] | None = None
        self._constraint: ConstraintState | None = None
        self._spelled = frozenset(text.encode() for text in request.spelled)
        edits = _bans(request, vocabulary, workspace) + _penalties(request, vocabulary, prompt, workspace)
        self.sampler = Sampler(request.sampling, self._index, edits, workspace)

    def __repr__(self) -> str:
        return (
            f"Generation(index={self._index}, num_tokens={len(self.tokens)}, finish={self.finish_reason}, "
            f"{self._assembler!r}, {self._gate!r}, {self.sampler!r})"
        )

    def constrain(self, constraint: ConstraintState) -> None:
        """Hold it to a constraint, its own from here on; before its first token."""
        assert not self.tokens, f"constrained after it began: {self!r}"
        self._constraint = constraint
        self.sampler.add_edit(constraint)

    @property
    def num_needed(self) -> int | None:
        """How many of a row's largest logits it needs for any token; None: all of them."""
        return self.sampler.num_needed if self._request.logprobs is None else None

    def advance(self, row: Rows | Candidates) -> Delta:
        """Draw the next token; returns what it adds.

        Args:
            row: raw logits, float32 (n_vocab,), which may be overwritten; or the best of one row,
                `num_needed` of them at least.

        Raises:
            StepFailedError: logits that are not numbers.
            InvalidRequestError: the request forbids every token.
        """
        assert self.finish_reason is None, f"advanced after its end: {self!r}"
        if isinstance(row, Candidates):
            return self._delta(_token(*draw_together([self.sampler], row, self.workspace)), None)
        num_top = self._request.logprobs
        is_raw_kept = num_top is not None and self.sampler.edits_logits
        raw = self.workspace.keep_raw(row) if is_raw_kept else row
        token = self.sampler.draw(row)
        logprob = None if num_top is None else token_logprob(raw, token, num_top, self._vocabulary)
        return self._delta(token, logprob)

    def draw(self, row: Rows) -> int:
        """Draw the next token only; `deliver` has to follow before the next draw.

        Args:
            row: raw logits, float32 (n_vocab,); may be overwritten.

        Raises:
            StepFailedError, InvalidRequestError: as `advance`.
        """
        assert self.finish_reason is None, f"drawn after its end: {self!r}"
        assert self._drawn is None, f"drawn twice: {self!r}"
        raw = None if self._request.logprobs is None else row.copy()  # rows do not outlive the next step
        token = self.sampler.draw(row)
        self._drawn = token, raw
        return token

    def take(self, token: int) -> None:
        """The next token was drawn by its sampler; `deliver` has to follow, as after `draw`."""
        assert self.finish_reason is None, f"drawn after its end: {self!r}"
        assert self._drawn is None, f"drawn twice: {self!r}"
        self._drawn = token, None

    def is_last(self, token: int) -> bool:
        """Whether it ends the generation whatever its text is, if it is drawn next."""
        return token in self._ends or len(self.tokens) + 1 == self._request.max_tokens

    def deliver(self) -> Delta:
        """What the token of `draw` adds."""
        assert self._drawn is not None, f"nothing was drawn: {self!r}"
        (token, raw), self._drawn = self._drawn, None
        num_top = self._request.logprobs
        logprob = (
            None if num_top is None or raw is None else token_logprob(raw, token, num_top, self._vocabulary)
        )
        return self._delta(token, logprob)

    def _delta(self, token: int, logprob: TokenLogprob | None) -> Delta:
        """Move on by one token; one that ends the generation is reported but adds no text of its own."""
        text = self._accept(token)
        return Delta(
            request_id=self._request_id,
            index=self._index,
            text=text,
            token_ids=[token],
            logprobs=None if logprob is None else [logprob],
            finish_reason=self.finish_reason,
            stop_text=self.stop_text,
            mirostat_mu=self.sampler.mirostat_mu,
        )

    def replay(self, tokens: Sequence[int], mirostat_mu: float | None) -> None:
        """Take over tokens that an interrupted run has delivered; the state is as if they were drawn here.

        Args:
            tokens: all ids delivered, from the first.
            mirostat_mu: `Delta.mirostat_mu` of the last of them.
        """
        for token in tokens:
            self._accept(token)
        self.sampler.restore(mirostat_mu)

    def flush(self) -> str:
        """The text still held, when the generation is ended from outside; nothing is held afterwards."""
        return self._gate.flush() + self._assembler.flush()

    def close(self) -> None:
        """Free native memory now instead of with the object; idempotent. It cannot advance afterwards."""
        self.sampler.close()

    def _accept(self, token: int) -> str:
        """Move on by one token; returns the text that it lets through."""
        self.tokens.append(token)
        self.sampler.accept(token)
        if token in self._ends:
            self.finish_reason = FinishReason.STOP
            return self.flush()
        piece = self._vocabulary.piece(token)
        if self._spelled and not piece:
            piece = self._spelling(token)
        text = self._assembler.push(piece)
        if self._has_stops and len(self.tokens) > self._request.min_tokens:
            text, self.stop_text = self._gate.push(text)
        if self.stop_text is not None:
            self.finish_reason = FinishReason.STOP
        elif self._constraint is not None and self._constraint.is_complete:
            self.finish_reason = FinishReason.STOP
            text += self.flush()
        elif len(self.tokens) == self._request.max_tokens:
            self.finish_reason = FinishReason.LENGTH
            text += self.flush()
        return text

    def _spelling(self, token: int) -> bytes:
        """The bytes that a control token adds to the text: its own where the request spells it."""
        spelled = self._vocabulary.special_piece(token)
        return spelled if spelled in self._spelled else b""


def _token(drawn: int | StokerError) -> int:
    if isinstance(drawn, StokerError):
        raise drawn
    return drawn


def _bans(request: GenerateRequest, vocabulary: Vocabulary, workspace: Workspace) -> list[LogitEdit]:
    edits: list[LogitEdit] = []
    biases = dict(request.sampling.logit_bias)
    if request.ignore_eos:
        biases |= dict.fromkeys(vocabulary.eog_tokens, float("-inf"))
    if biases:
        edits.append(LogitBias(biases, workspace.num_vocab))
    if request.min_tokens and not request.ignore_eos:
        edits.append(EarlyEndBan(vocabulary.eog_tokens, request.min_tokens))
    return edits


def _penalties(
    request: GenerateRequest, vocabulary: Vocabulary, prompt: Sequence[int], workspace: Workspace
) -> list[LogitEdit]:
    edits: list[LogitEdit] = []
    sampling = request.sampling
    if RepeatPenalty.can_act(sampling):
        edits.append(RepeatPenalty(sampling, prompt))
    if DryPenalty.can_act(sampling):
        tails = workspace.breakers.tails(vocabulary, sampling.dry_sequence_breakers)
        edits.append(DryPenalty(sampling, prompt, tails))
    return edits
