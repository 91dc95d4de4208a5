// Vectors as wide as the registers of the instruction set. The vector types use the compilers' `vector_size`, so one
// source works for all three instruction sets.
//
// A file that is compiled once per instruction set includes this file inside the namespace of its instruction set, so
// every definition exists once per instruction set. This file has no include guard and includes nothing, because it is
// included inside a namespace.

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef float Quad __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

template <typename T> struct VectorOf { typedef Halves type; };
template <> struct VectorOf<float> { typedef Floats type; };

inline Floats broadcast(float x) { return x - Floats{}; }
inline Words as_words(Floats x) { return reinterpret_cast<Words>(x); }
inline Floats as_floats(Words x) { return reinterpret_cast<Floats>(x); }
inline Words select(Words mask, Words yes, Words no) { return (mask & yes) | (~mask & no); }

inline Floats square_root(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_sqrt_ps(0xffff, (__m512)x);
#elif defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
  return (Floats)_mm_sqrt_ps((__m128)x);
#else
  for (int k = 0; k < kLanes; ++k) x[k] = __builtin_sqrtf(x[k]);
  return x;
#endif
}

inline float sum_of_lanes(Floats x) {
  Quad quads[kLanes / 4];
  memcpy(quads, &x, sizeof(x));
  for (int k = 1; k < kLanes / 4; ++k) quads[0] += quads[k];
  return (quads[0][0] + quads[0][2]) + (quads[0][1] + quads[0][3]);
}

inline Floats decode(const float*, Floats x) { return x; }

inline Floats decode(const BFloat16*, Halves x) { return as_floats(__builtin_convertvector(x, Words) << 16); }

// A subnormal float16 number is converted by a subtraction of two normal float32 numbers, because XLA lets the
// processor read subnormal numbers as zero.
inline Floats decode(const Float16*, Halves x) {
  const Words bits = __builtin_convertvector(x, Words);
  const Words magnitude = (bits & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
  const Words normal = magnitude + (112u << 23);
  const Words infinite = normal + (112u << 23);
  const Words tiny = as_words(as_floats(normal + (1u << 23)) - as_floats(Words{} + (113u << 23)));
  const Words is_infinite = (Words)(exponent == 0x0f800000), is_tiny = (Words)(exponent == 0);
  return as_floats(select(is_tiny, tiny, select(is_infinite, infinite, normal)) | (bits & 0x8000) << 16);
}

inline Floats encode(const float*, Floats x) { return x; }

// Rounds to nearest, ties to even. NaN stays a quiet NaN.
inline Halves encode(const BFloat16*, Floats x) {
  const Words bits = as_words(x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(select((Words)(x != x), (bits >> 16) | 0x40, rounded), Halves);
}

inline Halves encode(const Float16*, Floats x) {
  const Words bits = as_words(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Float32 numbers from 0.5 to 1 have the spacing of subnormal float16 numbers. So adding 0.5 rounds to the nearest
  // subnormal number, and the lowest bits of the sum are the mantissa of this number.
  const Words tiny = as_words(as_floats(magnitude) + 0.5f) - 0x3f000000;
  const Words huge = select((Words)(magnitude > 0x7f800000), Words{} + 0x7e00, Words{} + 0x7c00);
  const Words finite = select((Words)(magnitude < 0x38800000), tiny, normal);
  return __builtin_convertvector(sign | select((Words)(magnitude >= 0x47800000), huge, finite), Halves);
}

template <typename T>
inline Floats load(const T* from) {
  typename VectorOf<T>::type raw;
  memcpy(&raw, from, sizeof(raw));
  return decode(from, raw);
}

template <typename T>
inline void store(T* to, Floats x) {
  const typename VectorOf<T>::type raw = encode(to, x);
  memcpy(to, &raw, sizeof(raw));
}

// Loads and stores the last columns of a row, which are fewer than kLanes. A load fills the remaining lanes of the
// vector with zeros, and a store skips these lanes. A loop over single columns would be slow for rows that are shorter
// than a vector.
#if defined(__AVX512F__)
inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

inline Floats load_tail(const float* from, int64_t count) {
  return (Floats)_mm512_maskz_loadu_ps(first_lanes(count), from);
}

template <typename T>
inline Floats load_tail(const T* from, int64_t count) {
  return decode(from, (Halves)_mm256_maskz_loadu_epi16(first_lanes(count), from));
}

inline void store_tail(float* to, Floats x, int64_t count) {
  _mm512_mask_storeu_ps(to, first_lanes(count), (__m512)x);
}

template <typename T>
inline void store_tail(T* to, Floats x, int64_t count) {
  _mm256_mask_storeu_epi16(to, first_lanes(count), (__m256i)encode(to, x));
}
#else
// Loads `bytes` bytes, or the first eight bytes if `bytes` is more than 8. `bytes` is a multiple of 2.
inline uint64_t load_bytes(const void* from, int64_t bytes) {
  const char* const part = static_cast<const char*>(from);
  uint64_t whole = 0;
  uint32_t four = 0;
  uint16_t two = 0;
  if (bytes >= 8) {
    memcpy(&whole, part, 8);
    return whole;
  }
  if (bytes & 4) memcpy(&four, part, 4);
  if (bytes & 2) memcpy(&two, part + (bytes & 4), 2);
  return bytes & 4 ? four | static_cast<uint64_t>(two) << 32 : two;
}

inline void store_bytes(void* to, uint64_t whole, int64_t bytes) {
  char* const part = static_cast<char*>(to);
  const uint32_t four = static_cast<uint32_t>(whole);
  const uint16_t two = static_cast<uint16_t>(bytes & 4 ? whole >> 32 : whole);
  if (bytes >= 8) {
    memcpy(part, &whole, 8);
    return;
  }
  if (bytes & 4) memcpy(part, &four, 4);
  if (bytes & 2) memcpy(part + (bytes & 4), &two, 2);
}

#if defined(__AVX2__)
inline Floats load_tail(const float* from, int64_t count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i is_there = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
  return (Floats)_mm256_maskload_ps(from, is_there);
}
#endif

template <typename T>
inline Floats load_tail(const T* from, int64_t count) {
  // The type Pair joins two parts of 8 bytes in a register. Storing the two parts to memory one by one is slower,
  // because a load of the whole vector has to wait for both stores.
  typedef uint64_t Pair __attribute__((vector_size(16)));
  constexpr int64_t kColumns = 8 / sizeof(T), kBytes = sizeof(T);
  const Pair parts = {load_bytes(from, count * kBytes),
                      count > kColumns ? load_bytes(from + kColumns, (count - kColumns) * kBytes) : 0};
  typename VectorOf<T>::type raw;
  static_assert(sizeof(raw) <= sizeof(parts), "wider vectors have loads of their own");
  memcpy(&raw, &parts, sizeof(raw));
  return decode(from, raw);
}

template <typename T>
inline void store_tail(T* to, Floats x, int64_t count) {
  const typename VectorOf<T>::type raw = encode(to, x);
  constexpr int64_t kParts = sizeof(raw) / 8, kColumns = 8 / sizeof(T);
  uint64_t parts[kParts];
  memcpy(parts, &raw, sizeof(raw));
#pragma GCC unroll 4
  for (int64_t k = 0; k < kParts; ++k) {
    const int64_t left = count - k * kColumns;
    if (left > 0) store_bytes(to + k * kColumns, parts[k], left * static_cast<int64_t>(sizeof(T)));
  }
}
#endif

// Stores to an aligned address and bypasses the caches, so that the processor does not read a cache line only to
// overwrite it.
inline void stream(float* to, Floats x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, (__m256)x);
#else
  store(to, x);
#endif
}

template <typename T>
inline float dot(const T* row, const float* vector, int64_t dim) {
  Floats sum = {};
  int64_t column = 0;
  for (; column + kLanes <= dim; column += kLanes) sum += load(row + column) * load(vector + column);
  if (column < dim) sum += load_tail(row + column, dim - column) * load_tail(vector + column, dim - column);
  return sum_of_lanes(sum);
}

// Buffer for a few rows, on the stack unless the rows are long.
class RowsInUse {
 public:
  RowsInUse(int64_t num_rows, int64_t dim) {
    const int64_t size = num_rows * dim;
    rows_ = size <= kSmallSize ? small_ : static_cast<float*>(malloc(size * sizeof(float)));
    if (rows_ == nullptr) abort();  // the buffer is small, so malloc fails only if the system is out of memory
  }
  RowsInUse(const RowsInUse&) = delete;
  ~RowsInUse() {
    if (rows_ != small_) free(rows_);
  }
  float* get() const { return rows_; }

 private:
  static constexpr int64_t kSmallSize = 4096;
  float small_[kSmallSize];
  float* rows_;
};
