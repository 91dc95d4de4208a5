"""Generated sentences are those of their law, whose entropy is computed without drawing any."""

import math
from collections import Counter
from functools import cache
from itertools import islice, pairwise

import numpy as np
import pytest

from rsembed import datasets
from rsembed.datasets import text_grammar

NUM_WORDS = 30_000
WORDS = tuple(islice(text_grammar.generated_words(), NUM_WORDS))


def sentences():
    """Every whole sentence with who says it, in lower case but for `I` and `O`."""
    speaker, words = "", []
    for word in WORDS:
        if word.endswith(":"):
            speaker = word
            continue
        words.append(word if words or word in "IO" else word.lower())
        if word in ".?!":
            yield speaker, tuple("a" if word == "an" else word for word in words)
            words = []


def weighted(speaker, name):
    """Alternatives of a name with their weights, read from the tables as they are written."""
    if name in text_grammar._RULES:
        lines = text_grammar._RULES[name].strip().split("\n")
        return [(float(line.split()[0]), tuple(line.split()[1:])) for line in lines]
    words = (text_grammar._SPEAKERS[speaker] | text_grammar._SMALL_WORDS)[name].split()
    return [(1 / (rank + 2), (word,)) for rank, word in enumerate(words)]


@cache
def derivations(speaker, symbol, words):
    """The probability of each way in which a symbol becomes these words."""
    if not symbol.startswith("$"):
        return (1.0,) if words == (symbol,) else ()
    name, _, ending = symbol[1:].partition("+")
    alternatives = weighted(speaker, name)
    total = sum(weight for weight, _ in alternatives)
    found = []
    for weight, symbols in alternatives:
        inflected = tuple(text_grammar.inflected(own, ending) for own in symbols) if ending else symbols
        found += [weight / total * own for own in splits(speaker, inflected, words)]
    return tuple(found)


@cache
def splits(speaker, symbols, words):
    if not symbols:
        return () if words else (1.0,)
    first, *rest = symbols
    cuts = range(1, len(words) - len(rest) + 1)
    return tuple(
        left * right
        for cut in cuts
        for left in derivations(speaker, first, words[:cut])
        for right in splits(speaker, tuple(rest), words[cut:])
    )


def test_every_sentence_has_one_derivation_and_their_surprise_is_the_one_computed():
    num_sentences = num_words = nats = 0
    for speaker, words in islice(sentences(), 800):
        ways = derivations(speaker, "$say", words)
        assert len(ways) == 1, (speaker, words)
        nats -= math.log(ways[0])
        num_sentences, num_words = num_sentences + 1, num_words + len(words)
    # Beside its words a sentence takes two thirds of a speaker, drawn from six, and of the choice between one and two.
    nats += num_sentences * (math.log(6) + math.log(2)) / 1.5
    num_words += num_sentences / 1.5
    assert text_grammar.surprise_per_word() == pytest.approx(nats / num_words, rel=0.02)


def test_no_word_is_of_two_kinds_or_of_two_speakers():
    lists = [words.split() for own in text_grammar._SPEAKERS.values() for words in own.values()]
    counts = Counter(word for words in lists for word in words)
    assert [word for word, count in counts.items() if count > 1] == []
    small = {word for words in text_grammar._SMALL_WORDS.values() for word in words.split()}
    assert small.isdisjoint(counts)
    inflections = Counter(text_grammar.inflected(word, ending) for word in counts for ending in ("", "s", "eth", "est"))
    assert [word for word, count in inflections.items() if count > 1] == []


def test_parts_of_a_sentence_agree():
    pairs = Counter(pairwise(WORDS))
    vowels = {word for word in set(WORDS) if word[0] in "aeiou"}
    assert {after for (word, after) in pairs if word == "an"} <= vowels
    assert {after for (word, after) in pairs if word == "a"}.isdisjoint(vowels)
    assert {word for (word, after) in pairs if after == "wilt"} <= {"Thou", "thou"}
    followers = {after for (word, after) in pairs if word in ("this", "This", "that", "That")}
    assert not {text_grammar.inflected(noun, "s") for noun in ("king", "ship", "rose")} & followers


def test_equal_seeds_give_equal_words_and_other_seeds_do_not():
    assert WORDS[:300] == tuple(islice(text_grammar.generated_words(seed=text_grammar.SEED), 300))
    assert WORDS[:300] != tuple(islice(text_grammar.generated_words(seed=1), 300))


def test_words_that_say_something_have_a_kind():
    others = set(WORDS) - datasets.word_kinds().keys() - text_grammar._SPEAKERS.keys()
    assert " ".join(sorted(others)) == "! , . ? I If O There Thou We When Where a an and are dost is thou why"


def test_the_best_loss_is_known_where_every_word_has_an_id():
    whole = datasets.shakespeare(source="generated", max_words=NUM_WORDS)
    assert whole.best_loss == text_grammar.surprise_per_word()
    assert whole.best_loss < datasets.unigram_entropy(whole.word_ids, 2048) - 3
    assert datasets.shakespeare(50, source="generated", max_words=NUM_WORDS).best_loss is None
    assert datasets.shakespeare(source="pastiche").best_loss is None
    assert np.all(whole.word_ids > 0)
