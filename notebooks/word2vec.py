"""Word2vec: vectors of words from the words around them, by skip-gram with negative samples.

    python notebooks/word2vec.py [--steps 3000]

There are two tables, one of words and one of contexts. Each pair of a word and a context trains one
row of the first table, and the rows of the context and of its negative samples in the second.

Source: Mikolov et al., "Distributed Representations of Words and Phrases and their
  Compositionality", 2013, equation 4.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs

DIM = 64
BATCH_SIZE = 1024
NUM_NEGATIVES = 5  # for each pair
WINDOW = 4  # words on either side


def pairs(word_ids, rng):
    """Each word with one of its neighbours, in random order, as arrays of words and contexts."""
    num_words = len(word_ids)
    offsets = rng.integers(1, WINDOW + 1, num_words) * rng.choice([-1, 1], num_words)
    positions = np.arange(num_words)
    neighbours = positions + offsets
    is_in_text = (neighbours >= 0) & (neighbours < num_words)
    shuffled = rng.permutation(positions[is_in_text])
    return word_ids[shuffled], word_ids[neighbours[shuffled]]


def loss_fn(params, vectors):
    """Mean loss of the pairs. The first context of each word is real, the others are drawn."""
    words = vectors["word"]  # [batch, dim]
    contexts = vectors["context"].reshape(len(words), 1 + NUM_NEGATIVES, -1)
    scores = jnp.einsum("bd,bkd->bk", words, contexts)
    signed_scores = scores.at[:, 1:].multiply(-1.0)
    return -jax.nn.log_sigmoid(signed_scores).sum(axis=1).mean()


def make_collection(vocabulary_size):
    """A table of words and a table of contexts."""
    features = []
    for name in ("word", "context"):
        table = rs.TableSpec(
            name=name,
            vocabulary_size=vocabulary_size,
            embedding_dim=DIM,
            combiner="none",
            optimizer=rs.optimizers.Adagrad(5.0 / BATCH_SIZE**0.5),
            initializer=jax.nn.initializers.normal(0.1),
        )
        features.append(rs.FeatureSpec(name=name, table_spec=table))
    return rs.EmbeddingCollection(features)


def nearest(vectors, text, word, count=5):
    """The words with the smallest angle between their vector and the vector of `word`."""
    unit_vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit_vectors @ unit_vectors[text.vocabulary.index(word)]
    # The first word is `word` itself.
    order = np.argsort(-cosines)[1 : count + 1]
    return [text.vocabulary[number] for number in order]


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000)
    num_steps = parser.parse_args(argv).steps
    text = rs.datasets.shakespeare(4096)
    rng = np.random.default_rng(0)
    weights = np.bincount(text.word_ids, minlength=len(text.vocabulary)) ** 0.75
    probabilities = weights / weights.sum()
    collection = make_collection(len(text.vocabulary))
    state = collection.init(jax.random.key(0))

    @jax.jit(donate_argnums=0)
    def train_step(state, batch):
        loss, (_, row_gradients) = rs.value_and_grad(loss_fn, collection)((), state, batch)
        return collection.apply(state, row_gradients), loss

    losses = []
    words = np.zeros(0, np.int32)
    contexts = np.zeros(0, np.int32)
    for step in range(num_steps):
        if len(words) < BATCH_SIZE:
            words, contexts = pairs(text.word_ids, rng)
        negatives = rng.choice(len(probabilities), (BATCH_SIZE, NUM_NEGATIVES), p=probabilities)
        real = contexts[:BATCH_SIZE, None]
        batch = {
            "word": words[:BATCH_SIZE],
            "context": np.concatenate([real, negatives.astype(np.int32)], axis=1),
        }
        words = words[BATCH_SIZE:]
        contexts = contexts[BATCH_SIZE:]
        state, loss = train_step(state, collection.prepare(batch))
        losses.append(float(loss))
        if (step + 1) % 500 == 0:
            print(f"step {step + 1}: loss {np.mean(losses[-500:]):.3f}")
    vectors = np.asarray(collection.tables(state)["word"])
    # The vocabulary begins with the most frequent words, after a row for unknown words.
    frequent = [word for word in text.vocabulary[1:200] if word.isalpha() and len(word) > 3]
    for word in frequent[:8]:
        print(f"{word}: {', '.join(nearest(vectors, text, word))}")
    return losses, vectors, text


if __name__ == "__main__":
    main()
