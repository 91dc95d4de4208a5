"""A dynamic table in Python dicts: what one shard holds after any sequence of batches."""

from __future__ import annotations

from rsembed.kernels.contract import NO_ROW


class Rows:
    """Which key has which row: `keys[row]` is the key, with its last step and count."""

    def __init__(self, capacity):
        self.keys = [None] * capacity
        self.last_step, self.counts = [-1] * capacity, [0] * capacity
        self.free = list(range(capacity))  # the first is next

    def row_of(self, key):
        return self.keys.index(key) if key is not None and key in self.keys else NO_ROW

    def release(self, rows):
        for row in rows:
            self.keys[row], self.last_step[row] = None, -1
        self.free = list(rows) + self.free

    def assign(self, keys, step, counts, evict):
        """Rows of new keys, and how many keys were evicted for them."""
        victims = []
        if evict and len(keys) > len(self.free):
            candidates = [r for r, k in enumerate(self.keys) if k is not None and self.last_step[r] != step]
            score = self.last_step if evict == "lru" else self.counts
            worst = sorted(candidates, key=lambda row: (score[row], self.keys[row]))
            victims = sorted(worst[: len(keys) - len(self.free)])
            self.release(victims)
        rows = []
        for key, count in zip(keys, counts, strict=True):
            rows.append(self.free.pop(0) if self.free else NO_ROW)
            if rows[-1] != NO_ROW:
                self.touch(rows[-1], step, count)
                self.keys[rows[-1]] = key
        return rows, len(victims)

    def touch(self, row, step, count):
        self.last_step[row], self.counts[row] = step, count

    def as_dict(self):
        return {k: (r, self.last_step[r], self.counts[r]) for r, k in enumerate(self.keys) if k is not None}


class Table:
    """The rules of `Hashed`, one key after the other; values are left to the tests."""

    def __init__(self, table):
        self.home = table.storage
        self.evict = self.home.eviction if self.home.when_full == "evict" else None
        self.rows = Rows(table.vocabulary_size)
        self.waiting = Rows(self.home.admission_capacity or table.vocabulary_size)
        names = ("inserted", "evicted", "failed", "not_admitted", "forgotten", "unknown", "stale", "invalid")
        self.counters = dict.fromkeys(names, 0)

    def translate(self, keys, step, train=True):
        """Rows of a batch of keys, None for padding; and the keys that are new."""
        totals: dict[int, int] = {}
        for key in keys:
            if key is not None:
                totals[key] = totals.get(key, 0) + 1
        missing = [key for key in totals if self.rows.row_of(key) == NO_ROW]
        if not train:
            self.counters["unknown"] += len(missing)
            return [self.rows.row_of(key) for key in keys], []
        for key, total in totals.items():
            row = self.rows.row_of(key)
            if row != NO_ROW:
                self.rows.touch(row, step, self.rows.counts[row] + total)
        waited = {key: self.waiting.row_of(key) for key in missing}
        seen = {k: totals[k] + (self.waiting.counts[row] if row != NO_ROW else 0) for k, row in waited.items()}
        admitted = [key for key in missing if seen[key] > self.home.admission_count]
        rows, num_evicted = self.rows.assign(admitted, step, [seen[k] for k in admitted], self.evict)
        placed = [key for key, row in zip(admitted, rows, strict=True) if row != NO_ROW]
        num_failed = len(admitted) - len(placed)
        if self.home.admission_count:
            self.waiting.release([waited[key] for key in placed if waited[key] != NO_ROW])
            left = [key for key in missing if key not in placed]
            for key in left:
                if waited[key] != NO_ROW:
                    self.waiting.touch(waited[key], step, seen[key])
            strangers = [key for key in left if waited[key] == NO_ROW]
            rows, num_forgotten = self.waiting.assign(strangers, step, [seen[k] for k in strangers], self.evict)
            refused = {key for key, row in zip(strangers, rows, strict=True) if row == NO_ROW}
            num_failed = len(refused | {key for key in admitted if key not in placed})
            self.counters["forgotten"] += num_forgotten
        self.counters["inserted"] += len(placed)
        self.counters["evicted"] += num_evicted
        self.counters["failed"] += num_failed
        self.counters["not_admitted"] += len(missing) - len(admitted)
        return [self.rows.row_of(key) for key in keys], placed

    def evict_older(self, step, steps_to_live):
        old = [
            r for r, k in enumerate(self.rows.keys) if k is not None and step - self.rows.last_step[r] > steps_to_live
        ]
        self.rows.release(old)
        self.counters["evicted"] += len(old)
