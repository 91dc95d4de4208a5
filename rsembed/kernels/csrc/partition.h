// Arguments and results of the partitioner on the host. The structs must match those of
// rsembed/sparsecore/native_partitioner.py.
#pragma once

#include <cstdint>

namespace rsembed {

enum GainRule : int32_t { kGainsAsGiven, kGainsOverSum, kGainsOverNorm };
enum IdType : int32_t { kInt8, kInt16, kInt32, kInt64, kUInt8, kUInt16, kUInt32, kUInt64, kNumIdTypes };
enum DropKind { kDroppedIds, kDroppedUniqueIds, kDroppedByBuffer, kNumDropKinds };
enum PartitionStatus : int32_t { kPartitioned, kBadEntry, kOutOfMemory };

// Ids of one feature in this process. Sample s has the entries offsets[s] to offsets[s + 1] - 1.
struct PartitionFeature {
  const void* ids;
  const int64_t* offsets;  // null: every sample has `ids_per_sample` ids
  const float* weights;    // null: all weights are 1
  int64_t ids_per_sample;
  int64_t samples_per_core;
  int64_t vocabulary_size;  // below 2^31
  int64_t first_row;     // first row of the feature's table in every shard
  int64_t first_sample;  // first sample of the feature in every core
  int64_t rotation;      // number of shards by which the table's ids are rotated
  int32_t id_type;
};

// Features and buffers of one stack of tables. Every buffer has one part for each of the `num_cores` SparseCores of
// this process. Features are sorted by (first_row, first_sample). Features of one table have the same first row.
struct PartitionStack {
  const PartitionFeature* features;
  int64_t num_features;
  int64_t num_cores;
  int64_t num_shards;
  int64_t samples_per_core;
  int64_t max_ids;
  int64_t max_unique;
  int64_t places_per_core;    // entries in a core's part of a buffer, a multiple of 8
  int64_t pointers_per_core;  // at least num_shards
  int32_t* row_pointers;
  int32_t* embedding_ids;
  int32_t* sample_ids;
  float* gains;
  int64_t* num_ids;     // [num_cores, num_shards], counted before ids are dropped
  int64_t* num_unique;  // [num_cores, num_shards]
  // Number of dropped ids, [num_cores, num_features, kNumDropKinds], 0 on entry. If several features share a table, the
  // dropped ids of the table are counted for the first of the features.
  int64_t* drops;
  int32_t gain_rule;
  int32_t drops_something;  // set if a limit is exceeded or a buffer is too small; 0 on entry
};

}  // namespace rsembed
