// Attention over the keys [lower(t), t] of each query, in blocks, never more than one block of scores (FlashAttention).
//
// One task is one kv head of one row of the batch: its keys and values are packed once. The rows of a query block are
// the query heads that share the kv head, each with the same positions. Backward recomputes the scores from the saved
// log-sum-exp.
#include <cmath>

#include "gemm.h"
#include "pool.h"
#include "vector.h"

namespace noon {
namespace {
namespace ffi = xla::ffi;

constexpr long kKeys = 256;  // keys of one block
constexpr float kHidden = -1e30f;

struct Heads {
  long batch, length, queries, kv, width;  // B, S, N, K, H
  long group() const { return queries / kv; }
  long positions() const { return std::max(12L, 96 / group()); }  // of one query block
  long rows() const { return positions() * group(); }
};

// The query block that begins at position `first`: where its rows lie and which keys they see.
struct Block {
  const Heads& heads;
  long batch, kv, first, count;  // count positions
  const int* lower;

  long rows() const { return count * heads.group(); }
  long position(long row) const { return first + row % count; }
  long low(long row) const { return lower[batch * heads.length + position(row)]; }
  long index(long row) const { return ((batch * heads.length + position(row)) * heads.queries + kv * heads.group() + row / count); }
  long first_key() const {
    long least = first;
    for (long i = 0; i < count; ++i) least = std::min(least, low(i));
    return least / kKeys * kKeys;
  }
};

// scores[row][0, count) of the keys that begin at `from`; what a row does not see is kHidden.
void hide(const Block& block, long from, long count, float* scores) {
  for (long r = 0; r < block.rows(); ++r) {
    const long low = block.low(r) - from, high = block.position(r) - from;
    float* row = scores + r * kKeys;
    for (long j = 0; j < std::min(low, count); ++j) row[j] = kHidden;
    for (long j = std::max(high + 1, 0L); j < count; ++j) row[j] = kHidden;
  }
}

// One running softmax step of a row: exponentials in place, top and total updated; returns the factor for what was
// summed before.
inline float soften(float* row, long count, float& top, float& total) {
  __m512 most = _mm512_set1_ps(kHidden);
  for (long j = 0; j < count; j += 16) most = _mm512_mask_max_ps(most, lanes(count - j), most, load16(row + j, lanes(count - j)));
  const float new_top = std::max(top, _mm512_reduce_max_ps(most));
  const __m512 shift = _mm512_set1_ps(new_top);
  __m512 sum = _mm512_setzero_ps();
  for (long j = 0; j < count; j += 16) {
    const __mmask16 mask = lanes(count - j);
    const __m512 x = load16(row + j, mask);
    // a hidden key weighs nothing even in a block where every key is hidden
    const __mmask16 seen = _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(0.5f * kHidden), _CMP_NLE_UQ);
    const __m512 e = _mm512_maskz_mov_ps(seen, exp16(_mm512_sub_ps(x, shift)));
    sum = _mm512_add_ps(sum, e);
    store16(row + j, mask, e);
  }
  __m512 back = exp16(_mm512_set1_ps(top - new_top));
  const float shrink = top <= 0.5f * kHidden ? 0.0f : _mm512_cvtss_f32(back);
  total = total * shrink + _mm512_reduce_add_ps(sum);
  top = new_top;
  return shrink;
}

void attention_forward(ffi::ThreadPool& pool, const float* q, const float* k, const float* v, const int* lower, float* out, float* lse,
                       const Heads& h) {
  const Unit unit = best_unit();
  const long depth = round_up(h.width, kDepth), padded = round_up(h.length, kKeys), row_stride = h.kv * h.width;
  parallel_for(pool, h.batch * h.kv, [&](long task) {
    const long b = task / h.kv, kv = task % h.kv, rows = h.rows();
    static thread_local Scratch<bf16> packed;
    static thread_local Scratch<float> blocks;
    bf16* keys = packed.get(2 * padded * depth + round_up(rows, 32) * (leading(h.width) + leading(kKeys)));
    bf16 *values = keys + padded * depth, *queries = values + padded * depth, *weights = queries + round_up(rows, 32) * leading(h.width);
    float *scores = blocks.get(rows * (kKeys + depth + 2)), *sum = scores + rows * kKeys, *top = sum + rows * depth, *total = top + rows;
    const auto k_row = [&](long i) { return k + (b * h.length + i) * row_stride + kv * h.width; };
    const auto v_row = [&](long i) { return v + (b * h.length + i) * row_stride + kv * h.width; };
    pack_b_transposed(k_row, h.width, h.length, keys, 0, round_up(h.length, kPanel) / kPanel, depth, 0);
    for (long from = 0; from < h.length; from += kKeys)  // values in panels per block of keys, because they are contracted over keys
      pack_b([&](long i) { return v_row(from + i); }, std::min(kKeys, h.length - from), h.width, values + from * depth, 0, depth / kPanel);
    for (long first = 0; first < h.length; first += h.positions()) {
      const Block block{h, b, kv, first, std::min(h.positions(), h.length - first), lower};
      const long m = block.rows();
      pack_a([&](long r) { return q + block.index(r) * h.width; }, m, h.width, queries, leading(h.width));
      std::fill(sum, sum + m * depth, 0.0f);
      std::fill(top, top + m, kHidden);
      std::fill(total, total + m, 0.0f);
      for (long from = block.first_key(); from < first + block.count; from += kKeys) {
        const long count = std::min(kKeys, std::min(h.length, first + block.count) - from), deep = round_up(std::min(kKeys, h.length - from), kDepth);
        multiply(unit, queries, leading(h.width), keys + from * depth, m, count, depth, scores, kKeys, false);
        hide(block, from, count, scores);
        for (long r = 0; r < m; ++r) {
          const __m512 shrink = _mm512_set1_ps(soften(scores + r * kKeys, count, top[r], total[r]));
          for (long j = 0; j < depth; j += 16) _mm512_storeu_ps(sum + r * depth + j, _mm512_mul_ps(_mm512_loadu_ps(sum + r * depth + j), shrink));
          std::fill(scores + r * kKeys + count, scores + r * kKeys + deep, 0.0f);
        }
        pack_a([&](long r) { return scores + r * kKeys; }, m, deep, weights, leading(kKeys));
        multiply(unit, weights, leading(kKeys), values + from * depth, m, depth, deep, sum, depth, true);
      }
      for (long r = 0; r < m; ++r) {
        const __m512 share = _mm512_set1_ps(1.0f / total[r]);
        float* to = out + block.index(r) * h.width;
        for (long j = 0; j < h.width; j += 16) store16(to + j, lanes(h.width - j), _mm512_mul_ps(_mm512_loadu_ps(sum + r * depth + j), share));
        lse[block.index(r)] = top[r] + std::log(total[r]);
      }
    }
  });
}

// weights = exp(scores - lse) and d_scores = weights * (d_weights - delta), in place of scores and d_weights.
inline void score_slopes(float* scores, float* d_weights, long count, float lse, float delta) {
  const __m512 shift = _mm512_set1_ps(lse), d = _mm512_set1_ps(delta);
  for (long j = 0; j < count; j += 16) {
    const __mmask16 mask = lanes(count - j);
    const __m512 x = load16(scores + j, mask);
    const __mmask16 seen = _mm512_mask_cmp_ps_mask(mask, x, _mm512_set1_ps(0.5f * kHidden), _CMP_NLE_UQ);
    const __m512 p = _mm512_maskz_mov_ps(seen, exp16(_mm512_sub_ps(x, shift)));
    store16(scores + j, mask, p);
    store16(d_weights + j, mask, _mm512_mul_ps(p, _mm512_sub_ps(load16(d_weights + j, mask), d)));
  }
}

inline float dot(const float* a, const float* b, long n) {
  __m512 sum = _mm512_setzero_ps();
  for (long j = 0; j < n; j += 16) sum = _mm512_fmadd_ps(load16(a + j, lanes(n - j)), load16(b + j, lanes(n - j)), sum);
  return _mm512_reduce_add_ps(sum);
}

void attention_backward(ffi::ThreadPool& pool, const float* q, const float* k, const float* v, const int* lower, const float* out,
                        const float* lse, const float* d_out, float* dq, float* dk, float* dv, const Heads& h) {
  const Unit unit = best_unit();
  const long depth = round_up(h.width, kDepth), padded = round_up(h.length, kKeys), row_stride = h.kv * h.width;
  parallel_for(pool, h.batch * h.kv, [&](long task) {
    const long b = task / h.kv, kv = task % h.kv, rows = h.rows(), tall = round_up(rows, 32);
    static thread_local Scratch<bf16> packed;
    static thread_local Scratch<float> blocks;
    bf16* keys = packed.get(3 * padded * depth + 2 * tall * leading(h.width) + tall * leading(kKeys) + kKeys * leading(rows) +
                            2 * panels_size(rows, h.width));
    bf16 *keys_down = keys + padded * depth, *values = keys_down + padded * depth, *queries = values + padded * depth;
    bf16 *slopes = queries + tall * leading(h.width), *d_rows = slopes + tall * leading(h.width), *turned = d_rows + tall * leading(kKeys);
    bf16 *q_panels = turned + kKeys * leading(rows), *d_panels = q_panels + panels_size(rows, h.width);
    float *scores = blocks.get(2 * rows * kKeys), *d_weights = scores + rows * kKeys;
    const auto at = [&](auto* of) { return [=](long i) { return of + (b * h.length + i) * row_stride + kv * h.width; }; };
    const long panels = round_up(h.length, kPanel) / kPanel;
    pack_b_transposed(at(k), h.width, h.length, keys, 0, panels, depth, 0);
    pack_b_transposed(at(v), h.width, h.length, values, 0, panels, depth, 0);
    for (long from = 0; from < h.length; from += kKeys)
      pack_b([&](long i) { return at(k)(from + i); }, std::min(kKeys, h.length - from), h.width, keys_down + from * depth, 0, depth / kPanel);
    for (long i = 0; i < h.length; ++i)
      for (float* to : {at(dk)(i), at(dv)(i)}) std::fill(to, to + h.width, 0.0f);
    for (long first = 0; first < h.length; first += h.positions()) {
      const Block block{h, b, kv, first, std::min(h.positions(), h.length - first), lower};
      const long m = block.rows(), deep_m = round_up(m, kDepth);
      const auto q_row = [&](long r) { return q + block.index(r) * h.width; };
      const auto d_row = [&](long r) { return d_out + block.index(r) * h.width; };
      pack_a(q_row, m, h.width, queries, leading(h.width));
      pack_a(d_row, m, h.width, slopes, leading(h.width));
      pack_b(q_row, m, h.width, q_panels, 0, depth / kPanel);
      pack_b(d_row, m, h.width, d_panels, 0, depth / kPanel);
      const long begin = block.first_key();
      for (long from = begin; from < first + block.count; from += kKeys) {
        const long count = std::min(kKeys, first + block.count - from), deep = round_up(std::min(kKeys, h.length - from), kDepth);
        multiply(unit, queries, leading(h.width), keys + from * depth, m, count, depth, scores, kKeys, false);
        multiply(unit, slopes, leading(h.width), values + from * depth, m, count, depth, d_weights, kKeys, false);
        hide(block, from, count, scores);
        for (long r = 0; r < m; ++r) {
          const float delta = dot(d_row(r), out + block.index(r) * h.width, h.width);
          score_slopes(scores + r * kKeys, d_weights + r * kKeys, count, lse[block.index(r)], delta);
          std::fill(d_weights + r * kKeys + count, d_weights + r * kKeys + deep, 0.0f);
        }
        const auto row_of = [&](const float* of) { return [=](long r) { return of + r * kKeys; }; };
        const long ld = leading(rows);
        pack_a_transposed(row_of(scores), count, m, turned, ld);
        multiply(unit, turned, ld, d_panels, count, h.width, deep_m, at(dv)(from), row_stride, true);
        pack_a_transposed(row_of(d_weights), count, m, turned, ld);
        multiply(unit, turned, ld, q_panels, count, h.width, deep_m, at(dk)(from), row_stride, true);
        pack_a(row_of(d_weights), m, deep, d_rows, leading(kKeys));
        for (long g = 0; g < h.group(); ++g)  // the positions of one query head are evenly spaced in dq
          multiply(unit, d_rows + g * block.count * leading(kKeys), leading(kKeys), keys_down + from * depth, block.count, h.width, deep,
                   dq + block.index(g * block.count) * h.width, h.queries * h.width, from > begin);
      }
    }
  });
}

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

Heads heads_of(const F32& q, const F32& k) {
  const auto a = q.dimensions(), b = k.dimensions();
  return {a[0], a[1], a[2], b[2], a[3]};
}

ffi::Error attention_forward_handler(ffi::ThreadPool pool, F32 q, F32 k, F32 v, I32 lower, ffi::Result<F32> out, ffi::Result<F32> lse) {
  attention_forward(pool, q.typed_data(), k.typed_data(), v.typed_data(), lower.typed_data(), out->typed_data(), lse->typed_data(),
                    heads_of(q, k));
  return ffi::Error::Success();
}

ffi::Error attention_backward_handler(ffi::ThreadPool pool, F32 q, F32 k, F32 v, I32 lower, F32 out, F32 lse, F32 d_out, ffi::Result<F32> dq,
                                      ffi::Result<F32> dk, ffi::Result<F32> dv) {
  attention_backward(pool, q.typed_data(), k.typed_data(), v.typed_data(), lower.typed_data(), out.typed_data(), lse.typed_data(),
                     d_out.typed_data(), dq->typed_data(), dk->typed_data(), dv->typed_data(), heads_of(q, k));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace noon

#define NOON_ATTENTION \
  xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Arg<noon::F32>().Arg<noon::F32>().Arg<noon::F32>().Arg<noon::I32>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(noon_attention_forward, noon::attention_forward_handler, NOON_ATTENTION.Ret<noon::F32>().Ret<noon::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(noon_attention_backward, noon::attention_backward_handler,
                              NOON_ATTENTION.Arg<noon::F32>().Arg<noon::F32>().Arg<noon::F32>().Ret<noon::F32>().Ret<noon::F32>()
                                  .Ret<noon::F32>());
