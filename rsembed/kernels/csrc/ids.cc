// The ids of many features as rows of their stack, and how many of them are in use: XLA FFI handlers.
//
// XLA would compile an operation for every feature; these serve all features of a call at once. They mean what their
// namesakes in rsembed/kernels/ids.py mean. The attribute `places` has, per feature, the numbers of a Place of
// rsembed/places.py and the size of its table.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "arguments.h"
#include "parallel.h"
#include "sorting.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {
namespace {

constexpr int64_t kIdsPerTask = 1 << 14;
constexpr int32_t kPadId = -1;  // PAD_ID of rsembed/bags.py

// Numbers without a sign, so that no sum or product of them is undefined.
struct Place {
  uint64_t owner, first, rotation, num_ids;
};

// The ids of a feature; `first_entry` counts those of the features before it.
struct Feature {
  const int32_t* ids;
  int64_t first_entry, num_entries;
  Place place;
  int32_t* rows;
};

// Ids are compared as unsigned numbers, so that negative ones are outside every table.
void WriteRows(const Feature& feature, uint64_t spread, uint64_t rows_per_shard, int64_t begin, int64_t end) {
  const Place& place = feature.place;
  const uint32_t num_ids = static_cast<uint32_t>(place.num_ids);
  const uint64_t phase = place.first + place.rotation;
  const uint32_t first_row = static_cast<uint32_t>(place.owner * rows_per_shard + place.first);
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t id = static_cast<uint32_t>(feature.ids[i]);
    uint32_t row = id + first_row;
    if (spread > 1) {
      const uint64_t shard = place.owner + (id + phase) % spread;
      row = static_cast<uint32_t>(shard * rows_per_shard + (place.first + id) / spread);
    }
    feature.rows[i] = id < num_ids ? static_cast<int32_t>(row) : kNoRow;
  }
}

ffi::Error RowsOfIds(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Span<const int64_t> places, int64_t spread, int64_t rows_per_shard) {
  Reader reader(args);
  if (places.size() != 4 * args.size() || rets.size() != args.size() || spread < 1) reader.Fail("unreadable places");
  std::vector<Feature> features;
  int64_t num_entries = 0;
  for (size_t k = 0; k < args.size() && !reader.Failed(); ++k) {
    const auto number = [&](size_t at) { return static_cast<uint64_t>(places.begin()[4 * k + at]); };
    Feature feature = {};
    feature.ids = static_cast<int32_t*>(reader.Next("ids", ffi::S32, &feature.num_entries));
    feature.first_entry = num_entries;
    feature.place = {number(0), number(1), number(2), number(3)};
    auto rows = rets.get<ffi::BufferR1<ffi::S32>>(k);
    if (!rows.has_value() || static_cast<int64_t>((*rows)->element_count()) != feature.num_entries) {
      reader.Fail("wrong size of rows");
      break;
    }
    feature.rows = (*rows)->typed_data();
    num_entries += feature.num_entries;
    features.push_back(feature);
  }
  if (reader.Failed()) return reader.Complaint();
  Workers(pool).ForEachRange(num_entries, kIdsPerTask, [&](int64_t first, int64_t last) {
    ForEachPart<&Feature::first_entry, &Feature::num_entries>(
        features, first, last, [&](const Feature& feature, int64_t begin, int64_t end) {
          WriteRows(feature, spread, rows_per_shard, begin, end);
        });
  });
  return ffi::Error::Success();
}

// Of every feature: ids inside its table, and ids outside that are no padding; entries behind the last bag are neither.
ffi::Error CountIds(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Span<const int64_t> sizes) {
  Reader reader(args);
  if (args.size() != 2 * sizes.size() || rets.size() != 2 * sizes.size()) reader.Fail("unreadable sizes");
  std::vector<Feature> features;
  std::vector<int32_t*> counts;
  for (size_t k = 0; k < sizes.size() && !reader.Failed(); ++k) {
    Feature feature = {};
    int64_t num_offsets;
    feature.ids = static_cast<int32_t*>(reader.Next("ids", ffi::S32, &feature.num_entries));
    const int32_t* const offsets = static_cast<int32_t*>(reader.Next("offsets", ffi::S32, &num_offsets));
    if (num_offsets < 1) reader.Fail("offsets must not be empty");
    if (reader.Failed()) break;
    feature.num_entries = std::clamp<int64_t>(offsets[num_offsets - 1], 0, feature.num_entries);
    feature.place.num_ids = sizes[k];
    features.push_back(feature);
    for (size_t result = 2 * k; result < 2 * k + 2; ++result) {
      auto count = rets.get<ffi::BufferR0<ffi::S32>>(result);
      if (!count.has_value()) {
        reader.Fail("wrong type of a count");
        break;
      }
      counts.push_back((*count)->typed_data());
    }
  }
  if (reader.Failed()) return reader.Complaint();
  Workers(pool).ForEachBlock(static_cast<int64_t>(features.size()), [&](int64_t k) {
    const Feature& feature = features[k];
    int32_t num_inside = 0, num_padding = 0;
    for (int64_t i = 0; i < feature.num_entries; ++i) {
      num_inside += static_cast<uint32_t>(feature.ids[i]) < static_cast<uint32_t>(feature.place.num_ids);
      num_padding += feature.ids[i] == kPadId;
    }
    *counts[2 * k] = num_inside;
    *counts[2 * k + 1] = static_cast<int32_t>(feature.num_entries) - num_inside - num_padding;
  });
  return ffi::Error::Success();
}

auto BindLists() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets(); }

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    rsembed_rows_of_ids, RowsOfIds,
    BindLists().Attr<ffi::Span<const int64_t>>("places").Attr<int64_t>("spread").Attr<int64_t>("rows_per_shard"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(rsembed_count_ids, CountIds, BindLists().Attr<ffi::Span<const int64_t>>("sizes"));

#pragma GCC visibility pop

}  // namespace rsembed
