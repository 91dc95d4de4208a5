"""Logs of film ratings, and a generator of logs that are drawn from a known distribution."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Int32, Int64

from rsembed.checks import NonNegativeInt, PositiveInt, validated
from rsembed.datasets.generated import id_of_rank, zipf_probabilities

GENRES = (
    "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
START_SECONDS = 956_700_000
DAY_SECONDS = 86_400
SPAN_DAYS = 1_000
FEWEST_RATINGS = 20
NUM_VISITS = 4
TASTE_DIM = 4
TASTE_STRENGTH = 6.0
"""Weight of the inner product of taste vector and item vector in the log-odds of a rating.

If `TASTE_STRENGTH` were 0, the films that a user rates would not depend on the user's taste.
"""
TASTE_NOISE = 0.6
"""Length of the random part of an item vector or a taste vector.

The part of a vector that the genres determine has length 1.
"""
DRIFT_RADIANS = 0.8
"""Angle by which tastes turn between the first and the last visit, see `TasteLaw`."""
NEW_SHARE = 0.3
"""Share of films that are released after the log begins."""
NEW_LOG_ODDS = 2.0
"""Additional log-odds of a film on its release day."""
NEW_DAYS = 60.0
"""Number of days in which the additional log-odds of a new film decay by a factor of e."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasteLaw:
    """Distribution that a generated log is drawn from: popularity, tastes and release days.

    The taste of a user is `cos(angle) * first_taste + sin(angle) * last_taste`, where `angle` grows
    from 0 on the first visit to `DRIFT_RADIANS` on the last visit.

    Attributes:
      first_tastes, last_tastes: vectors `first_taste` and `last_taste` of each user.
      first_days, last_days: first and last visit of every user, in days from the beginning of the
        log.
      item_vectors: vector of every item. The larger the inner product of item vector and taste, the
        more likely the user is to rate the item.
      log_popularity: logarithm of every item's popularity.
      release_days: release day of each item, negative for a release before the log begins.
    """

    first_tastes: Float64[np.ndarray, "users dim"]
    last_tastes: Float64[np.ndarray, "users dim"]
    first_days: Float64[np.ndarray, " users"]
    last_days: Float64[np.ndarray, " users"]
    item_vectors: Float64[np.ndarray, "items dim"]
    log_popularity: Float64[np.ndarray, " items"]
    release_days: Float64[np.ndarray, " items"]

    @validated
    def log_odds(
        self, users: Int[np.ndarray, " samples"], days: Float64[np.ndarray, " samples"]
    ) -> Float64[np.ndarray, "samples items"]:
        """Logarithm of the probability that a user rates each item next, up to a constant.

        The result is `-inf` for items that are not released yet. For the best possible ranking of
        the items that a user has not rated yet, sort the items by `log_odds`, largest first.

        Args:
          users: index of the user in each sample.
          days: time of each sample, in days from the beginning of the log, see `RatingsLog.days`.
        """
        users = np.asarray(users)
        if np.shape(days) != users.shape or ((users < 0) | (users >= len(self.first_days))).any():
            raise ValueError(
                f"log_odds: give users from 0 to {len(self.first_days) - 1}, and as many days."
            )
        first_days = self.first_days[users]
        career = np.maximum(self.last_days[users] - first_days, 1e-9)
        progress = np.clip((days - first_days) / career, 0.0, 1.0)
        angle = DRIFT_RADIANS * progress[:, None]
        first_part = np.cos(angle) * self.first_tastes[users]
        last_part = np.sin(angle) * self.last_tastes[users]
        tastes = first_part + last_part
        matches = TASTE_STRENGTH * tastes @ self.item_vectors.T
        age = days[:, None] - self.release_days
        decay = np.exp(-np.maximum(age, 0.0) / NEW_DAYS)
        log_probability = self.log_popularity + matches + NEW_LOG_ODDS * decay
        return np.where(age >= 0, log_probability, -np.inf)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RatingsLog:
    """Ratings in chronological order, with the titles and genres of the items.

    Attributes:
      users, items: user and item of each rating, as indices from 0.
      ratings: stars of each rating, from 0.5 to 5. Some logs, such as generated logs, have only
        whole stars.
      timestamps: time of each rating in seconds since 1970.
      user_ids, item_ids: id of each user and item in the files of the log, in ascending order. The
        ids need not be consecutive.
      titles: title of every item.
      genres: mask of the `genre_names` of each item. If no genre of an item is known, all entries
        of the item are False.
      source: description of the files that the log was read from, or of the generated log.
      law: distribution that a generated log is drawn from. None if the ratings are real.
    """

    users: Int32[np.ndarray, " ratings"]
    items: Int32[np.ndarray, " ratings"]
    ratings: Float32[np.ndarray, " ratings"]
    timestamps: Int64[np.ndarray, " ratings"]
    user_ids: Int64[np.ndarray, " users"]
    item_ids: Int64[np.ndarray, " items"]
    titles: tuple[str, ...]
    genres: Bool[np.ndarray, "items genres"]
    genre_names: tuple[str, ...]
    source: str
    law: TasteLaw | None = None

    def __repr__(self) -> str:
        return (
            f"RatingsLog({len(self.ratings):,} ratings of {len(self.item_ids):,} items by "
            f"{len(self.user_ids):,} users; {self.source})"
        )

    @property
    def days(self) -> Float64[np.ndarray, " ratings"]:
        """Time of each rating in days since the first rating.

        In a generated log, days are counted from the beginning of the log, as in `TasteLaw`.
        """
        start = START_SECONDS if self.law is not None else self.timestamps.min()
        return (self.timestamps - start) / DAY_SECONDS

    def is_last(self) -> Bool[np.ndarray, " ratings"]:
        """Mask of the last rating of each user, the usual test data of a recommender.

        Example:
          >>> log = generated_ratings(10, 80, seed=0)
          >>> int(log.is_last().sum())
          10
        """
        num_ratings = len(self.users)
        latest_first = self.users[::-1]
        _, positions = np.unique(latest_first, return_index=True)
        is_last = np.zeros(num_ratings, bool)
        is_last[num_ratings - 1 - positions] = True
        return is_last

    @validated
    def histories(self, length: PositiveInt) -> Int32[np.ndarray, "ratings length"]:
        """For each rating, the items that the user had rated before, padded with `-1`.

        Each history starts with the most recently rated item.

        Raises: ValueError: `length` is below 1.

        Example:
          >>> log = generated_ratings(10, 80, seed=0)
          >>> of_one = log.users == 3
          >>> (log.histories(2)[of_one][2:, 1] == log.items[of_one][:-2]).all()
          np.True_
        """
        order = np.argsort(self.users, kind="stable")
        items = self.items[order]
        users = self.users[order]
        num_ratings = len(users)
        # For each rating, `num_before` is the number of earlier ratings by the same user.
        first_of_user = np.searchsorted(users, users)
        num_before = np.arange(num_ratings) - first_of_user
        sorted_histories = np.full((num_ratings, length), -1, np.int32)
        longest = min(length, num_ratings - 1)
        for back in range(1, longest + 1):
            has_item = num_before[back:] >= back
            earlier_items = np.where(has_item, items[:-back], -1)
            sorted_histories[back:, back - 1] = earlier_items
        histories = np.empty_like(sorted_histories)
        histories[order] = sorted_histories
        return histories


@validated
def generated_ratings(
    num_users: PositiveInt,
    num_items: Annotated[int, "[40, inf)"],
    *,
    ratings_per_user: float = 40.0,
    exponent: float = 0.8,
    seed: NonNegativeInt,
) -> RatingsLog:
    """Generated ratings log with the columns of MovieLens.

    Because the log is drawn from a known distribution, the best possible ranking is known, too: see
    `TasteLaw.log_odds`.

    Films have Zipf popularity, one to three genres, and a vector similar to the vectors of their
    genres. Users like films with a vector similar to their taste, and tastes change with time. A
    user visits a few times, rates many films in each visit, and rates no film twice. Some films are
    released after the log begins, and are popular for some weeks. A model that uses the user, the
    user's latest ratings, the genres and the time can predict the next film better than a model
    that uses only popularity.

    Args:
      num_users: number of users. A hundred users are enough for a quick test.
      num_items: number of films, at least 40.
      ratings_per_user: average number of ratings of a user, before larger numbers are cut to half
        of all films. Every user rates at least 20 films, as in MovieLens, and at most half of all
        films.
      exponent: Zipf exponent of the popularity of films.
      seed: seed of all random numbers.

    Raises: ValueError: an argument is out of range.

    Source: Plackett, "The Analysis of Permutations", 1975. The films of a visit are sampled without
      replacement: Gumbel noise is added to the log-odds, and the films with the largest sums are
      rated.

    Example:
      >>> log = generated_ratings(100, 80, seed=0)
      >>> len(log.titles), int(np.bincount(log.users).min()) >= 20
      (80, True)
    """
    if not FEWEST_RATINGS <= ratings_per_user <= num_items / 2:
        raise ValueError(
            f"generated_ratings: ratings_per_user={ratings_per_user} must be from {FEWEST_RATINGS} to {num_items / 2}, "
            "half of num_items."
        )
    generator = np.random.Generator(np.random.PCG64(seed))
    law, genres = _law(generator, num_users, num_items, exponent)
    counts = FEWEST_RATINGS + generator.exponential(ratings_per_user - FEWEST_RATINGS, num_users)
    counts = np.minimum(counts, num_items // 2).astype(np.int64)
    visits = _visits(generator, law, counts)
    order = np.argsort(visits[2], kind="stable")
    users, items, seconds = visits[:, order]
    affinity = np.einsum("nd,nd->n", law.first_tastes[users], law.item_vectors[items])
    stars = 3.4 + 1.2 * affinity + 0.7 * generator.standard_normal(len(users))
    whole_stars = np.clip(np.rint(stars), 1, 5)
    release_days = START_SECONDS / DAY_SECONDS + law.release_days
    years = (1970 + release_days / 365.25).astype(int)
    first_genres = genres.argmax(axis=1)
    titles = []
    for item, (genre, year) in enumerate(zip(first_genres, years, strict=True)):
        titles.append(f"{GENRES[genre]} {item} ({year})")
    # Some film ids are missing, as in logs from which films were removed.
    largest_id = num_items + num_items // 20
    item_ids = np.sort(generator.choice(largest_id, num_items, replace=False)) + 1
    return RatingsLog(
        users=users.astype(np.int32),
        items=items.astype(np.int32),
        ratings=whole_stars.astype(np.float32),
        timestamps=seconds,
        user_ids=np.arange(1, num_users + 1),
        item_ids=item_ids,
        titles=tuple(titles),
        genres=genres,
        genre_names=GENRES,
        source=f"generated, seed {seed}: nobody rated these films, and there are none",
        law=law,
    )


def _law(
    generator: np.random.Generator, num_users: int, num_items: int, exponent: float
) -> tuple[TasteLaw, np.ndarray]:
    """A random `TasteLaw`, and a mask of each item's genres."""
    num_genres = len(GENRES)
    centres = _unit(generator.standard_normal((num_genres, TASTE_DIM)))
    # `ranks[g]` is the popularity rank of genre `g`: some genres are more frequent than others.
    ranks = np.argsort(id_of_rank(num_genres, 3))
    weights = zipf_probabilities(num_genres, exponent=0.5)[ranks]
    noise = generator.gumbel(size=(num_items, num_genres))
    drawn = np.argsort(-np.log(weights) - noise, axis=1)
    genre_counts = 1 + generator.integers(0, 3, num_items)
    genres = np.zeros((num_items, num_genres), bool)
    for item, genre_count in enumerate(genre_counts):
        genres[item, drawn[item, :genre_count]] = True

    def tastes() -> np.ndarray:
        favourite_genres = generator.integers(0, num_genres, (num_users, 2))
        favourites = _unit(centres[favourite_genres].sum(axis=1))
        noise = _unit(generator.standard_normal((num_users, TASTE_DIM)))
        return _unit(favourites + TASTE_NOISE * noise)

    item_noise = TASTE_NOISE * _unit(generator.standard_normal((num_items, TASTE_DIM)))
    item_vectors = _unit(_unit(genres @ centres) + item_noise)
    # Some films are released after the log begins, and all other films are released before.
    is_new = generator.permutation(num_items) < NEW_SHARE * num_items
    first_days = generator.uniform(0.0, 0.7 * SPAN_DAYS, num_users)
    first_tastes = tastes()
    last_tastes = tastes()
    careers = generator.uniform(0.1, 0.3, num_users) * SPAN_DAYS
    popularity = generator.permutation(zipf_probabilities(num_items, exponent=exponent))
    days_if_new = generator.uniform(0.0, SPAN_DAYS, num_items)
    days_if_old = -generator.uniform(300.0, 9_000.0, num_items)
    law = TasteLaw(
        first_tastes=first_tastes,
        last_tastes=last_tastes,
        first_days=first_days,
        last_days=first_days + careers,
        item_vectors=item_vectors,
        log_popularity=np.log(popularity),
        release_days=np.where(is_new, days_if_new, days_if_old),
    )
    return law, genres


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _visits(generator: np.random.Generator, law: TasteLaw, counts: np.ndarray) -> np.ndarray:
    """User, item and time (in seconds) of each rating, `[3, ratings]`.

    Args:
      generator: source of random numbers.
      law: distribution that the log is drawn from.
      counts: number of ratings of each user, which are spread over `NUM_VISITS` visits.
    """
    num_users = len(counts)
    num_items = len(law.item_vectors)
    ends = counts[:, None] * np.arange(NUM_VISITS + 1) // NUM_VISITS
    counts_of_visits = np.diff(ends, axis=1)
    # `moments` are fractions of the time from a user's first visit (0) to the last visit (1).
    inner = np.sort(generator.random((num_users, NUM_VISITS - 2)), axis=1)
    first = np.zeros((num_users, 1))
    last = np.ones((num_users, 1))
    moments = np.concatenate([first, inner, last], axis=1)
    careers = law.last_days - law.first_days
    visit_days = law.first_days[:, None] + moments * careers[:, None]
    parts = []
    # The loop handles at most 256 users at a time, to bound the memory.
    num_parts = 1 + num_users // 256
    for user_part in np.array_split(np.arange(num_users), num_parts):
        is_rated = np.zeros((len(user_part), num_items), bool)
        for visit in range(NUM_VISITS):
            days = visit_days[user_part, visit]
            num_ratings = counts_of_visits[user_part, visit]
            most = num_ratings.max()
            log_odds = law.log_odds(user_part, days)
            noisy = log_odds + generator.gumbel(size=is_rated.shape)
            costs = np.where(is_rated, np.inf, -noisy)
            best_items = np.argsort(costs, axis=1)[:, :most]
            rows, ranks = np.nonzero(np.arange(most) < num_ratings[:, None])
            items = best_items[rows, ranks]
            is_rated[rows, items] = True
            visit_seconds = (days[rows] * DAY_SECONDS).astype(np.int64)
            seconds = START_SECONDS + visit_seconds + 20 * ranks
            parts.append(np.stack([user_part[rows], items, seconds]))
    return np.concatenate(parts, axis=1)
