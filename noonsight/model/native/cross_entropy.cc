// Cross-entropy with z-loss and its gradient in one pass (model/loss.py): the logits of a block of rows exist once, in
// the cache, and the gradient is formed from those very logits.
//
// Tokens go by chunks. In a chunk each task takes a block of rows: logits, log-sum-exp, slope of the logits (bf16, the
// only thing kept), dh. Then d_head gains the chunk's product, each task a range of the vocabulary.
#include <cmath>
#include <string>

#include "gemm.h"
#include "pool.h"
#include "vector.h"

namespace noon {
namespace {
namespace ffi = xla::ffi;

constexpr long kChunk = 4 * kRowBlock;  // tokens whose logit slopes exist at a time

struct Row {
  float lse, target;
};

// Log-sum-exp of a row and the logit of its target.
Row measure(const float* logits, long count, int target) {
  __m512 most = _mm512_set1_ps(-INFINITY);
  for (long j = 0; j < count; j += 16) most = _mm512_mask_max_ps(most, lanes(count - j), most, load16(logits + j, lanes(count - j)));
  const float top = _mm512_reduce_max_ps(most);
  __m512 sum = _mm512_setzero_ps();
  for (long j = 0; j < count; j += 16) {
    const __mmask16 mask = lanes(count - j);
    sum = _mm512_mask_add_ps(sum, mask, sum, exp16(_mm512_sub_ps(load16(logits + j, mask), _mm512_set1_ps(top))));
  }
  return {top + std::log(_mm512_reduce_add_ps(sum)), logits[target]};
}

// slope * softmax - weight * onehot, in bf16.
void write_slopes(const float* logits, long count, long padded, const Row& row, int target, float slope, float weight, bf16* out) {
  for (long j = 0; j < padded; j += 16) {
    const __mmask16 mask = lanes(count - j);
    const __m512 p = exp16(_mm512_sub_ps(load16(logits + j, mask), _mm512_set1_ps(row.lse)));
    store16(out + j, 0xffff, _mm512_maskz_mul_ps(mask, p, _mm512_set1_ps(slope)));
  }
  const float at_target = std::exp(row.target - row.lse) * slope - weight;
  store16(out + target, 1, _mm512_set1_ps(at_target));
}

struct Shape {
  long tokens, width, vocabulary;
};

void cross_entropy(ffi::ThreadPool& pool, const float* h, const float* head, const int* targets, const float* weights, float z, float* ce,
                   float* lse, float* dh, float* d_head, const Shape& s) {
  const Unit unit = best_unit();
  const long depth = round_up(s.width, kDepth), wide = round_up(s.vocabulary, kPanel), ld_wide = leading(s.vocabulary);
  static thread_local Scratch<bf16> shared;
  bf16* columns = shared.get(2 * depth * wide + (kChunk + 32) * ld_wide + round_up(s.width, 32) * leading(kChunk));
  bf16 *rows_of_head = columns + depth * wide, *slopes = rows_of_head + depth * wide, *h_turned = slopes + (kChunk + 32) * ld_wide;  // a last tile reads on
  const auto head_row = [&](long i) { return head + i * s.vocabulary; };
  constexpr long kGrain = 8;
  const long panels = wide / kPanel, groups = (panels + kGrain - 1) / kGrain;
  parallel_for(pool, groups, [&](long g) { pack_b(head_row, s.width, s.vocabulary, columns, g * kGrain, std::min(panels, (g + 1) * kGrain)); });
  parallel_for(pool, depth / kPanel, [&](long p) { pack_b_transposed(head_row, s.vocabulary, s.width, rows_of_head, p, p + 1, wide, 0); });
  if (s.tokens == 0) std::fill(d_head, d_head + s.width * s.vocabulary, 0.0f);
  for (long begin = 0; begin < s.tokens; begin += kChunk) {
    const long tokens = std::min(kChunk, s.tokens - begin), deep = round_up(tokens, kDepth);
    const auto h_row = [&](long i) { return h + (begin + i) * s.width; };
    constexpr long kRows = kRowBlock / 2;
    parallel_for(pool, (tokens + kRows - 1) / kRows, [&](long task) {
      static thread_local Scratch<float> block;
      static thread_local Scratch<bf16> packed;
      const long first = task * kRows, count = std::min(kRows, tokens - first);
      float* logits = block.get(kRows * wide);
      bf16* rows = packed.get(round_up(kRows, 32) * leading(s.width));
      pack_a([&](long i) { return h_row(first + i); }, count, s.width, rows, leading(s.width));
      multiply(unit, rows, leading(s.width), columns, count, s.vocabulary, depth, logits, wide, false);
      for (long i = 0; i < count; ++i) {
        const long t = begin + first + i;
        const Row row = measure(logits + i * wide, s.vocabulary, targets[t]);
        ce[t] = row.lse - row.target;
        lse[t] = row.lse;
        write_slopes(logits + i * wide, s.vocabulary, wide, row, targets[t], weights[t] * (1 + 2 * z * row.lse), weights[t],
                     slopes + (first + i) * ld_wide);
      }
      multiply(unit, slopes + first * ld_wide, ld_wide, rows_of_head, count, s.width, wide, dh + (begin + first) * s.width, s.width, false);
    });
    pack_a_transposed(h_row, s.width, tokens, h_turned, leading(kChunk));
    parallel_for(pool, groups, [&](long g) {
      static thread_local Scratch<bf16> packed;
      const long first = g * kGrain * kPanel, count = std::min(kGrain * kPanel, s.vocabulary - first);
      bf16* right = packed.get(panels_size(kChunk, kGrain * kPanel));
      pack_b([&](long i) { return slopes + i * ld_wide + first; }, tokens, count, right, 0, round_up(count, kPanel) / kPanel);
      multiply(unit, h_turned, leading(kChunk), right, s.width, count, deep, d_head + first, s.vocabulary, begin > 0);
    });
  }
}

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;

ffi::Error cross_entropy_handler(ffi::ThreadPool pool, F32 h, F32 head, I32 targets, F32 weights, float z, ffi::Result<F32> ce,
                                 ffi::Result<F32> lse, ffi::Result<F32> dh, ffi::Result<F32> d_head) {
  const auto a = h.dimensions(), b = head.dimensions();
  for (long t = 0; t < a[0]; ++t)
    if (const int target = targets.typed_data()[t]; target < 0 || target >= b[1])
      return ffi::Error::InvalidArgument("cross-entropy: target " + std::to_string(target) + " at token " + std::to_string(t) +
                                         " is outside the vocabulary of " + std::to_string(b[1]));
  cross_entropy(pool, h.typed_data(), head.typed_data(), targets.typed_data(), weights.typed_data(), z, ce->typed_data(),
                lse->typed_data(), dh->typed_data(), d_head->typed_data(), {a[0], a[1], b[1]});
  return ffi::Error::Success();
}

}  // namespace
}  // namespace noon

XLA_FFI_DEFINE_HANDLER_SYMBOL(noon_cross_entropy, noon::cross_entropy_handler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<noon::F32>()
                                  .Arg<noon::F32>()
                                  .Arg<noon::I32>()
                                  .Arg<noon::F32>()
                                  .Attr<float>("z_loss_weight")
                                  .Ret<noon::F32>()
                                  .Ret<noon::F32>()
                                  .Ret<noon::F32>()
                                  .Ret<noon::F32>());
