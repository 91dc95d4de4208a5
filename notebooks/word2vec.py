"""Word2vec: vectors of words from the words around them, by skip-gram with negative samples.

    python notebooks/word2vec.py [--steps 3000]

Two tables, of words and of contexts; every pair steps two rows and those of its negative samples. Source: Mikolov et
al., "Distributed Representations of Words and Phrases and their Compositionality", 2013, equation 4.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs

DIM, BATCH, NEGATIVES, WINDOW = 64, 1024, 5, 4


def pairs(word_ids, rng):
    """Every word with one of its `WINDOW` neighbours on either side, in random order."""
    offsets = rng.integers(1, WINDOW + 1, len(word_ids)) * rng.choice([-1, 1], len(word_ids))
    places = np.arange(len(word_ids))
    inside = (places + offsets >= 0) & (places + offsets < len(word_ids))
    chosen = rng.permutation(places[inside])
    return word_ids[chosen], word_ids[chosen + offsets[chosen]]


def loss_fn(params, vectors):
    words = vectors["word"]  # [batch, dim]
    # The true one, and those drawn.
    contexts = vectors["context"].reshape(len(words), 1 + NEGATIVES, -1)
    scores = jnp.einsum("bd,bkd->bk", words, contexts)
    return -jax.nn.log_sigmoid(scores.at[:, 1:].multiply(-1.0)).sum(axis=1).mean()


def make_collection(vocabulary_size):
    table = {"vocabulary_size": vocabulary_size, "embedding_dim": DIM, "combiner": "none"}
    table |= {
        "optimizer": rs.optimizers.Adagrad(5.0 / BATCH**0.5),
        "initializer": jax.nn.initializers.normal(0.1),
    }
    tables = [rs.TableSpec(name=name, **table) for name in ("word", "context")]
    return rs.EmbeddingCollection(
        [rs.FeatureSpec(name=table.name, table_spec=table) for table in tables]
    )


def nearest(vectors, text, word, count=5):
    """The words whose vectors have the smallest angle to that of `word`."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    order = np.argsort(-unit @ unit[text.vocabulary.index(word)])[1 : count + 1]
    return [text.vocabulary[number] for number in order]


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args(argv).steps
    text, rng = rs.datasets.shakespeare(4096), np.random.default_rng(0)
    counts = np.bincount(text.word_ids, minlength=len(text.vocabulary)) ** 0.75
    collection = make_collection(len(text.vocabulary))
    state, losses = collection.init(jax.random.key(0)), []

    @jax.jit(donate_argnums=0)
    def train_step(state, batch):
        loss, (_, row_gradients) = rs.value_and_grad(loss_fn, collection)((), state, batch)
        return collection.apply(state, row_gradients), loss

    words, contexts = np.zeros(0, np.int32), np.zeros(0, np.int32)
    for step in range(steps):
        if len(words) < BATCH:
            words, contexts = pairs(text.word_ids, rng)
        drawn = rng.choice(len(counts), (BATCH, NEGATIVES), p=counts / counts.sum()).astype(
            np.int32
        )
        batch = {
            "word": words[:BATCH],
            "context": np.concatenate([contexts[:BATCH, None], drawn], axis=1),
        }
        words, contexts = words[BATCH:], contexts[BATCH:]
        state, loss = train_step(state, collection.prepare(batch))
        losses.append(float(loss))
        if (step + 1) % 500 == 0:
            print(f"step {step + 1}: loss {np.mean(losses[-500:]):.3f}")
    vectors = np.asarray(collection.tables(state)["word"])
    frequent = [word for word in text.vocabulary[1:200] if word.isalpha() and len(word) > 3][:8]
    for word in frequent:
        print(f"{word}: {', '.join(nearest(vectors, text, word))}")
    return losses, vectors, text


if __name__ == "__main__":
    main()
