"""Formats of JSON Schema as regular expressions, for texts that are not inside JSON (string arguments of a call).

Each takes valid texts alone; what it leaves out of those is odd (fractions of a second of more than nine digits, quoted
local parts of mail addresses, and the like).
"""

from __future__ import annotations

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = "(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"  # not 02-29
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+\-]{_CLOCK})"
_MANY = "[0-9]{1,9}"
_DATE_PART = f"(?:{_MANY}Y(?:{_MANY}M(?:{_MANY}D)?)?|{_MANY}M(?:{_MANY}D)?|{_MANY}D)"
_TIME_PART = f"T(?:{_MANY}H(?:{_MANY}M(?:{_MANY}S)?)?|{_MANY}M(?:{_MANY}S)?|{_MANY}S)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+\-/=?^_`{|}~]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "|".join(
    [
        f"(?:{_GROUP}:){{6}}{_LAST}",
        # A gap of at least one group: so many before it, and so many after it as are left at most.
        f"::(?:(?:{_GROUP}:){{0,6}}{_GROUP})?",
        *(f"{_GROUP}(?::{_GROUP}){{{n - 1}}}::(?:(?:{_GROUP}:){{0,{6 - n}}}{_GROUP})?" for n in range(1, 7)),
        f"{_GROUP}(?::{_GROUP}){{6}}::",
    ]
)  # fmt: skip
_PCHAR = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.\-]*:(?://(?:{_HOST}(?::[0-9]{{1,5}})?)?(?:/{_PCHAR}*)*|/?{_PCHAR}+(?:/{_PCHAR}*)*)"
    rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
)
_HEX = "[0-9A-Fa-f]"

REGEXES: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_MANY}W|{_DATE_PART}(?:{_TIME_PART})?|{_TIME_PART})",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": f"(?:{_IPV6})",
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": _URI,
}
"""Every format that is enforced."""
