// Binding of sums over ranks (csrc/sum_parts.h).
#include <pybind11/pybind11.h>

#include "arguments.h"
#include "sum_parts.h"

namespace py = pybind11;
using namespace py::literals;

namespace hq {

using namespace arguments;

void bind_sum_parts(py::module_& m) {
  m.def("sum_parts_cuda", [](uintptr_t parts, uintptr_t received, uintptr_t total, int dtype, int64_t lead,
                             int64_t ranks, int64_t count, int64_t rank, uintptr_t stream) {
    check_dtype(dtype, "dtype of the parts");
    const auto of = static_cast<Dtype>(dtype);
    HQ_REQUIRE(ranks > 0 && rank >= 0 && rank < ranks,
               "rank is " + text(rank) + " of " + text(ranks) + ", must be one of them");
    HQ_REQUIRE(count >= 0 && count < kMostElements && count * static_cast<int64_t>(bytes_of(of)) % kBytesOfSummand == 0,
               "count is " + text(count) + ", must be whole words of 16 bytes, fewer than 2^59 values");
    HQ_REQUIRE(lead >= 0 && (count == 0 || lead * ranks < kMostElements / count),
               "lead is " + text(lead) + ", must be >= 0, for fewer than 2^59 values in all");
    HQ_REQUIRE(lead * count == 0 || (parts && total && (received || ranks == 1)),
               "parts, received and total are 0 only without elements");
    check_aligned(parts, kBytesOfSummand, "parts");
    check_aligned(received, kBytesOfSummand, "received");
    check_aligned(total, kBytesOfSummand, "total");
    sum_parts_cuda({pointer<void>(parts), pointer<void>(received), pointer<void>(total), of, lead, ranks, count, rank},
                   stream);
  }, "parts"_a, "received"_a, "total"_a, "dtype"_a, "lead"_a, "ranks"_a, "count"_a, "rank"_a, "stream"_a = 0,
     "total [lead, count] = the sum of parts [lead, ranks, count] of this rank and of received [ranks - 1, lead, count],\n"
     "in the order of ranks, on the current GPU.");
}

}  // namespace hq
