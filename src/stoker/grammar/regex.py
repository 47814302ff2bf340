"""How large a regex becomes when its counted repetitions are written out.

The grammar engine derives automata lazily, so a short regex may cost seconds later; this says so before.
Whether it is a regex at all is the engine's to judge.
"""

from __future__ import annotations

import re

MAX_EXPANDED_CHARS = 20_000
MAX_QUANTIFIERS = 1000  # compiling takes time in their square: 1 s for as many optional \p{L}

# None reads a part of a stranger's regex over and over; a class that is never closed goes to the end.
_COUNT = re.compile(r"\{(\d*+)(,?)(\d*+)\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*(?:\]|\\?\Z)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^}]{0,99}\}|.)", re.DOTALL)


def refusal(regex: str) -> str:
    """Why a regex is too much to compile, "repeats too often" for instance; empty: it is not."""
    if expanded_size(regex) > MAX_EXPANDED_CHARS:
        return f"repeats more than {MAX_EXPANDED_CHARS} characters"
    plain = _ESCAPE.sub("", _CLASS.sub("", regex))
    if sum(map(plain.count, "?*+")) + len(_COUNT.findall(plain)) > MAX_QUANTIFIERS:
        return f"has more than {MAX_QUANTIFIERS} quantifiers"
    return ""


def _number(digits: str) -> int:
    """What they say, or of a long number its beginning, which is too much as well."""
    return int(digits.lstrip("0")[:9] or 0)


def expanded_size(regex: str) -> int:
    """Characters to match in `regex` with every `{m,n}` written out; a lower bound where it is malformed."""
    totals, last = [0], 0
    index = 0
    while index < len(regex):
        char = regex[index]
        match = _CLASS.match(regex, index) or _ESCAPE.match(regex, index)
        if char == "(":
            totals.append(0)
            last = 0
        elif char == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif (count := _COUNT.match(regex, index)) is not None:
            times = max(map(_number, (count[1], count[3])))
            grown = last * max(times, 1)
            totals[-1] += grown - last
            last = grown
            match = count
        elif char not in "*+?|^$":
            last = 1
            totals[-1] += 1
        index = index + 1 if match is None else match.end()
    return sum(totals)
