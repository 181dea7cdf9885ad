"""Invented names, codes and phrases. Held-out ones hold at least one syllable pair that training never shows."""

from __future__ import annotations

import itertools
import random
import string

from k3stack.verify.language import words

CONSONANTS = "bdfghjklmnprstvwz"
VOWELS = "aeiou"
CODAS = "nrs"
_ODD_LETTERS = string.ascii_lowercase
_ACCENTED = "éèüöäñçåøíôã"
_UNITS = ("%", " km", " kg", " m", " °C", "°", " litres", " euros", " km/h")
_FRAGMENTS = (
    *words.NOUNS,
    *words.HELD_OUT_NOUNS,
    *words.PARAMS,
    *words.HELD_OUT_PARAMS,
    *words.ADJECTIVES,
    *words.FILLERS,
)


def syllables() -> list[str]:
    """Every syllable of the invented names, lower case: consonant, vowel and perhaps one of three last letters."""
    return [c + v + end for end in ("", *CODAS) for c in CONSONANTS for v in VOWELS]


_SYLLABLES = syllables()
_OPEN = len(CONSONANTS) * len(VOWELS)


def reserved_pair(first: int, second: int) -> bool:
    """True for one pair of neighbouring syllables in nine: held-out names have one, names in training have none."""
    return (first * 7919 + second * 104_729) % 9 == 4


class Namer:
    """Draws names and values from ``rng``; ``held_out`` chooses which side of the split they come from."""

    def __init__(self, rng: random.Random, *, held_out: bool) -> None:
        self.rng = rng
        self.held_out = held_out
        self.nouns = words.HELD_OUT_NOUNS if held_out else words.NOUNS
        self.params = words.HELD_OUT_PARAMS if held_out else words.PARAMS

    def syllabic(self, count: int) -> str:
        """One lower-case invented word of ``count`` syllables."""
        rand = self.rng.random
        while True:
            picks = []
            for _ in range(count):
                closed = rand() < 0.3
                picks.append(int(rand() * _OPEN) + (_OPEN * (1 + int(rand() * len(CODAS))) if closed else 0))
            pairs = sum(reserved_pair(a, b) for a, b in itertools.pairwise(picks))
            if count < 2 or (pairs > 0) == self.held_out:
                return "".join(_SYLLABLES[i] for i in picks)

    def word(self) -> str:
        return self.syllabic(2 if self.rng.random() < 0.5 else 3)

    def name(self) -> str:
        """A proper name: mostly one capitalised word, sometimes two."""
        roll = self.rng.random()
        if roll < 0.12:
            return self.syllabic(2).capitalize() + " " + self.syllabic(2).capitalize()
        if roll < 0.19:
            return self.rough().capitalize()
        if roll < 0.3:
            return self.blend().capitalize()
        return self.word().capitalize()

    def blend(self) -> str:
        """The head of one listed word and the tail of another: every piece of a word, though no held-out word."""
        while True:
            one, two = self.rng.choice(_FRAGMENTS), self.rng.choice(_FRAGMENTS)
            word = one[: self.rng.randint(1, len(one) - 1)] + two[self.rng.randint(1, len(two) - 1) :]
            if 3 <= len(word) <= 11 and word not in words.HELD_OUT:
                return word

    def rough(self, *, accents: bool = True) -> str:
        """A word of arbitrary letters, as real names hold that no syllable list foresees."""
        rng = self.rng
        letters = []
        for _ in range(rng.randint(4, 8)):
            letters.append(rng.choice(VOWELS) if rng.random() < 0.38 else rng.choice(_ODD_LETTERS))
        if accents and rng.random() < 0.12:
            letters[rng.randrange(len(letters))] = rng.choice(_ACCENTED)
        return "".join(letters)

    def code(self) -> str:
        rng = self.rng
        kind = rng.randrange(4)
        if kind == 0:
            return f"{self._caps(2)}-{rng.randint(10, 999)}"
        if kind == 1:
            return f"{self._caps(3)}{rng.randint(1, 99)}"
        if kind == 2:
            return f"{rng.randint(1, 23):02d}:{rng.randint(0, 59):02d}"
        return f"{rng.randint(1900, 2099)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"

    def _caps(self, count: int) -> str:
        return "".join(self.rng.choice(string.ascii_uppercase) for _ in range(count))

    def number(self) -> int:
        rng = self.rng
        size = rng.randint(0, 9) if rng.random() < 0.3 else rng.randint(10, 10 ** rng.randint(2, 4))
        return -size if rng.random() < 0.05 else size

    def quantity(self) -> str:
        return f"{self.number()}{self.rng.choice(_UNITS)}"

    def decimal(self) -> float:
        return round(self.rng.uniform(0.1, 99.9), 1)

    def noun(self) -> str:
        """A thing to ask about: a listed word, or an invented one so that no tool name is a closed vocabulary."""
        roll = self.rng.random()
        if roll < 0.2:
            return self.word()
        if roll < 0.26:
            return self.rough(accents=False)
        if roll < 0.45:
            return self.blend()
        return self.rng.choice(self.nouns)

    def param(self) -> str:
        roll = self.rng.random()
        if roll < 0.1:
            return self.word()
        if roll < 0.25:
            return self.blend()
        if roll < 0.4:
            return self.rng.choice(self.params) + "_" + self.rng.choice(self.params)
        return self.rng.choice(self.params)

    def phrase(self) -> str:
        """Two to five listed words, for arguments that are free text."""
        rng = self.rng
        parts = [rng.choice(words.ADJECTIVES), rng.choice(words.FILLERS)]
        for _ in range(rng.randint(0, 3)):
            parts.append(rng.choice(words.FILLERS))
        return " ".join(parts)

    def text_value(self) -> str:
        """A string argument."""
        roll = self.rng.random()
        if roll < 0.55:
            return self.name()
        if roll < 0.66:
            return self.code()
        if roll < 0.72:
            return self.quantity()
        if roll < 0.8:
            return self.word()
        if roll < 0.88:
            return self.rough()
        return self.phrase()

    def sentence(self) -> str:
        """A sentence that states nothing anybody asks for."""
        rng = self.rng
        pick = rng.choice
        kind = rng.randrange(5)
        if kind == 0:
            head = f"The {pick(words.ADJECTIVES)} {pick(words.FILLERS)}"
            return f"{head} {pick(words.FILLER_VERBS)} the {pick(words.FILLERS)}."
        if kind == 1:
            head = f"In the {pick(words.FILLERS)} the {pick(words.FILLERS)}"
            return f"{head} is {pick(words.ADJECTIVES)} and {pick(words.ADJECTIVES)}."
        if kind == 2:
            return f"Nobody {pick(words.FILLER_VERBS)} a {pick(words.ADJECTIVES)} {pick(words.FILLERS)} here."
        if kind == 3:
            return f"Every {pick(words.FILLERS)} {pick(words.FILLER_VERBS)} some {pick(words.FILLERS)}."
        return f"A {pick(words.FILLERS)} is never {pick(words.ADJECTIVES)} in the {pick(words.FILLERS)}."
