// Vectors as wide as the instruction set, of the compilers' own kind (`vector_size`), so that one text serves all three.
//
// For files that are compiled once per instruction set and include this inside a namespace of their set: whatever is
// defined here exists once for each. It has no guard and includes nothing for that reason.

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

// Subnormals become normal by a subtraction of normal numbers, because XLA lets the processor read subnormals as zero.
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

// Round to nearest, ties to even; NaN stays a quiet NaN.
inline Halves encode(const BFloat16*, Floats x) {
  const Words bits = as_words(x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(select((Words)(x != x), (bits >> 16) | 0x40, rounded), Halves);
}

inline Halves encode(const Float16*, Floats x) {
  const Words bits = as_words(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 leaves exactly the ten bits of a subnormal half in the low end of the sum, rounded to nearest.
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

// The columns behind the last full vector; missing lanes read as zero and are not written.
template <typename T>
inline Floats load_tail(const T* from, int64_t count) {
  T lanes[kLanes] = {};
  for (int64_t k = 0; k < count; ++k) lanes[k] = from[k];
  return load(lanes);
}

template <typename T>
inline void store_tail(T* to, Floats x, int64_t count) {
  T lanes[kLanes];
  store(lanes, x);
  for (int64_t k = 0; k < count; ++k) to[k] = lanes[k];
}

// Stores past the caches, to an aligned place: nobody has to read first what is overwritten.
inline void stream(float* to, Floats x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, (__m256)x);
#else
  store(to, x);
#endif
}
