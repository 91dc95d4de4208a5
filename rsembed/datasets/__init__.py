"""Small data to learn from: text, Zipf ids, click logs whose best reachable loss is known, and ratings of films.

Everything works offline and is deterministic. Arrays are numpy; each loader has a tiny size for tests
(`max_words`, `num_batches`, `num_ids`, `num_samples`, `max_users`).
"""

from rsembed.datasets.generated import ClickLog, synthetic_clicks, zipf_ids, zipf_probabilities
from rsembed.datasets.ratings import RatingsLog, TasteLaw, generated_ratings, movielens
from rsembed.datasets.text import (
    UNKNOWN_WORD,
    Text,
    load_shakespeare,
    next_word_batches,
    shakespeare,
    unigram_entropy,
    word_id_batches,
)

__all__ = [
    "UNKNOWN_WORD",
    "ClickLog",
    "RatingsLog",
    "TasteLaw",
    "Text",
    "generated_ratings",
    "load_shakespeare",
    "movielens",
    "next_word_batches",
    "shakespeare",
    "synthetic_clicks",
    "unigram_entropy",
    "word_id_batches",
    "zipf_ids",
    "zipf_probabilities",
]
