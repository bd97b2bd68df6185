// Newton-Schulz (train/muon.py): each matrix of a stack becomes its nearest orthogonal one by quintic iterations,
//
//   X <- X / (|X| + 1e-8);   A = X X^T;   X <- a X + (b A + c A A) X   for each triple (a, b, c).
//
// One task is one matrix, which stays in the cache for all iterations. A and A A are symmetric: only the blocks on and
// below the diagonal are multiplied. Inputs of products are rounded to bf16, X itself stays f32.
#include <cmath>

#include "gemm.h"
#include "pool.h"

namespace noon {
namespace {
namespace ffi = xla::ffi;

constexpr long kBlock = 48;  // rows of one block of the symmetric product

// out[j][i] = in[i][j].
void transpose(const float* in, long rows, long columns, float* out) {
  for (long i = 0; i < rows; i += 16)
    for (long j = 0; j < columns; j += 16) {
      __m512i block[16];
      for (long p = 0; p < 16; ++p)
        block[p] = i + p < rows ? _mm512_castps_si512(load16(in + (i + p) * columns + j, lanes(columns - j))) : _mm512_setzero_si512();
      transpose16(block);
      for (long p = 0; p < 16 && j + p < columns; ++p) store16(out + (j + p) * rows + i, lanes(rows - i), _mm512_castsi512_ps(block[p]));
    }
}

// c = a b for a symmetric result of n rows: blocks below the diagonal, then the mirror image.
void multiply_symmetric(Unit unit, const bf16* a, long ld, const bf16* b, long n, long depth, float* c) {
  for (long i = 0; i < n; i += kBlock) {
    const long end = std::min(n, i + kBlock);
    multiply(unit, a + i * ld, ld, b, end - i, end, depth, c + i * n, n, false);
  }
  for (long i = 0; i < n; i += 16)
    for (long j = i; j < n; j += 16) {
      __m512i block[16];
      for (long p = 0; p < 16; ++p)
        block[p] = j + p < n ? _mm512_castps_si512(load16(c + (j + p) * n + i, lanes(n - i))) : _mm512_setzero_si512();
      transpose16(block);
      for (long p = 0; p < 16 && i + p < n; ++p)
        store16(c + (i + p) * n + j, i == j ? lanes(n - j) & ~lanes(p + 1) : lanes(n - j), _mm512_castsi512_ps(block[p]));
    }
}

struct Work {
  Scratch<float> floats;
  Scratch<bf16> packed;
};

// One matrix with rows <= columns, in place.
void iterate(Unit unit, float* x, long rows, long columns, const float* triples, long count, float* gram, float* square, bf16* left,
             bf16* right) {
  const long size = rows * columns, r = round_up(rows, kDepth), c = round_up(columns, kDepth);
  __m512 sum = _mm512_setzero_ps();
  for (long i = 0; i < size; i += 16) sum = _mm512_fmadd_ps(load16(x + i, lanes(size - i)), load16(x + i, lanes(size - i)), sum);
  const __m512 scale = _mm512_set1_ps(1.0f / (std::sqrt(_mm512_reduce_add_ps(sum)) + 1e-8f));
  for (long i = 0; i < size; i += 16) store16(x + i, lanes(size - i), _mm512_mul_ps(load16(x + i, lanes(size - i)), scale));
  const auto x_row = [=](long i) { return x + i * columns; };
  const auto gram_row = [=](long i) { return gram + i * rows; };
  for (long t = 0; t < count; ++t, triples += 3) {
    pack_a(x_row, rows, columns, left, leading(columns));
    pack_b_transposed(x_row, columns, rows, right, 0, r / kPanel, c, 0);
    multiply_symmetric(unit, left, leading(columns), right, rows, c, gram);
    pack_a(gram_row, rows, rows, left, leading(rows));
    pack_b(gram_row, rows, rows, right, 0, r / kPanel);
    multiply_symmetric(unit, left, leading(rows), right, rows, r, square);
    const __m512 b = _mm512_set1_ps(triples[1]), q = _mm512_set1_ps(triples[2]), a = _mm512_set1_ps(triples[0]);
    for (long i = 0; i < rows * rows; i += 16) {
      const __mmask16 mask = lanes(rows * rows - i);
      store16(gram + i, mask, _mm512_fmadd_ps(b, load16(gram + i, mask), _mm512_mul_ps(q, load16(square + i, mask))));
    }
    pack_a(gram_row, rows, rows, left, leading(rows));
    pack_b(x_row, rows, columns, right, 0, c / kPanel);
    for (long i = 0; i < size; i += 16) store16(x + i, lanes(size - i), _mm512_mul_ps(a, load16(x + i, lanes(size - i))));
    multiply(unit, left, leading(rows), right, rows, columns, r, x, columns, true);
  }
}

void newton_schulz(ffi::ThreadPool& pool, const float* matrices, const float* triples, long num_triples, float* out, long number, long m,
                   long n) {
  const Unit unit = best_unit();
  const long rows = std::min(m, n), columns = std::max(m, n), tall = round_up(rows, 96);
  parallel_for(pool, number, [&](long task) {
    static thread_local Work work;
    float* x = work.floats.get(rows * columns + 2 * rows * rows + 48);
    float *gram = x + round_up(rows * columns, 16), *square = gram + round_up(rows * rows, 16);
    bf16* left = work.packed.get(tall * leading(columns) + panels_size(columns, columns));
    bf16* right = left + tall * leading(columns);
    const float* in = matrices + task * m * n;
    if (m > n) transpose(in, m, n, x);
    else std::copy(in, in + m * n, x);
    iterate(unit, x, rows, columns, triples, num_triples, gram, square, left, right);
    if (m > n) transpose(x, n, m, out + task * m * n);
    else std::copy(x, x + m * n, out + task * m * n);
  });
}

using F32 = ffi::Buffer<ffi::F32>;

ffi::Error newton_schulz_handler(ffi::ThreadPool pool, F32 matrices, F32 triples, ffi::Result<F32> out) {
  const auto dims = matrices.dimensions();
  newton_schulz(pool, matrices.typed_data(), triples.typed_data(), triples.dimensions()[0], out->typed_data(), dims[0], dims[1], dims[2]);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace noon

XLA_FFI_DEFINE_HANDLER_SYMBOL(noon_newton_schulz, noon::newton_schulz_handler,
                              xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Arg<noon::F32>().Arg<noon::F32>().Ret<noon::F32>());
