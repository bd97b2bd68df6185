// Routed SwiGLU experts: gather the rows of each expert, multiply, and bring the results back. Nothing is dropped.
//
// Forward:  y[t] = sum_a w[t, a] * out[t, a],  out = (silu(x Wg_e) * (x Wu_e)) Wd_e,  e = chosen[t, a].
// The products x Wg and x Wu are kept in bf16, by expert, for the backward pass; everything between the matrix products
// stays in a block of rows that fits the cache. One task is one expert, the heaviest first.
#include <numeric>
#include <vector>

#include "gemm.h"
#include "pool.h"
#include "vector.h"

namespace noon {
namespace {
namespace ffi = xla::ffi;

struct Sizes {
  long tokens, per_token, rows, inner, experts;  // T, A, Z, F, E
};

// The assignments (token * A + choice) sorted by expert, stable; those of invalid tokens are left out.
struct Plan {
  std::vector<int> start;   // first position of each expert, E + 1 entries
  std::vector<int> source;  // assignment at each position
  std::vector<int> slot;    // position of each assignment, -1 where it is not sent
  std::vector<int> order;   // experts by falling load

  Plan(const int* chosen, const bool* valid, const Sizes& s) : start(s.experts + 1), slot(s.tokens * s.per_token, -1), order(s.experts) {
    const long count = s.tokens * s.per_token;
    for (long i = 0; i < count; ++i)
      if (valid[i / s.per_token]) ++start[chosen[i] + 1];
    std::partial_sum(start.begin(), start.end(), start.begin());
    source.resize(start.back());
    std::vector<int> next(start.begin(), start.end() - 1);
    for (long i = 0; i < count; ++i)
      if (valid[i / s.per_token]) source[slot[i] = next[chosen[i]]++] = i;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return load(a) > load(b); });
  }
  long load(int expert) const { return start[expert + 1] - start[expert]; }
};

// result[t] = sum over the choices of t, in order, of weight * rows[slot]; `weights` null means 1.
template <class Out>
void gather_sum(ffi::ThreadPool& pool, const Plan& plan, const float* rows, const float* weights, Out* result, const Sizes& s) {
  constexpr long kTokens = 64;
  parallel_for(pool, (s.tokens + kTokens - 1) / kTokens, [&](long task) {
    for (long t = task * kTokens; t < std::min(s.tokens, (task + 1) * kTokens); ++t)
      for (long j = 0; j < s.rows; j += 16) {
        const __mmask16 mask = lanes(s.rows - j);
        __m512 sum = _mm512_setzero_ps();
        for (long i = t * s.per_token; i < (t + 1) * s.per_token; ++i)
          if (plan.slot[i] >= 0)
            sum = _mm512_fmadd_ps(_mm512_set1_ps(weights ? weights[i] : 1.0f), load16(rows + plan.slot[i] * s.rows + j, mask), sum);
        store16(result + t * s.rows + j, mask, sum);
      }
  });
}

template <class T>
void experts_forward(ffi::ThreadPool& pool, const T* x, const Plan& plan, const float* weights, const float* gate, const float* up,
                     const float* down, T* y, bf16* saved_gate, bf16* saved_up, const Sizes& s) {
  const Unit unit = best_unit();
  const long z = round_up(s.rows, kDepth), f = round_up(s.inner, kDepth), matrix = s.rows * s.inner;
  static thread_local Scratch<float> out_scratch;
  float* out = out_scratch.get(plan.source.size() * s.rows);
  parallel_for(pool, s.experts, [&](long task) {
    const int e = plan.order[task];
    if (plan.load(e) == 0) return;
    static thread_local Scratch<bf16> packed;
    static thread_local Scratch<float> blocks;
    bf16* packed_gate = packed.get(3 * panels_size(z, f) + kRowBlock * (leading(z) + leading(f)));
    bf16 *packed_up = packed_gate + panels_size(z, f), *packed_down = packed_up + panels_size(z, f);
    bf16 *rows = packed_down + panels_size(f, z), *hidden = rows + kRowBlock * leading(z);
    float *g = blocks.get(2 * kRowBlock * f), *u = g + kRowBlock * f;
    pack_b([&](long i) { return gate + e * matrix + i * s.inner; }, s.rows, s.inner, packed_gate, 0, f / kPanel);
    pack_b([&](long i) { return up + e * matrix + i * s.inner; }, s.rows, s.inner, packed_up, 0, f / kPanel);
    pack_b([&](long i) { return down + e * matrix + i * s.rows; }, s.inner, s.rows, packed_down, 0, z / kPanel);
    for (long first = plan.start[e]; first < plan.start[e + 1]; first += kRowBlock) {
      const long count = std::min(kRowBlock, plan.start[e + 1] - first);
      pack_a([&](long i) { return x + plan.source[first + i] / s.per_token * s.rows; }, count, s.rows, rows, leading(z));
      multiply(unit, rows, leading(z), packed_gate, count, f, z, g, f, false);
      multiply(unit, rows, leading(z), packed_up, count, f, z, u, f, false);
      for (long i = 0; i < count; ++i)
        for (long j = 0; j < f; j += 16) {
          const __m512 gj = _mm512_load_ps(g + i * f + j), uj = _mm512_load_ps(u + i * f + j);
          store16(hidden + i * leading(f) + j, 0xffff, _mm512_mul_ps(_mm512_mul_ps(gj, sigmoid16(gj)), uj));
          store16(saved_gate + (first + i) * s.inner + j, lanes(s.inner - j), gj);
          store16(saved_up + (first + i) * s.inner + j, lanes(s.inner - j), uj);
        }
      multiply(unit, hidden, leading(f), packed_down, count, s.rows, f, out + first * s.rows, s.rows, false);
    }
  });
  const long sent = plan.source.size(), all = s.tokens * s.per_token;  // what no expert wrote must not be left to chance
  std::fill(saved_gate + sent * s.inner, saved_gate + all * s.inner, 0);
  std::fill(saved_up + sent * s.inner, saved_up + all * s.inner, 0);
  gather_sum(pool, plan, out, weights, y, s);
}

// One thread's work space of the backward pass, for `kRowBlock` rows.
struct Workspace {
  Scratch<bf16> packed;
  Scratch<float> blocks;
  bf16 *down_t, *gate_up_t, *dy_rows, *d_rows, *left, *right;
  float *d_hidden, *hidden, *d_gate, *d_up;
  void reserve(long z, long f) {
    const long wide = std::max(z, f), left_size = wide * leading(kRowBlock);
    down_t = packed.get(panels_size(z, f) + panels_size(2 * f, z) + kRowBlock * (leading(z) + leading(2 * f)) + left_size +
                        panels_size(kRowBlock, wide));
    gate_up_t = down_t + panels_size(z, f);
    dy_rows = gate_up_t + panels_size(2 * f, z);
    d_rows = dy_rows + kRowBlock * leading(z);
    left = d_rows + kRowBlock * leading(2 * f);
    right = left + left_size;
    d_hidden = blocks.get(4 * kRowBlock * f);
    hidden = d_hidden + kRowBlock * f;
    d_gate = hidden + kRowBlock * f;
    d_up = d_gate + kRowBlock * f;
  }
};

// From the saved products and dh (the slope of the unweighted hidden row): the weighted hidden row, the slopes of both
// products, and the slope of the combine weight, <h, dh>, which equals <out, dy>.
inline float swiglu_backward(const bf16* gate, const bf16* up, float weight, float* d_hidden, float* hidden, float* d_gate, float* d_up,
                             long inner, long padded) {
  const __m512 one = _mm512_set1_ps(1.0f), w = _mm512_set1_ps(weight);
  __m512 dot = _mm512_setzero_ps();
  for (long j = 0; j < padded; j += 16) {
    const __mmask16 mask = lanes(inner - j);
    const __m512 g = load16(gate + j, mask), u = load16(up + j, mask), dh = _mm512_load_ps(d_hidden + j);
    const __m512 sigma = sigmoid16(g), silu = _mm512_mul_ps(g, sigma), h = _mm512_mul_ps(silu, u), wdh = _mm512_mul_ps(w, dh);
    const __m512 slope = _mm512_mul_ps(sigma, _mm512_fmadd_ps(g, _mm512_sub_ps(one, sigma), one));
    dot = _mm512_fmadd_ps(h, dh, dot);
    _mm512_store_ps(hidden + j, _mm512_mul_ps(w, h));
    _mm512_store_ps(d_gate + j, _mm512_mul_ps(_mm512_mul_ps(wdh, u), slope));
    _mm512_store_ps(d_up + j, _mm512_mul_ps(wdh, silu));
  }
  return _mm512_reduce_add_ps(dot);
}

template <class T>
void experts_backward(ffi::ThreadPool& pool, const T* x, const Plan& plan, const float* weights, const float* gate, const float* up,
                      const float* down, const bf16* saved_gate, const bf16* saved_up, const T* dy, T* dx, float* d_weights, float* d_gate,
                      float* d_up, float* d_down, const Sizes& s) {
  const Unit unit = best_unit();
  const long z = round_up(s.rows, kDepth), f = round_up(s.inner, kDepth), matrix = s.rows * s.inner;
  static thread_local Scratch<float> dx_scratch;
  float* dx_rows = dx_scratch.get(plan.source.size() * s.rows);
  std::fill(d_weights, d_weights + s.tokens * s.per_token, 0.0f);
  parallel_for(pool, s.experts, [&](long task) {
    const int e = plan.order[task];
    float *dg_e = d_gate + e * matrix, *du_e = d_up + e * matrix, *dd_e = d_down + e * matrix;
    if (plan.load(e) == 0) {
      for (float* idle : {dg_e, du_e, dd_e}) std::fill(idle, idle + matrix, 0.0f);
      return;
    }
    static thread_local Workspace w;
    w.reserve(z, f);
    pack_b_transposed([&](long j) { return down + e * matrix + j * s.rows; }, s.rows, s.inner, w.down_t, 0, f / kPanel, z, 0);
    pack_b_transposed([&](long j) { return gate + e * matrix + j * s.inner; }, s.inner, s.rows, w.gate_up_t, 0, z / kPanel, 2 * f, 0);
    pack_b_transposed([&](long j) { return up + e * matrix + j * s.inner; }, s.inner, s.rows, w.gate_up_t, 0, z / kPanel, 2 * f, f);
    for (long first = plan.start[e]; first < plan.start[e + 1]; first += kRowBlock) {
      const long count = std::min(kRowBlock, plan.start[e + 1] - first), depth = round_up(count, kDepth);
      const bool add = first > plan.start[e];
      const auto token = [&](long i) { return plan.source[first + i] / s.per_token; };
      const auto x_row = [&](long i) { return x + token(i) * s.rows; };
      const auto dy_row = [&](long i) { return dy + token(i) * s.rows; };
      const auto block = [&](const float* of) { return [=](long i) { return of + i * f; }; };
      pack_a(dy_row, count, s.rows, w.dy_rows, leading(z));
      multiply(unit, w.dy_rows, leading(z), w.down_t, count, f, z, w.d_hidden, f, false);
      for (long i = 0; i < count; ++i) {
        const long at = (first + i) * s.inner, assignment = plan.source[first + i], row = i * f;
        d_weights[assignment] = swiglu_backward(saved_gate + at, saved_up + at, weights[assignment], w.d_hidden + row, w.hidden + row,
                                                w.d_gate + row, w.d_up + row, s.inner, f);
      }
      pack_a(block(w.d_gate), count, f, w.d_rows, leading(2 * f));
      pack_a(block(w.d_up), count, f, w.d_rows + f, leading(2 * f));
      multiply(unit, w.d_rows, leading(2 * f), w.gate_up_t, count, s.rows, 2 * f, dx_rows + first * s.rows, s.rows, false);
      const long ld = leading(kRowBlock);
      pack_a_transposed(block(w.hidden), s.inner, count, w.left, ld);
      pack_b(dy_row, count, s.rows, w.right, 0, z / kPanel);
      multiply(unit, w.left, ld, w.right, s.inner, s.rows, depth, dd_e, s.rows, add);
      pack_a_transposed(x_row, s.rows, count, w.left, ld);
      pack_b(block(w.d_gate), count, s.inner, w.right, 0, f / kPanel);
      multiply(unit, w.left, ld, w.right, s.rows, s.inner, depth, dg_e, s.inner, add);
      pack_b(block(w.d_up), count, s.inner, w.right, 0, f / kPanel);
      multiply(unit, w.left, ld, w.right, s.rows, s.inner, depth, du_e, s.inner, add);
    }
  });
  gather_sum<T>(pool, plan, dx_rows, nullptr, dx, s);
}

using F32 = ffi::Buffer<ffi::F32>;
using Bf16 = ffi::Buffer<ffi::BF16>;
using I32 = ffi::Buffer<ffi::S32>;
using Flags = ffi::Buffer<ffi::PRED>;

Sizes sizes(const I32& chosen, const F32& gate) {
  const auto c = chosen.dimensions(), g = gate.dimensions();
  return {c[0], c[1], g[1], g[2], g[0]};
}
bf16* raw(ffi::Result<Bf16>& buffer) { return static_cast<bf16*>(buffer->untyped_data()); }
const bf16* raw(Bf16& buffer) { return static_cast<const bf16*>(buffer.untyped_data()); }

ffi::Error forward_handler(ffi::ThreadPool pool, F32 x, I32 chosen, F32 weights, Flags valid, F32 gate, F32 up, F32 down,
                           ffi::Result<F32> y, ffi::Result<Bf16> saved_gate, ffi::Result<Bf16> saved_up) {
  const Sizes s = sizes(chosen, gate);
  const Plan plan(chosen.typed_data(), valid.typed_data(), s);
  experts_forward(pool, x.typed_data(), plan, weights.typed_data(), gate.typed_data(), up.typed_data(), down.typed_data(), y->typed_data(),
                  raw(saved_gate), raw(saved_up), s);
  return ffi::Error::Success();
}

ffi::Error backward_handler(ffi::ThreadPool pool, F32 x, I32 chosen, F32 weights, Flags valid, F32 gate, F32 up, F32 down, Bf16 saved_gate,
                            Bf16 saved_up, F32 dy, ffi::Result<F32> dx, ffi::Result<F32> d_weights, ffi::Result<F32> d_gate,
                            ffi::Result<F32> d_up, ffi::Result<F32> d_down) {
  const Sizes s = sizes(chosen, gate);
  const Plan plan(chosen.typed_data(), valid.typed_data(), s);
  experts_backward(pool, x.typed_data(), plan, weights.typed_data(), gate.typed_data(), up.typed_data(), down.typed_data(),
                   raw(saved_gate), raw(saved_up), dy.typed_data(), dx->typed_data(), d_weights->typed_data(), d_gate->typed_data(),
                   d_up->typed_data(), d_down->typed_data(), s);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace noon

#define NOON_EXPERTS                                                                                                     \
  xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Arg<noon::F32>().Arg<noon::I32>().Arg<noon::F32>().Arg<noon::Flags>() \
      .Arg<noon::F32>().Arg<noon::F32>().Arg<noon::F32>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(noon_experts_forward, noon::forward_handler,
                              NOON_EXPERTS.Ret<noon::F32>().Ret<noon::Bf16>().Ret<noon::Bf16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(noon_experts_backward, noon::backward_handler,
                              NOON_EXPERTS.Arg<noon::Bf16>().Arg<noon::Bf16>().Arg<noon::F32>().Ret<noon::F32>().Ret<noon::F32>()
                                  .Ret<noon::F32>().Ret<noon::F32>().Ret<noon::F32>());
