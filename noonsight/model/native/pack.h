// From arrays in memory to the form in which the matrix units read them: bf16 pairs along the contracted dim.
//
// A is packed row by row, [m][k]. B is packed in panels of 32 columns, [n / 32][k / 2][32][2]: the pair (k, k + 1) of
// one column is one dword, which is what both AVX512-BF16 and AMX multiply. K is padded with zeros to 32.
// Sources are f32 or bf16 and are rounded to nearest even on the way. `row(i)` gives the address of a source row, so
// the rows of one expert are gathered while they are packed.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>

namespace noon {

using bf16 = uint16_t;
constexpr long kPanel = 32;     // columns of a panel of B
constexpr long kDepth = 32;     // K is padded to a multiple of this
constexpr long kRowBlock = 96;  // rows worked on at a time: a multiple of both kernels' tiles (12 and 32)

inline long round_up(long x, long to) { return (x + to - 1) / to * to; }
inline long leading(long k) { return round_up(k, kDepth) + 32; }  // row stride of packed A; the odd line keeps rows out of one cache set
inline long panels_size(long k, long n) { return round_up(k, kDepth) * round_up(n, kPanel); }
inline __mmask16 lanes(long n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1); }

inline __m512 load16(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
inline __m512 load16(const bf16* p, __mmask16 m) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}
inline void store16(float* p, __mmask16 m, __m512 x) { _mm512_mask_storeu_ps(p, m, x); }
inline void store16(bf16* p, __mmask16 m, __m512 x) {
  _mm256_mask_storeu_epi16(p, m, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

// 32 neighbours as bf16, the first 16 low.
inline __m512i join(__m512 low, __m512 high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }

// Dword i holds (even[i], odd[i]).
inline __m512i zip(__m512 even, __m512 odd) {
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), join(even, odd));
}

// Transposes a 16 x 16 block of dwords: unpack within 128-bit lanes, then move the lanes.
inline void transpose16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// A[i][j] = row(i)[j].
template <class Row>
void pack_a(Row row, long m, long k, bf16* out, long ld) {
  for (long i = 0; i < m; ++i) {
    auto* p = row(i);
    for (long j = 0; j < k; j += 32)
      _mm512_storeu_si512(out + i * ld + j, join(load16(p + j, lanes(k - j)), load16(p + j + 16, lanes(k - j - 16))));
  }
}

// A[i][j] = row(j)[i]: the transpose of what is stored.
template <class Row>
void pack_a_transposed(Row row, long m, long k, bf16* out, long ld) {
  for (long j = 0; j < k; j += 32)
    for (long i = 0; i < m; i += 16) {
      __m512i block[16];
      for (int p = 0; p < 16; ++p) {
        const long even = j + 2 * p, odd = even + 1;
        const __m512 zero = _mm512_setzero_ps();
        block[p] = zip(even < k ? load16(row(even) + i, lanes(m - i)) : zero, odd < k ? load16(row(odd) + i, lanes(m - i)) : zero);
      }
      transpose16(block);
      for (int q = 0; q < 16 && i + q < m; ++q) _mm512_storeu_si512(out + (i + q) * ld + j, block[q]);
    }
}

// Panels [first, last) of B[i][j] = row(i)[j].
template <class Row>
void pack_b(Row row, long k, long n, bf16* out, long first, long last) {
  const long depth = round_up(k, kDepth);
  const __m512 zero = _mm512_setzero_ps();
  for (long panel = first; panel < last; ++panel) {
    bf16* to = out + panel * kPanel * depth;
    for (long i = 0; i < depth; i += 2, to += 64)
      for (long half = 0; half < 2; ++half) {
        const long j = panel * kPanel + half * 16;
        const __m512 even = i < k ? load16(row(i) + j, lanes(n - j)) : zero;
        const __m512 odd = i + 1 < k ? load16(row(i + 1) + j, lanes(n - j)) : zero;
        _mm512_storeu_si512(to + half * 32, zip(even, odd));
      }
  }
}

// Panels [first, last) of B[i][j] = row(j)[i]. `depth` and `offset` place it inside deeper panels: two matrices that
// are contracted one after the other share one panel.
template <class Row>
void pack_b_transposed(Row row, long k, long n, bf16* out, long first, long last, long depth, long offset) {
  for (long panel = first; panel < last; ++panel)
    for (long half = 0; half < 2; ++half)
      for (long i = 0; i < round_up(k, kDepth); i += 32) {
        __m512i block[16];
        for (int q = 0; q < 16; ++q) {
          const long j = panel * kPanel + half * 16 + q;
          block[q] = j < n ? join(load16(row(j) + i, lanes(k - i)), load16(row(j) + i + 16, lanes(k - i - 16))) : _mm512_setzero_si512();
        }
        transpose16(block);
        bf16* to = out + panel * kPanel * depth + (offset + i) * kPanel + half * 32;
        for (int p = 0; p < 16; ++p) _mm512_storeu_si512(to + p * 64, block[p]);
      }
}

// Memory that a thread keeps: fresh pages cost more than the work done in them.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }
  T* get(long size) {
    if (size > size_) {
      std::free(data_);
      size_ = round_up(size, 1024);
      data_ = static_cast<T*>(std::aligned_alloc(64, size_ * sizeof(T)));
      if (data_ == nullptr) std::abort();  // nothing sensible is left to do without memory
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  long size_ = 0;
};

}  // namespace noon
