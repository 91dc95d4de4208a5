"""Small data to learn from: text, Zipf ids, click logs whose best reachable loss is known, and ratings of films.

Everything works offline and is deterministic. Arrays are numpy; each loader has a tiny size for tests
(`max_words`, `num_batches`, `num_ids`, `num_samples`, `max_users`).
"""

from rsembed.datasets.generated import synthetic_clicks as synthetic_clicks
from rsembed.datasets.generated import zipf_ids as zipf_ids
from rsembed.datasets.ratings import generated_ratings as generated_ratings
from rsembed.datasets.ratings import movielens as movielens
from rsembed.datasets.text import shakespeare as shakespeare
from rsembed.datasets.text import word_id_batches as word_id_batches
from rsembed.datasets.vectors import word_vectors as word_vectors
