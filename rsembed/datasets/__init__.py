"""Data sets: text, Zipf ids, click logs and film ratings, read from files or generated at random.

Generated data need neither files nor network, and equal seeds give equal data. All arrays are NumPy
arrays. For a small data set, such as for a test, use the arguments `max_words`, `num_ids`,
`num_samples`, `max_users` or `rows` of the loaders.
"""

from rsembed.datasets.click_files import criteo as criteo, criteo_chunks as criteo_chunks
from rsembed.datasets.generated import synthetic_clicks as synthetic_clicks, zipf_ids as zipf_ids
from rsembed.datasets.ratings import generated_ratings as generated_ratings
from rsembed.datasets.ratings_files import movielens as movielens
from rsembed.datasets.text import shakespeare as shakespeare, word_id_batches as word_id_batches
from rsembed.datasets.vectors import word_vectors as word_vectors
