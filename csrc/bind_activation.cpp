// Bindings of the activations.
#include <pybind11/pybind11.h>

#include <string>

#include "activation.h"
#include "arguments.h"

namespace py = pybind11;
using namespace py::literals;

#if defined(HQ_HAVE_CUDA)
namespace hq {
namespace {

using namespace arguments;

const Names<Activation> kActivations = {{"swiglu", Activation::swiglu}, {"gelu", Activation::gelu}};

Activated make_activated(const std::string& kind, int64_t rows, int64_t width, uintptr_t z, uintptr_t dh) {
  check_shape(rows, width);
  HQ_REQUIRE(width % 8 == 0, "width is " + text(width) + ", must be a multiple of 8");
  HQ_REQUIRE(z != 0 || rows * width == 0, "z is 0 but the matrix is not empty");
  check_aligned(z | dh, 16, "the least of z and dh");
  return {lookup(kActivations, "activation", kind), rows, width, pointer<void>(z), pointer<void>(dh), nullptr};
}

}  // namespace

void bind_activation(py::module_& m) {
  m.def("activation_cuda", [](const std::string& kind, int64_t rows, int64_t width, uintptr_t z, uintptr_t dh,
                              uintptr_t out, uintptr_t amax, uintptr_t columns, bool signs, uintptr_t end,
                              uintptr_t stream) {
    Activated call = make_activated(kind, rows, width, z, dh);
    HQ_REQUIRE(out != 0 || rows * width == 0, "out is 0 but the matrix is not empty");
    check_aligned(out, 16, "out");
    check_aligned(amax | columns, 4, "the least of amaxes");
    HQ_REQUIRE(!columns || (amax && rows % 16 == 0), "the amax of transformed columns takes strips of 16 rows, and amax");
    check_aligned(end, 8, "end");
    HQ_REQUIRE(!(end && columns), "strips of 16 rows take no end");
    call.end = pointer<int64_t>(end);
    activation_cuda(call, pointer<void>(out), {pointer<float>(amax), pointer<float>(columns), signs}, stream);
  }, "kind"_a, "rows"_a, "width"_a, "z"_a, "dh"_a, "out"_a, "amax"_a = 0, "columns"_a = 0, "signs"_a = true,
     "end"_a = 0, "stream"_a = 0,
     "h [rows, width] of z, or with dh the gradient of z; bf16 without gaps. Rows from *end on, an int64 on the GPU, are\n"
     "left out. amax is raised to the output's, and columns to "
     "that of its columns after the random Hadamard transform.");
  m.def("quantize_activated_cuda", [](const std::string& kind, int64_t rows, int64_t width, uintptr_t z, uintptr_t dh,
                                      const Direction* row, const Direction* column, bool dequantized, uintptr_t stream) {
    const Activated of = make_activated(kind, rows, width, z, dh);
    const int64_t cols = width * (dh ? inputs_of(of.kind) : 1);
    make_call(z, static_cast<int>(Dtype::bf16), rows, cols, cols, 1, row, column, dequantized);  // as quantize_cuda
    return quantize_activated_cuda(of, row, column, dequantized, stream);
  }, "kind"_a, "rows"_a, "width"_a, "z"_a, "dh"_a, "row"_a.none(true), "column"_a.none(true), "dequantized"_a = false,
     "stream"_a = 0, "quantize_cuda of activation_cuda's output, which is not made; False where no kernel does that.");
}

}  // namespace hq
#endif
