// Python binding of products by cuBLASLt (product.h): checks, and integers to addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <tuple>

#include "arguments.h"
#include "product.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

using namespace hq::arguments;

// (stride, step, turned, alignment) of a matrix [rows, contracted].
using FactorTuple = std::tuple<int64_t, int64_t, bool, uint32_t>;

hq::Factor make_factor(const FactorTuple& given, int64_t rows, int64_t contracted, const char* name) {
  const auto& [stride, step, turned, alignment] = given;
  const int64_t least = turned ? rows : contracted;
  HQ_REQUIRE(stride >= least && stride <= kMostElements / (turned ? contracted : rows),
             std::string("the stride of ") + name + " is " + text(stride) + " for lines of " + text(least));
  HQ_REQUIRE(alignment >= 2 && alignment <= 256,
             std::string("the alignment of ") + name + " is " + text(alignment) + ", must be from 2 to 256 bytes");
  return {stride, step, turned, alignment};
}

std::unique_ptr<hq::ProductPlan> make_plan(const std::array<int64_t, 4>& sizes, const FactorTuple& a,
                                           const FactorTuple& b, int out_dtype, uint32_t out_alignment, bool accumulate,
                                           bool scaled, int device, int64_t most_workspace, int rank) {
  const auto [count, m, n, k] = sizes;
  HQ_REQUIRE(count > 0 && m > 0 && n > 0 && k > 0, "every size of a product must be greater than 0");
  HQ_REQUIRE(std::max({count, m, n, k}) < int64_t{1} << 31, "every size of a product must be less than 2^31");
  HQ_REQUIRE(out_dtype == 0 || out_dtype == 1, "out_dtype is " + text(out_dtype) + ", must be 0 (fp32) or 1 (bf16)");
  HQ_REQUIRE(!accumulate || out_dtype == 0, "sums are added to fp32 only");
  HQ_REQUIRE(most_workspace >= 0, "most_workspace is " + text(most_workspace) + ", must not be less than 0");
  HQ_REQUIRE(rank >= 0 && rank < hq::kMostRanks,
             "rank is " + text(rank) + ", must be from 0 to " + text(hq::kMostRanks - 1));
  check_shape(m, n);
  check_stride(count, m * n, "the product's size");
  const hq::ProductShape shape{count, m, n, k, make_factor(a, m, k, "a"), make_factor(b, n, k, "b"),
                               static_cast<hq::Dtype>(out_dtype), out_alignment, accumulate, scaled, most_workspace,
                               rank};
  return std::make_unique<hq::ProductPlan>(shape, device);
}

}  // namespace

namespace hq {

void bind_product(py::module_& m) {
  py::class_<hq::ProductPlan>(m, "ProductPlan", "cuBLASLt's algorithm for products of one shape on the current GPU.")
      .def(py::init(&make_plan), "sizes"_a, "a"_a, "b"_a, "out_dtype"_a, "out_alignment"_a, "accumulate"_a, "scaled"_a,
           "device"_a, "most_workspace"_a = int64_t{32} << 20, "rank"_a = 0)
      .def_property_readonly("found", &hq::ProductPlan::found, "Whether the library has an algorithm for this shape.")
      .def_property_readonly("scratch", [](const hq::ProductPlan& plan) { return hq::kProductHead + plan.workspace(); },
                             "Bytes that a call needs, at a multiple of 256.")
      .def("run", [](const hq::ProductPlan& plan, uintptr_t a, uintptr_t b, uintptr_t out, uintptr_t factor_a,
                     uintptr_t factor_b, float constant, uintptr_t scratch, uintptr_t stream) {
        HQ_REQUIRE(plan.found(), "the library has no algorithm for this product");
        HQ_REQUIRE(a && b && out && scratch, "a, b, out and scratch must not be 0");
        check_aligned(factor_a | factor_b, 4, "the least of factors");
        check_aligned(scratch, 256, "scratch");
        plan.run({pointer<void>(a), pointer<void>(b), pointer<void>(out), pointer<float>(factor_a),
                  pointer<float>(factor_b), constant, pointer<void>(scratch)}, stream);
      }, "a"_a, "b"_a, "out"_a, "factor_a"_a, "factor_b"_a, "constant"_a, "scratch"_a, "stream"_a,
         "out = alpha * a @ b.T (+ out), alpha = the factors that are not 0 times the constant.");
  m.def("product_library_version", &hq::product_library_version, "Version of the loaded cuBLASLt; 0 without one.");
}

}  // namespace hq
