// matmul(a, b) of two matrices, either of them transposed: f32 or bf16 in, products of bf16, sums and result in f32.
#include "gemm.h"
#include "pool.h"

namespace noon {
namespace {
namespace ffi = xla::ffi;

// Rows of one task: enough tasks for every thread, each a multiple of both kernels' tiles where there are rows enough.
long rows_per_task(long m, long threads) {
  const long even = round_up((m + 2 * threads - 1) / (2 * threads), m > 32 * threads ? 96 : 12);
  return std::max(12L, std::min(kRowBlock, even));
}

template <class A, class B>
void matmul(ffi::ThreadPool& pool, const A* a, bool a_transposed, long lda, const B* b, bool b_transposed, long ldb, float* c, long m,
            long n, long k) {
  const Unit unit = best_unit();
  const long depth = round_up(k, kDepth), panels = round_up(n, kPanel) / kPanel;
  static thread_local Scratch<bf16> b_scratch;
  bf16* packed_b = b_scratch.get(panels_size(k, n));
  const auto a_row = [=](long i) { return a + i * lda; };
  const auto b_row = [=](long i) { return b + i * ldb; };
  constexpr long kGrain = 4;
  parallel_for(pool, (panels + kGrain - 1) / kGrain, [&](long task) {
    const long first = task * kGrain, last = std::min(panels, first + kGrain);
    if (b_transposed) {
      pack_b_transposed(b_row, k, n, packed_b, first, last, depth, 0);
    } else {
      pack_b(b_row, k, n, packed_b, first, last);
    }
  });
  const long rows = rows_per_task(m, std::max<long>(1, pool.num_threads()));
  parallel_for(pool, (m + rows - 1) / rows, [&](long task) {
    static thread_local Scratch<bf16> a_scratch;
    const long first = task * rows, count = std::min(rows, m - first), ld = leading(k);
    bf16* packed_a = a_scratch.get(round_up(count, 32) * ld);
    if (a_transposed) {
      pack_a_transposed([&](long i) { return a_row(i) + first; }, count, k, packed_a, ld);
    } else {
      pack_a([&](long i) { return a_row(first + i); }, count, k, packed_a, ld);
    }
    multiply(unit, packed_a, ld, packed_b, count, n, depth, c + first * n, n, false);
  });
}

ffi::Error matmul_handler(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::Buffer<ffi::F32>> c,
                          bool a_transposed, bool b_transposed) {
  for (const auto type : {a.element_type(), b.element_type()})
    if (type != ffi::F32 && type != ffi::BF16) return ffi::Error::InvalidArgument("noon_matmul takes float32 and bfloat16");
  const auto a_dims = a.dimensions(), b_dims = b.dimensions();
  if (a_dims.size() != 2 || b_dims.size() != 2) return ffi::Error::InvalidArgument("noon_matmul takes two matrices");
  const long m = a_dims[a_transposed ? 1 : 0], k = a_dims[a_transposed ? 0 : 1], n = b_dims[b_transposed ? 0 : 1];
  if (b_dims[b_transposed ? 1 : 0] != k) return ffi::Error::InvalidArgument("noon_matmul: inner sizes differ");
  const auto with_b = [&](const auto* a_data) {
    if (b.element_type() == ffi::F32)
      matmul(pool, a_data, a_transposed, a_dims[1], b.typed_data<float>(), b_transposed, b_dims[1], c->typed_data(), m, n, k);
    else
      matmul(pool, a_data, a_transposed, a_dims[1], static_cast<const bf16*>(b.untyped_data()), b_transposed, b_dims[1],
             c->typed_data(), m, n, k);
  };
  if (a.element_type() == ffi::F32) with_b(a.typed_data<float>());
  else with_b(static_cast<const bf16*>(a.untyped_data()));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace noon

XLA_FFI_DEFINE_HANDLER_SYMBOL(noon_matmul, noon::matmul_handler,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<bool>("a_transposed")
                                  .Attr<bool>("b_transposed"));

extern "C" int noon_unit() { return static_cast<int>(noon::best_unit()); }
