// Bindings of rows between ranks that share out experts (csrc/expert_rows.h).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "arguments.h"
#include "expert_rows.h"

namespace py = pybind11;
using namespace py::literals;

namespace hq {

using namespace arguments;

void bind_expert_rows(py::module_& m) {
  m.def("copy_rows_cuda", [](uintptr_t index, uintptr_t from, uintptr_t out, int64_t rows, int64_t bytes, uintptr_t stream) {
    HQ_REQUIRE(bytes >= 0 && bytes % kBytesOfExpertWord == 0,
               "a row has " + text(bytes) + " bytes, must be whole words of " + text(kBytesOfExpertWord));
    check_shape(rows, bytes);
    HQ_REQUIRE(rows * bytes == 0 || (index && from && out), "index, from and out are 0 only without rows");
    check_aligned(index, 8, "index");
    check_aligned(from | out, kBytesOfExpertWord, "the least of from and out");
    copy_rows_cuda({pointer<int64_t>(index), pointer<void>(from), pointer<void>(out), rows, bytes}, stream);
  }, "index"_a, "from"_a, "out"_a, "rows"_a, "bytes"_a, "stream"_a = 0,
     "Copies the row that each index names, on the current GPU, to this one's memory or another's; none where it is negative.");
  m.def("expert_places_cuda", [](uintptr_t ends, uintptr_t here, uintptr_t offsets, int64_t ranks, int64_t experts,
                                 int64_t rank, int64_t rows, int64_t places, const std::array<uintptr_t, 6>& results,
                                 uintptr_t stream) {
    HQ_REQUIRE(ranks > 0 && rank >= 0 && rank < ranks, "rank is " + text(rank) + " of " + text(ranks) + ", must be one of them");
    HQ_REQUIRE(experts > 0 && experts % ranks == 0,
               "experts is " + text(experts) + ", must be a multiple of " + text(ranks) + " ranks");
    check_shape(rows, ranks);
    check_shape(places, 1);
    uintptr_t all = ends | here | offsets;
    HQ_REQUIRE(ends && here && offsets, "ends, here or offsets are at address 0");
    for (int i = 0; i < 6; ++i) {
      HQ_REQUIRE(results[i] || (i < 3 ? places : rows) == 0, "a result is at address 0");
      all |= results[i];
    }
    check_aligned(all, 8, "the least of the addresses");
    const auto at = [&](int i) { return pointer<int64_t>(results[i]); };
    expert_places_cuda({pointer<int64_t>(ends), pointer<int64_t>(here), pointer<int64_t>(offsets), ranks, experts, rank,
                        rows, places, at(0), at(1), at(2), at(3), at(4), at(5)}, stream);
  }, "ends"_a, "here"_a, "offsets"_a, "ranks"_a, "experts"_a, "rank"_a, "rows"_a, "places"_a, "results"_a, "stream"_a = 0,
     "Where rows stand at the experts of this rank, and at their sources; results: own, sent, filling, there, leaving and\n"
     "returning, int64, in this order.");
}

}  // namespace hq
