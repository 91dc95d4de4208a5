// Types and checks for the arguments of handlers that take keys.

#pragma once

#include <cstdint>
#include <string>

#include "arguments.h"
#include "row_kernels.h"
#include "xla/ffi/api/ffi.h"

namespace rsembed {

using Int32s = ffi::BufferR1<ffi::S32>;
using Words = ffi::BufferR1<ffi::U32>;
using Marks = ffi::BufferR1<ffi::PRED>;
using LanePairs = ffi::BufferR2<ffi::U32>;
using Int32Result = ffi::Result<Int32s>;
using CountResult = ffi::Result<ffi::BufferR0<ffi::S32>>;

// Row numbers that mark slots without a key, and the hash of a key. The row numbers and the hash are the same as in
// rsembed/kernels/keyed.py.
constexpr int32_t kEmpty = -1, kDeleted = -2;
inline uint32_t Mix(uint32_t high, uint32_t low) {
  uint32_t h = low ^ (high * 0x9E3779B1u);
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// Checks the arguments of a handler, and keeps the first error.
class Checks {
 public:
  void Need(bool is_met, const char* complaint) {
    if (!is_met && complaint_ == nullptr) complaint_ = complaint;
  }
  bool Failed() const { return complaint_ != nullptr; }
  ffi::Error Complaint() const { return ffi::Error::InvalidArgument(std::string("rsembed: ") + complaint_); }

 private:
  const char* complaint_ = nullptr;
};

template <typename Buffer>
int64_t Size(Buffer& buffer) {
  return static_cast<int64_t>(buffer.element_count());
}

// Keys of a call, and the table of each key. If `tables` is empty, all keys are in the first table.
struct Keys {
  const uint32_t* high;
  const uint32_t* low;
  const bool* is_key;
  const int32_t* table;
  int64_t count;

  Keys(Checks& checks, const Words& high_lane, const Words& low_lane, const Marks& marks, const Int32s& tables)
      : high(high_lane.typed_data()),
        low(low_lane.typed_data()),
        is_key(marks.typed_data()),
        table(Size(tables) == 0 ? nullptr : tables.typed_data()),
        count(Size(marks)) {
    checks.Need(Size(high_lane) == count && Size(low_lane) == count && count <= kNoRow, "wrong number of keys");
    checks.Need(Size(tables) == 0 || Size(tables) == count, "wrong number of tables");
  }

  int64_t TableOf(int64_t i) const { return table == nullptr ? 0 : table[i]; }
  bool IsIn(int64_t i, int64_t num_tables) const {
    return is_key[i] && TableOf(i) >= 0 && TableOf(i) < num_tables;
  }
  bool AreEqual(int64_t i, int64_t k) const {
    return low[i] == low[k] && high[i] == high[k] && TableOf(i) == TableOf(k);
  }
  uint32_t Storage(int64_t i) const { return Mix(high[i], low[i]); }
  // Hash of a key and its table, for code that handles the keys of all tables together. Several tables can have equal
  // keys.
  uint32_t HomeOfAll(int64_t i) const { return Mix(high[i] ^ static_cast<uint32_t>(TableOf(i)) * 0x9E3779B1u, low[i]); }
};

}  // namespace rsembed
