"""One pass over a model's output: token ids (or text) in, reasoning, content and tool calls out.

Structure is decided on control ids alone. Text that merely reads like a tag was emitted as ordinary pieces and stays
text, so a model that is made to echo a call cannot have it carried out. Streaming and whole answers use the same
pass, hence agree; any cut of the input gives the same result.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from k3stack.chat.control import CLOSE, END_OF_MSG, OPEN, SEP
from k3stack.chat.deltas import Collector, Delta, Parsed
from k3stack.chat.machine import MARK_CLOSE, MARK_END, MARK_OPEN, MARK_SEP, Machine, State
from k3stack.chat.tokenizer import Tokenizer

_MARKS = {OPEN: MARK_OPEN, CLOSE: MARK_CLOSE, SEP: MARK_SEP, END_OF_MSG: MARK_END}
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
_LONGEST = max(map(len, _MARKS))


class _Parser:
    """What both parsers share: the machine and the reason for the end."""

    def __init__(
        self, thinking: bool, *, max_calls: int | None = None, hold: int = 0, force_content: bool = False
    ) -> None:
        self._machine = Machine(thinking, max_calls=max_calls, hold=hold, force_content=force_content)
        self._reason: str | None = None

    @property
    def done(self) -> bool:
        """The message has been closed."""
        return self._machine.state is State.DONE

    @property
    def calls(self) -> int:
        """Tool calls completed so far."""
        return self._machine.calls

    @property
    def finish_reason(self) -> str:
        """The reason given to ``finish``, or what the output shows; a stop after complete calls is ``tool_calls``."""
        reason = self._reason or ("stop" if self.done else "length")
        return "tool_calls" if reason == "stop" and self.calls else reason

    def _end(self, reason: str | None, out: list[Delta]) -> list[Delta]:
        self._machine.end(out, stopped=reason == "stop")
        self._reason = reason
        return out


class OutputParser(_Parser):
    """Parses token ids as they come.

    ``thinking``: the prompt ended inside think (``prompt.starts_in_think``). ``max_calls``: complete calls after which
    others are dropped; 0 where calls are forbidden, 1 where they may not be parallel. ``hold``: characters of first
    reasoning to keep back (see ``Machine``). ``force_content``: an output that ends without leaving its think block is
    content. Raises CheckpointError if the tokenizer has no K3 control tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: bool = True,
        *,
        max_calls: int | None = None,
        hold: int = 0,
        force_content: bool = False,
    ) -> None:
        super().__init__(thinking, max_calls=max_calls, hold=hold, force_content=force_content)
        control = tokenizer.control
        self._marks = dict.fromkeys(control.end_ids, MARK_END)
        self._marks |= {control.open: MARK_OPEN, control.close: MARK_CLOSE, control.sep: MARK_SEP}
        self._texts, self._pieces = tokenizer.texts, tokenizer.pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._halves = False

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the output spent thinking, the closing tag's included."""
        return self._machine.reasoning_tokens

    def feed(self, ids: Iterable[int]) -> list[Delta]:
        """Deltas that follow from ``ids``. Text of one field that comes in one call is one delta."""
        out: list[Delta] = []
        machine, marks, texts = self._machine, self._marks, self._texts
        run = ""
        for token in ids:
            machine.position += 1
            mark = marks.get(token)
            if mark is not None:
                if self._halves:
                    run += self._flush()
                if run:
                    machine.text(run, out)
                    run = ""
                machine.mark(mark, out)
                continue
            text = texts[token]
            if text is None or self._halves:
                text = self._decode(token)
            run += text
        if run:
            machine.text(run, out)
        return out

    def finish(self, reason: str | None = None) -> list[Delta]:
        """The last deltas. ``reason`` is the engine's: stop, length, abort ...; None reads it off the output."""
        out: list[Delta] = []
        if self._halves:
            self._machine.text(self._flush(), out)
        return self._end(reason, out)

    def _decode(self, token: int) -> str:
        text = self._decoder.decode(self._pieces[token] if self._texts[token] != "" else b"")
        self._halves = bool(self._decoder.getstate()[0])
        return text

    def _flush(self) -> str:
        self._halves = False
        return self._decoder.decode(b"", True)


class StreamingTextParser(_Parser):
    """Parses text in which control tokens are written by name (``<|open|>`` ...), cut anywhere.

    For outputs that are at hand only as text. Whatever reads like a control token is one: prefer ids.
    """

    def __init__(
        self, thinking: bool = True, *, max_calls: int | None = None, hold: int = 0, force_content: bool = False
    ) -> None:
        super().__init__(thinking, max_calls=max_calls, hold=hold, force_content=force_content)
        self._tail = ""

    def feed(self, text: str) -> list[Delta]:
        """Deltas that follow from ``text``; an end that may be half a control token waits."""
        out: list[Delta] = []
        text = self._tail + text
        begin = 0
        for found in _MARK.finditer(text):
            if found.start() > begin:
                self._machine.text(text[begin : found.start()], out)
            self._machine.mark(_MARKS[found.group()], out)
            begin = found.end()
        half = text.rfind("<", max(begin, len(text) - _LONGEST + 1))
        if half < 0 or not any(mark.startswith(text[half:]) for mark in _MARKS):
            half = len(text)
        if half > begin:
            self._machine.text(text[begin:half], out)
        self._tail = text[half:]
        return out

    def finish(self, reason: str | None = None) -> list[Delta]:
        """The last deltas; half a control token at the end was text."""
        out: list[Delta] = []
        if self._tail:
            self._machine.text(self._tail, out)
            self._tail = ""
        return self._end(reason, out)


def parse_output(text: str, thinking: bool = True) -> Parsed:
    """Parse a whole output, control tokens written by name: reasoning, content and tool calls.

    ``finish_reason`` of the result is read off the output: ``length`` if it ends before the message's close.
    """
    parser = StreamingTextParser(thinking)
    collector = Collector()
    collector.add(parser.feed(text))
    collector.add(parser.finish())
    return collector.result(parser.finish_reason)


def parse_ids(ids: Iterable[int], tokenizer: Tokenizer, thinking: bool = True) -> Parsed:
    """Parse a whole output given as token ids."""
    parser = OutputParser(tokenizer, thinking)
    collector = Collector()
    collector.add(parser.feed(ids))
    collector.add(parser.finish())
    return collector.result(parser.finish_reason)
