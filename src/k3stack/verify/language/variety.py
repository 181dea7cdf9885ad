"""Coined words for training: names of one to four words, verbs, values and subjects that no list can hold.

A model that sees listed words alone learns to recall them. Here most words are new, so that what is declared or said
can only be copied. Held-out questions use none of this: they ask with plain names of words that training never shows.
"""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING

from k3stack.verify.language import words

if TYPE_CHECKING:
    from k3stack.verify.language.names import Namer

_UNSEEN = frozenset((*words.HELD_OUT, "weather", "forecast"))
_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[_-]+")
_VOWELS = "aeiou"


def parts(key: str) -> list[str]:
    """The words of a name in any spelling, lower case: ``seatCount``, ``seat_count`` and ``seat-count`` alike."""
    return [part.lower() for part in _BORDER.split(key) if part]


def label(key: str) -> str:
    """A parameter as people say it: its words with blanks between."""
    return " ".join(parts(key))


class Coiner:
    """Coins with the random numbers of ``namer``; every word differs from all held-out words."""

    def __init__(self, namer: Namer) -> None:
        self.namer = namer
        self.rng = namer.rng

    def word(self, listed: tuple[str, ...]) -> str:
        """One lower-case word: listed, of syllables, of letters, of pieces, shortened, or with a number."""
        while True:
            word = self._word(listed)
            if word not in _UNSEEN and not any(word.startswith(w) and word[len(w) :].isdigit() for w in _UNSEEN):
                return word

    def _word(self, listed: tuple[str, ...]) -> str:
        rng, namer = self.rng, self.namer
        roll = rng.random()
        if roll < 0.36:
            return rng.choice(listed)
        if roll < 0.42:
            return rng.choice(
                (words.ADJECTIVES, words.FILLERS, words.ENUMS, words.NOUNS, words.PARAMS)[rng.randrange(5)]
            )
        if roll < 0.57:
            return namer.syllabic(rng.choice((1, 2, 2, 3)))
        if roll < 0.70:
            return namer.rough(accents=False)
        if roll < 0.90:
            return namer.blend()
        if roll < 0.95:
            return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(1, 3)))
        if roll < 0.97:
            base = rng.choice(listed)
            return (base[0] + "".join(c for c in base[1:] if c not in _VOWELS))[:4]
        return rng.choice((namer.blend, namer.word))() + str(rng.randint(1, 30))

    def spell(self, pieces: list[str]) -> str:
        """Several words as one name."""
        roll = self.rng.random()
        if len(pieces) == 1 or roll < 0.74:
            return "_".join(pieces)
        if roll < 0.88:
            return pieces[0] + "".join(p.capitalize() for p in pieces[1:])
        if roll < 0.94:
            return "-".join(pieces)
        if roll < 0.97:
            return "".join(pieces)
        return "".join(p.capitalize() for p in pieces)

    def key(self) -> str:
        """The name of a parameter or of a field in a result."""
        count = self.rng.choices((1, 2, 3, 4), (50, 36, 11, 3))[0]
        return self.spell([self.word(words.PARAMS) for _ in range(count)])

    def key_like(self, key: str) -> str:
        """A parameter that shares a word with ``key``, as ``start_day`` and ``end_day`` do."""
        old = parts(key)
        shared = self.rng.choice(old)
        if shared in _UNSEEN:  # a name that runs its words together may hold one by chance
            return self.key()
        pieces = [shared, self.word(words.PARAMS)]
        if self.rng.random() < 0.5:
            pieces.reverse()
        return self.spell(pieces)

    def noun(self) -> str:
        """What a tool is about, as people say it: one word, sometimes two."""
        one = self.word(words.NOUNS)
        return one if self.rng.random() < 0.85 else f"{one} {self.word(words.NOUNS)}"

    def noun_like(self, noun: str) -> str:
        """A noun easily taken for ``noun``: a letter differs, a half is shared, a word is added."""
        rng = self.rng
        while True:
            roll = rng.random()
            if roll < 0.25:
                at = rng.randrange(len(noun))
                new = noun[:at] + rng.choice(string.ascii_lowercase) + noun[at + rng.randrange(2) :]
            elif roll < 0.5:
                tail = self.word(words.NOUNS)
                new = noun[: max(2, len(noun) // 2)].rstrip() + tail[len(tail) // 2 :]
            elif roll < 0.75:
                new = f"{noun.split()[0]} {self.word(words.NOUNS)}"
            else:
                new = f"{self.word(words.NOUNS)} {noun.split()[-1]}"
            if new != noun and not _UNSEEN & set(new.split()) and "  " not in new:
                return new.strip()

    def verb(self, listed: tuple[str, ...], *, several: bool) -> str:
        """A verb; ``several``: two words joined by an underscore at times."""
        one = self.rng.choice(listed) if self.rng.random() < 0.5 else self.word(listed)
        if several and self.rng.random() < 0.06:
            return f"{one}_{self.word(listed)}"
        return one

    def tool(self, verb: str, noun: str) -> str:
        """The name of a tool that does ``verb`` with ``noun``."""
        rng = self.rng
        doing, thing = verb.split("_"), noun.split()
        roll = rng.random()
        if roll < 0.6:
            return "_".join((*doing, *thing))
        if roll < 0.7:
            return "".join((doing[0], *(p.capitalize() for p in (*doing[1:], *thing))))
        if roll < 0.77:
            return "_".join(thing)
        if roll < 0.84:
            return "_".join((*thing, *doing))
        if roll < 0.88:
            return "-".join((*doing, *thing))
        if roll < 0.94:
            return "_".join((*doing, *thing, rng.choice(("v", "")) + str(rng.randint(1, 9))))
        return rng.choice(("_", "__")).join((self.word(words.NOUNS), "_".join((*doing, *thing))))

    def subject(self) -> str:
        """What a look-up is about: mostly a proper name, at times anything that can be written."""
        roll = self.rng.random()
        if roll < 0.6:
            return self.namer.name()
        if roll < 0.8:
            count = self.rng.choice((1, 1, 2, 2, 3))
            return " ".join(self.word(words.NOUNS).capitalize() for _ in range(count))
        return self.text()

    def text(self) -> str:
        """A string value without commas, semicolons and quotes."""
        rng, namer = self.rng, self.namer
        roll = rng.random()
        if roll < 0.5:
            return namer.text_value()
        if roll < 0.7:
            return " ".join(self.word(words.FILLERS) for _ in range(rng.randint(1, 4)))
        if roll < 0.75:
            return f"{namer.name()}-{namer.name()}"
        if roll < 0.8:
            return self.word(words.NOUNS).upper()
        if roll < 0.85:
            return "".join(rng.choice(string.ascii_lowercase + string.digits) for _ in range(rng.randint(3, 8)))
        if roll < 0.89:
            return f"{self.word(words.NOUNS)}@{self.word(words.NOUNS)}.{rng.choice(('org', 'net', 'com'))}"
        if roll < 0.93:
            return "/" + "/".join(self.word(words.NOUNS) for _ in range(rng.randint(1, 3)))
        if roll < 0.97:
            return str(rng.randrange(10 ** rng.randint(1, 8)))
        return self.key()
