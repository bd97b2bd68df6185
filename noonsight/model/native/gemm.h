// C = A B for packed A and B (pack.h), C in f32: one block of rows against any number of panels.
//
// Two kernels: AVX512-BF16 holds 12 x 32 of C in registers, AMX 32 x 32 in tiles. Each entry of C is one running sum
// over k in a fixed order, so a result does not depend on how work was split over threads.
#pragma once
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "pack.h"

namespace noon {

enum class Unit { kNone, kAvx512, kAmx };

template <int kRows>
void multiply_avx512(const bf16* a, long ld, const bf16* b, long depth, float* c, long ldc, long n, bool add) {
  __m512 sum[kRows][2];
  const __mmask16 low = lanes(n), high = lanes(n - 16);
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = add ? load16(c + r * ldc, low) : _mm512_setzero_ps();
    sum[r][1] = add ? load16(c + r * ldc + 16, high) : _mm512_setzero_ps();
  }
  for (long k = 0; k < depth; k += 2, b += 64) {
    const __m512bh b0 = reinterpret_cast<__m512bh>(_mm512_load_si512(b));
    const __m512bh b1 = reinterpret_cast<__m512bh>(_mm512_load_si512(b + 32));
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      int pair;
      std::memcpy(&pair, a + r * ld + k, sizeof(pair));
      const __m512bh ar = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], ar, b0);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], ar, b1);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    store16(c + r * ldc, low, sum[r][0]);
    if (high) store16(c + r * ldc + 16, high, sum[r][1]);
  }
}

using Kernel = void (*)(const bf16*, long, const bf16*, long, float*, long, long, bool);
inline constexpr Kernel kAvx512ByRows[13] = {
    nullptr, multiply_avx512<1>, multiply_avx512<2>, multiply_avx512<3>, multiply_avx512<4>, multiply_avx512<5>, multiply_avx512<6>,
    multiply_avx512<7>, multiply_avx512<8>, multiply_avx512<9>, multiply_avx512<10>, multiply_avx512<11>, multiply_avx512<12>};

// Eight tiles of 16 rows x 64 bytes. Set before every product: other libraries on XLA's threads set their own.
inline void configure_tiles() {
  alignas(64) uint8_t config[64] = {1};
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;
    config[48 + tile] = 16;
  }
  _tile_loadconfig(config);
}

// 32 x 32 of C. Up to 31 rows of A beyond the matrix are read and not stored: whoever packs A leaves room for them.
inline void multiply_amx(const bf16* a, long ld, const bf16* b, long depth, float* c, long ldc, long m, long n, bool add) {
  alignas(64) float block[32 * 32];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long k = 0; k < depth; k += 32) {
    _tile_loadd(4, a + k, ld * 2);
    _tile_loadd(5, a + 16 * ld + k, ld * 2);
    _tile_loadd(6, b + k * kPanel, 128);
    _tile_loadd(7, b + k * kPanel + 32, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, block, 128);
  _tile_stored(1, block + 16, 128);
  _tile_stored(2, block + 16 * 32, 128);
  _tile_stored(3, block + 16 * 32 + 16, 128);
  for (long r = 0; r < m; ++r)
    for (long j = 0; j < n; j += 16) {
      const __m512 sum = _mm512_load_ps(block + r * 32 + j);
      const __mmask16 mask = lanes(n - j);
      store16(c + r * ldc + j, mask, add ? _mm512_add_ps(sum, load16(c + r * ldc + j, mask)) : sum);
    }
}

// c[m, n] (+)= packed a [m, k] times packed b [k, n].
inline void multiply(Unit unit, const bf16* a, long ld, const bf16* b, long m, long n, long depth, float* c, long ldc, bool add) {
  if (unit == Unit::kAmx) configure_tiles();
  for (long j = 0; j < n; j += kPanel, b += kPanel * depth) {
    const long columns = std::min(kPanel, n - j);
    if (unit == Unit::kAmx) {
      for (long i = 0; i < m; i += 32) multiply_amx(a + i * ld, ld, b, depth, c + i * ldc + j, ldc, std::min(32L, m - i), columns, add);
    } else {
      for (long i = 0; i < m; i += 12) kAvx512ByRows[std::min(12L, m - i)](a + i * ld, ld, b, depth, c + i * ldc + j, ldc, columns, add);
    }
  }
}

// Whether a unit computes what a plain loop does: 41 x 45 of depth 70, small integers, so exact. A kernel that this
// machine runs wrongly is never used.
inline bool is_right(Unit unit) {
  constexpr long m = 41, n = 45, k = 70, depth = 96, ld = 128;
  static float a[m * k], b[k * n], c[m * n];
  Scratch<bf16> a_packed, b_packed;
  for (long i = 0; i < m * k; ++i) a[i] = i * 7 % 13 - 6;
  for (long i = 0; i < k * n; ++i) b[i] = i * 5 % 11 - 5;
  pack_a([](long i) { return a + i * k; }, m, k, a_packed.get(64 * ld), ld);
  pack_b([](long i) { return b + i * n; }, k, n, b_packed.get(panels_size(k, n)), 0, 2);
  for (const bool add : {false, true}) multiply(unit, a_packed.get(1), ld, b_packed.get(1), m, n, depth, c, n, add);
  for (long i = 0; i < m; ++i)
    for (long j = 0; j < n; ++j) {
      float sum = 0;
      for (long p = 0; p < k; ++p) sum += a[i * k + p] * b[p * n + j];
      if (c[i * n + j] != 2 * sum) return false;
    }
  return true;
}

// The fastest unit that this processor has, the system lets us use, and that is right. NOONSIGHT_UNIT=avx512 leaves AMX
// out.
inline Unit best_unit() {
  static const Unit unit = [] {
    unsigned a, b, c, d, a1, b1, c1, d1;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !__get_cpuid_count(7, 1, &a1, &b1, &c1, &d1)) return Unit::kNone;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && (a1 >> 5 & 1);
    if (!avx512) return Unit::kNone;  // the packing needs its conversions, on AMX machines too
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    const char* asked = std::getenv("NOONSIGHT_UNIT");
    const bool amx = (d >> 22 & 1) && (d >> 24 & 1) && !(asked && std::strcmp(asked, "avx512") == 0);
    if (amx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 && is_right(Unit::kAmx)) return Unit::kAmx;
    return is_right(Unit::kAvx512) ? Unit::kAvx512 : Unit::kNone;
  }();
  return unit;
}

}  // namespace noon
