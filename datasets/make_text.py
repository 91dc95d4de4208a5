"""Writes `sentences.txt`: sentences in Shakespeare's manner from a small grammar, of a law that is known.

`python datasets/make_text.py` writes the file that is there, to the byte, and prints the loss that no model can beat.
"""

from __future__ import annotations

import functools
import math
import random
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

SEED = 1600
NUM_WORDS = 72_000

# Every speaker has words of their own, and no word is in two classes. So each sentence can be made in one way only, and
# its probability is that of the choices which made it.
_SPEAKERS = {
    "SAILOR:": {
        "person": "captain sailor pilot whale gull pirate",
        "thing": "ship sail anchor oar rope mast",
        "place": "sea shore harbour deck rock island",
        "manner": "bold wild angry hardy",
        "quality": "deep grey cold salt bitter",
        "act": "follow steer carry cross drown",
        "rest": "return wander drift land swim",
    },
    "SOLDIER:": {
        "person": "soldier enemy general archer rider guard",
        "thing": "sword shield banner drum spear helmet",
        "place": "field wall tower gate hill camp",
        "manner": "brave fierce proud loyal",
        "quality": "bloody iron broken heavy sharp",
        "act": "raise strike seize lose throw",
        "rest": "fight march fall charge perish",
    },
    "KING:": {
        "person": "king queen duke servant judge fool",
        "thing": "crown throne letter law seal treasure",
        "place": "court palace hall chamber city council",
        "manner": "noble royal wise idle",
        "quality": "golden great rich precious just",
        "act": "honour obey guide keep inherit",
        "rest": "kneel speak reign bow wait",
    },
    "LADY:": {
        "person": "lady lover friend youth maiden poet",
        "thing": "promise song tear word vow gift",
        "place": "window garden door bower street balcony",
        "manner": "gentle fair faithful cruel",
        "quality": "sweet tender soft true dear",
        "act": "love remember forgive believe cherish",
        "rest": "sigh weep smile dream sing",
    },
    "SHEPHERD:": {
        "person": "shepherd lamb farmer bird dove bee",
        "thing": "rose apple flower seed root lily",
        "place": "meadow valley brook wood orchard barn",
        "manner": "young merry quiet happy",
        "quality": "green ripe bright red little",
        "act": "gather plant tend find taste",
        "rest": "rest dance play hide climb",
    },
    "WATCHMAN:": {
        "person": "moon star ghost owl shadow watchman",
        "thing": "candle lantern bell secret tale prayer",
        "place": "night sky church tomb darkness silence",
        "manner": "pale silent old lonely",
        "quality": "dark dim hidden black strange",
        "act": "hear see know whisper dread",
        "rest": "sleep wake rise vanish tremble",
    },
}
_SMALL_WORDS = {
    "one": "the my thy his our her this that",
    "some": "the my thy his our her these those",
    "near": "near beside beyond beneath before upon",
    "I_will": "will shall must would",
    "thou_wilt": "shalt wilt must wouldst",
    "he_will": "doth will shall must",
    "he": "he she",
    "good": "good kind",
}
# `$name` is a choice of its own, from a class of words or from the alternatives of a rule. The number before an
# alternative is its weight. `+eth`, `+est` and `+s` inflect the word.
_RULES = {
    "say": """
        8 $who $act+eth $what .
        6 $who $rest+eth $where .
        5 $who $act+eth $what $where .
        4 $crowd $rest $where .
        3 $crowd $act $what .
        4 I $I_will $act $what .
        3 I $rest $where .
        4 thou $thou_wilt $act $what , $good $person .
        3 $he $he_will $rest $where .
        3 $he $he_will $act $what .
        3 we $I_will $rest $where .
        4 O $manner $person , why dost thou $act $what ?
        3 where is $what ?
        2 where are $heap ?
        3 when $who $rest+eth , I $I_will $act $what .
        3 if thou $act+est $what , I $I_will $rest .
        3 $act $what , $good $person !
        3 $who is $manner , and $what is $quality .
        2 there is a $manner $person $where .
        2 $heap are $quality .
    """,
    "who": "2 $one $person \n 1 $one $manner $person",
    "what": "2 $one $thing \n 1 $one $quality $thing",
    "crowd": "2 $some $person+s \n 1 $some $manner $person+s",
    "heap": "2 $some $thing+s \n 1 $some $quality $thing+s",
    "where": "3 $near the $place \n 1 $near the $quality $place",
}


_TWO_SENTENCES = 0.5
"""Probability that a speaker says two, not one."""
_VOWELS = "aeiou"


class _Choice(NamedTuple):
    """What a name of the grammar may stand for, and how often it does."""

    alternatives: tuple[tuple[str, ...], ...]
    probabilities: tuple[float, ...]
    cumulative: tuple[float, ...]

    @classmethod
    def among(cls, alternatives: Sequence[Sequence[str]], weights: Sequence[float]) -> _Choice:
        shares = tuple(weight / sum(weights) for weight in weights)
        return cls(tuple(map(tuple, alternatives)), shares, (*accumulate(shares[:-1]), 1.0))


@functools.cache
def _choices_of(speaker: str) -> dict[str, _Choice]:
    """All symbols with a `$`, as this speaker uses them."""
    found = {}
    for name, words in (_SPEAKERS[speaker] | _SMALL_WORDS).items():
        for ending in ("", "+s", "+eth", "+est"):
            alternatives = [(inflected(word, ending[1:]),) for word in words.split()]
            # Some words are more frequent than others, as in any language: Zipf's law, from its second rank on.
            weights = [1.0 / (rank + 2) for rank in range(len(alternatives))]
            found[f"${name}{ending}"] = _Choice.among(alternatives, weights)
    for name, rule in _RULES.items():
        parts = [line.split() for line in rule.strip().splitlines()]
        weights = [float(weight) for weight, *_ in parts]
        found[f"${name}"] = _Choice.among([symbols for _, *symbols in parts], weights)
    return found


def inflected(word: str, ending: str) -> str:
    """The word with the ending `eth`, `est` or `s`; or as it is, with none."""
    if word.endswith("y") and word[-2] not in _VOWELS and ending:
        return word[:-1] + "i" + ("es" if ending == "s" else ending)
    return word + ending if ending in ("", "s") else word.removesuffix("e") + ending


def generated_words() -> Iterator[str]:
    """Words and stops of one speaker after another, without end."""
    draw, speakers = random.Random(SEED).random, tuple(_SPEAKERS)
    while True:
        speaker = speakers[int(draw() * len(speakers))]
        choices = _choices_of(speaker)
        yield speaker
        for _ in range(1 + (draw() < _TWO_SENTENCES)):
            words, symbols = [], ["$say"]  # the symbols to come, the next one last
            while symbols:
                if choice := choices.get(symbol := symbols.pop()):
                    symbols += reversed(choice.alternatives[bisect(choice.cumulative, draw())])
                else:
                    words.append(symbol)
            yield words[0].capitalize()
            for word, following in zip(words[1:], [*words[2:], "."], strict=True):
                yield "an" if word == "a" and following[0] in _VOWELS else word


def surprise_per_word() -> float:
    """Mean surprise of a word, in nats, to who knows the law and all words before: no loss can stay below it."""

    def expected(symbol: str, choices: Mapping[str, _Choice]) -> tuple[float, float]:
        """Nats of all choices that a symbol takes, and words that come of it."""
        if symbol not in choices:
            return 0.0, 1.0
        nats = words = 0.0
        for share, symbols in zip(
            choices[symbol].probabilities, choices[symbol].alternatives, strict=True
        ):
            of_symbols = [expected(own, choices) for own in symbols]
            nats += share * (sum(own for own, _ in of_symbols) - math.log(share))
            words += share * sum(own for _, own in of_symbols)
        return nats, words

    sentences = 1.0 + _TWO_SENTENCES
    of_number = -sum(share * math.log(share) for share in (_TWO_SENTENCES, 1.0 - _TWO_SENTENCES))
    nats = words = 0.0
    for speaker in _SPEAKERS:
        own_nats, own_words = expected("$say", _choices_of(speaker))
        nats += math.log(len(_SPEAKERS)) + of_number + sentences * own_nats
        words += 1.0 + sentences * own_words
    return nats / words


def main() -> None:
    """Writes the file beside this one, a speaker a line."""
    text = " ".join(islice(generated_words(), NUM_WORDS))
    for speaker in _SPEAKERS:
        text = text.replace(f" {speaker}", f"\n{speaker}")
    (Path(__file__).parent / "sentences.txt").write_bytes(f"{text}\n".encode())
    print(f"best loss {surprise_per_word()!r} nats a word")


if __name__ == "__main__":
    main()
