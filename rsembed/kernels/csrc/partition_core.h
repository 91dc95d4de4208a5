// Partitions the ids of one SparseCore on the host, and writes the part of the buffers that belongs to this core.
//
// The ids of each feature are in the order of the samples. The partitioner packs each entry into one number (shard,
// row, sample), sorts the entries by (shard, row) with a stable radix sort, and merges entries with equal numbers. The
// tables of a stack have disjoint rows, so each table is sorted separately. The sort keys of a single table are short,
// and its entries fit in the cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "partition.h"

namespace rsembed {
inline constexpr int64_t kTile = 8;
inline constexpr int64_t kMostOnes = int64_t{1} << 24;  // from this value on, adding 1 does not change a float32
inline constexpr int kStreams = 4;
inline constexpr int32_t kPaddingValue = std::numeric_limits<int32_t>::max();

inline int BitsFor(uint64_t count) {
  int bits = 0;
  while (bits < 64 && (uint64_t{1} << bits) < count) ++bits;
  return bits;
}

inline float AsFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t AsBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline int64_t RoundUp(int64_t count) { return (count + kTile - 1) / kTile * kTile; }

inline int64_t FirstEntry(const PartitionFeature& feature, int64_t sample) {
  return feature.offsets == nullptr ? sample * feature.ids_per_sample : feature.offsets[sample];
}

// Quotient of an id by the number of shards, exact for ids below 2^32.
class QuotientByShards {
 public:
  explicit QuotientByShards(uint64_t num_shards)
      : shift_((num_shards & (num_shards - 1)) == 0 ? BitsFor(num_shards) : -1),
        reciprocal_(std::numeric_limits<uint64_t>::max() / num_shards + 1) {}

  uint64_t operator()(uint64_t id) const {
    // Lemire, Kaser and Kurz, "Faster remainder by direct computation", 2019.
    return shift_ >= 0 ? id >> shift_ : static_cast<uint64_t>((static_cast<__uint128_t>(reciprocal_) * id) >> 64);
  }

 private:
  int shift_;
  uint64_t reciprocal_;
};

// Features of one table, and the layout of their sort keys. A sort key consists of the sample, the row and the shard of
// an entry, and `sample_bits`, `row_bits` and `shard_bits` are the widths of these parts.
struct Group {
  const PartitionFeature* features;
  int64_t num_features;
  int64_t first_sample;
  int sample_bits, row_bits, shard_bits;

  int key_bits() const { return sample_bits + row_bits + shard_bits; }
};

inline std::vector<Group> GroupsOf(const PartitionStack& stack) {
  std::vector<Group> groups;
  const PartitionFeature* const end = stack.features + stack.num_features;
  for (const PartitionFeature *first = stack.features, *last; first != end; first = last) {
    uint64_t rows = 0;
    for (last = first; last != end && last->first_row == first->first_row; ++last) {
      rows = std::max<uint64_t>(rows, (last->vocabulary_size + stack.num_shards - 1) / stack.num_shards);
    }
    const uint64_t samples = last[-1].first_sample + last[-1].samples_per_core - first->first_sample;
    groups.push_back(
        {first, last - first, first->first_sample, BitsFor(samples), BitsFor(rows), BitsFor(stack.num_shards)});
  }
  return groups;
}

// Uninitialised memory that a thread reuses for all SparseCores that it handles.
class Scratch {
 public:
  template <typename T>
  T* Get(int64_t size) {
    const size_t needed = (size * sizeof(T) + sizeof(Word) - 1) / sizeof(Word) + 1;
    if (needed > size_) {
      words_.reset();
      words_.reset(new Word[needed]);
      size_ = needed;
    }
    return reinterpret_cast<T*>(words_.get());
  }

 private:
  struct alignas(16) Word {
    char bytes[16];
  };
  std::unique_ptr<Word[]> words_;
  size_t size_ = 0;
};

struct WorkerMemory {
  Scratch items, spare, counts, scales, runs;
};

template <typename K>
struct Item {
  using Key = K;
  static constexpr bool kHasGain = false;
  K key;
};

template <typename K>
struct GainedItem {
  using Key = K;
  static constexpr bool kHasGain = true;
  K key;
  float gain;
};

// Partitions the ids that one SparseCore looks up in a stack.
template <typename ItemType>
class CorePartitioner {
  using Key = typename ItemType::Key;

 public:
  CorePartitioner(PartitionStack& stack, const std::vector<Group>& groups, int64_t core, bool drops_ids,
                  WorkerMemory& memory)
      : stack_(stack), groups_(groups), core_(core), drops_ids_(drops_ids), memory_(memory) {}

  // Returns false if an id is outside its table or a weight is not finite.
  bool Run() {
    int64_t num_entries = 0;
    for (const Group& group : groups_) num_entries += NumEntries(group);
    items_ = memory_.items.Get<ItemType>(num_entries);
    runs_ = memory_.runs.Get<const ItemType*>(groups_.size() * (stack_.num_shards + 1));
    scales_ = nullptr;
    if (!ItemType::kHasGain && stack_.gain_rule != kGainsAsGiven) {
      scales_ = memory_.scales.Get<float>(stack_.samples_per_core);
    }
    ItemType* place = items_;
    const ItemType** bounds = runs_;
    for (const Group& group : groups_) {
      const int64_t size = NumEntries(group);
      if (!Sort(group, size, place)) return false;
      FindShards(group, place, size, bounds);
      place += size;
      bounds += stack_.num_shards + 1;
    }
    Write();
    return true;
  }

 private:
  int64_t NumEntries(const Group& group) const {
    int64_t count = 0;
    for (int64_t f = 0; f < group.num_features; ++f) {
      const PartitionFeature& feature = group.features[f];
      count += FirstEntry(feature, (core_ + 1) * feature.samples_per_core) -
               FirstEntry(feature, core_ * feature.samples_per_core);
    }
    return count;
  }

  // Sorts the entries of a group into `sorted`, starting with the least significant digit of (shard, row).
  bool Sort(const Group& group, int64_t size, ItemType* sorted) {
    const int sort_bits = group.row_bits + group.shard_bits;
    // A small number of entries is sorted faster with short digits, which need more passes but fewer counters per pass.
    const int max_digit_bits = size < 256 ? 6 : size < 1024 ? 8 : 11;
    const int num_passes = (sort_bits + max_digit_bits - 1) / max_digit_bits;
    const int digit_bits = num_passes == 0 ? 0 : (sort_bits + num_passes - 1) / num_passes;
    uint32_t* const counts = memory_.counts.Get<uint32_t>(kStreams << digit_bits);
    ItemType* spare = memory_.spare.Get<ItemType>(size);
    ItemType* from = num_passes % 2 == 0 ? sorted : spare;
    ItemType* to = num_passes % 2 == 0 ? spare : sorted;
    int64_t emitted = 0;
    for (int64_t f = 0; f < group.num_features; ++f) {
      if (!EmitFeature(group, group.features[f], from, &emitted)) return false;
    }
    for (int pass = 0; pass < num_passes; ++pass) {
      SortByDigit(from, to, size, group.sample_bits + pass * digit_bits, digit_bits, counts);
      std::swap(from, to);
    }
    return true;
  }

  // One pass of the stable radix sort, by one digit of the keys. Frequent ids increment the same counter repeatedly,
  // and a processor stalls when it reads a counter that it is still writing. To avoid waiting for counters, the items
  // are split into several streams, which take turns and have separate counters.
  static void SortByDigit(const ItemType* from, ItemType* to, int64_t size, int shift, int digit_bits,
                          uint32_t* counts) {
    const int64_t num_digits = int64_t{1} << digit_bits, length = size / kStreams;
    const Key mask = static_cast<Key>(num_digits - 1);
    std::fill_n(counts, kStreams * num_digits, 0);
    const auto for_each = [&](const auto& body) {
      for (int64_t i = 0; i < length; ++i) {
        for (int stream = 0; stream < kStreams; ++stream) {
          const ItemType item = from[stream * length + i];
          body(item, counts[stream * num_digits + ((item.key >> shift) & mask)]);
        }
      }
      for (int64_t i = kStreams * length; i < size; ++i) {  // the last stream also has the remaining items
        body(from[i], counts[(kStreams - 1) * num_digits + ((from[i].key >> shift) & mask)]);
      }
    };
    for_each([](const ItemType&, uint32_t& count) { ++count; });
    uint32_t place = 0;
    for (int64_t digit = 0; digit < num_digits; ++digit) {
      for (int stream = 0; stream < kStreams; ++stream) {
        uint32_t& count = counts[stream * num_digits + digit];
        const uint32_t next = place + count;
        count = place;
        place = next;
      }
    }
    for_each([=](const ItemType& item, uint32_t& count) { to[count++] = item; });
  }

  bool EmitFeature(const Group& group, const PartitionFeature& feature, ItemType* items, int64_t* emitted) {
    switch (feature.id_type) {
      case kInt8:
        return Emit<int8_t>(group, feature, items, emitted);
      case kInt16:
        return Emit<int16_t>(group, feature, items, emitted);
      case kInt32:
        return Emit<int32_t>(group, feature, items, emitted);
      case kInt64:
        return Emit<int64_t>(group, feature, items, emitted);
      case kUInt8:
        return Emit<uint8_t>(group, feature, items, emitted);
      case kUInt16:
        return Emit<uint16_t>(group, feature, items, emitted);
      case kUInt32:
        return Emit<uint32_t>(group, feature, items, emitted);
      default:
        return Emit<uint64_t>(group, feature, items, emitted);
    }
  }

  // Writes one item for every entry of a feature on this SparseCore. An id outside its table is reported only after the
  // last item, so that the loop has no branch.
  template <typename Id>
  bool Emit(const Group& group, const PartitionFeature& feature, ItemType* items, int64_t* emitted) {
    const Id* const ids = static_cast<const Id*>(feature.ids);
    const uint64_t vocabulary_size = feature.vocabulary_size;
    const uint64_t num_shards = stack_.num_shards;
    const QuotientByShards quotient(num_shards);
    const uint64_t rotation = feature.rotation;
    const int row_bits = group.row_bits, sample_bits = group.sample_bits;
    const int64_t first_sample = core_ * feature.samples_per_core;
    const Key sample_base = static_cast<Key>(feature.first_sample - group.first_sample);
    bool bad = false;
    int64_t out = *emitted;
    int64_t last = FirstEntry(feature, first_sample);
    for (int64_t s = 0; s < feature.samples_per_core; ++s) {
      const int64_t first = last;
      last = FirstEntry(feature, first_sample + s + 1);
      const double inverse = Inverse(feature.weights, first, last, &bad);
      if (scales_ != nullptr) scales_[feature.first_sample + s] = static_cast<float>(inverse);
      const Key sample = sample_base + static_cast<Key>(s);
      for (int64_t entry = first; entry < last; ++entry, ++out) {
        const uint64_t id = static_cast<uint64_t>(ids[entry]);  // as an unsigned number, a negative id is out of range
        bad |= id >= vocabulary_size;
        const uint64_t row = quotient(id);
        uint64_t shard = id - row * num_shards + rotation;
        shard -= shard >= num_shards ? num_shards : 0;
        items[out].key = static_cast<Key>(((shard << row_bits | row) << sample_bits) | sample);
        if constexpr (ItemType::kHasGain) {
          const float weight = feature.weights == nullptr ? 1.0f : feature.weights[entry];
          items[out].gain = stack_.gain_rule == kGainsAsGiven ? weight : static_cast<float>(weight * inverse);
        }
      }
    }
    *emitted = out;
    return !bad;
  }

  // Reciprocal of the divisor of a sample's weights, or 0 if the divisor is 0.
  double Inverse(const float* weights, int64_t first, int64_t last, bool* bad) const {
    double sum = 0;
    if (weights == nullptr) {
      sum = static_cast<double>(last - first);
    } else {
      for (int64_t entry = first; entry < last; ++entry) {
        const double weight = weights[entry];
        *bad |= !std::isfinite(weight);
        sum += stack_.gain_rule == kGainsOverNorm ? weight * weight : weight;
      }
    }
    const double divisor = stack_.gain_rule == kGainsOverNorm ? std::sqrt(sum) : sum;
    return divisor != 0 ? 1.0 / divisor : 0.0;
  }

  // Computes the bounds of the shards: shard p has the sorted items from bounds[p] up to bounds[p + 1].
  void FindShards(const Group& group, const ItemType* items, int64_t size, const ItemType** bounds) const {
    const int shift = group.sample_bits + group.row_bits;
    bounds[0] = items;
    bounds[stack_.num_shards] = items + size;
    for (int64_t p = 1; p < stack_.num_shards; ++p) {
      const Key shard = static_cast<Key>(p);
      bounds[p] = std::partition_point(bounds[p - 1], items + size,
                                       [=](const ItemType& item) { return (item.key >> shift) < shard; });
    }
  }

  const ItemType* RunBegin(size_t group, int64_t shard) const { return runs_[group * (stack_.num_shards + 1) + shard]; }
  const ItemType* RunEnd(size_t group, int64_t shard) const { return RunBegin(group, shard + 1); }

  // Counts and writes all partitions of the SparseCore.
  void Write() {
    int64_t pos = 0;
    int32_t* const pointers = stack_.row_pointers + core_ * stack_.pointers_per_core;
    for (int64_t p = 0; p < stack_.num_shards; ++p) {
      int64_t num_ids = 0, num_unique = 0;
      for (size_t g = 0; g < groups_.size(); ++g) {
        Count(groups_[g].sample_bits, RunBegin(g, p), RunEnd(g, p), &num_ids, &num_unique);
      }
      stack_.num_ids[core_ * stack_.num_shards + p] = num_ids;
      stack_.num_unique[core_ * stack_.num_shards + p] = num_unique;
      const bool is_within = num_ids <= stack_.max_ids && num_unique <= stack_.max_unique;
      if (is_within && pos + num_ids <= stack_.places_per_core) {
        for (size_t g = 0; g < groups_.size(); ++g) pos = WriteRun(groups_[g], RunBegin(g, p), RunEnd(g, p), pos);
      } else {
        __atomic_store_n(&stack_.drops_something, 1, __ATOMIC_RELAXED);
        if (drops_ids_) pos += WriteWithinLimits(p, pos);
      }
      const int64_t end = std::min(pos, stack_.places_per_core);
      pointers[p] = static_cast<int32_t>(end);
      pos = RoundUp(pos);
      Pad(end, std::min(pos, stack_.places_per_core));
    }
    const int64_t end = std::min(pos, stack_.places_per_core);
    std::fill(pointers + stack_.num_shards, pointers + stack_.pointers_per_core, static_cast<int32_t>(end));
    Pad(end, stack_.places_per_core);
  }

  static void Count(int sample_bits, const ItemType* first, const ItemType* last, int64_t* num_ids,
                    int64_t* num_unique) {
    if (first == last) return;
    Key ids = 0, unique = 0;  // as wide as the keys, so that compilers vectorise the loop
    const int64_t size = last - first;
    for (int64_t i = 1; i < size; ++i) {
      const Key change = first[i].key ^ first[i - 1].key;
      ids += change != 0;
      unique += (change >> sample_bits) != 0;
    }
    *num_ids += 1 + static_cast<int64_t>(ids);
    *num_unique += 1 + static_cast<int64_t>(unique);
  }

  // Writes the merged entries of one shard at `pos`, and returns the position after the last entry. The buffer must
  // have room for all entries.
  int64_t WriteRun(const Group& group, const ItemType* first, const ItemType* last, int64_t pos) const {
    if (first == last) return pos;
    const bool counts = !ItemType::kHasGain && scales_ == nullptr && last - first < kMostOnes;
    return counts ? WriteRun<true>(group, first, last, pos) : WriteRun<false>(group, first, last, pos);
  }

  // A branch on whether an entry equals the previous entry would be unpredictable, so the loop uses masks instead.
  template <bool kGainsAreCounts>
  int64_t WriteRun(const Group& group, const ItemType* items, const ItemType* last, int64_t pos) const {
    const int sample_bits = group.sample_bits;
    const Key sample_mask = static_cast<Key>((uint64_t{1} << sample_bits) - 1);
    const Key row_mask = static_cast<Key>((uint64_t{1} << group.row_bits) - 1);
    const Key shard = (items->key >> sample_bits) & ~row_mask;
    const uint32_t row_base = static_cast<uint32_t>(group.features->first_row - static_cast<int64_t>(shard));
    const int32_t first_sample = static_cast<int32_t>(group.first_sample);
    const int64_t base = core_ * stack_.places_per_core + pos;
    int32_t* const embedding_ids = stack_.embedding_ids + base;
    int32_t* const sample_ids = stack_.sample_ids + base;
    float* const gains = stack_.gains + base;
    const int32_t size = static_cast<int32_t>(last - items);
    Key previous = ~items->key;
    int32_t place = -1, start = 0;
    uint32_t sum = 0;  // sum of the gains, as the bits of a float32
    for (int32_t i = 0; i < size; ++i) {
      const Key key = items[i].key;
      const int32_t is_new = key != previous;
      const int32_t sample = first_sample + static_cast<int32_t>(key & sample_mask);
      place += is_new;
      embedding_ids[place] = static_cast<int32_t>(row_base + static_cast<uint32_t>(key >> sample_bits));
      sample_ids[place] = sample;
      if constexpr (kGainsAreCounts) {
        start ^= (start ^ i) & -is_new;
        gains[place] = static_cast<float>(i - start + 1);
      } else {
        const uint32_t none = 0x80000000;  // bits of -0; adding -0 changes no float32
        sum ^= (sum ^ none) & static_cast<uint32_t>(-is_new);
        gains[place] = AsFloat(sum) + Gain(items[i], sample);
        sum = AsBits(gains[place]);
      }
      previous = key;
    }
    return pos + place + 1;
  }

  float Gain(const ItemType& item, int64_t sample) const {
    if constexpr (ItemType::kHasGain) {
      return item.gain;
    } else {
      return scales_ == nullptr ? 1.0f : scales_[sample];
    }
  }

  // Writes the merged entries of a partition that are within the limits: at most `max_ids` entries of the first
  // `max_unique` rows, until the buffer is full. Returns the number of entries within `max_ids` and `max_unique`,
  // including entries for which the buffer has no room.
  int64_t WriteWithinLimits(int64_t shard, int64_t pos) const {
    int64_t rank = 0, row_rank = 0, num_kept = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
      const int sample_bits = groups_[g].sample_bits;
      const int64_t feature = groups_[g].features - stack_.features;
      int64_t* const drops = stack_.drops + (core_ * stack_.num_features + feature) * kNumDropKinds;
      const ItemType* const end = RunEnd(g, shard);
      Key previous = 0;
      for (const ItemType *item = RunBegin(g, shard), *next; item != end; item = next, ++rank) {
        row_rank += item == RunBegin(g, shard) || (item->key ^ previous) >> sample_bits != 0;
        previous = item->key;
        for (next = item + 1; next != end && next->key == item->key;) ++next;
        if (rank >= stack_.max_ids) {
          drops[kDroppedIds] += next - item;
        } else if (row_rank > stack_.max_unique) {
          drops[kDroppedUniqueIds] += next - item;
        } else if (pos + num_kept++ < stack_.places_per_core) {
          WriteRun(groups_[g], item, next, pos + num_kept - 1);
        } else {
          ++drops[kDroppedByBuffer];
        }
      }
    }
    return num_kept;
  }

  void Pad(int64_t first, int64_t last) const {
    const int64_t base = core_ * stack_.places_per_core;
    std::fill(stack_.embedding_ids + base + first, stack_.embedding_ids + base + last, kPaddingValue);
    std::fill(stack_.sample_ids + base + first, stack_.sample_ids + base + last, kPaddingValue);
    std::fill(stack_.gains + base + first, stack_.gains + base + last, std::numeric_limits<float>::quiet_NaN());
  }

  PartitionStack& stack_;
  const std::vector<Group>& groups_;
  const int64_t core_;
  const bool drops_ids_;
  WorkerMemory& memory_;
  ItemType* items_ = nullptr;
  const ItemType** runs_ = nullptr;
  float* scales_ = nullptr;  // null: all gains are 1, or every item stores its gain
};

}  // namespace rsembed
