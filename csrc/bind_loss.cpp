// Bindings of the loss (csrc/loss.h).
#include <pybind11/pybind11.h>

#include "arguments.h"
#include "loss.h"

namespace py = pybind11;
using namespace py::literals;

namespace hq {

using namespace arguments;

void bind_loss(py::module_& m) {
  m.def("cross_entropy_cuda", [](uintptr_t logits, uintptr_t targets, uintptr_t losses, int64_t rows,
                                 int64_t vocabulary, float scale, bool gradient, uintptr_t amax, uintptr_t stream) {
    check_shape(rows, vocabulary);
    HQ_REQUIRE(vocabulary % kLogitsOfLoad == 0 && vocabulary < int64_t{1} << 31,
               "the vocabulary has " + text(vocabulary) + " entries, must be a multiple of " + text(kLogitsOfLoad) +
                   " below 2^31");
    HQ_REQUIRE(rows * vocabulary == 0 || (logits && targets && losses),
               "logits, targets and losses are 0 only without elements");
    check_aligned(logits, 16, "logits");
    check_aligned(targets, 8, "targets");
    check_aligned(losses, 4, "losses");
    check_aligned(amax, 4, "amax");
    cross_entropy_cuda({pointer<void>(logits), pointer<int64_t>(targets), pointer<float>(losses), rows, vocabulary,
                        scale, gradient, pointer<float>(amax)}, stream);
  }, "logits"_a, "targets"_a, "losses"_a, "rows"_a, "vocabulary"_a, "scale"_a, "gradient"_a, "amax"_a = 0,
     "stream"_a = 0,
     "Losses of bf16 logits [rows, vocabulary], which the gradient replaces if wanted, on the current GPU.");
  m.def("scale_values_cuda", [](uintptr_t values, int dtype, int64_t count, uintptr_t factor, uintptr_t stream) {
    HQ_REQUIRE(dtype == 0 || dtype == 1, "dtype of the values is " + text(dtype) + ", must be 0 (fp32) or 1 (bf16)");
    HQ_REQUIRE(count >= 0 && count < kMostElements, "count is " + text(count) + ", must be >= 0 and less than 2^59");
    HQ_REQUIRE(count == 0 || (values && factor), "values and factor are 0 only without elements");
    check_aligned(values, bytes_of(static_cast<Dtype>(dtype)), "values");
    check_aligned(factor, 4, "factor");
    scale_values_cuda({pointer<void>(values), static_cast<Dtype>(dtype), count, pointer<float>(factor)}, stream);
  }, "values"_a, "dtype"_a, "count"_a, "factor"_a, "stream"_a = 0,
     "values *= factor[0] in place, on the current GPU; nothing is touched where the factor is 1.");
}

}  // namespace hq
